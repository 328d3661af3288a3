"""Figures of a comparison over seeds, worked out by hand."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fleetdistill_lab.experiments.figures import holm, lines_of, make_table, paired_p, save_csv, save_figure
from fleetdistill_lab.experiments.sweep import Result
from fleetdistill_lab.simulation.report.comparison import ComparisonRow


def result(method: str, name: str, seed: int, accuracy: float | None, nbytes: float = 1000.0) -> Result:
    return Result(method, seed, ComparisonRow(name, accuracy, accuracy, nbytes, 2.0 if nbytes else 0.0))


RESULTS = [
    result("a", "a", 0, 0.5),
    result("b", "b", 0, 0.6, 3000.0),
    result("b", "b global", 0, 0.4, 3000.0),
    result("a", "a", 1, 0.7),
    result("b", "b", 1, 0.9, 5000.0),
    result("b", "b global", 1, None, 5000.0),
]


def test_lines_have_means_spreads_and_paired_differences() -> None:
    first, second, third = lines_of(RESULTS)
    assert (first.name, first.method, first.seeds) == ("a", "a", 2)
    assert (first.difference, first.p) == (None, None)
    assert first.accuracy == pytest.approx(0.6)
    assert first.accuracy_spread == pytest.approx(statistics.stdev([0.5, 0.7]))
    assert (second.bytes, second.exchanges) == (4000.0, 2.0)
    assert second.accuracy == pytest.approx(0.75)
    assert second.difference == pytest.approx(0.15), "of 0.1 and 0.2"
    assert second.difference_spread == pytest.approx(0.005**0.5)
    assert (third.accuracy, third.accuracy_spread) == (0.4, None)
    assert third.difference == pytest.approx(-0.1)
    assert third.p is None, "one pair"


def test_p_value_of_a_paired_t_test() -> None:
    """1, 2 and 3 have t = 2 sqrt(3); with two degrees of freedom p = 1 - t / sqrt(t^2 + 2)."""
    differences = [0.01, 0.02, 0.03]
    t = 2 * 3**0.5
    assert paired_p(differences) == pytest.approx(1 - t / (t**2 + 2) ** 0.5)


@pytest.mark.parametrize("differences", [[], [0.1], [0.2, 0.2, 0.2]])
def test_too_few_or_equal_differences_have_no_p_value(differences: list[float]) -> None:
    assert paired_p(differences) is None


def test_holm_multiplies_by_the_number_of_remaining_tests() -> None:
    assert holm([0.01, None, 0.04, 0.03]) == [pytest.approx(0.03), None, pytest.approx(0.06), pytest.approx(0.06)]
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1)))
def test_adjusted_values_are_no_smaller_and_keep_their_order(values: list[float]) -> None:
    adjusted = holm(values)
    assert all(new is not None and old <= new <= 1 for old, new in zip(values, adjusted, strict=True))
    order = sorted(range(len(values)), key=values.__getitem__)
    assert [adjusted[at] for at in order] == sorted(adjusted)  # type: ignore[type-var]


def test_table_shows_percent_and_points() -> None:
    console = Console(width=200, record=True)
    console.print(make_table(lines_of(RESULTS), "title"))
    text = console.export_text()
    assert "60.0 ± 14.1" in text
    assert "+15.0 ± 7.1" in text
    assert "from a" in text


def test_model_without_scores_is_said_to_have_none() -> None:
    console = Console(width=200, record=True)
    console.print(make_table(lines_of([result("a", "a", 0, None)]), "title"))
    assert "not scored" in console.export_text()


def test_csv_has_a_row_for_each_model_and_seed(tmp_path: Path) -> None:
    save_csv(RESULTS, tmp_path / "x.csv")
    with (tmp_path / "x.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["seed"], row["name"]) for row in rows[:2]] == [("a", "0", "a"), ("b", "0", "b")]
    assert float(rows[1]["accuracy"]) == 0.6
    assert rows[-1]["accuracy"] == ""


@pytest.mark.pictures
def test_picture_of_methods_with_and_without_exchanges(tmp_path: Path) -> None:
    save_figure(lines_of([*RESULTS, result("c", "c", 0, 0.3, 0.0)]), tmp_path / "x.png", "title")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
