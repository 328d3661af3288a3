"""Baselines with class logits or a generator next to the average: numbers worked out by hand, and their limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from baselines.bed import make_device, make_fleet, make_rows, make_server, tiny_model
from methods.tiny_context import CLASSES
from torch.testing import assert_close

from fleetdistill.errors import ConfigurationError, WireError
from fleetdistill.knowledge import NamedTensors
from fleetdistill.methods.base import Ask
from fleetdistill.training.parameters import model_parameters
from fleetdistill_server.methods.traffic import Sizes
from fleetdistill_server.testing import always, play

LOGITS, LABELS = torch.tensor([[2.0, 0, 0], [4.0, 0, 0], [0, 3.0, 0]]), torch.tensor([0, 0, 1])
HOSTILE = [
    np.zeros((2, CLASSES), np.float32),
    np.full((CLASSES, CLASSES), np.nan, np.float32),
    np.full((CLASSES, CLASSES), np.inf, np.float32),
]


def same_models(method: str, rounds: int = 3, changed: dict[str, Any] | None = None, **settings: Any) -> bool:
    """Whether a method with further settings ends with the same bits as FedAvg."""
    ended = []
    for name, own in (("fedavg", {}), (method, changed or {})):
        server, members = make_fleet(name, local_epochs=3, **settings, **own)
        play(server, members, rounds=rounds)
        ended.append(server.model.state_dict())
    return all(torch.equal(tensor, ended[1][name]) for name, tensor in ended[0].items())


def sent_logits(device: Any) -> list[list[float]]:
    """The class logits of a device that has seen three rows in a round."""
    device.begin(Ask(round=1, step="train", seed=0))
    device.count(LOGITS[:2], LABELS[:2])
    device.count(LOGITS[2:], LABELS[2:])
    return device.end(Ask(round=1, step="train", seed=0))["classes"].tensors["logits"].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("smoothing", "expected"),
    [(True, [[2.0, 0, 0], [0, 1.5, 0], [0, 0, 0]]), (False, [[3.0, 0, 0], [0, 3.0, 0], [0, 0, 0]])],
)
def test_class_logits_of_feddistill(smoothing: bool, expected: list[list[float]]) -> None:
    """With smoothing (2 + 4) / (1 + 2) and 3 / (1 + 1); without it the means."""
    assert sent_logits(make_device("feddistill", tiny_model(), make_rows(0), smoothing=smoothing)) == expected


@pytest.mark.parametrize(("window", "expected"), [("all", 12 / 5), ("round", 2.0)])
def test_window_of_feddistill(window: str, expected: float) -> None:
    """Over two equal rounds the smoothed row is (2 + 4 + 2 + 4) / (1 + 4), of one round it stays 2."""
    device = make_device("feddistill", tiny_model(), make_rows(0), window=window)
    sent_logits(device)
    assert sent_logits(device)[0] == pytest.approx([expected, 0, 0])


def test_repeated_round_counts_once() -> None:
    """A device whose answer was lost starts again from the state of before, which training must not change."""
    device = make_device("feddistill", tiny_model(), make_rows(0))
    before = device.state_dict()
    first = sent_logits(device)
    device.load_state_dict(before)
    assert sent_logits(device) == first


def table(rows: Any, counts: list[int]) -> Any:
    """A member that answers with a model, class logits and counts."""
    logits = NamedTensors(tensors={"logits": np.array(rows, np.float32)}, reveals=["logits"])
    held = NamedTensors(tensors={"counts": np.array(counts, np.int32)}, reveals=["counts"])
    return always({"parameters": model_parameters(tiny_model()), "classes": logits, "counts": held})


ONE, OTHER = [[2.0, 0, 0], [0, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 4.0, 0], [0, 0, 0]]


def test_smoothing_halves_rows_of_disjoint_devices() -> None:
    """The mean of a row and a row of zeros; without smoothing the row of the device that has the class."""
    for smoothing, expected in ((True, [[1, 0, 0], [0, 2, 0], [0, 0, 0]]), (False, [[2, 0, 0], [0, 4, 0], [0, 0, 0]])):
        server = make_server("feddistill", smoothing=smoothing)
        play(server, {"d0": table(ONE, [5, 0, 0]), "d1": table(OTHER, [0, 5, 0])})
        assert server.logits_cc.tolist() == expected


@pytest.mark.parametrize(("smoothing", "expected"), [(True, 0.5), (False, 0.0)])
def test_class_that_nobody_has_teaches_only_with_smoothing(smoothing: bool, expected: float) -> None:
    """A row of zeros is the uniform teacher: KL(1/3 || own), here for log-probabilities with this divergence."""
    device = make_device("feddistill", tiny_model(), make_rows(0), smoothing=smoothing)
    rows = NamedTensors(tensors={"logits": np.array(ONE, np.float32)})
    device.begin(Ask(round=2, step="train", seed=0, parts={"classes": rows}))
    inputs, labels = make_rows(0).inputs[:4], torch.full((4,), 2)
    logits = device.local.model(inputs)
    cross_entropy = torch.nn.functional.cross_entropy(logits, labels)
    uniform = (-np.log(3) - logits.log_softmax(1)).mean()
    assert_close(device.loss(inputs, labels) - cross_entropy, uniform * (expected > 0), atol=1e-6, rtol=0)


def test_feddistill_without_its_term_is_fedavg() -> None:
    assert same_models("feddistill", changed={"gamma": 0.0})


def test_first_round_of_feddistill_is_fedavg() -> None:
    assert same_models("feddistill", rounds=1)
    assert not same_models("feddistill", rounds=2)


def test_fd_leaves_a_device_out_of_its_own_teacher() -> None:
    """Mean of three rows 2, 4 and 9 without the first: 6.5; a class that only one device has teaches others only."""
    server = make_server("fd")
    members = {
        "d0": table([[2.0, 0, 0], [0, 7.0, 0], [0, 0, 0]], [1, 1, 0]),
        "d1": table([[4.0, 0, 0], [0, 0, 0], [0, 0, 0]], [1, 0, 0]),
        "d2": table([[9.0, 0, 0], [0, 0, 0], [0, 0, 0]], [1, 0, 0]),
    }
    first, second = play(server, members, rounds=2)
    assert first.sent("d0") == [{}]
    assert sent_row(second, "d0") == [[6.5, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert sent_row(second, "d1") == [[5.5, 0, 0], [0, 7.0, 0], [0, 0, 0]]
    server.forget("d2", None)
    (third,) = play(server, members)
    assert sent_row(third, "d0") == [[4.0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert sent_row(third, "d2") == [[3.0, 0, 0], [0, 7.0, 0], [0, 0, 0]]


def sent_row(cohort: Any, device: str) -> Any:
    return cohort.sent(device)[0]["classes"].tensors["logits"].tolist()


def test_fd_of_one_device_trains_alone() -> None:
    ended = []
    for method in ("fd", "no_transfer"):
        server, members = make_fleet(method, devices=1, local_epochs=2)
        play(server, members, rounds=3)
        ended.append(members["d0"].local.model.state_dict())
    for name, tensor in ended[0].items():
        assert torch.equal(tensor, ended[1][name])


@pytest.mark.parametrize("method", ["feddistill", "fd"])
def test_saved_state_continues_the_run(method: str) -> None:
    server, members = make_fleet(method, local_epochs=1)
    play(server, members, rounds=2)
    again, others = make_fleet(method, local_epochs=1)
    again.load_state_dict(server.state_dict())
    for name, member in members.items():
        others[name].local.model.load_state_dict(member.local.model.state_dict())
        others[name].load_state_dict(member.state_dict())
    continued, same = (play(half, fleet, completed=2)[0] for half, fleet in ((server, members), (again, others)))
    for name in members:
        assert np.array_equal(class_logits(continued, name), class_logits(same, name))


def class_logits(cohort: Any, device: str) -> Any:
    return cohort.answers(device)[0]["classes"].tensors["logits"]


@pytest.mark.parametrize("bad", HOSTILE, ids=["shape", "nan", "infinity"])
@pytest.mark.parametrize("method", ["feddistill", "fd"])
def test_bad_class_logits_of_the_server_are_refused(method: str, bad: Any) -> None:
    device = make_device(method, tiny_model(), make_rows(0))
    parts = {**device.first_ask().parts, "classes": NamedTensors(tensors={"logits": bad})}
    with pytest.raises(WireError, match=r"classes/logits .* finite numbers \[3, 3\]"):
        device.handle(Ask(round=2, step="train", seed=0, parts=parts))
    parts = {**parts, "classes": NamedTensors(tensors={})}
    with pytest.raises(WireError, match="missing"):
        device.handle(Ask(round=2, step="train", seed=0, parts=parts))


def test_negative_counts_are_none() -> None:
    server = make_server("feddistill", smoothing=False)
    play(server, {"d0": table(ONE, [-5, 0, 0]), "d1": table(ONE, [0, 0, 0])})
    assert server.logits_cc.tolist() == [[0.0] * CLASSES] * CLASSES


def test_class_logits_of_26_classes_have_2704_bytes() -> None:
    (exchange,) = type(make_server("fd")).exchanges(None, Sizes(classes=26))
    assert exchange.nbytes("down", "float32") == 2_704
    assert exchange.nbytes("up", "float32") == 2_704 + 4 * 26


@pytest.mark.parametrize(("method", "settings"), [("feddistill", {"gamma": -1.0}), ("fd", {"window": "epoch"})])
def test_settings_out_of_range_are_refused(method: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        make_device(method, tiny_model(), make_rows(0), **settings)
