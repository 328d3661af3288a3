"""Summaries of an experiment over seeds, worked out by hand."""

from __future__ import annotations

import csv
import math
import statistics
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fleetdistill_console.tables import open_console, print_all
from fleetdistill_lab.experiments.definition import Claim
from fleetdistill_lab.experiments.figures import draw_boxes, draw_lines, save_figure
from fleetdistill_lab.experiments.notes import power_notes
from fleetdistill_lab.experiments.results import ModelRow
from fleetdistill_lab.experiments.summary import (
    Pair,
    at_equal_bytes,
    check_claims,
    comparisons,
    holm,
    lines_of,
    paired_p,
    significant_ratio,
    summarize,
)
from fleetdistill_lab.experiments.tables import (
    Table,
    claim_table,
    equal_bytes_table,
    fit,
    format_value,
    model_table,
    printed_table,
    rich_table,
    save_csv,
    save_latex,
    short_table,
    summary_table,
)
from fleetdistill_lab.simulation.report.metrics import fairness_of


def check_claim(claim: Claim, metric: str, values: Any, *more: Any) -> list[Pair]:
    """The only claim of its file."""
    return check_claims([(claim, metric)], {metric: values}, *more)[0]


def row(label: str, model: str, seed: int, accuracy: float | None, nbytes: float = 1000.0) -> ModelRow:
    return ModelRow(label, seed, model, accuracy, accuracy, nbytes, 2.0 if nbytes else 0.0, 3 + seed)


ROWS = [
    row("a", "devices", 0, 0.5),
    row("b", "devices", 0, 0.6, 3000.0),
    row("b", "global", 0, 0.4, 3000.0),
    row("a", "devices", 1, 0.7),
    row("b", "devices", 1, 0.9, 5000.0),
    row("b", "global", 1, None, 5000.0),
]
VALUES = {
    "alpha 0.1": {"a": {0: 0.5, 1: 0.7, 2: 0.6}, "b": {0: 0.6, 1: 0.9, 2: 0.9}, "c": {0: 0.4}},
    "alpha 1": {"a": {0: 0.5, 1: 0.7, 2: 0.6}, "b": {0: 0.5, 1: 0.7, 2: 0.6}, "c": {}},
}
FINISHED = {(point, label): 3 for point in VALUES for label in ("a", "b")} | {
    ("alpha 0.1", "c"): 3,
    ("alpha 1", "c"): 3,
}


def text_of(table, width: int = 200) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(rich_table(table))
    return console.export_text()


@pytest.mark.parametrize("width", [80, 120, 160])
def test_wide_table_is_shown_whole_with_points_as_rows(width: int) -> None:
    points = [f"MNIST, {devices} devices, alpha {alpha}" for devices in (10, 50) for alpha in (0.05, 0.1, 1.0, 5.0)]
    labels = ["FedAvg", "CDKT (RepFull)", "FedProx, mu 1", *"abcdef"]
    printed = {
        label: {point: 10.0 * row + column for column, point in enumerate(points)} for row, label in enumerate(labels)
    }
    parts = fit(printed_table("accuracy", printed), width)
    text = "\n".join(text_of(part, width) for part in parts)
    assert "…" not in text
    assert all(label in text for label in labels)
    assert text.count(points[-1]) == len(parts) == (2 if width == 80 else 1)
    values = [value for part in parts for row in part.rows for value in row[1:]]
    assert sorted(values, key=float) == [f"{value:g}" for of in printed.values() for value in of.values()]
    narrow = printed_table("accuracy", {"a": {"x": 1.0, "y": 2.0}})
    assert fit(narrow, width) == [narrow]


def test_lines_have_means_spreads_and_paired_differences() -> None:
    first, second, third = lines_of(ROWS)
    assert (first.name, first.method, first.seeds) == ("a", "a", 2)
    assert (first.difference, first.p) == (None, None)
    assert first.accuracy == pytest.approx(0.6)
    assert first.accuracy_spread == pytest.approx(statistics.stdev([0.5, 0.7]))
    assert (second.name, second.bytes, second.exchanges, second.devices) == ("b devices", 4000.0, 2.0, 3)
    assert second.accuracy == pytest.approx(0.75)
    assert second.difference == pytest.approx(0.15), "of 0.1 and 0.2"
    assert second.difference_spread == pytest.approx(0.005**0.5)
    assert (third.name, third.accuracy, third.accuracy_spread) == ("b global", 0.4, None)
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


def test_summary_pairs_seeds_and_corrects_for_all_points() -> None:
    """Leads of b are 0.1, 0.2 and 0.3: t = 2 sqrt(3). It is the only test, since all others have no spread or pairs."""
    found = {(one.point, one.label): one for one in summarize(VALUES, "a", FINISHED, 3)}
    lead = found["alpha 0.1", "b"]
    assert lead.mean == pytest.approx(0.8)
    assert lead.difference == pytest.approx(0.2)
    assert lead.difference_spread == pytest.approx(0.1)
    assert lead.p == pytest.approx(0.0741799)
    same = found["alpha 1", "b"]
    assert (same.difference, same.difference_spread, same.p) == (0.0, 0.0, None)
    assert found["alpha 0.1", "a"].difference is None


def test_mean_without_all_seeds_does_not_exist() -> None:
    """The seeds that reached a target say nothing of those that did not."""
    found = {(one.point, one.label): one for one in summarize(VALUES, "a", FINISHED, 3)}
    some, none = found["alpha 0.1", "c"], found["alpha 1", "c"]
    assert (some.seeds, some.missing, some.mean) == (1, 2, None)
    assert (none.seeds, none.missing, none.mean) == (0, 3, None)
    text = text_of(short_table("rounds_to_target", list(found.values()), {}))
    assert "never in 2 of 3" in text
    assert "none in 2 of 3" in text_of(short_table("global", list(found.values()), {})), "without a global model"


def test_summary_table_marks_the_best_mean_and_the_source() -> None:
    found = summarize(VALUES, "a", FINISHED, 3)
    table = summary_table("accuracy", found, "a", {"b": {"alpha 1": 61.5}})
    assert list(table.header) == ["", *["alpha 0.1", "from a", "p", "in the source"], "alpha 1", *table.header[6:]]
    assert table.rows[1][:4] == ["b", "80.0 ± 17.3", "+20.0 ± 10.0", "0.074"]
    assert table.rows[1][8] == "61.5"
    assert (1, 1) in table.strong


def test_smaller_is_better_for_bytes(tmp_path: Path) -> None:
    values = {"": {"a": {0: 2000.0, 1: 2001.0}, "b": {0: 1000.0, 1: 1000.0}}}
    found = summarize(values, "a", {("", "a"): 2, ("", "b"): 2}, 2, unit="bytes")
    table = summary_table("bytes", found, "a", {})
    assert table.strong == {(1, 1)}
    assert table.rows == [["a", "2.0 kB"], ["b", "1.0 kB"]]
    save_csv(found, tmp_path / "x.csv")
    with (tmp_path / "x.csv").open(newline="") as file:
        assert [row["p"] for row in csv.DictReader(file)] == ["", ""], "it would be 0.0003 of 1000 and 1001"


def test_power_is_said_only_of_comparisons() -> None:
    assert power_notes(1, 0) == power_notes(2, 0) == power_notes(5, 1) == []
    assert power_notes(1, 1) == ["Only 1 seed: no difference can be told from chance."]
    assert power_notes(2, 1)[0].startswith("2 seeds and 1 comparison a metric: ")


def test_claims_are_checked_pair_by_pair() -> None:
    """At alpha 0.1 b leads a by 0.1, 0.2, 0.3, and at alpha 1 by nothing; c has one seed in common with a."""
    claim = Claim(order=["b", "a", "c"], metric="accuracy", at=["alpha 0.1"])
    first, second = check_claim(claim, "accuracy", VALUES, FINISHED, 3)
    assert (first.pairs, first.wins) == (3, 3)
    assert first.difference == pytest.approx(0.2)
    assert first.verdict == "not decided", "p is 0.074"
    assert (second.pairs, second.wins, second.p, second.verdict) == (1, 1, None, "not decided")
    everywhere, _ = check_claim(claim.model_copy(update={"at": []}), "accuracy", VALUES, FINISHED, 3)
    assert (everywhere.pairs, everywhere.wins) == (6, 3)
    assert everywhere.difference == pytest.approx(0.1)
    assert "b > a" in text_of(claim_table("text", "accuracy", [first]))


SHARED = {
    point: {"a": {0: 0.8, 1: 0.6}, "b": {0: 0.5, 1: 0.5}, "c": {0: at, 1: at + 0.1}}
    for point, at in (("T 1", 0.1), ("T 4", 0.2))
}
RUNS = {
    (point, label, seed): f"{label}-{seed}" + (f"-{point}" if label == "c" else "")
    for point, of in SHARED.items()
    for label, by_seed in of.items()
    for seed in by_seed
}
"""Only c has the grid's setting, so that the grid points share the runs of a and b."""
ALL = {(point, label): 2 for point in SHARED for label in "abc"}


def test_pair_of_runs_of_several_grid_points_counts_once() -> None:
    """Leads of 0.3 and 0.1 have t = 0.2 / 0.1 = 2; with one degree of freedom p = 1 - 2 arctan(2) / pi = 0.295."""
    (pair,) = check_claim(Claim(order=["a", "b"]), "accuracy", SHARED, ALL, 2, RUNS)
    assert (pair.pairs, pair.wins, pair.verdict) == (2, 2, "not decided")
    assert pair.difference == pytest.approx(0.2)
    assert pair.p == pytest.approx(1 - 2 * math.atan(2) / math.pi)
    (other,) = check_claim(Claim(order=["b", "c"]), "accuracy", SHARED, ALL, 2, RUNS)
    assert (other.pairs, other.seeds) == (4, 2), "c has runs of its own at each grid point"
    (partial,) = check_claim(Claim(order=["a", "b"]), "accuracy", SHARED, ALL, 3, RUNS)
    assert partial.left == 2, "one run of each, not one at each grid point"


def test_claim_over_grid_points_has_one_lead_a_seed() -> None:
    """Mean leads of 2, 4 and 6 points over two grid points: t = 2 sqrt(3), p = 1 - t / sqrt(t^2 + 2) = 0.0742.

    All six leads, 1, 3, 5, 3, 5 and 7, would have t = 4 / (2.098 / sqrt(6)) = 4.67 and p = 0.0055.
    """
    leads = {"x": (0.01, 0.03, 0.05), "y": (0.03, 0.05, 0.07)}
    values = {
        point: {"a": {seed: 0.5 + lead for seed, lead in enumerate(of)}, "b": dict.fromkeys(range(3), 0.5)}
        for point, of in leads.items()
    }
    finished = {(point, label): 3 for point in values for label in "ab"}
    (pair,) = check_claim(Claim(order=["a", "b"]), "accuracy", values, finished, 3)
    assert (pair.pairs, pair.wins, pair.seeds, pair.verdict) == (6, 6, 3, "not decided")
    assert pair.difference == pytest.approx(0.04)
    t = 2 * 3**0.5
    assert pair.p == pytest.approx(1 - t / (t**2 + 2) ** 0.5)
    del values["y"]["a"][2]
    (unequal,) = check_claim(Claim(order=["a", "b"]), "rounds_to_target", values, finished, 3)
    assert (unequal.pairs, unequal.seeds) == (5, 3)
    assert unequal.difference == pytest.approx(-(0.02 + 0.04 + 0.05) / 3), "each seed counts once"


def test_holm_counts_comparisons_of_the_same_runs_once() -> None:
    """a has p = 0.295 at both grid points, c has 0.0903 at T 1 (leads 0.4, 0.3) and 0.1257 at T 4 (0.3, 0.2)."""
    found = {(one.point, one.label): one.p for one in summarize(SHARED, "b", ALL, 2, {}, RUNS)}
    assert found["T 1", "c"] == pytest.approx(3 * (1 - 2 * math.atan(7) / math.pi)), "three comparisons, not four"
    assert found["T 4", "c"] == found["T 1", "c"], "no smaller; 2 x 0.1257 is"
    assert found["T 1", "a"] == found["T 4", "a"] == pytest.approx(1 - 2 * math.atan(2) / math.pi)
    assert holm([0.01, 0.01, 0.03], ["x", "x", "y"]) == pytest.approx([0.02, 0.02, 0.03])
    assert comparisons(RUNS, "b") == 3


@pytest.mark.parametrize(("metric", "verdict"), [("accuracy", "holds"), ("rounds_to_target", "does not hold")])
def test_verdict_follows_the_direction_of_the_metric(metric: str, verdict: str) -> None:
    """Leads of 10, 11 and 12: t is 11 sqrt(3), p is 0.0027."""
    values = {"": {"a": {0: 20.0, 1: 22.0, 2: 24.0}, "b": {0: 10.0, 1: 11.0, 2: 12.0}}}
    (pair,) = check_claim(Claim(order=["a", "b"]), metric, values, {("", "a"): 3, ("", "b"): 3}, 3)
    assert pair.verdict == verdict
    assert pair.p == pytest.approx(0.0027, abs=5e-5)


def test_claims_of_a_file_are_corrected_together() -> None:
    """Leads of 10, 11 and 12: p is 0.0027. A claim that is there twice counts once, another metric is another test."""
    values = {"": {"a": {0: 20.0, 1: 22.0, 2: 24.0}, "b": {0: 10.0, 1: 11.0, 2: 12.0}}}
    same, opposite = Claim(order=["a", "b"]), Claim(order=["b", "a"])
    claims = [(same, "accuracy"), (opposite, "accuracy"), (same, "own_accuracy")]
    of = dict.fromkeys(("accuracy", "own_accuracy"), values)
    found = check_claims(claims, of, {("", "a"): 3, ("", "b"): 3}, 3)
    assert [pair.p for (pair,) in found] == pytest.approx([2 * 0.0027] * 3, abs=1e-4)
    assert [pair.verdict for (pair,) in found] == ["holds", "does not hold", "holds"]


def test_few_seeds_need_large_differences() -> None:
    """Quantiles of Student's t: 4.3027 with two degrees of freedom at 97.5 %, 2.7764 with four."""
    assert significant_ratio(1, 1) is None
    assert significant_ratio(3, 1) == pytest.approx(4.3027 / 3**0.5, rel=1e-4)
    assert significant_ratio(5, 1) == pytest.approx(2.7764 / 5**0.5, rel=1e-4)
    more = significant_ratio(3, 18)
    assert more is not None
    assert more == pytest.approx(10.9, abs=0.05)


def test_partial_means_say_their_seeds_and_are_not_the_best() -> None:
    values = {"": {"a": {0: 0.5, 1: 0.5, 2: 0.5}, "b": {0: 0.9}}}
    table = summary_table("accuracy", summarize(values, "a", {("", "a"): 3, ("", "b"): 1}, 3), "a", {})
    assert table.rows[1][1] == "90.0 (1 of 3 seeds)"
    assert table.strong == frozenset(), "the mean of all seeds of b may be the best"
    assert table.rows[1][2:] == ["", ""], "no difference yet"


def test_difference_and_p_value_need_all_seeds() -> None:
    """Two of three seeds would have a p value of 0.0063: the same lead, but for rounding, over a spread of 0.0014."""
    values = {"": {"a": {0: 0.5, 1: 0.5, 2: 0.5}, "b": {0: 0.6, 1: 0.602}}}
    found = summarize(values, "a", {("", "a"): 3, ("", "b"): 2}, 3)
    assert found[1].mean == pytest.approx(0.601)
    assert (found[1].difference, found[1].p) == (None, None)
    assert "*" not in short_table("accuracy", found, {}).rows[1][1]
    whole = summarize(values, "a", {("", "a"): 3, ("", "b"): 2}, 2)
    assert whole[1].p == pytest.approx(0.0063, abs=5e-5)


def test_claim_with_unfinished_runs_has_no_verdict() -> None:
    """Leads of 0.1, 0.101 and 0.102 decide; so does not what was known before the last run."""
    values = {"": {"a": {0: 0.6, 1: 0.601, 2: 0.602}, "b": {0: 0.5, 1: 0.5, 2: 0.5}}}
    claim = Claim(order=["a", "b"])
    (whole,) = check_claim(claim, "accuracy", values, {("", "a"): 3, ("", "b"): 3}, 3)
    (partial,) = check_claim(claim, "accuracy", values, {("", "a"): 3, ("", "b"): 3}, 5)
    assert (whole.left, whole.verdict) == (0, "holds")
    assert (partial.left, partial.p, partial.verdict) == (4, None, "none yet: 4 runs not finished")
    shown = ("+10.1 (3 of 5 seeds)", "3 of 3", "", "none yet: 4 runs not finished")
    assert claim_table("", "accuracy", [partial]).rows[0][1:] == shown
    assert claim_table("", "accuracy", [whole]).rows[0][1] == "+10.1"


def test_models_without_all_seeds_say_so_and_are_not_compared() -> None:
    rows = [row("a", "devices", 0, 0.5), row("a", "devices", 1, 0.5), row("b", "devices", 0, 0.9)]
    first, second = lines_of(rows, "a", 2)
    assert (second.seeds, second.wanted, second.difference) == (1, 2, None)
    rows_of_table = model_table([first, second], "").rows
    assert [cells[:2] for cells in rows_of_table] == [("a", "50.0 ± 0.0"), ("b (1 of 2 seeds)", "90.0")]


def test_failed_runs_are_not_those_that_have_not_run() -> None:
    values = {"": {"a": {0: 0.5, 1: 0.5, 2: 0.5}, "b": {0: 0.9}, "c": {}, "d": {}}}
    finished, failed = {("", "a"): 3, ("", "b"): 1}, {("", "b"): 2, ("", "c"): 3}
    found = summarize(values, "a", finished, 3, failed)
    expected = ["50.0 ± 0.0", "90.0 (1 of 3 seeds, 2 failed)", "failed (3 of 3 seeds)", "not run"]
    assert [row[1] for row in summary_table("accuracy", found, "a", {}).rows] == expected
    assert [one.failed for one in found] == [0, 2, 3, 0]


def test_no_difference_from_a_reference_without_all_figures() -> None:
    """Seeds that reached the target say nothing of a method beside those that did not."""
    values = {"": {"a": {0: 3.0, 1: 4.0}, "b": {0: 2.0, 1: 2.0, 2: 3.0}}}
    _, second = summarize(values, "a", {("", "a"): 3, ("", "b"): 3}, 3)
    assert second.mean == pytest.approx(7 / 3)
    assert (second.difference, second.p) == (None, None)


def test_models_of_the_reference_come_first() -> None:
    assert [line.name for line in lines_of(ROWS, "b")] == ["b devices", "b global", "a"]
    assert lines_of(ROWS, "b")[2].difference == pytest.approx(-0.15)


def test_differences_are_between_models_of_the_same_name() -> None:
    rows = [
        row(label, model, seed, accuracy + 0.01 * seed * weight)
        for label, model, accuracy, weight in (
            *(("a", "devices", 0.5, 1), ("a", "global", 0.2, 1)),
            *(("b", "devices", 0.6, 2), ("b", "global", 0.4, 2)),
            *(("c", "general", 0.9, 3), ("c", "personal", 0.7, 3)),
        )
        for seed in range(3)
    ]
    lines = lines_of(rows)
    assert [line.base for line in lines] == ["", "", "a devices", "a global", "a global", "a devices"]
    assert [line.difference for line in lines[2:]] == pytest.approx([0.11, 0.21, 0.72, 0.22])
    assert [line.p for line in lines[:2]] == [None, None], "a model of the reference is compared with none"
    own = [
        paired_p([step + 0.01 * seed * more for seed in range(3)])
        for step, more in ((0.1, 1), (0.2, 1), (0.7, 2), (0.2, 2))
    ]
    assert [line.p for line in lines[2:]] == pytest.approx(holm(own))
    table = model_table(lines, "")
    assert list(table.header) == ["", *compared("all"), *compared("own"), "bytes", "exchanges", "from"]
    assert [(cells[2], cells[-1]) for cells in table.rows] == [
        ("", ""),
        ("", ""),
        ("+11.0 ± 1.0", "a devices"),
        ("+21.0 ± 1.0", "a global"),
        ("+72.0 ± 2.0", "a global"),
        ("+22.0 ± 2.0", "a devices"),
    ]


def compared(classes: str) -> list[str]:
    return [f"{classes} classes", "difference", "p"]


def test_differences_on_own_classes_have_their_own_p_value() -> None:
    """On all classes 10, 20 and 30 points, on own ones 1, 2 and 3, whose p value is the same, and in a third method."""
    rows = [
        replace(row(name, "devices", seed, 0.5 + step * (1 + seed)), own_accuracy=0.5 + own * (1 + seed))
        for name, step, own in (("a", 0.0, 0.0), ("b", 0.1, 0.01), ("c", 0.1, -0.01))
        for seed in range(3)
    ]
    rows[-1] = replace(rows[-1], own_accuracy=None)
    _, second, third = lines_of(rows)
    assert [second.own_difference, second.own_difference_spread] == pytest.approx([0.02, 0.01])
    assert [second.p, second.own_p] == pytest.approx([2 * 0.0742, 2 * 0.0742], abs=1e-4)
    assert third.own_difference == pytest.approx(-0.015), "of the seeds that have the figure"
    assert model_table([second, third], "").rows[0][4:7] == ("52.0 ± 1.0", "+2.0 ± 1.0", "0.15")


def test_each_accuracy_has_its_own_spread_in_the_table() -> None:
    """On all classes 50 and 70 %, on a device's own 60 and 60.2 %."""
    rows = [replace(row("a", "devices", seed, 0.5 + 0.2 * seed), own_accuracy=0.6 + 0.002 * seed) for seed in (0, 1)]
    ((_, whole, _, _, own, *_),) = model_table(lines_of(rows), "").rows
    assert (whole, own) == ("60.0 ± 14.1", "60.1 ± 0.1")


def test_words_in_brackets_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """rich takes `[method]` for markup and leaves it out."""
    words = "set it in [method]"
    print_all(open_console(), [words, rich_table(Table(words, ("", words), [(words, words)]))])
    assert capsys.readouterr().out.count(words) == 5


def test_table_shows_percent_and_points() -> None:
    text = text_of(model_table(lines_of(ROWS), "title"))
    assert "60.0 ± 14.1" in text
    assert "+15.0 ± 7.1" in text
    assert "from a" in text
    without = model_table(lines_of(ROWS), "title", with_p=False)
    assert [len(cells) for cells in without.rows] == [len(without.header)] * 3
    assert list(without.header[1:5]) == ["all classes", "from a", "own classes", "from a"]


@pytest.mark.parametrize(
    ("value", "spread", "unit", "text"),
    [
        (0.5, 0.1, "percent", "50.0 ± 10.0"),
        (12.0, 1.5, "rounds", "12.0 ± 1.5"),
        (2500.0, 9.0, "bytes", "2.5 kB"),
        (None, None, "rounds", ""),
    ],
)
def test_only_rates_are_in_percent(value: float | None, spread: float | None, unit: str, text: str) -> None:
    assert format_value(value, spread, unit) == text


def test_small_p_values_keep_their_digits() -> None:
    """Differences of 1, 2 and 3 points: p = 1 - t / sqrt(t^2 + 2) with t = 2 sqrt(3) is 0.074."""
    rows = [row("a", "devices", seed, 0.5) for seed in range(3)]
    rows += [row("b", "devices", seed, 0.51 + 0.01 * seed) for seed in range(3)]
    assert [cells[3] for cells in model_table(lines_of(rows), "").rows] == ["", "0.074"]


def test_model_without_scores_is_said_to_have_none() -> None:
    assert "not scored" in text_of(model_table(lines_of([row("a", "devices", 0, None)]), "title"))


def test_csv_has_full_precision(tmp_path: Path) -> None:
    save_csv(ROWS, tmp_path / "x.csv")
    with (tmp_path / "x.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(one["label"], one["seed"], one["model"]) for one in rows[:2]] == [
        ("a", "0", "devices"),
        ("b", "0", "devices"),
    ]
    assert float(rows[1]["accuracy"]) == 0.6
    assert rows[-1]["accuracy"] == ""


def test_latex_escapes_and_emphasizes(tmp_path: Path) -> None:
    values = {"a_b & c": {"x%": {0: 0.5, 1: 0.7}, "y": {0: 0.4, 1: 0.4}}}
    found = summarize(values, "x%", {("a_b & c", "x%"): 2, ("a_b & c", "y"): 2}, 2)
    save_latex(summary_table("accuracy", found, "x%", {}), tmp_path / "x.tex", "tab:x")
    text = (tmp_path / "x.tex").read_text()
    assert r"x\% & \textbf{60.0 $\pm$ 14.1} &" in text
    assert r"a\_b \& c" in text
    assert r"\label{tab:x}" in text
    special = "# $ % & ~ _ ^ { } < > \\"
    save_latex(Table(special, ("", "b"), [(special, "1")]), tmp_path / "y.tex", "tab:y")
    escaped = r"\# \$ \% \& \textasciitilde{} \_ \textasciicircum{} \{ \} $<$ $>$ \textbackslash{}"
    assert (tmp_path / "y.tex").read_text().count(escaped) == 2, "caption and cell"
    assert r"\toprule" in text


def test_latex_of_a_grid_fits_a_column_and_a_page(tmp_path: Path) -> None:
    """Fifteen grid points of two methods: 46 columns, or three lines a point and 40 lines a page."""
    values = {f"alpha {at}": {"a": {0: 0.5, 1: 0.7}, "b": {0: 0.6, 1: 0.9}} for at in range(15)}
    finished = {(point, label): 2 for point in values for label in ("a", "b")}
    save_latex(summary_table("accuracy", summarize(values, "a", finished, 2), "a", {}), tmp_path / "x.tex", "tab:x")
    first, second, end = (tmp_path / "x.tex").read_text().split(r"\end{table}")
    assert end.strip() == ""
    lines = first.splitlines()
    at = lines.index(r" & alpha 1 & from a & p \\")
    assert lines[at - 1] == lines[at + 1] == r"\midrule"
    assert lines[at + 2] == r"a & 60.0 $\pm$ 14.1 &  &  \\"
    assert lines[at + 3].startswith(r"b & \textbf{75.0 $\pm$ 21.2} & $+$15.0 $\pm$ 7.1 & ")
    assert r"\begin{tabular}{lrrr}" in lines
    assert (first.count("& alpha"), second.count("& alpha")) == (13, 2)
    assert (r"\label{tab:x}" in first, r"\label{tab:x-2}" in second, "continued" in second) == (True, True, True)


def test_latex_has_a_short_caption_and_notes_below(tmp_path: Path) -> None:
    found = summarize({"": VALUES["alpha 0.1"]}, "a", dict.fromkeys([("", name) for name in "abc"], 3), 3)
    table = summary_table("accuracy", found, "a", {})
    save_latex(table, tmp_path / "x.tex", "tab:x", "Mean over 3 seeds; 95 % of the rows.")
    text = (tmp_path / "x.tex").read_text()
    assert r"\caption{Accuracy on all classes, model at the end, in percent}" in text
    assert list(table.header) == ["", "mean", "from a", "p"]
    assert text.index(r"\end{tabular}") < text.index(
        r"\par\smallskip\raggedright Mean over 3 seeds; 95 \% of the rows."
    )


@pytest.mark.parametrize("width", [20, 60, 140])
def test_grid_points_that_do_not_fit_are_below_each_other(width: int) -> None:
    """Twelve points of 14 characters beside a label of 10, with the space between columns."""
    points = [f"alpha 0.{at:03}" for at in range(12)]
    table = printed_table("accuracy", {label: dict.fromkeys(points, 1.0) for label in ("FedAvg", "FedProx")})
    parts = replace(table, strong=frozenset({(1, 5)})).blocks(width)
    assert [name for part in parts for name in part.header[1:]] == points
    assert [len(part.header) - 1 for part in parts] == {20: [1] * 12, 60: [3] * 4, 140: [9, 3]}[width]
    assert all([row[0] for row in part.rows] == ["FedAvg", "FedProx"] for part in parts)
    ((part, (row, column)),) = [(part, where) for part in parts for where in part.strong]
    assert (row, part.header[column]) == (1, points[4])


def test_tables_of_texts_break_lines_and_continue(tmp_path: Path) -> None:
    """A table of 41 methods with long settings: a column that has lines, and 40 rows a page."""
    table = Table("Settings", ("", "settings"), [(f"method {number}", "mu = 1, " * 30) for number in range(41)])
    save_latex(table, tmp_path / "x.tex", "tab:x", of_texts=True)
    first, second, end = (tmp_path / "x.tex").read_text().split(r"\end{table*}")
    assert r"\begin{tabular}{lp{0.80\textwidth}}" in first
    assert (first.count("method "), second.count("method "), end.strip()) == (40, 1, "")
    save_csv(table, tmp_path / "x.csv")
    assert list(csv.reader((tmp_path / "x.csv").open()))[1] == ["method 0", "mu = 1, " * 30]
    save_latex(replace(table, rows=[]), tmp_path / "none.tex", "tab:none", of_texts=True)
    assert r"\toprule" in (tmp_path / "none.tex").read_text()


def test_latex_of_printed_values_fits_a_page(tmp_path: Path) -> None:
    points = [f"alpha 0.{at}, local_epochs 5" for at in range(12)]
    save_latex(printed_table("accuracy", {"FedAvg": dict.fromkeys(points, 50.0)}), tmp_path / "x.tex", "tab:x")
    text = (tmp_path / "x.tex").read_text()
    assert r"\begin{tabular}{lrrr}" in text
    assert text.count("FedAvg & 50 & 50 & 50 ") == 4


@pytest.mark.pictures
def test_histogram_has_the_bins_of_the_report(tmp_path: Path) -> None:
    rates = [0.05, 0.3, 0.30000000000000004, 0.79, 1.0]
    devices = pandas.DataFrame({"label": "a", "point": "", "seed": 0, "own_accuracy": rates})
    figure = draw_boxes(devices, "own_accuracy", histogram=True)
    assert figure is not None
    fairness = fairness_of(rates)
    assert fairness is not None
    bars: Any = figure.axes[0].patches
    assert [bar.get_height() for bar in bars] == fairness.bins
    save_figure(figure, tmp_path, "x")


@pytest.mark.pictures
def test_picture_of_methods_with_and_without_exchanges(tmp_path: Path) -> None:
    figure = draw_lines(lines_of([*ROWS, row("c", "devices", 0, 0.3, 0.0)]), "title")
    files = save_figure(figure, tmp_path, "x", ("png", "pdf", "svg"))
    assert [file.read_bytes()[:4] for file in files] == [b"\x89PNG", b"%PDF", b"<?xm"]


@pytest.mark.parametrize("sent", [(1_232_026.0, 1_232_032.0), (1_232_026.0, 1_300_000.0), (2e3, 2e6)])
def test_axis_of_bytes_spans_more_than_headers(sent: tuple[float, float]) -> None:
    figure = draw_lines(
        lines_of([row(name, "devices", 0, 0.5, size) for name, size in zip("ab", sent, strict=True)]), ""
    )
    low, high = figure.axes[0].get_xlim()
    assert low < min(sent) / 1e3 < max(sent) / 1e3 < high
    assert high / low > 1.05
    ticks = [tick for tick in figure.axes[0].get_xticks() if low <= tick <= high]
    assert len(ticks) >= 2


def test_bytes_that_differ_by_headers_are_equal() -> None:
    """7 of 1.2 MB; without the tolerance p is 0.003."""
    sent = {"a": {0: 1232026.0, 1: 1232025.0, 2: 1232026.0}, "b": {0: 1232033.0, 1: 1232032.0, 2: 1232032.0}}
    finished = dict.fromkeys([("", "a"), ("", "b")], 3)
    (pair,) = check_claim(Claim(order=["a", "b"]), "bytes", {"": sent}, finished, 3)
    assert (pair.difference, pair.p, pair.verdict, pair.wins) == (0.0, None, "equal", 0)
    differences = [summarize({"": sent}, "a", finished, 3, unit=unit)[1].difference for unit in ("bytes", "")]
    assert differences == [0.0, pytest.approx(20 / 3)]


def test_tables_of_the_page_may_be_wider_than_its_text() -> None:
    page = (files("fleetdistill_lab.experiments") / "page.html").read_text()
    rules = [rule.partition("{") for rule in page.partition("<style>")[2].partition("</style>")[0].split("}")]
    width = {name.strip(): "72rem" in rule.partition("max-width:")[2] for name, _, rule in rules}
    assert (width["body > *, details > *"], width[".scroll"], width["body"]) == (True, False, False)


# --- at equal bytes

Curves = dict[tuple[str, str], dict[int, list[tuple[float, float | None]]]]

EACH_TEN: list[tuple[float, float | None]] = [
    (10.0, 0.1),
    (20.0, 0.2),
    (30.0, 0.3),
    (40.0, 0.4),
    (50.0, 0.5),
    (120.0, 0.6),
]
"""Bytes until each round, and an accuracy."""


def test_each_pair_of_runs_has_bytes_of_its_own() -> None:
    """40 bytes are four rounds of the reference in the first seed, and 20 are two rounds in the second one."""
    curves: Curves = {
        ("", "a"): {0: EACH_TEN, 1: EACH_TEN},
        ("", "b"): {0: [(10.0, 0.3), (40.0, 0.5)], 1: [(15.0, 0.3), (20.0, 0.5)]},
    }
    (one,) = at_equal_bytes(curves, "a", 2)
    assert (one.label, one.seeds, one.rounds, one.reference_rounds) == ("b", 2, 2.0, 3.0)
    assert one.difference == pytest.approx(0.2)  # 0.5 - 0.4 and 0.5 - 0.2
    assert one.difference_spread == pytest.approx(0.02**0.5)
    assert one.p == pytest.approx(paired_p([0.1, 0.3]))
    (row,) = equal_bytes_table([one], "a").rows
    assert row == ["b", "+20.0 ± 14.1", "0.3", "2 and 3"]


def test_round_that_was_not_scored_has_no_part_in_equal_bytes() -> None:
    unscored: list[tuple[float, float | None]] = [(10.0, 0.1), (20.0, None), (30.0, 0.3)]
    (one,) = at_equal_bytes({("", "a"): {0: unscored}, ("", "b"): {0: [(20.0, 0.5)]}}, "a", 1)
    assert (one.rounds, one.reference_rounds) == (1.0, 1.0)
    assert one.difference == pytest.approx(0.4)


def test_bytes_without_a_round_of_both_give_no_difference() -> None:
    curves: Curves = {("p", "a"): {0: [(100.0, 0.9)]}, ("p", "b"): {0: EACH_TEN[:3]}}
    (one,) = at_equal_bytes(curves, "a", 1)
    assert (one.seeds, one.difference, one.rounds) == (0, None, None)
    assert equal_bytes_table([one], "a").rows == [["b", "", "", "none within the bytes"]]


def test_method_that_was_never_scored_is_left_out_at_equal_bytes() -> None:
    unscored: list[tuple[float, float | None]] = [(10.0, None), (20.0, None)]
    curves: Curves = {("", "a"): {0: EACH_TEN}, ("", "b"): {0: EACH_TEN}, ("", "c"): {0: unscored}}
    assert [one.label for one in at_equal_bytes(curves, "a", 1)] == ["b"]
    assert at_equal_bytes(curves, "c", 1) == []


def test_missing_seed_leaves_no_difference_at_equal_bytes() -> None:
    curves: Curves = {("", "a"): {0: EACH_TEN, 1: EACH_TEN}, ("", "b"): {0: EACH_TEN}}
    (one,) = at_equal_bytes(curves, "a", 2)
    assert (one.seeds, one.difference, one.p) == (1, None, None)
    assert equal_bytes_table([one], "a").rows[0][1] == " (1 of 2 seeds)"


def test_equal_bytes_may_differ_by_headers() -> None:
    """The same payload each round; a round's number with two digits makes the tenth header longer."""
    curves: Curves = {("", "a"): {0: [(1000.0, 0.1), (2000.1, 0.2)]}, ("", "b"): {0: [(1000.0, 0.3), (2000.0, 0.4)]}}
    (one,) = at_equal_bytes(curves, "a", 1)
    assert (one.rounds, one.reference_rounds) == (2.0, 2.0)
