"""FedD2S's device half: training and distillation below the cut."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from methods.fedd2s.fedd2s_fleet import (
    CLASSES,
    changed,
    disturbed_server,
    make_device,
    make_fleet,
    make_server,
    run_round,
    state_of,
    triplets_of,
)
from torch.nn import functional
from torch.testing import assert_close

from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import Plan, RefinedKnowledge, SampleKnowledge
from fleetdistill.methods.base import Ask
from fleetdistill.methods.fedd2s.device import FedD2SDevice
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.losses import feature_distance
from fleetdistill.wire.codec import decode, encode
from fleetdistill_server.methods.fedd2s.server import FedD2SServer
from fleetdistill_server.testing import FakeCohort


def learn_ask(server: FedD2SServer, device: FedD2SDevice, layer: int) -> Ask:
    reply = server.reply(triplets_of(server, device, layer), 1.0, FakeCohort({}))
    return Ask(round=1, step="learn", seed=5, parts=decode(encode(reply)))


@pytest.mark.parametrize("settings", [{}, {"s2c_mode": "feature_grad"}, {"distance": "mse"}])
@pytest.mark.parametrize("layer", [2, 3])
def test_distillation_leaves_layers_above_cut_bit_identical(settings: dict[str, Any], layer: int) -> None:
    settings = {**settings, "label_epochs": 0, "weight_decay": 0.1, "warmup_epochs": 3}
    server, device = disturbed_server(**settings), make_device(**settings)
    extract_ask = Ask(round=1, step="extract", seed=1, parts={"plan": Plan(values={"layer": layer})})
    device.handle(extract_ask)  # the warm-up fills Adam's moments, so that a zero gradient would still move a layer
    before = state_of(device.local.model)
    device.handle(learn_ask(server, device, layer))
    assert changed(device.local.model, before) == set("abcd"[:layer])


@pytest.mark.parametrize("steps", ["joint", "alternating"])
def test_labels_train_dropped_layers_too(steps: str) -> None:
    settings: dict[str, Any] = {"distill_epochs": 0, "label_epochs": 1, "steps": steps}
    server, device = disturbed_server(**settings), make_device(**settings)
    before = state_of(device.local.model)
    device.handle(learn_ask(server, device, 2))
    assert changed(device.local.model, before) == set("abcd")


def test_the_device_descends_equation_12_through_the_frozen_head() -> None:
    how = {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 0.1, "batch_size": 64, "label_epochs": 0}
    settings: dict[str, Any] = {**how, "distill_epochs": 1, "temperature": 2.0}
    server, device = disturbed_server(**settings), make_device(**settings)
    ask = learn_ask(server, device, 2)
    mine = copy.deepcopy(device.model)
    t_bc = torch.from_numpy(np.array(ask.part("teacher", RefinedKnowledge).values))
    v_bc = server.head(2)(mine.features(device.local.data.inputs[:], 2)) / 2
    loss = 4 * (t_bc * (t_bc.log() - v_bc.log_softmax(1))).sum(1).mean()
    loss.backward()
    device.handle(ask)
    for (name, parameter), other in zip(device.model.named_parameters(), mine.parameters(), strict=True):
        expected = other if other.grad is None else other - 0.1 * other.grad
        assert_close(parameter, expected, atol=1e-6, rtol=1e-5)
        assert (other.grad is None) == (name.split(".")[1] in "cd")


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_feature_gradients_give_the_heads_first_step(layer: int) -> None:
    """One full batch, so that there is a first step only; the network at layer 1 differs from the devices' too."""
    how = {"optimizer": "sgd", "momentum": 0.0, "batch_size": 64, "distill_epochs": 1, "label_epochs": 0}
    models = []
    for mode in ("head", "feature_grad"):
        settings: dict[str, Any] = {**how, "s2c_mode": mode, "temperature": 3.0}
        server, device = disturbed_server(**settings), make_device(**settings)
        ask = learn_ask(server, device, layer)
        if layer == 1:  # with one head, t and v agree there: a teacher of another kind shows that gradients do
            ask = other_teacher(server, device, settings)
        assert ("head" in ask.parts) == (mode == "head")
        device.handle(ask)
        models.append(device.model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert_close(one, other, atol=1e-6, rtol=1e-4)
    assert changed(models[0], state_of(make_device().model)) == set("abcd"[:layer])


def other_teacher(server: FedD2SServer, device: FedD2SDevice, settings: dict[str, Any]) -> Ask:
    sent = triplets_of(server, device, 1)
    t_bc = torch.full((len(sent.labels), CLASSES), 1 / CLASSES)
    reply = {"plan": server.plan("d0", 1), **server.knowledge(sent, t_bc)}
    return Ask(round=1, step="learn", seed=5, parts=decode(encode(reply)))


def test_the_ablation_brings_features_together_instead() -> None:
    settings: dict[str, Any] = {
        "distance": "mse",
        "distill_epochs": 1,
        "label_epochs": 0,
        "batch_size": 64,
        "learning_rate": 1e-3,
    }
    server, device = disturbed_server(**settings), make_device(**settings)
    ask = learn_ask(server, device, 3)
    assert set(ask.parts) == {"plan", "features"}
    sent = triplets_of(server, device, 3)
    target = np.array(ask.part("features", SampleKnowledge).features["c"])
    with torch.no_grad():
        assert_close(torch.from_numpy(target), server.network[:2](sent.first))
    loss = server.distillation(copy.deepcopy(server.network), sent, torch.empty(0))
    assert_close(loss(torch.arange(20)), functional.mse_loss(server.network[:2](sent.first), sent.at_layer))  # type: ignore[misc]
    before = float(functional.mse_loss(sent.at_layer, torch.from_numpy(target)))
    device.handle(ask)
    after = functional.mse_loss(triplets_of(server, device, 3).at_layer, torch.from_numpy(target))
    assert float(after) < before
    nothing = learn_ask(server, device, 1).part("teacher", RefinedKnowledge)  # at layer 1 there is nothing between
    assert not nothing.valid


def test_rows_without_fleet_features_do_not_train_towards_zeros() -> None:
    """The server has features of every second row; the others must count as rows that are where they should be."""
    how: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 0.1, "batch_size": 64}
    settings: dict[str, Any] = {**how, "distance": "mse", "distill_epochs": 1, "label_epochs": 0}
    server = disturbed_server(**settings)
    models = []
    for complete in (False, True):
        device = make_device(**settings)
        ask = learn_ask(server, device, 3)
        sent = ask.part("features", SampleKnowledge)
        there = np.arange(len(sent.sample_ids)) % 2 == 0
        target = np.array(sent.features["c"], np.float32)
        if complete:
            own = device.model.features(device.local.data.inputs[:], 3).detach().numpy()
            target[~there] = own[sent.sample_ids[~there]]
            there[:] = True
        part = SampleKnowledge(sample_ids=sent.sample_ids[there], features={"c": target[there]})
        device.handle(replace(ask, parts={**ask.parts, "features": part}))
        models.append(device.model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert_close(one, other, atol=1e-6, rtol=1e-5)
    assert changed(models[0], state_of(make_device(**settings).model)) == set("abc")


def test_feature_distance_counts_rows_without_a_target_as_zero() -> None:
    student, target = torch.ones(2, 2, 2), torch.full((2, 2, 2), torch.nan)
    target[0] = 3.0
    assert float(feature_distance(student, target, valid_b=torch.tensor([True, False]))) == 2.0  # 4 * 4 / 8
    with pytest.raises(KnowledgeError, match=r"\[2, 2, 2\], but their target has \[2, 2\]"):
        feature_distance(student, target[0])


def test_rows_match_by_sample_id_and_unknown_ids_are_counted() -> None:
    device = make_device(rows=5)
    values, valid, unknown = device.own_rows(np.array([3, 99, 1]), np.array([[1.0], [2.0], [3.0]], np.float16), (1,))
    assert valid.tolist() == [False, True, False, True, False]
    assert (values[3].item(), values[1].item(), unknown) == (1.0, 3.0, 1)
    teacher = RefinedKnowledge(valid=True, sample_ids=np.array([99]), values=np.float32([[1, 0, 0]]))  # type: ignore[arg-type]
    parts = {"plan": Plan(values={"layer": 4}), "teacher": teacher}
    assert device.handle(Ask(round=1, step="learn", seed=1, parts=parts)).notes == {"unknown_ids": 1}


def test_warm_up_happens_once_and_same_ask_gives_same_answer() -> None:
    ask = Ask(round=1, step="extract", seed=1, parts={"plan": Plan(values={"layer": 4, "participation": 1})})
    one, other = make_device(), make_device()
    first, again = (device.handle(ask).parts["knowledge"].features["a"] for device in (one, other))  # type: ignore[attr-defined]
    np.testing.assert_array_equal(first, again)
    cold = make_device(warmup_epochs=0).handle(ask).parts["knowledge"].features["a"]  # type: ignore[attr-defined]
    assert not np.array_equal(first, cold)
    second = one.handle(ask)
    np.testing.assert_array_equal(second.parts["knowledge"].features["a"], first)  # type: ignore[attr-defined]
    assert second.notes == {"participations_differ": 0}
    late = Ask(round=1, step="extract", seed=1, parts={"plan": Plan(values={"layer": 4, "participation": 3})})
    assert one.handle(late).notes == {"participations_differ": 1}


def test_both_halves_go_on_from_their_saved_state() -> None:
    server, fleet = make_server(), make_fleet()
    run_round(server, fleet)
    states = {name: unpack_state(pack_state(device.state_dict())) for name, device in fleet.items()}
    twin, twins = make_server(), make_fleet()
    twin.load_state_dict(unpack_state(pack_state(server.state_dict())))
    for name, device in twins.items():
        device.local.model.load_state_dict(fleet[name].local.model.state_dict())
        device.load_state_dict(states[name])
    for number in (2, 3):
        run_round(server, fleet, number)
        run_round(twin, twins, number)
    assert pack_state(server.state_dict()) == pack_state(twin.state_dict())
    assert not changed(fleet["d1"].model, state_of(twins["d1"].model))
    assert twins["d1"].participations == 3
