"""docs/how-to/read-a-report.md lists all fields of report.json, and no others, with their types."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.fleets import HOSTILE, RUNS, SMALL

from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.timing.behaviour import FleetBehaviour

PAGE = Path(__file__).parents[2] / "docs/how-to/read-a-report.md"
TYPES: dict[str, Any] = {"text": str, "number": (int, float), "whole number": int, "true or false": bool, "any": object}
WANTED = {
    "controls": replace(RUNS["classstats"], rounds=2, control_rounds=2, with_alone=True, with_fedavg=True),
    "suspects": HOSTILE,
    "simulated time": replace(SMALL, method="fedavg", behaviour=FleetBehaviour(compute="lognormal:0.5")),
    "private": replace(RUNS["classstats_private"], rounds=1),
}
"""Simulations of which each has fields that the others leave empty."""


def documented() -> dict[str, str]:
    """The type of each field in the page's tables."""
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \| .* \|$", PAGE.read_text(), re.MULTILINE)
    result: dict[str, str] = {}
    for cell, kinds in rows:
        fields, types = re.findall("`([^`]+)`", cell), kinds.split(", ")
        result |= dict(zip(fields, types * len(fields) if len(types) == 1 else types, strict=len(types) > 1))
    return result


def values(value: Any, path: str, known: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """All values of a report with their fields, written as on the page."""
    if isinstance(value, dict):
        has_any_name = any(field.startswith(f"{path}.*") for field in known)
        for name, item in value.items():
            here = "*" if has_any_name else name
            yield from values(item, f"{path}.{here}" if path else here, known)
    elif isinstance(value, list):
        for item in value:
            yield from values(item, f"{path}[]", known)
        if not value:
            yield f"{path}[]", None
    elif value is not None or not any(field.startswith((f"{path}.", f"{path}[")) for field in known):
        yield path, value


def test_the_page_lists_all_fields_of_a_report_with_types(tmp_path: Path) -> None:
    known, found = documented(), set()
    for name, wanted in WANTED.items():
        simulate(replace(wanted, out=tmp_path / name))
        report = json.loads((tmp_path / name / "report.json").read_text())
        for field, value in values(report, "", known):
            found.add(field)
            kind = known.get(field, "any")
            assert value is None or isinstance(value, TYPES[kind]), (field, value)
            assert kind in ("true or false", "any") or not isinstance(value, bool), field
    assert found == known.keys()
