"""Reads and writes a simulated device's score log: its models' results on the test set, one line per round."""

from __future__ import annotations

import json
from bisect import bisect
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fleetdistill_server.simulation.report.metrics import Ints

START = 0
"""Round number of the initial models' scores."""


def append_scores(file: Path, number: int, confusion: npt.ArrayLike) -> None:
    """Appends a model's confusion matrix `[C, C]` on the test set after round `number`.

    The line has only the cells that are not zero, at most one for each row of the test set.
    """
    counts = np.asarray(confusion, np.int64)
    cells = [(int(true), int(predicted), int(counts[true, predicted])) for true, predicted in np.argwhere(counts)]
    with file.open("a") as stream:
        stream.write(json.dumps({"round": number, "classes": len(counts), "cells": cells}) + "\n")


def read_scores(file: Path) -> dict[int, Ints]:
    """Returns the confusion matrices `[C, C]` in a score log by round; the last one for a repeated round."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {row["round"]: _matrix(row["classes"], row["cells"]) for row in map(json.loads, lines)}


def _matrix(classes: int, cells: Sequence[Sequence[int]]) -> Ints:
    found = np.zeros((classes, classes), np.int64)
    for true, predicted, count in cells:
        found[true, predicted] = count
    return found


def after_rounds(noted: Mapping[int, Ints], rounds: Sequence[int]) -> list[Ints]:
    """Returns the confusion matrix of the model that a device has after each of these rounds.

    Args:
        noted: Result of `read_scores` for a device, with the round `START`.
        rounds: Numbers of the rounds, ascending.
    """
    numbers = sorted(noted)
    return [noted[numbers[bisect(numbers, last) - 1]] for last in rounds]
