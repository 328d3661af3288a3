"""The server's log: one line an event on standard error, as text or JSON, alike in every process of `serve`.

All loggers are below `fleetdistill`. What an event is about goes into `extra`, by the names in `FIELDS`. Nothing that a
device or a person keeps secret is ever logged, and what a device chose is printable.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from fleetdistill.printable import PrintableRecords, printable


class LogFormat(StrEnum):
    """How a line of the log looks."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """From which level on lines are written."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


FIELDS = ("run", "round", "device", "ask", "event", "code")
"""What a line may be about; `event` and `code` as in `fleetdistill runs show`."""
_ORDINARY = (
    "settings-changed",
    "started-from",
    "lease-ended",
    "declined",
    "revoked",
    "forgotten",
    "restored",
    "refusals-left-out",
)
"""Events that no operator has to look at."""
_LOGGED_WHERE_THEY_HAPPEN = ("engine-failed",)
"""Events whose line has the traceback, or has to be there when the store cannot be written."""
_events = logging.getLogger("fleetdistill.server.events")
_events.addHandler(logging.NullHandler())  # a program that configures no log has none of them on its terminal


def configure(process: str, log_format: str = LogFormat.TEXT, level: str = LogLevel.INFO) -> None:
    """Sets the log of this process up; warnings of libraries become lines of it.

    Args:
        process: Its name in every line: serve, front or engine.
        log_format: A `LogFormat`.
        level: A `LogLevel`; lower lines are left out.
    """
    handler = logging.StreamHandler()
    handler.addFilter(PrintableRecords())
    handler.setFormatter(JsonLines(process) if log_format == LogFormat.JSON else TextLines(process))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)


def about(**fields: Any) -> dict[str, Any]:
    """`extra` of a log call; fields that are empty are left out."""
    return {f"about_{name}": value for name, value in fields.items() if value not in (None, "", 0)}


def log_event(row: Mapping[str, Any]) -> None:
    """Logs an event of the store, once it is committed there."""
    if row["kind"] in _LOGGED_WHERE_THEY_HAPPEN:
        return
    level = logging.INFO if row["kind"] in _ORDINARY else logging.WARNING
    what = {name: row[name] for name in ("run", "round", "device", "code")}
    _events.log(level, "%s", row["text"], extra=about(event=row["kind"], **what))


class TextLines(logging.Formatter):
    """`2026-11-22T08:00:00.123Z WARNING front the message run=digits round=3 device=camera-7`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback follows on indented lines."""
        words = [_when(record), record.levelname, self._process, record.getMessage()]
        words += [f"{name}={_word(value)}" for name, value in _fields(record).items()]
        return "\n".join([" ".join(words), *([record.exc_text] if record.exc_text else [])])


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, process, logger, message, the `FIELDS` that there are, and a traceback."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever it holds."""
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
    given = {name: getattr(record, f"about_{name}", None) for name in FIELDS}
    return {name: value for name, value in given.items() if value is not None}


def _when(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"


def _word(value: object) -> str:
    """A value that holds together and cannot look like another field."""
    text = printable(str(value))
    plain = text and not set(text) & set(' ="\\')
    return text if plain else json.dumps(text)
