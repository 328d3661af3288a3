"""Means over devices: oracles, which were computed independently, and what holds whatever the devices send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods.stale import run_stale_round
from methods.tiny_context import tiny_context

from fleetdistill.knowledge import Array, ModelParameters
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill_server.methods.averaging import TensorMean, WeightedMean, cap
from fleetdistill_server.methods.fedavg import FedAvgServer
from fleetdistill_server.testing import always


class Taken:
    """Keeps the events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.texts: list[str] = []

    def event(self, kind: str, text: str, device: str = "", *, once: bool = False) -> None:
        self.events.append((kind, device))
        self.texts.append(text)


Model = dict[str, Any]


def mean_of(
    models: Sequence[Model], weights: Sequence[float] | None = None, robust: str = "gross"
) -> tuple[dict[str, Array], Taken]:
    """The mean of models of named tensors, floats as parameters and whole numbers as buffers; and what it noted."""
    mean, taken = WeightedMean(robust), Taken()
    for number, model in enumerate(models):
        arrays = {name: np.asarray(value) for name, value in model.items()}
        floats = {name: one.astype(np.float32) for name, one in arrays.items() if one.dtype.kind == "f"}
        counters = {name: one for name, one in arrays.items() if one.dtype.kind == "i"}
        weight = 1 if weights is None else weights[number]
        mean.add(f"d{number}", ModelParameters(parameters=floats, buffers=counters), weight)
    result = mean.result(taken)  # type: ignore[arg-type]
    assert mean.left_out == [device for kind, device in taken.events if kind == "update-left-out"]
    return {**result.parameters, **result.buffers}, taken


def mean_of_numbers(*numbers: float, weights: Sequence[float] | None = None, robust: str = "gross") -> float:
    result, _ = mean_of([{"w": [float(number)]} for number in numbers], weights, robust)
    return float(result["w"][0])


def test_rob_1_a_device_that_is_far_off_is_left_out() -> None:
    """v = 1.5, r = (1.5, .5, .5, 8.5), m = 1: the last one is beyond 4."""
    assert mean_of_numbers(0, 1, 2, 10) == 1
    _, taken = mean_of([{"w": [float(number)]} for number in (0, 1, 2, 10)])
    assert taken.events == [("update-left-out", "d3")]
    assert taken.texts == [
        "d3 is left out of the mean: 1 of its 1 tensors are farther from the devices' median than 4 times the median "
        "distance (w: 8.5, median 1)"
    ]


def test_rob_2_within_twice_usual_distance_is_plain_mean() -> None:
    assert mean_of_numbers(0, 1, 2, 3) == 1.5


def test_rob_3_a_device_in_between_is_drawn_in() -> None:
    """v = 1.5, r = (1.5, .5, .5, 3.3), m = 1: the last one counts as 3.5."""
    assert mean_of_numbers(0, 1, 2, 4.8) == pytest.approx(6.5 / 4, abs=1e-7)


def test_rob_4_weights_are_bounded_by_three_medians() -> None:
    assert cap([10, 20, 30, 10**9]) == [10, 20, 30, 75]
    assert mean_of_numbers(0, 0, 1, weights=[10, 10, 10**9]) == pytest.approx(30 / 50)


def test_rob_5_predictions_are_trimmed() -> None:
    mean = TensorMean("gross")
    for number in (1.0, 2.0, 3.0, 4.0, 100.0):
        mean.add(torch.tensor([[number]]))
    result = mean.result()
    assert result is not None
    assert result.item() == 3


def test_off_takes_everything_as_it_is_sent() -> None:
    assert mean_of_numbers(0, 1, 2, 10, robust="off") == 3.25
    assert mean_of_numbers(0, 0, 1, weights=[10, 10, 80], robust="off") == pytest.approx(0.8)
    mean = TensorMean("off")
    for number in (1.0, 2.0, 3.0, 4.0, 100.0):
        mean.add(torch.tensor([[number]]))
    result = mean.result()
    assert result is not None
    assert result.item() == 22


def test_strict_is_gross_for_means() -> None:
    for numbers in ((0, 1, 2, 10), (0, 1, 2, 4.8)):
        assert mean_of_numbers(*numbers, robust="strict") == mean_of_numbers(*numbers)


@pytest.mark.parametrize("numbers", [(0, 100), (0, 0, 1e6)])
def test_of_three_devices_nobody_can_tell_who_is_far_off(numbers: Sequence[float]) -> None:
    assert mean_of_numbers(*numbers) == pytest.approx(sum(numbers) / len(numbers))


def test_device_far_off_in_half_of_tensors_stays_in_others() -> None:
    honest = [{"a": [float(n)], "b": [float(n)]} for n in (0, 1, 2)]
    result, taken = mean_of([*honest, {"a": [10.0], "b": [3.0]}])
    assert (result["a"], result["b"]) == (1, 1.5)  # type: ignore[comparison-overlap]
    assert taken.events == []


def test_device_far_off_in_over_half_of_tensors_counts_in_none() -> None:
    honest = [{"a": [float(n)], "b": [float(n)], "c": [float(n)]} for n in (0, 1, 2)]
    result, taken = mean_of([*honest, {"a": [10.0], "b": [10.0], "c": [3.0]}])
    assert (result["a"], result["b"], result["c"]) == (1, 1, 1)  # type: ignore[comparison-overlap]
    assert taken.events == [("update-left-out", "d3")]


def test_where_most_devices_agree_to_the_bit_only_they_count() -> None:
    assert mean_of_numbers(7, 7, 7, 7.001) == 7
    assert mean_of_numbers(7, 7, 7, 7) == 7


def test_counters_take_median_and_no_device_makes_them_overflow() -> None:
    largest = np.iinfo(np.int64).max
    models = [{"w": [float(n)], "n": np.int64(count)} for n, count in enumerate((3, 4, 6, largest))]
    result, _ = mean_of(models)
    assert (result["n"], result["n"].dtype, result["n"].shape) == (4, np.int64, ())  # type: ignore[comparison-overlap]
    assert mean_of(models, robust="off")[0]["n"] == largest
    assert mean_of(models[:3])[0]["n"] == 6


def test_a_device_with_most_of_the_weight_is_named() -> None:
    def events(*weights: float) -> list[tuple[str, str]]:
        return mean_of([{"w": [0.0]} for _ in weights], weights)[1].events

    assert events(10, 10, 10**9) == [("most-of-the-weight", "d2")]
    assert events(10, 29) == []
    assert events(10, 31) == [("most-of-the-weight", "d1")]
    assert events(10, 10, 10, 10**9) == []  # 30 of 60
    assert events(5) == []


numbers = st.floats(-1e3, 1e3, width=32)
fleets = st.integers(4, 9).flatmap(
    lambda count: st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=count, max_size=count)
)
some_weights = st.lists(st.integers(1, 100), min_size=9, max_size=9)


@given(rows=fleets, weights=some_weights, order=st.randoms(use_true_random=False))
def test_the_order_of_the_devices_changes_nothing_but_rounding(rows: Any, weights: Any, order: Any) -> None:
    numbered = list(enumerate(rows))
    order.shuffle(numbered)
    first, noted = mean_of([{"w": row} for row in rows], weights)
    mixed, noted_mixed = mean_of([{"w": row} for _, row in numbered], [weights[at] for at, _ in numbered])
    np.testing.assert_allclose(first["w"], mixed["w"], rtol=1e-5, atol=1e-4)
    named = {f"d{numbered[int(device[1:])][0]}" for _, device in noted_mixed.events}
    assert named == {device for _, device in noted.events}


@given(rows=fleets, weights=some_weights)
def test_within_twice_usual_distance_is_exactly_plain_mean(rows: Any, weights: Any) -> None:
    x_kn = np.array(rows, np.float32).astype(np.float64)
    distances = np.linalg.norm(x_kn - np.median(x_kn, axis=0), axis=1)
    weights = [min(weight, 30) + 30 for weight in weights[: len(rows)]]  # within three medians
    result, noted = mean_of([{"w": row} for row in rows], weights)
    plain, _ = mean_of([{"w": row} for row in rows], weights, robust="off")
    if distances.max() <= 1.999 * np.median(distances):
        assert np.array_equal(result["w"], plain["w"])
        assert noted.events == []


@given(
    rows=fleets,
    weights=some_weights,
    hostile=st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=3, max_size=3),
)
def test_no_device_moves_a_tensor_further_than_its_bound(rows: Any, weights: Any, hostile: Any) -> None:
    """The mean is within 2m of the median, and a device that sends the median instead moves it by 2m w / sum(w)."""
    models = [*rows, hostile]
    weights = [*weights[: len(rows)], 10**9]
    x_kn = np.array(models, np.float32).astype(np.float64)
    middle = np.median(x_kn, axis=0)
    usual = float(np.median(np.linalg.norm(x_kn - middle, axis=1)))
    result, _ = mean_of([{"w": row} for row in models], weights)
    rounding = 1e-6 * (1 + np.abs(middle).max() + usual)
    assert np.linalg.norm(result["w"] - middle) <= 2 * usual * (1 + 1e-6) + rounding


def test_a_hostile_devices_share_is_its_capped_weight() -> None:
    """In a fleet whose median and usual distance it does not change, it moves the mean by 2m w / sum(w) at most."""
    honest = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    far = mean_of_numbers(*honest, 9.0, weights=[10] * 7 + [10**9])
    near = mean_of_numbers(*honest, 6.0, weights=[10] * 7 + [10**9])
    assert 0 < far - near <= 2 * 2.0 * 30 / 100


@given(rows=fleets)
def test_large_tensors_are_read_in_parts_with_same_result(rows: Any) -> None:
    import fleetdistill_server.methods.averaging as averaging

    whole, noted = mean_of([{"w": row} for row in rows])
    usual, averaging.BLOCK_NUMBERS = averaging.BLOCK_NUMBERS, 2 * len(rows)
    try:
        parts, noted_parts = mean_of([{"w": row} for row in rows])
    finally:
        averaging.BLOCK_NUMBERS = usual
    np.testing.assert_allclose(whole["w"], parts["w"], rtol=1e-5, atol=1e-4)
    assert noted.events == noted_parts.events


@given(
    logits=st.lists(st.lists(st.floats(-20, 20), min_size=3, max_size=3), min_size=1, max_size=12),
    weights=st.lists(st.integers(1, 50), min_size=12, max_size=12),
)
def test_trimmed_predictions_are_probabilities_within_given_ones(logits: Any, weights: Any) -> None:
    said = [torch.tensor([row], dtype=torch.float64).softmax(1) for row in logits]
    mean = TensorMean("gross", probabilities=True)
    for one, weight in zip(said, weights, strict=False):
        mean.add(one, weight)
    result = mean.result()
    assert result is not None
    torch.testing.assert_close(result.sum(1), torch.ones(1, dtype=torch.float64))
    assert bool((result >= 0).all())


def test_classes_are_equal_where_no_two_devices_agree() -> None:
    mean = TensorMean("gross", probabilities=True)
    for label in range(5):
        mean.add(torch.eye(5)[label : label + 1])
    torch.testing.assert_close(mean.result(), torch.full((1, 5), 0.2, dtype=torch.float64))


def test_up_to_four_devices_are_weighted_and_not_trimmed() -> None:
    mean = TensorMean("gross")
    for number, weight in ((1.0, 1), (2.0, 2), (3.0, 1), (100.0, 1000)):
        mean.add(torch.tensor([number]), weight)
    result = mean.result()
    assert result is not None
    assert result.item() == pytest.approx((1 + 4 + 3 + 100 * 4.5) / 8.5)  # three times the median of 1.5


def test_large_predictions_are_sorted_in_parts_with_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    import fleetdistill_server.methods.averaging as averaging

    def mean() -> torch.Tensor:
        made, random = TensorMean("gross", probabilities=True), torch.Generator().manual_seed(0)
        for weight in range(1, 8):
            made.add(torch.rand(11, 3, generator=random).softmax(1), weight)
        result = made.result()
        assert result is not None
        return result

    whole, stack, sizes = mean(), torch.stack, list[int]()
    monkeypatch.setattr(averaging, "BLOCK_NUMBERS", 40)
    monkeypatch.setattr(torch, "stack", lambda rows: (made := stack(rows), sizes.append(made.numel()))[0])  # type: ignore[func-returns-value]
    torch.testing.assert_close(mean(), whole)
    assert max(sizes) <= 40


@pytest.mark.parametrize(("weighting", "expected"), [("uniform", 0.5 / 1.5), ("samples", 0.5 / 3.5)])
def test_an_answer_to_an_earlier_round_has_half_its_weight(weighting: str, expected: float) -> None:
    """FedAvg's mean of a model of zeros from 3 samples, and one of ones from 1 sample with a factor of 0.5."""
    context = tiny_context("digits_linear", classes=10, input_shape=(1, 8, 8))
    server = FedAvgServer(FedAvgConfig(weighting=weighting), context)
    initial = server.initial()
    models = {
        device: replace(
            initial, parameters={name: np.full_like(one, value) for name, one in initial.parameters.items()}
        )
        for device, value in (("a", 0.0), ("b", 1.0))
    }
    members = {
        device: always({"parameters": models[device]}, samples=samples) for device, samples in (("a", 3), ("b", 1))
    }
    run_stale_round(server, members, {"b": 0.5})
    for parameter in server.model.parameters():
        assert parameter.detach().numpy() == pytest.approx(expected)
