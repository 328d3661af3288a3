"""FedDKC with `labels = false`: what leaves, what the server learns from, and the device's guard."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from methods.feddkc.feddkc_fleet import NOTHING, ask, make_device, make_knowledge, make_server, run_round

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import RefinedKnowledge, SampleKnowledge
from fleetdistill.methods.feddkc.config import FedDKCConfig
from fleetdistill_server.methods.feddkc.server import FedDKCServer


def without_labels(seed: int) -> SampleKnowledge:
    known = make_knowledge(seed)
    return SampleKnowledge(sample_ids=known.sample_ids, features=known.features, logits=known.logits)


def test_labels_stay_on_the_device() -> None:
    answer = make_device(labels=False).train(ask(NOTHING))
    assert answer.parts["knowledge"].columns() == ("features", "logits")
    assert set(FedDKCServer.columns(FedDKCConfig(labels=False))) == {"features", "logits"}
    assert set(FedDKCServer.columns(FedDKCConfig())) == {"features", "logits", "labels"}


def test_the_server_learns_the_devices_classes_from_their_logits() -> None:
    """Twelve rows a device, and logits that are right: the predictor then has the labels that it never saw."""
    knowledge = {name: without_labels(number) for number, name in enumerate("abcd")}
    server = make_server(labels=False, server_learning_rate=0.1, server_epochs=40)
    run_round(server, knowledge)
    right = [
        (server.knowledge[name][1].argmax(dim=1).numpy() == make_knowledge(number).labels).mean()
        for number, name in enumerate("abcd")
    ]
    assert np.mean(right) > 0.7  # chance is 1 / 3


def test_only_the_distillation_is_descended() -> None:
    """The gradient of one step is that of the distillation alone: labels have no influence."""
    knowledge, steps = make_knowledge(0), []
    assert knowledge.labels is not None
    for shift in (0, 1):
        server = make_server(labels=False)
        labels = torch.from_numpy((knowledge.labels.astype(np.int64) + shift) % 3)
        features = torch.from_numpy(knowledge.features["cut"])
        server.loss(features, labels, torch.full((12, 3), 1 / 3)).backward()
        server.optimizer.step()
        steps.append(server.state_dict()["predictor"])
    assert all(torch.equal(steps[0][name], steps[1][name]) for name in steps[0])


def test_the_device_uses_only_logits_with_the_right_class() -> None:
    """Rows 0 to 2 have labels 0, 1, 2; the server's classes for them are 0, 2, 2."""
    values = np.array([[5.0, 0, 0], [0, 0, 5], [0, 0, 5]], np.float32)
    sent = RefinedKnowledge(valid=True, sample_ids=np.arange(3), values=values)
    for settings, used in (({"labels": False}, [True, False, True]), ({}, [True] * 3)):
        teacher = make_device(**settings).teacher(sent)
        assert teacher is not None
        assert teacher.valid[:3].tolist() == used
        assert not teacher.valid[3:].any()
    unguarded = make_device(labels=False, teacher_guard=False).teacher(sent)
    assert unguarded is not None
    assert unguarded.valid[:3].all()


def test_server_without_labels_and_distillation_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="labels is false and server_beta is 0"):
        FedDKCConfig(labels=False, server_beta=0.0)
