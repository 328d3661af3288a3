"""Figures of a fleet: oracles, which were computed independently, and laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetdistill.errors import ConfigurationError
from fleetdistill_lab.simulation.report.metrics import (
    Ints,
    accuracy,
    c_gen,
    c_per,
    c_spec,
    confusion,
    f1_by_class,
    f1_macro,
    f1_weighted,
    fleet_scores,
    median_of_rounds,
)


def hits(correct: int, rows: int) -> Ints:
    """A confusion matrix of one class that is answered right or as the other."""
    return np.array([[correct, rows - correct], [0, 0]])


OWN = np.stack([hits(9, 10), hits(24, 30), hits(30, 60)])
# 40, 50 and 70 of the 100 rows of the union; what stands on the diagonal is OWN.
EVERYWHERE = np.stack(
    [
        np.stack([hits(9, 10), hits(11, 30), hits(20, 60)]),
        np.stack([hits(6, 10), hits(24, 30), hits(20, 60)]),
        np.stack([hits(10, 10), hits(30, 30), hits(30, 60)]),
    ]
)


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
    server = np.stack([hits(5, 10), hits(15, 30), hits(60, 60)])
    result = fleet_scores(EVERYWHERE, server)
    assert (result.global_, result.c_spec, result.empty_parts) == (0.8, c_spec(OWN), 0)
    assert result.c_per == pytest.approx(0.633333, abs=1e-6)
    by_part = fleet_scores(EVERYWHERE, server, f1_weighted)
    # F1 of a part of one class with h of n right is 2h / (n + h): 10 / 15, 30 / 45 and 1
    assert by_part.global_ == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    assert np.isnan(fleet_scores(EVERYWHERE).global_)


def test_metrics_f1_of_three_classes() -> None:
    counts = confusion([0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 2, 2], 3)
    assert f1_by_class(counts) == pytest.approx([0.8, 0.5, 0.666667], abs=1e-6)
    assert f1_macro(counts) == pytest.approx(0.655556, abs=1e-6)
    assert f1_weighted(counts) == pytest.approx(0.677778, abs=1e-6)
    assert accuracy(counts) == pytest.approx(0.666667, abs=1e-6)


def test_metrics_f1_weighted_is_by_part_and_then_the_mean() -> None:
    pairs = [f1_weighted(part) for row in EVERYWHERE for part in row]
    assert c_gen(EVERYWHERE, f1_weighted) == pytest.approx(np.mean(pairs))
    assert c_gen(EVERYWHERE, f1_weighted) != pytest.approx(np.mean([f1_weighted(row.sum(0)) for row in EVERYWHERE]))


def test_metrics_count_absent_and_never_answered_classes() -> None:
    counts = confusion([0, 0, 1], [0, 0, 0], 4)  # class 1 is never answered, 2 and 3 are neither there nor answered
    assert f1_by_class(counts).tolist() == pytest.approx([0.8, 0, 0, 0])
    assert f1_macro(counts) == pytest.approx(0.4)


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
    late = median_of_rounds(per_round, 2, 4)
    assert late == pytest.approx(0.45)
    assert late != c_per(median_of_rounds(generic, 2, 4), median_of_rounds(specific, 2, 4))


def test_device_without_test_rows_is_counted_but_not_in_means() -> None:
    with_empty = EVERYWHERE.copy()
    with_empty[:, 2] = 0
    result = fleet_scores(with_empty)
    assert result.c_spec == pytest.approx((0.9 + 0.8) / 2)
    assert result.empty_parts == 1


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40))
def test_scores_are_0_to_1_and_1_only_if_every_answer_is_right(rows: list[tuple[int, int]]) -> None:
    labels, answers = zip(*rows, strict=True)
    counts = confusion(labels, answers, 5)
    assert counts.sum() == len(rows)
    for score in (accuracy, f1_weighted, f1_macro):
        assert 0 <= score(counts) <= 1 + 1e-12
        assert (score(counts) == pytest.approx(1)) == (labels == answers)
