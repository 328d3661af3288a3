"""Which layer is cut at in a round: eq. (6)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from methods.fedd2s.fedd2s_fleet import CLASSES, make_context, make_server, tiny_model
from torch import nn

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.fedd2s.config import FedD2SConfig
from fleetdistill.models import build_model
from fleetdistill.training.model import SplitModel
from fleetdistill_server.methods.fedd2s.schedule import distillation_layer, shallowest_layer
from fleetdistill_server.methods.fedd2s.server import FedD2SServer
from fleetdistill_server.testing import FakeCohort, always

SETS = {"F1,F2,F3": 3, "F2,F3": 4, "C3,F1,F2,F3": 2, "C2,C3,F1,F2,F3": 1}


def test_d2s_1_the_unclamped_schedule() -> None:
    layers = [distillation_layer(z, 6, drop_every=3, l_min=0) for z in range(1, 20)]
    assert layers == [6, 6, 6, 5, 5, 5, 4, 4, 4, 3, 3, 3, 2, 2, 2, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("dropping_set", "first"), [("F1,F2,F3", 10), ("F2,F3", 7), ("C3,F1,F2,F3", 13), ("C2,C3,F1,F2,F3", 16)]
)
def test_d2s_2_the_clamped_schedule_of_the_papers_dropping_sets(dropping_set: str, first: int) -> None:
    lowest = shallowest_layer(build_model("fedd2s_m1"), l_min=None, dropping_set=dropping_set)  # type: ignore[arg-type]
    assert lowest == SETS[dropping_set]
    layers = [distillation_layer(z, 6, 3, lowest) for z in range(1, 20)]
    assert layers.index(lowest) + 1 == first
    assert layers[first - 1 :] == [lowest] * (20 - first)


def test_d2s_3_the_participation_that_first_uses_layer_3() -> None:
    firsts = [next(z for z in range(1, 100) if distillation_layer(z, 6, every, 3) == 3) for every in (3, 5, 7)]
    assert firsts == [10, 16, 22]
    server = make_server(participation_ratio=0.2)
    devices = {f"d{number:02d}": always({}) for number in range(50)}
    ratio = server.config.participation_ratio
    taken = [FakeCohort(devices, number=number).sample(ratio) for number in range(1, 101)]
    assert sum(map(len, taken)) / 50 == 20  # expected participations of a device: 7 * 3 + 1 = 22 is out of reach
    assert len({device for item in taken for device in item}) == 50


@given(drop_every=st.integers(1, 9), layers=st.integers(2, 12), l_min=st.integers(1, 12), first=st.integers(1, 200))
def test_the_layer_never_rises_and_stays_within_its_bounds(
    drop_every: int, layers: int, l_min: int, first: int
) -> None:
    l_min = min(l_min, layers)
    used = [distillation_layer(z, layers, drop_every, l_min) for z in range(first, first + 30)]
    assert all(before >= after for before, after in pairwise(used))
    assert all(l_min <= layer <= layers for layer in used)
    assert all(before - after <= 1 for before, after in pairwise(used))


def test_dropping_set_defaults_to_fully_connected_layers() -> None:
    for model, lowest in (("fedd2s_m1", 3), ("fedd2s_m2", 3), ("fedd2s_digits", 2), ("digits_mlp_large", 2)):
        assert shallowest_layer(build_model(model), l_min=None, dropping_set="") == lowest  # type: ignore[arg-type]
    assert shallowest_layer(tiny_model(), l_min=None, dropping_set="") == 1  # all are linear: one is always left
    convolutions = SplitModel({"a": nn.Conv2d(1, 1, 1), "b": nn.Conv2d(1, 1, 1), "c": nn.Flatten()}, cut=1)
    assert shallowest_layer(convolutions, l_min=None, dropping_set="") == 2


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dropping_set": "C3,F2"}, "dropping_set is ['C3', 'F2'], but must be the last layers of"),
        ({"dropping_set": "F1,F2"}, "but must be the last layers of"),
        ({"l_min": 7}, "l_min is 7, must be in [1, 6]"),
        ({"l_min": 0}, "l_min is 0, must be in [1, 6]"),
    ],
)
def test_a_dropping_set_that_is_none_is_refused(settings: dict[str, Any], sentence: str) -> None:
    context = make_context("fedd2s_m1", input_shape=(3, 32, 32))
    with pytest.raises(ConfigurationError) as error:
        FedD2SServer(FedD2SConfig(**settings).for_classes(CLASSES), context)
    assert sentence in str(error.value)
