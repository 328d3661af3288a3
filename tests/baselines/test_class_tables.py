"""Baselines that exchange tables of classes: numbers worked out by hand, limits, and hostile input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from baselines.bed import HIDDEN, SameLogits, make_device, make_fleet, make_rows, make_server, tiny_model
from methods.tiny_context import CLASSES
from torch.testing import assert_close

from fleetdistill.errors import ConfigurationError, ModelError, WireError
from fleetdistill.knowledge import Array, NamedTensors
from fleetdistill.methods.base import Ask
from fleetdistill_lab.baselines.shared import class_sums
from fleetdistill_server.testing import Member, always, play

COLUMNS = ["features", "counts"]


def answer_with(counts: list[int], prototypes: dict[int, float]) -> Member:
    """A member whose prototype of a class has the same number everywhere."""
    table = np.zeros((CLASSES, HIDDEN), np.float32)
    for label, value in prototypes.items():
        table[label] = value
    tensors: dict[str, Array] = {"prototypes": table, "counts": np.array(counts, np.int64)}
    return always({"prototypes": NamedTensors(tensors=tensors, reveals=COLUMNS)})


def proto_ask(prototypes: Any = None, devices: Any = None) -> Ask:
    tensors = {
        "prototypes": np.zeros((CLASSES, HIDDEN), np.float32) if prototypes is None else prototypes,
        "devices": np.zeros(CLASSES, np.int64) if devices is None else devices,
    }
    return Ask(round=1, step="train", seed=0, parts={"prototypes": NamedTensors(tensors=tensors)})


def test_class_sums_are_those_of_each_class() -> None:
    sums, counts = class_sums(torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([0, 2, 0]), 3)
    assert sums.tolist() == [[6], [0], [2]]
    assert counts.tolist() == [2, 0, 1]


@pytest.mark.parametrize(("weighting", "first"), [("samples", 7.0), ("uniform", 6.0)])
def test_prototypes_are_means_over_devices_with_the_class(weighting: str, first: float) -> None:
    """Class 0: (1 * 4 + 3 * 8) / 4, or (4 + 8) / 2; only one device has class 1, none class 2."""
    server = make_server("fedproto", weighting=weighting)
    members = {"d0": answer_with([1, 5, 0], {0: 4, 1: 2}), "d1": answer_with([3, 0, 0], {0: 8, 1: 99, 2: 99})}
    play(server, members)
    assert server.prototypes[:, 0].tolist() == [first, 2, 0]
    assert server.devices_c.tolist() == [2, 1, 0]


def test_class_missing_in_a_round_keeps_its_prototype() -> None:
    server = make_server("fedproto")
    play(server, {"d0": answer_with([1, 1, 0], {0: 4, 1: 2})})
    play(server, {"d0": answer_with([1, 0, 0], {0: 6})})
    assert server.prototypes[:, 0].tolist() == [6, 2, 0]
    again = make_server("fedproto")
    again.load_state_dict(server.state_dict())
    assert torch.equal(again.prototypes, server.prototypes)
    assert torch.equal(again.devices_c, server.devices_c)


def test_counts_below_0_do_not_count() -> None:
    server = make_server("fedproto")
    play(server, {"d0": answer_with([-3, 1, 0], {0: 4, 1: 2})})
    assert server.devices_c.tolist() == [0, 1, 0]


def test_loss_is_the_mean_squared_distance_to_prototypes() -> None:
    """The embedding is 0, so that the distance to a prototype of 3 is 9; a row without a prototype counts as 0."""
    model = tiny_model()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    data = make_rows(0, rows=4)  # classes 0, 1, 2, 0
    device = make_device("fedproto", model, data, prototype_weight=0.5)
    prototypes = np.full((CLASSES, HIDDEN), 3, np.float32)
    device.handle(proto_ask(prototypes, np.array([2, 1, 0])))
    assert device.trained.mean_loss == pytest.approx(np.log(CLASSES) + 0.5 * 9 * 3 / 4)


def test_device_sends_the_mean_embedding_of_its_classes() -> None:
    data = make_rows(0, rows=5)
    device = make_device("fedproto", tiny_model(), data)
    sent = device.handle(proto_ask()).parts["prototypes"]
    rows = device.local.model.embedding(data.inputs)
    expected = torch.stack([rows[data.labels == label].mean(0) for label in range(CLASSES)])
    assert_close(torch.from_numpy(sent.tensors["prototypes"]), expected)
    assert sent.tensors["counts"].tolist() == [2, 2, 1]
    assert sent.columns() == ("features", "counts")


def test_class_that_a_device_lacks_has_count_0() -> None:
    data = make_rows(0, rows=1)
    sent = make_device("fedproto", tiny_model(), data).handle(proto_ask()).parts["prototypes"].tensors
    assert sent["counts"].tolist() == [1, 0, 0]
    assert not sent["prototypes"][1:].any()


def test_prototype_weight_0_is_training_alone() -> None:
    states = []
    runs: list[tuple[str, dict[str, Any]]] = [("no_transfer", {}), ("fedproto", {"prototype_weight": 0.0})]
    for method, settings in runs:
        server, members = make_fleet(method, **settings)
        play(server, members, rounds=2)
        states.append(members["d0"].local.model.state_dict())
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name])


def test_prototypes_draw_devices_together() -> None:
    distances = []
    for weight in (0.0, 5.0):
        server, members = make_fleet("fedproto", prototype_weight=weight)
        play(server, members, rounds=8)
        one, other = (member.handle(member.first_ask()).parts["prototypes"] for member in members.values())
        gap = one.tensors["prototypes"] - other.tensors["prototypes"]
        distances.append(float(np.abs(gap).mean()))
    assert distances[1] < distances[0] / 2


@pytest.mark.parametrize(
    "bad",
    [
        {"prototypes": np.zeros((CLASSES, HIDDEN + 1), np.float32)},
        {"prototypes": np.full((CLASSES, HIDDEN), np.nan, np.float32)},
        {"prototypes": np.full((CLASSES, HIDDEN), np.inf, np.float32)},
        {"devices": np.zeros(CLASSES + 1, np.int64)},
    ],
    ids=["shape", "nan", "infinity", "classes"],
)
def test_bad_prototypes_of_the_server_are_refused(bad: dict[str, Any]) -> None:
    device = make_device("fedproto", tiny_model(), make_rows(0))
    before = {name: tensor.clone() for name, tensor in device.local.model.state_dict().items()}
    with pytest.raises(WireError, match="the server's"):
        device.handle(proto_ask(**bad))
    assert all(torch.equal(tensor, before[name]) for name, tensor in device.local.model.state_dict().items())


def test_tables_of_other_names_are_refused() -> None:
    device = make_device("fedproto", tiny_model(), make_rows(0))
    sent = NamedTensors(tensors={"means": np.zeros((CLASSES, HIDDEN), np.float32)})
    with pytest.raises(WireError, match="expected"):
        device.handle(Ask(round=1, step="train", seed=0, parts={"prototypes": sent}))


def test_model_without_an_embedding_is_refused() -> None:
    with pytest.raises(ModelError, match="FedProto needs"):
        make_device("fedproto", SameLogits([0.0] * CLASSES), make_rows(0))


@pytest.mark.parametrize(("method", "settings"), [("fedproto", {"prototype_weight": -1.0})])
def test_settings_out_of_range_are_refused(method: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        make_server(method, **settings)
