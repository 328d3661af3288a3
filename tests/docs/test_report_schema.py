"""docs/reference/report.schema.json is made from the code, describes every field, and holds for real reports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError
from support.fleets import HOSTILE, RUNS, SMALL
from support.long import long_except

from fleetdistill_lab.simulation.fleet import Interrupted, simulate
from fleetdistill_lab.simulation.progress import Progress
from fleetdistill_lab.simulation.timing.behaviour import FleetBehaviour

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs/reference/report.schema.json"
SCHEMA = json.loads(FILE.read_text(encoding="utf-8"))
OBJECTS: Mapping[str, Any] = {SCHEMA["title"]: SCHEMA, **SCHEMA["$defs"]}
WANTED = {
    "controls": replace(RUNS["classstats"], rounds=2, control_rounds=2, with_alone=True, with_fedavg=True),
    "suspects": HOSTILE,
    "without a global model": RUNS["feddkc"],
    "simulated time": replace(SMALL, method="fedavg", behaviour=FleetBehaviour(compute="lognormal:0.5")),
    "private": replace(RUNS["classstats_private"], rounds=1),
    "nothing scored": replace(RUNS["fedavg"], score="none"),
}
"""Simulations of which each has fields that the others leave empty."""


@pytest.mark.long
def test_the_schema_is_made_from_the_code() -> None:
    """Repair it with `python tools/report_schema.py --write`."""
    command = [sys.executable, "tools/report_schema.py"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert made.stdout == FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", OBJECTS)
def test_every_field_has_a_description(name: str) -> None:
    without = [field for field, one in OBJECTS[name]["properties"].items() if not one.get("description")]
    assert not without, f"describe them under Attributes in the docstring of {name}"


@pytest.mark.parametrize("name", long_except(WANTED, *({"suspects", "simulated time", "nothing scored"})))
def test_a_report_follows_the_schema(tmp_path: Path, name: str) -> None:
    simulate(replace(WANTED[name], out=tmp_path))
    check(json.loads((tmp_path / "report.json").read_text()))


def test_the_report_of_an_interrupted_run_follows_the_schema(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        simulate(replace(SMALL, out=tmp_path), stop_after_the_first_round)
    report = json.loads((tmp_path / "report.json").read_text())
    assert not report["finished"]
    check(report)


def stop_after_the_first_round(done: Progress) -> None:
    if (done.phase, done.completed) == ("fleet", 1):
        raise KeyboardInterrupt


def check(report: dict[str, Any]) -> None:
    """Checks a report, and that the schema refuses it with another field or version, and without a field."""
    validator = Draft202012Validator(SCHEMA)
    validator.check_schema(SCHEMA)
    validator.validate(report)
    assert list(report)[:2] == ["schema_version", "method"]
    less = {name: value for name, value in report.items() if name != "late"}
    device = {**report["devices"][0], "colour": "red"}
    for wrong in ({**report, "colour": "red"}, less, {**report, "schema_version": 2}, {**report, "devices": [device]}):
        with pytest.raises(ValidationError):
            validator.validate(wrong)
