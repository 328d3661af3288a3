"""Texts of several folders: their length, since most of them come from devices, times, sizes, numbers and names."""

from __future__ import annotations

import json
import math
import time
from typing import Any

__all__ = ["SUMS_UNREVIEWED", "counted", "readable_bytes", "to_json", "when"]

LONGEST = 1000
"""Largest number of characters in a stored text."""

HEALTH_PROBLEM = "fleetdistill-problem-bin"
"""Trailing metadata of a check of fleetdistill.engine: which engines do not work and why, in UTF-8."""

UNREVIEWED = "(not yet reviewed by a cryptographer)"
"""Ends each event about a secure sum."""

SUMS_UNREVIEWED = (
    "secure sums are not yet reviewed by a cryptographer: an error in them could show the server one device's part"
)
"""What an operator of secure sums should know at least."""


def shorten(text: str, longest: int = LONGEST) -> str:
    """Returns the text, truncated to at most `longest` characters with an ellipsis at the end."""
    return text if len(text) <= longest else f"{text[: longest - 1]}\N{HORIZONTAL ELLIPSIS}"


def to_json(value: Any, indent: int | None = None) -> str:
    """Returns plain data as JSON, with null for NaN and infinity, which JSON does not have."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def round_or_none(value: float | str | None, digits: int) -> float | str | None:
    """Returns a number for display, and other values unchanged: whole numbers, texts, and None."""
    return round(value, digits) if isinstance(value, float) else value


def when(seconds: float) -> str:
    """Formats Unix time in seconds as ISO 8601 in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def readable_bytes(count: int) -> str:
    """Formats a number of bytes in B, kB, MB or GB, in powers of ten."""
    for unit, name, digits in ((1e9, "GB", 2), (1e6, "MB", 2), (1e3, "kB", 1)):
        if count >= unit:
            return f"{count / unit:.{digits}f} {name}"
    return f"{count} B"


def counted(number: int, what: str) -> str:
    """Returns a number with its noun: `1 round`, `2 rounds`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
