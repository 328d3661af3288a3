"""What an MLflow server and a directory of TensorBoard have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class RoundPoint:
    """Figures of one step of a run.

    Attributes:
        step: Number of the round.
        at: Unix time in seconds.
        values: Figures by name, such as `accuracy/test`; finite numbers.
    """

    step: int
    at: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Description:
    """A run as a tracker shows it.

    Attributes:
        id: Identifies the run in every tracker; the same after each start.
        title: Name shown.
        began: Unix time in seconds.
        settings: Settings by name, such as `run.method`.
        parent: The `id` of the run that it is shown below; empty for none.
    """

    id: str
    title: str
    began: float
    settings: Mapping[str, str] = field(default_factory=dict)
    parent: str = ""


class TrackedRun(Protocol):
    """A run in a tracker. A method that fails may have written a part; repeating it on a new object completes it."""

    def known(self) -> Mapping[str, AbstractSet[int]]:
        """Returns the steps that the tracker has of each figure."""

    def write(self, points: Sequence[RoundPoint]) -> None:
        """Writes figures that are not known yet."""

    def note(self, name: str) -> str | None:
        """Returns a note that `set_note` made, also by an earlier process."""

    def set_note(self, name: str, value: str) -> None:
        """Stores a note with the run."""

    def keep(self, files: Mapping[str, Path]) -> None:
        """Stores copies of files, by the path under which they are shown; replaces earlier ones."""

    def end(self, status: str, reason: str) -> None:
        """Shows the run's status, as in the store."""

    def close(self) -> None:
        """Releases what the object holds."""


class Tracker(Protocol):
    """An MLflow server or a directory of TensorBoard."""

    def open(self, run: Description) -> TrackedRun:
        """Returns a run, created if the tracker does not have it."""


def write_missing(run: TrackedRun, points: Sequence[RoundPoint]) -> None:
    """Writes the figures that the tracker does not have."""
    missing = list(_missing(run.known(), points))
    if missing:
        run.write(missing)


def _missing(known: Mapping[str, AbstractSet[int]], points: Sequence[RoundPoint]) -> Iterator[RoundPoint]:
    for point in points:
        values = {name: value for name, value in point.values.items() if point.step not in known.get(name, ())}
        if values:
            yield RoundPoint(point.step, point.at, values)
