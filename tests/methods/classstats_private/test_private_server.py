"""The server half of private class statistics: merge, guard on the noise, screening, newcomers and forgetting.

Noise has fixed seeds here; the device's own is tested in device/test_private_release.py.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods.classstats.class_statistics_fleet import CPU, SHAPE

from fleetdistill.errors import ConfigurationError, RunError
from fleetdistill.knowledge import ClassSpace
from fleetdistill.methods.base import Answer, Local
from fleetdistill.methods.classstats.class_space import coordinates, logits
from fleetdistill.methods.classstats_private.config import ClassStatsPrivateConfig
from fleetdistill.methods.classstats_private.device import ClassStatsPrivateDevice
from fleetdistill.methods.classstats_private.merge import (
    other_dimensions,
    precisions,
    recommended_dimensions,
    rows_needed,
    strength,
    too_few_rows,
)
from fleetdistill.methods.classstats_private.sums import class_sums, release_rounded, to_wire, unit_rows
from fleetdistill.models import build_model
from fleetdistill.privacy.accountant import mu_for
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import check_local_model
from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.methods.base import MethodContext
from fleetdistill_server.methods.classstats_private.server import ClassStatsPrivateServer
from fleetdistill_server.testing import FakeCohort, play

CLASSES, SIZE, EPSILON = 4, 16, 3.0
MU = mu_for(EPSILON, 1e-5)
CENTRES = np.linalg.qr(np.random.default_rng(0).normal(size=(SIZE, SIZE)))[0][:CLASSES]


def config_of(**settings):
    return ClassStatsPrivateConfig.from_settings({"epsilon": EPSILON, "dimensions": SIZE, "exact": False} | settings)


def make_server(shape=SHAPE, extractor="digits_extractor", **settings):
    models = ModelSection(extractor=extractor, server="digits_server")
    context = MethodContext(classes=CLASSES, input_shape=shape, models=models, torch_device=CPU, seed=3)
    return ClassStatsPrivateServer(config_of(**settings), context)


def rows_of(counts: Any, seed: int) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(CLASSES), counts)
    return CENTRES[labels] + 0.2 * random.normal(size=(len(labels), SIZE)), labels


def released(rows, labels, seed, mu=MU):
    sums = class_sums(unit_rows(rows), labels, CLASSES)
    return to_wire(release_rounded(sums, mu, np.random.default_rng(seed)), mu, discrete=False)


class Member:
    """A device that releases its sums and takes every space."""

    def __init__(self, counts, seed=1, lie=None, mu=MU):
        self.sent = released(*rows_of(counts, seed), seed=seed, mu=mu)
        self.sent = lie(self.sent) if lie else self.sent
        self.spaces: list[ClassSpace] = []

    def __call__(self, ask):
        if ask.step == "summarise":
            return Answer(parts={"statistics": self.sent}, samples=1)
        if "space" in ask.parts:
            self.spaces.append(ask.part("space", ClassSpace))
        return Answer(parts={}, samples=1)


def members(names="abcde", rows=100, **changes):
    return {name: Member([rows] * CLASSES, seed=ord(name), **changes) for name in names}


def accuracy(space, seed=99):
    rows, labels = rows_of([200] * CLASSES, seed)
    own = math.sqrt(SIZE) * unit_rows(rows)
    return (logits(space, coordinates(space, own), CLASSES).argmax(axis=1) == labels).mean()


# --- merge


def test_the_fleet_gets_a_space_in_which_its_classes_are_apart():
    fleet = members()
    (cohort,) = play(make_server(), fleet)
    (space,) = fleet["a"].spaces
    assert accuracy(space) > 0.95
    assert cohort.figures["strength"] == pytest.approx(math.sqrt(5) * 400 * MU, rel=0.1)
    assert cohort.kinds == ["other-dimensions"]


MODELS = [
    {},
    {"predictor": "trained", "predictor_steps": 5},
    {"own_network": "taught", "own_network_epochs": 1, "drawn_images": 4},
]


@pytest.mark.parametrize("models", MODELS)
def test_device_halves_take_part_with_noise_of_their_own(models):
    """`play` adds the noise that `Device` adds; at epsilon 20 the 50 rows of each class are visible."""
    random = torch.Generator().manual_seed(0)
    data = TensorData(torch.rand(200, *SHAPE, generator=random), torch.arange(200) % CLASSES)
    model = build_model("digits_linear", classes=CLASSES)
    local = Local(model=model, taps=check_local_model(model), data=data, classes=CLASSES, torch_device=CPU)
    settings = {"epsilon": 20.0, "robust": "off", **models}
    halves = {name: ClassStatsPrivateDevice(config_of(**settings), local) for name in "ab"}
    (cohort,) = play(make_server(**settings), halves)
    sent: Any = cohort.answers("a", "summarise")[0]["statistics"]
    assert sent.counts == pytest.approx(np.full(CLASSES, 50), abs=20 * 1 / (mu_for(20, 1e-5) * math.sqrt(0.1)))
    assert [item.answer.samples for item in cohort.asked if item.answer is not None] == [1] * 4
    assert {"general", "personal"} <= halves["a"].variants().keys()
    assert halves["a"].variants()["personal"](data.inputs[:3]).shape == (3, CLASSES)


def test_device_with_smaller_epsilon_counts_less_and_is_named():
    fleet = members("abcd") | {"e": Member([100] * CLASSES, seed=5, mu=MU / 4)}
    (cohort,) = play(make_server(), fleet)
    events = [(event.kind, event.device) for event in cohort.events]
    assert events == [("more-noise", "e"), ("other-dimensions", "")]


def test_device_with_far_more_noise_does_not_spoil_merge():
    """Without weights its counts, below zero here, would end the run."""
    fleet = members("abcd") | {"e": Member([100] * CLASSES, seed=7, mu=MU / 1000)}
    (cohort,) = play(make_server(), fleet)
    assert accuracy(fleet["a"].spaces[0]) > 0.95
    assert cohort.figures["strength"] == pytest.approx(math.sqrt(4) * 400 * MU, rel=0.1)


def test_weights_of_precision():
    assert precisions([0.5, 0.25, 0.5]) == pytest.approx([1, 0.25, 1])


def test_claiming_less_noise_than_required_adds_no_weight():
    honest, boasting = make_server(), make_server()
    play(honest, members())
    play(
        boasting, members("abcd") | {"e": Member([100] * CLASSES, seed=ord("e"), lie=lambda one: replace(one, mu=50.0))}
    )
    assert honest.merge_name == boasting.merge_name


# --- the guard on the noise


def test_the_strength_of_a_fleet():
    """20 devices of 300 and of 3,000 rows at epsilon 1, computed independently."""
    one = mu_for(1, 1e-5)
    assert strength(300, [one] * 20) == pytest.approx(359.6, abs=0.05)
    assert strength(3000, [one] * 20) == pytest.approx(3596.3, abs=0.05)
    assert strength(600, [20 * one]) == pytest.approx(3216.6, abs=0.05)


@pytest.mark.parametrize(("devices", "rows"), [(5, 100), (20, 30)])
def test_a_fleet_with_too_few_rows_gets_the_number_that_suffices(devices, rows):
    text = too_few_rows(rows, devices, MU / 2, 1.0)
    assert text is not None
    assert f"on each of {devices} devices are too few for the noise at epsilon 1" in text
    needed = rows_needed(devices, MU / 2)
    assert f"better {needed:,}" in text
    assert strength(needed, [MU / 2] * devices) >= 350 > strength(needed - 1, [MU / 2] * devices)
    assert too_few_rows(needed, devices, MU / 2, 1.0) is None


def test_a_run_with_too_few_rows_ends_with_the_reason():
    with pytest.raises(
        RunError, match=r"rows on each of 3 devices are too few for the noise at epsilon 3; use .* better 282,"
    ):
        play(make_server(), members("abc", rows=10))


def test_a_run_with_much_noise_goes_on_with_an_event():
    (cohort,) = play(make_server(), members("abcd", rows=40))
    assert cohort.kinds == ["much-noise"]


# --- the number of features


@pytest.mark.parametrize(
    ("rows", "devices", "mu", "expected"),
    [
        (0, 1, 0.25, 64),
        (349, 4, 0.5, 64),  # R = 2 * 349 * 0.5 = 349
        (350, 4, 0.5, 128),  # R = 350
        (999, 16, 0.25, 128),  # R = 4 * 999 * 0.25 = 999
        (600, 100, 0.25, 192),  # R = 10 * 600 * 0.25 = 1,500
        (100 * 600, 1, 0.25, 192),  # the same rows behind one noise: R = 15,000
    ],
)
def test_recommended_dimensions_by_strength(rows, devices, mu, expected):
    assert recommended_dimensions(strength(rows, [mu] * devices)) == expected


@given(found=st.floats(0, 1e9), more=st.floats(0, 1e9))
def test_more_strength_never_means_fewer_dimensions(found, more):
    assert recommended_dimensions(found) <= recommended_dimensions(found + more)


@given(found=st.floats(0, 1e9), dimensions=st.integers(8, 192))
def test_the_recommended_dimensions_are_not_advised_again(found, dimensions):
    advice = other_dimensions(found, "scattering", dimensions)
    assert bool(advice) == (recommended_dimensions(found) != max(dimensions, 64))
    assert other_dimensions(found, "scattering", recommended_dimensions(found)) == []
    assert other_dimensions(found, "model", dimensions) == []


def test_the_advice_has_strength_and_both_numbers():
    text = "the strength of the fleet's statistics is 12,141: dimensions = 192 is usually more accurate than 64"
    assert other_dimensions(12140.6, "scattering", 64) == [text]


def test_the_server_advises_other_dimensions():
    """R = sqrt(5) * 400 * 0.72 = 643."""
    (cohort,) = play(make_server(), members())
    (event,) = cohort.events
    assert event.kind == "other-dimensions"
    assert event.text.endswith(
        "dimensions = 128 is usually more accurate than 16; in a new run the devices release their rows again"
    )


def test_forgetting_does_not_end_run_with_too_few_rows_left():
    server = make_server()
    (cohort,) = play(server, members("abcd", rows=40))
    for device in "bcd":
        server.forget(device, cohort)
    assert server.state_dict()["parts"].keys() == {"a"}


# --- screening


LIES = {
    "flips labels": lambda one: replace(one, counts=one.counts[::-1].copy(), sums=one.sums[::-1].copy()),
    "scales its sums": lambda one: replace(one, sums=40 * one.sums),
    "widens its second moment": lambda one: replace(one, second_moment=30 * one.second_moment),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("robust", ["gross", "strict"])
def test_lying_device_is_left_out_and_merge_is_of_others(lie, robust):
    server, others = make_server(robust=robust), make_server(robust=robust)
    (cohort,) = play(server, members("abcd") | {"z": Member([100] * CLASSES, seed=26, lie=LIES[lie])})
    play(others, members("abcd"))
    assert ("summary-left-out", "z") in {(event.kind, event.device) for event in cohort.events}
    assert server.merge_name == others.merge_name


@pytest.mark.parametrize("robust", ["gross", "strict"])
@pytest.mark.parametrize("seed", range(10))
def test_honest_devices_with_noise_are_not_left_out(robust, seed):
    """With few rows of some classes, whose means are noise; those are not compared."""
    counts = [[150, 100, 3, 0], [0, 120, 140, 2], [110, 0, 90, 130], [60, 100, 0, 120], [100, 5, 130, 90]]
    fleet = {name: Member(of, seed=10 * seed + n) for n, (name, of) in enumerate(zip("abcde", counts, strict=True))}
    (cohort,) = play(make_server(robust=robust), fleet)
    assert "summary-left-out" not in cohort.kinds


def test_a_device_with_very_many_rows_is_capped_with_its_noise():
    (cohort,) = play(make_server(), members("abcd") | {"z": Member([5000] * CLASSES, seed=26)})
    events = [(event.kind, event.device) for event in cohort.events]
    assert events == [("rows-capped", "z"), ("other-dimensions", "")]
    assert "which count as" in cohort.events[0].text


# --- newcomers, forgetting, replay


def test_newcomer_joins_merge_and_everybody_gets_new_space():
    server, fleet = make_server(), members("abcd")
    play(server, fleet)
    late = {"e": Member([100] * CLASSES, seed=5)}
    assert server.is_due(dict.fromkeys("abcde", ""))
    asyncio_round(server, fleet | late, completed=1)
    whole = make_server()
    play(whole, members("abcd") | {"e": Member([100] * CLASSES, seed=5)})
    assert server.merge_name == whole.merge_name
    assert len(fleet["a"].spaces) == 2
    assert not server.is_due(dict.fromkeys("abcde", ""))


def asyncio_round(server, fleet, completed):
    cohort = FakeCohort(fleet, completed=completed, number=completed + 1)
    asyncio.run(server.round(cohort))
    return cohort


def test_a_forgotten_devices_release_is_out_of_the_merge():
    server, others = make_server(), make_server()
    (cohort,) = play(server, members())
    play(others, members("abcd"))
    server.forget("e", cohort)
    assert server.merge_name == others.merge_name


def test_the_state_of_a_merge_survives_a_restart_to_the_bit():
    server, again = make_server(), make_server()
    play(server, members())
    again.load_state_dict(unpack_state(pack_state(server.state_dict())))
    assert pack_state(again.state_dict()) == pack_state(server.state_dict())
    again.merge_parts(FakeCohort({}))
    assert again.merge_name == server.merge_name


# --- what it cannot do


def test_an_extractor_with_too_many_outputs_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"\[model\] extractor has \d+ outputs; private statistics need at most 128"
    ):
        make_server(features="model", extractor="scattering")


def test_images_of_two_channels_are_refused():
    with pytest.raises(ConfigurationError, match="private scattering needs images of 1 or 3 channels"):
        make_server(shape=(2, 8, 8))
