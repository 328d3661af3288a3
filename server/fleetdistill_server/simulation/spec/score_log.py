"""The file in which a simulated device notes how its models do on the test part, a line a round."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fleetdistill_server.simulation.report.metrics import Ints

START = 0
"""The round of the models that devices start from."""


def append_scores(file: Path, number: int, confusion: Sequence[Sequence[int]]) -> None:
    """Notes how a device's model does on the test part after a round."""
    with file.open("a") as stream:
        stream.write(json.dumps({"round": number, "confusion": confusion}) + "\n")


def read_scores(file: Path) -> dict[int, Ints]:
    """Round -> confusion matrix `[C, C]` that a device noted; of a round that it did twice, the last."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {row["round"]: np.array(row["confusion"], dtype=np.int64) for row in map(json.loads, lines)}


def after_rounds(noted: Mapping[int, Ints], rounds: Sequence[int]) -> list[Ints]:
    """The confusion matrix of the model that a device has after each of these rounds.

    Args:
        noted: `read_scores` of a device, with the round `START`.
        rounds: Ascending.
    """
    return [noted[max(number for number in noted if number <= last)] for last in rounds]
