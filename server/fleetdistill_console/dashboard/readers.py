"""What pages read of a source. A reader that grows with the run keeps what it has read and reads only what is new."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fleetdistill_server.operations.source import Source
from fleetdistill_server.views.runs import TableRow, View

T = TypeVar("T")
_MAY_CHANGE = 3
"""Number of the newest rounds that are read again, because late answers can still change their figures."""
SLOW_SECONDS = 20.0
"""Seconds between two reads of what seldom changes."""


@dataclass(frozen=True)
class Subject(Generic[T]):
    """Something that can be read of a source.

    Attributes:
        name: Identifies it; two pages with equal names share one read.
        reader: Returns the function that reads it, which may keep what it has read.
        every_seconds: Seconds between two reads; None for the feed's own interval.
    """

    name: Hashable
    reader: Callable[[], Callable[[Source], T]]
    every_seconds: float | None = None


RUNS: Subject[View] = Subject("overview", lambda: Source.overview)
HEALTH: Subject[Sequence[str]] = Subject("health", lambda: Source.problems)
SERVER: Subject[View] = Subject("server", lambda: Source.server, 5.0)
CALLS: Subject[View] = Subject("operators", lambda: Source.operators, 5.0)
ABOUT: Subject[View] = Subject("about", lambda: Source.about, 5.0)


def rounds(run: str) -> Subject[Sequence[TableRow]]:
    """Returns the figures of a run's rounds, in order."""
    return Subject(("rounds", run), lambda: _Growing(lambda source, after: source.rounds(run, after).lists["rounds"]))


def traffic(run: str) -> Subject[Sequence[TableRow]]:
    """Returns the bytes of a run by round and kind of part, in the order of rounds."""
    return Subject(("traffic", run), lambda: _Growing(lambda source, after: source.traffic(run, after).lists["bytes"]))


def round_under_way(run: str) -> Subject[View]:
    """Returns the state of each device in the open round, or the newest one."""
    return Subject(("round", run), lambda: lambda source: source.round(run))


def participants(run: str) -> Subject[View]:
    """Returns the devices of a run."""
    return Subject(("participants", run), lambda: lambda source: source.participants(run))


def device(run: str, device: str) -> Subject[View]:
    """Returns one device in detail."""
    return Subject(("device", run, device), lambda: lambda source: source.device(run, device))


def classes(run: str) -> Subject[View]:
    """Returns the number of samples by device and class."""
    return Subject(("classes", run), lambda: lambda source: source.classes(run), SLOW_SECONDS)


def settings(run: str) -> Subject[View]:
    """Returns a run's settings."""
    return Subject(("settings", run), lambda: lambda source: source.settings(run), SLOW_SECONDS)


def events(run: str, kind: str, text: str, most: int) -> Subject[View]:
    """Returns the newest events of a kind (empty for all) that contain a text."""
    name = ("events", run, kind, text, most)
    return Subject(name, lambda: lambda source: source.events(run, kind=kind, text=text, most=most))


class _Growing:
    """Reads rows with a column `round` that a run appends to.

    Args:
        read: Reads the rows of the rounds after a round, ordered by round.
    """

    def __init__(self, read: Callable[[Source, int], list[TableRow]]) -> None:
        self._read = read
        self._rows: list[TableRow] = []

    def __call__(self, source: Source) -> Sequence[TableRow]:
        last = self._rows[-1]["round"] if self._rows else -1
        after = max(last - _MAY_CHANGE, -1)
        new = self._read(source, after)
        if self._rows and not self._continues(new, after):
            after, new = -1, self._read(source, -1)  # the run was rolled back, or deleted and begun again
        self._rows = [row for row in self._rows if row["round"] <= after] + new
        return self._rows

    def _continues(self, new: Sequence[TableRow], after: int) -> bool:
        """Returns whether rows that were read again are those of the same rounds."""
        known = [(row["round"], row.get("started_at")) for row in self._rows if row["round"] > after]
        return [(row["round"], row.get("started_at")) for row in new][: len(known)] == known
