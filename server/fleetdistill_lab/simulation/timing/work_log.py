"""Records in simulated time which device worked on which ask, and for how long.

The log is a file, so that a resumed simulation continues with the devices that were at work when it was interrupted.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Work:
    """Work of a device on an ask, in seconds after the simulation's start.

    Attributes:
        device: Id of the device.
        round, step_number: The ask.
        start, end: When the work starts, and when it ends or is interrupted.
        interrupted: Whether the device becomes unavailable before it can answer.
    """

    device: str
    round: int
    step_number: int
    start: float
    end: float
    interrupted: bool


class WorkLog:
    """Log of all work in a simulation.

    Args:
        path: Path of the file; created when the first work starts.
        until: Simulated time of a resumed simulation, in seconds after the start; later entries are dropped.
    """

    def __init__(self, path: Path, until: float) -> None:
        self._path = path
        self._last: dict[str, Work] = {}
        result = list(read_work(path))
        kept = [work for work in result if work.start <= until]
        if len(kept) < len(result):
            path.write_text("".join(_line(work) for work in kept))
        for work in kept:
            self._last[work.device] = work

    def last(self, device: str) -> Work | None:
        """Returns the device's last work, which may be in progress; None if it has not worked yet."""
        return self._last.get(device)

    def add(self, work: Work) -> None:
        """Appends an entry."""
        self._last[work.device] = work
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(work))


def read_work(path: Path) -> Iterator[Work]:
    """Yields the entries of a log; none if there is no file. An incomplete last line is ignored."""
    if not path.exists():
        return
    for row in csv.reader(path.read_text(encoding="utf-8").splitlines(keepends=True)):
        if len(row) == len(fields(Work)) and row[-1] in ("0", "1"):
            device, number, step_number, start, end, interrupted = row
            yield Work(device, int(number), int(step_number), float(start), float(end), interrupted == "1")


def _line(work: Work) -> str:
    *values, interrupted = astuple(work)
    return ",".join([*map(str, values), str(int(interrupted))]) + "\n"
