"""Logging of the server: one line per event on standard error, as text or JSON, in the same format for all processes.

All loggers are below `fleetdistill`. The subject of a record is passed in `extra`, with the names in `FIELDS`. Secrets
of devices and people are never logged, and text chosen by devices is made printable.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from fleetdistill.printable import PrintableRecords, printable

__all__ = ["Interruption", "Seldom", "about", "configure"]


class LogFormat(StrEnum):
    """Format of the log."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """Lowest level that is logged."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


FIELDS = ("run", "round", "device", "ask", "event", "code", "trace_id")
"""Names of the fields of a log line; `event` and `code` as in `fleetdistill runs show`, `trace_id` with traces only."""
_ORDINARY = (
    "settings-changed",
    "engine-restarted",
    "started-from",
    "lease-ended",
    "declined",
    "revoked",
    "forgotten",
    "restored",
    "refusals-left-out",
    "secure-sum",
    "head-refined",
    "waiting-for-batch",
)
"""Kinds of events that need no attention from the operator."""
_LOGGED_ELSEWHERE = (
    "engine-failed",
    "front-restarted",
    "process-hangs",
    "started",
    "paused",
    "resumed",
    "stopped",
    "rolled-back",
)
"""Kinds of events that are logged elsewhere: with a traceback, even if the store cannot be written, or as calls."""
_events = logging.getLogger("fleetdistill.server.events")
_events.addHandler(logging.NullHandler())  # no output unless the program configures logging


def configure(process: str, log_format: str = LogFormat.TEXT, level: str = LogLevel.INFO) -> None:
    """Configures logging for this process; library warnings are logged too.

    Args:
        process: Name of the process in every line: serve, front or engine.
        log_format: A `LogFormat`.
        level: A `LogLevel`; lower levels are not logged.
    """
    handler = logging.StreamHandler()
    handler.addFilter(PrintableRecords())
    handler.setFormatter(JsonLines(process) if log_format == LogFormat.JSON else TextLines(process))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)


QUIET_SECONDS = 3.0
"""Time without a failure after which an interruption has ended; some calls succeed during an outage too."""


class Seldom:
    """Limits how often a message is logged during an outage. Thread-safe.

    Args:
        seconds: Shortest time between two messages.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = -math.inf
        self._lock = threading.Lock()

    def is_due(self) -> bool:
        """Returns whether to log the message now."""
        with self._lock:
            now = time.monotonic()
            due = now - self._last >= self._seconds
            self._last = now if due else self._last
            return due


class Interruption:
    """Logs when something begins to fail and when it works again, one line each. Thread-safe.

    Args:
        logger: Logger for the two lines.
        fails: The first line, with %s for the error.
        works: The second line.
    """

    def __init__(self, logger: logging.Logger, fails: str, works: str) -> None:
        self._logger = logger
        self._fails = fails
        self._works = works
        self._last: float | None = None
        self._lock = threading.Lock()

    def fail(self, error: object) -> None:
        """Records a failure; the first one is logged."""
        with self._lock:
            begins, self._last = self._last is None, time.monotonic()
        if begins:
            self._logger.warning(self._fails, error)

    def work(self) -> None:
        """Records a success; it ends the interruption if nothing has failed for `QUIET_SECONDS`."""
        with self._lock:
            ends = self._last is not None and time.monotonic() - self._last >= QUIET_SECONDS
            self._last = None if ends else self._last
        if ends:
            self._logger.warning("%s", self._works)


def about(**fields: Any) -> dict[str, Any]:
    """Returns the `extra` argument of a logging call, without empty fields."""
    return {f"about_{name}": value for name, value in fields.items() if value not in (None, "", 0)}


def log_event(row: Mapping[str, Any]) -> None:
    """Logs an event that has been committed to the store."""
    if row["kind"] in _LOGGED_ELSEWHERE:
        return
    level = logging.INFO if row["kind"] in _ORDINARY else logging.WARNING
    what = {name: row[name] for name in ("run", "round", "device", "ask", "code")}
    _events.log(level, "%s", row["text"], extra=about(event=row["kind"], **what))


class TextLines(logging.Formatter):
    """Formats records like `2026-11-22T08:00:00.123Z WARNING front the message run=digits round=3 device=camera-7`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record as one line; a traceback follows on separate lines."""
        words = [_when(record), record.levelname, self._process, record.getMessage()]
        words += [f"{name}={_word(value)}" for name, value in _fields(record).items()]
        return "\n".join([" ".join(words), *([record.exc_text] if record.exc_text else [])])


class JsonLines(logging.Formatter):
    """Formats records as JSON objects: time, level, process, logger, message, non-empty `FIELDS`, and a traceback."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record as one line of JSON."""
        line = {
            "time": _when(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
            **({"traceback": record.exc_text} if record.exc_text else {}),
        }
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    values = {name: getattr(record, f"about_{name}", None) for name in FIELDS}
    return {name: value for name, value in values.items() if value is not None}


def _when(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"


def _word(value: object) -> str:
    """Quotes a value that contains spaces or could be mistaken for another field."""
    text = printable(str(value))
    plain = text and not set(text) & set(' ="\\')
    return text if plain else json.dumps(text)
