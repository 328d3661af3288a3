"""The guide to experiments names every column of the results and of the tables' files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import pytest
from sqlite_utils import Database

from fleetdistill_lab.experiments.results import ModelRow, Results
from fleetdistill_lab.experiments.summary import EqualBytes, Pair, Summary
from fleetdistill_lab.experiments.tables import ClassAccuracy, PrintedValue

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "run-experiments.md"
FILES = {
    "metric-METRIC.csv": Summary,
    "equal-bytes.csv": EqualBytes,
    "claim-NUMBER.csv": Pair,
    "models-POINT.csv": ModelRow,
    "classes-POINT.csv": ClassAccuracy,
    "source-METRIC.csv": PrintedValue,
}


def columns_of(name: str) -> set[str]:
    """The columns that the page has in the row of a table or file, its last cell."""
    lines = PAGE.read_text().partition("## The results as data")[2].splitlines()
    (row,) = [line for line in lines if line.startswith(f"| `{name}`")]
    cell = re.sub(r"\([^)]*\)", "", row.rstrip(" |").rpartition(" | ")[2])
    return set(re.findall(r"`(\w+)`", cell))


def names(of: Iterable[object]) -> set[str]:
    return {str(one) for one in of}


@pytest.mark.parametrize("name", FILES)
def test_page_has_the_columns_of_a_file(name: str) -> None:
    assert columns_of(name) == names(item.name for item in fields(FILES[name]))


def test_page_has_the_columns_of_the_results(tmp_path: Path) -> None:
    Results(tmp_path).close()
    database = Database(tmp_path / "results.sqlite")
    assert {name: columns_of(name) for name in database.table_names()} == {
        table.name: names(table.columns_dict) for table in database.tables
    }
