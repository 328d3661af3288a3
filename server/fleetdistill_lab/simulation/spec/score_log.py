"""Reads and writes what simulated devices log: scores of their models on the test set, and their optimisers' steps.

Each log has a line per device and round. Several processes may append to a file, because each line is one write.
"""

from __future__ import annotations

import json
import os
from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleetdistill.training.figures import Confusion

START = 0
"""Round number of the initial models' scores."""
PRODUCT = "/product"
"""Variant of the fleet's models that devices receive, logged under the last round that changed them."""
OWN = "own"
"""Split of a device's scores on its own rows of the test set."""
DELIVERED = "/delivered"
"""Variant of the models that devices have at the end, logged under their last training."""
ALONE = "/alone"
"""Variant of the models that are trained without the fleet, at the end: top-k scores, and those on own rows."""
GLOBAL = "/global"
"""Variant of the global model: top-k scores, whose device has an empty name, and those on own rows, at the end."""
TOP_K = "top_k"
"""Name of the split of a device's top-k scores."""
Scores = Mapping[str, Mapping[str, Mapping[int, Confusion]]]
"""Confusion matrices by variant, device and round. The general variant has an empty name."""
OPTIMIZER_STEPS, STEP_NUMBER = "optimizer_steps", "step_number"
"""Notes of a simulated device's answer: steps of its optimisers, and the number of the ask's step in the round."""


def append_scores(
    file: Path, device: str, number: int, confusion: Confusion, variant: str = "", *, own: bool = False
) -> None:
    """Appends a model's confusion matrix on the test set after round `number`.

    With `own`, the matrix is that of the device's own rows of the test set.
    """
    cells = confusion.cells.tolist()
    line = {"device": device, "variant": variant, "round": number, "classes": confusion.classes, "cells": cells}
    _append(file, line | {"own": True} if own else line)


def _append(file: Path, line: Mapping[str, Any]) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)


def read_scores(file: Path, *, own: bool = False) -> Scores:
    """Returns the matrices of a score log; the last one for a repeated round.

    Args:
        file: The score log.
        own: Whether to return those on the devices' own rows instead of the test set.
    """
    result: dict[str, dict[str, dict[int, Confusion]]] = defaultdict(lambda: defaultdict(dict))
    if file.exists():
        with file.open() as lines:
            for row in map(json.loads, lines):
                if row.get("own", False) is not own:
                    continue
                result[row["variant"]][row["device"]][row["round"]] = confusion_of(row["cells"], row["classes"])
    return result


def confusion_of(cells: Sequence[Sequence[int]], classes: int) -> Confusion:
    """Returns the confusion matrix of `Confusion.cells` that were read from JSON."""
    return Confusion(np.array(cells, np.int64).reshape(-1, 3), classes)


def append_steps(file: Path, device: str, number: int, notes: Mapping[str, int]) -> None:
    """Appends the steps of a device's optimisers for an answer in round `number`; `notes` are those of the answer."""
    _append(file, {"device": device, "round": number, **{name: notes[name] for name in (STEP_NUMBER, OPTIMIZER_STEPS)}})


def read_steps(file: Path) -> dict[tuple[str, int], int]:
    """Returns the steps of a log by device and round; of a repeated answer those of the last time."""
    last: dict[tuple[str, int, int], int] = {}
    if file.exists():
        with file.open() as lines:
            for row in map(json.loads, lines):
                last[row["device"], row["round"], row[STEP_NUMBER]] = row[OPTIMIZER_STEPS]
    result = defaultdict[tuple[str, int], int](int)
    for (device, number, _), steps in last.items():
        result[device, number] += steps
    return result


def after_rounds(noted: Mapping[int, Confusion], rounds: Sequence[int]) -> list[Confusion | None]:
    """Returns the confusion matrix of the model that a device has after each of these rounds, as last scored.

    Args:
        noted: Scores of a device by round.
        rounds: Numbers of the rounds, ascending.

    Returns:
        A matrix for each round; None before the first score.
    """
    numbers = sorted(noted)
    return [noted[numbers[at - 1]] if (at := bisect(numbers, last)) else None for last in rounds]
