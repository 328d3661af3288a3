"""Reads back what was written for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def events_in(directory: Path) -> Any:
    """Everything in the event files of a directory; also steps that TensorBoard would leave out as doubled."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0}, purge_orphaned_data=False)
    result.Reload()
    return result


def steps_in(directory: Path, name: str) -> list[int]:
    """Steps of a figure, in order."""
    return [Scalar.step for Scalar in events_in(directory).Scalars(name)]
