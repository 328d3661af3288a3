"""Measured figures of the methods' audits; benchmarks/experiments/audit_methods.py writes the JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["NOT_MEASURED", "linked"]

NOT_MEASURED = "not measured"
FILE = Path(__file__).with_name("audit_figures.json")


@cache
def figures() -> Mapping[str, Any]:
    """Returns the file: data sets, seeds, and results by form, which is a method's name or a name with settings."""
    loaded: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return loaded


def worst(form: str) -> Mapping[str, Any] | None:
    """Returns the attack on a form with the largest `linked`; None if nothing can be tested for single rows.

    Raises:
        KeyError: The form was not measured.
    """
    attacks = [item for item in figures()["forms"][form]["attacks"] if item["attack"] is not None]
    return max(attacks, key=lambda one: (one["linked"], one["auc"]), default=None)


def linked(method: str) -> float | str:
    """Returns the largest `linked` of a method with its defaults; `none` if nothing can be tested for single rows.

    For a method that is not in the file, such as an app's own, returns `NOT_MEASURED`.
    """
    if method not in figures()["forms"]:
        return NOT_MEASURED
    result = worst(method)
    return "none" if result is None else float(result["linked"])
