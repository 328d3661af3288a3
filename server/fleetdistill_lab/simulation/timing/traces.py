"""Reads the traces of real devices: when each one was available, and how fast it was.

A CSV file has a header with the columns `device`, `start`, `end` and optionally `speed`; a JSON file is a list of
objects with these keys. Each row is one interval in which the device is available.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from fleetdistill.errors import ConfigurationError, DataError

Interval = tuple[float, float, float]
"""Start and end in seconds after the simulation's start, and the speed relative to the median device."""
Traces = tuple[tuple[Interval, ...], ...]
"""The available intervals of each device, in ascending order."""
_COLUMNS = ("device", "start", "end")


def read_traces(path: str | Path) -> Traces:
    """Reads a CSV or JSON file of traces; the devices keep the order in which they first appear.

    Raises:
        DataError: The file cannot be read, or a row is not valid.
        ConfigurationError: Intervals are out of order, overlap or are empty, or a speed is not above 0.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
        rows = json.loads(text) if file.suffix.lower() == ".json" else list(csv.DictReader(text.splitlines()))
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    traces = _by_device(file, rows)
    check_traces(traces, 0.0)
    return traces


def _by_device(file: Path, rows: Any) -> Traces:
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{file} has no rows; expected columns {', '.join(_COLUMNS)} and optionally speed")
    result: dict[str, list[Interval]] = {}
    for number, row in enumerate(rows, start=1):
        device, interval = _interval(f"{file}, row {number}", row)
        result.setdefault(device, []).append(interval)
    return tuple(tuple(sorted(intervals)) for intervals in result.values())


def _interval(where: str, row: Any) -> tuple[str, Interval]:
    missing = [name for name in _COLUMNS if not isinstance(row, Mapping) or row.get(name) in (None, "")]
    if missing:
        raise DataError(f"{where} has no {missing[0]!r}; expected device, start, end and optionally speed")
    speed = row.get("speed")
    try:
        return str(row["device"]), (
            float(row["start"]),
            float(row["end"]),
            1.0 if speed in (None, "") else float(speed),
        )
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: start, end and speed must be numbers: {error}") from error


def check_traces(traces: Iterable[Iterable[Interval]], repeat_seconds: float) -> None:
    """Checks the intervals of all devices.

    Raises:
        ConfigurationError: An interval is empty, overlaps another one or exceeds the period, or a speed is not valid.
    """
    for number, intervals in enumerate(traces, start=1):
        where = f"the trace of device {number}"
        ordered = list(intervals)
        for start, end, speed in ordered:
            if not (0 <= start < end and math.isfinite(start) and not math.isnan(end)):
                raise ConfigurationError(f"{where} has the interval {start:g} to {end:g}; expected 0 <= start < end")
            if not 0 < speed < math.inf:
                raise ConfigurationError(f"{where} has speed {speed:g}, must be above 0 and finite")
            if repeat_seconds and end > repeat_seconds:
                raise ConfigurationError(f"{where} ends at {end:g}, after repeat_seconds ({repeat_seconds:g})")
        for (_, end, _), (start, _, _) in pairwise(ordered):
            if start < end:
                raise ConfigurationError(f"{where} has intervals that overlap or are out of order at {start:g}")
