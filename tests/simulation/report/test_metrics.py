"""Figures of a fleet: oracles, which were computed independently, and laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.confusions import matrix

from fleetdistill.errors import ConfigurationError
from fleetdistill.training.figures import Confusion
from fleetdistill_lab.simulation.report.metrics import (
    Margins,
    accuracy,
    accuracy_by_class,
    c_gen,
    c_per,
    c_spec,
    f1_by_class,
    f1_macro,
    f1_weighted,
    fairness_of,
    fleet_scores,
    rounds_to,
    summarize,
    top_k_predictions,
)


def hits(correct: int, rows: int) -> Confusion:
    """A confusion matrix of one class that is answered right or as the other."""
    return matrix([[correct, rows - correct], [0, 0]])


OWN = Margins.stack([hits(9, 10), hits(24, 30), hits(30, 60)])
# 40, 50 and 70 of the 100 rows of the union; what stands on the diagonal is OWN.
EVERYWHERE = [
    Margins.stack([hits(9, 10), hits(11, 30), hits(20, 60)]),
    Margins.stack([hits(6, 10), hits(24, 30), hits(20, 60)]),
    Margins.stack([hits(10, 10), hits(30, 30), hits(30, 60)]),
]


def test_metrics_c_spec_over_devices_and_over_samples() -> None:
    assert c_spec(OWN) == pytest.approx(0.733333, abs=1e-6)
    assert c_spec(OWN, average="samples") == pytest.approx(0.63)
    with pytest.raises(ConfigurationError, match="unknown average 'rows'"):
        c_spec(OWN, average="rows")


def test_metrics_c_gen_and_c_per() -> None:
    assert c_gen(EVERYWHERE) == pytest.approx(0.533333, abs=1e-6)
    assert c_per(c_gen(EVERYWHERE), c_spec(OWN)) == pytest.approx(0.633333, abs=1e-6)
    assert c_per(c_gen(EVERYWHERE), c_spec(OWN, average="samples")) == pytest.approx(0.581667, abs=1e-6)


def test_metrics_all_four_of_one_round() -> None:
    server = Margins.stack([hits(5, 10), hits(15, 30), hits(60, 60)])
    result = fleet_scores(EVERYWHERE, server)
    assert (result.global_, result.c_spec, result.empty_parts) == (0.8, c_spec(OWN), 0)
    assert result.c_per == pytest.approx(0.633333, abs=1e-6)
    by_part = fleet_scores(EVERYWHERE, server, f1_weighted)
    # F1 of a part of one class with h of n right is 2h / (n + h): 10 / 15, 30 / 45 and 1
    assert by_part.global_ == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    assert np.isnan(fleet_scores(EVERYWHERE).global_)


def test_metrics_f1_of_three_classes() -> None:
    counts = Confusion.of(np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 1, 1, 2, 2]), 3)
    assert f1_by_class(counts) == pytest.approx([0.8, 0.5, 0.666667], abs=1e-6)
    assert f1_macro(counts) == pytest.approx(0.655556, abs=1e-6)
    assert f1_weighted(counts) == pytest.approx(0.677778, abs=1e-6)
    assert accuracy(counts) == pytest.approx(0.666667, abs=1e-6)


def test_metrics_f1_weighted_is_by_part_and_then_the_mean() -> None:
    pairs = [f1_weighted(row.part(number)) for row in EVERYWHERE for number in range(3)]
    assert c_gen(EVERYWHERE, f1_weighted) == pytest.approx(np.mean(pairs))
    assert c_gen(EVERYWHERE, f1_weighted) != pytest.approx(np.mean([f1_weighted(row.total()) for row in EVERYWHERE]))


def test_metrics_count_absent_and_never_answered_classes() -> None:
    """Class 1 is never answered, 2 and 3 are neither there nor answered."""
    counts = matrix([[2, 0, 0, 0], [1, 0, 0, 0], [0] * 4, [0] * 4])
    assert f1_by_class(counts).tolist() == pytest.approx([0.8, 0, 0, 0])
    assert f1_macro(counts) == pytest.approx(0.4)
    answered_but_absent = matrix([[1, 1, 0], [0] * 3, [0] * 3])
    assert f1_macro(answered_but_absent) == pytest.approx((2 / 3 + 0) / 2)


def median(curve: list[float]) -> float:
    box = summarize(curve).box
    assert box is not None
    return box.median


# C-Gen and C-Spec as the paper prints them, the mean of both, and the C-Per that it prints
PRINTED = {
    "Scaffold": (20.58, 98.60, 59.59, 59.59),
    "MOON": (52.35, 99.30, 75.825, 75.83),
    "FedDyn": (74.58, 95.58, 85.08, 85.08),
    "Rep": (75.37, 96.74, 86.055, 86.06),
    "Full": (65.19, 98.14, 81.665, 81.66),
    "RepFull": (69.70, 98.37, 84.035, 84.08),
    "No Transfer": (19.58, 98.80, 59.19, 59.09),
    "FedAvg": (53.05, 98.14, 75.595, 76.41),
}


@pytest.mark.parametrize("method", PRINTED)
def test_cper_of_the_printed_medians(method: str) -> None:
    generic, specific, mean, printed = PRINTED[method]
    assert c_per(generic, specific) == pytest.approx(mean)
    assert mean == pytest.approx(printed, abs=0.82)  # not equal: see the next test


def test_cper_is_taken_per_round_and_then_the_median() -> None:
    generic, specific = [0.5, 0.6, 0.1, 0.9], [0.9, 0.2, 0.8, 0.7]
    per_round = [c_per(g, s) for g, s in zip(generic, specific, strict=True)]
    late, of_medians = median(per_round[1:]), c_per(median(generic[1:]), median(specific[1:]))
    assert late == pytest.approx(0.45)
    assert of_medians == pytest.approx((0.6 + 0.7) / 2), "what the printed C-Per of FedAvg is not"


def test_device_without_test_rows_is_counted_but_not_in_means() -> None:
    nothing = Margins.of(matrix(np.zeros((2, 2))))
    with_empty = [Margins.stack([row.part(0), row.part(1), nothing]) for row in EVERYWHERE]
    result = fleet_scores(with_empty)
    assert result.c_spec == pytest.approx((0.9 + 0.8) / 2)
    assert result.empty_parts == 1


def test_device_that_is_always_wrong_counts_in_the_means() -> None:
    last = EVERYWHERE[2]
    all_wrong = Margins.stack([last.part(0), last.part(1), hits(0, 60)])
    assert fleet_scores([*EVERYWHERE[:2], all_wrong]).c_spec == pytest.approx((0.9 + 0.8 + 0.0) / 3)


# --- over devices


def test_fairness_of_seven_devices() -> None:
    result = fairness_of([0.55, 0.05, 0.61, 0.72, 0.79, 0.80, 1.0])
    assert result is not None
    assert result.bins == [1, 0, 0, 0, 0, 1, 1, 2, 1, 1]
    assert result.std == pytest.approx(0.277996, abs=1e-6)
    assert result.worst == 0.05, "one device, the worst tenth of seven rounded up to one"
    assert result.jain == pytest.approx(0.843632, abs=1e-6)


def test_the_worst_tenth_of_29_devices_is_two() -> None:
    """0.00, 0.01, ... 0.28 have the mean 0.005 of the worst two."""
    result = fairness_of([number / 100 for number in range(29)])
    assert result is not None
    assert result.worst == pytest.approx(0.005)
    assert fairness_of([]) is None


@pytest.mark.parametrize("tenths", range(11))
def test_tenths_are_in_the_bin_that_they_begin(tenths: int) -> None:
    for rate in (tenths / 10, 1 - (10 - tenths) / 10, tenths * 0.1):
        result = fairness_of([min(rate, 1.0)])
        assert result is not None
        assert result.bins.index(1) == min(tenths, 9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_fairness_is_best_for_equal_devices(rates: list[float]) -> None:
    result, equal = fairness_of(rates), fairness_of([rates[0]] * len(rates))
    assert result is not None
    assert equal is not None
    assert sum(result.bins) == len(rates)
    assert 1 / len(rates) - 1e-9 <= result.jain <= 1 + 1e-9
    assert min(rates) <= result.worst <= np.mean(rates) + 1e-9
    assert (equal.std, equal.jain) == pytest.approx((0, 1), abs=1e-6)


# --- top k

DOWN, UP = [5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("k", "expected"), [(1, 0.0), (4, 0.0), (5, 0.5)])
def test_top_k_accuracy_of_two_samples(k: int, expected: float) -> None:
    """Class 4 has four larger logits in the first row, class 0 has five in the second."""
    counts = Confusion.of(np.array([4, 0]), top_k_predictions([DOWN, UP], [4, 0], k), 6)
    assert accuracy(counts) == expected
    if k == 1:
        assert top_k_predictions([DOWN, UP], [4, 0], k).tolist() == [0, 5], "classes that are wrong stay wrong"


def test_equal_logits_are_all_in_the_top() -> None:
    assert top_k_predictions([[1, 1, 1, 0]], [2], 1).tolist() == [2]
    assert top_k_predictions([[1, 1, 1, 0]], [3], 3).tolist() == [0], "three are strictly larger"


@pytest.mark.parametrize("k", [0, 6, 7])
def test_top_k_of_all_classes_is_refused(k: int) -> None:
    with pytest.raises(ConfigurationError, match=f"top_k is {k}, must be at least 1 and below 6"):
        top_k_predictions([DOWN], [0], k)


# --- over rounds


@pytest.mark.parametrize(("target", "number"), [(0.60, 2), (0.5, 1), (0.63, 4), (0.64, None)])
def test_the_first_hit_counts_though_the_curve_falls(target: float, number: int | None) -> None:
    assert rounds_to([0.50, 0.61, 0.59, 0.63], target) == number


def test_an_unknown_round_reaches_no_target() -> None:
    assert rounds_to([None, None, 0.5], 0.0) == 3
    assert rounds_to([], 0.0) is None


def test_summary_has_final_best_and_late_rounds() -> None:
    """Rounds 1 to 25 rise to .25 but for a peak in round 2; rounds 6 to 25 have the quartiles .1075, .155 and .2025."""
    curve = [number / 100 for number in range(1, 26)]
    curve[1] = 0.9
    result = summarize(curve)
    assert (result.final, result.best, result.best_round) == (0.25, 0.9, 2)
    assert result.last_mean == pytest.approx(0.205)
    assert result.box is not None
    assert list(vars(result.box).values()) == pytest.approx([0.06, 0.1075, 0.155, 0.2025, 0.25])


def test_summary_of_unscored_rounds_is_absent() -> None:
    curve = [None, 0.9, *[0.5] * 10]
    result = summarize(curve)
    assert (result.best, result.best_round, result.last_mean, result.box) == (0.9, 2, 0.5, None)
    assert summarize([*curve, None]).last_mean is None
    assert set(vars(summarize([None, None])).values()) == {None}


# --- laws


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40))
def test_scores_are_0_to_1_and_1_only_if_every_answer_is_right(rows: list[tuple[int, int]]) -> None:
    labels, answers = zip(*rows, strict=True)
    counts = Confusion.of(np.array(labels, int), np.array(answers, int), 5)
    assert (counts.count, counts.correct) == (len(rows), sum(a == b for a, b in rows))
    for score in (accuracy, f1_weighted, f1_macro):
        assert 0 <= score(counts) <= 1 + 1e-12
        assert (score(counts) == pytest.approx(1)) == (labels == answers)


def test_accuracy_by_class_is_the_mean_over_models() -> None:
    """Recalls of 3 of 4 and 1 of 2, and of 1 of 4 and 2 of 2; the third class has no rows."""
    one, other = matrix([[3, 1, 0], [0, 1, 1], [0, 0, 0]]), matrix([[1, 0, 3], [0, 2, 0], [0, 0, 0]])
    assert accuracy_by_class([one]) == [0.75, 0.5, None]
    assert accuracy_by_class([one, other]) == [0.5, 0.75, None]
    assert accuracy_by_class([]) is None
