"""Figures as people read them, each with its unit."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Any

from fleetdistill_server.texts import readable_bytes
from fleetdistill_server.views.overview import RECENT

_MAX_DIGITS, _MAX_DENOMINATOR = 8, 100
UNKNOWN = "–"
"""Shown for a figure that is not known."""
ROUND_SECONDS = f"Mean duration of the last {RECENT} rounds"
"""Name of the column `round_seconds` of the overview."""


def percent(rate: float | None) -> str:
    """Returns a rate from 0 to 1 in percent."""
    return UNKNOWN if rate is None else f"{100 * rate:.1f} %"


def size(number: int | None) -> str:
    """Returns a number of bytes in B, kB, MB or GB."""
    return UNKNOWN if number is None else readable_bytes(number)


def duration(seconds: float | None) -> str:
    """Returns a duration in its two largest units, such as `4 min 10 s`."""
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, hours = round(seconds) // 60, round(seconds) // 3600
    if hours < 1:
        return f"{minutes} min {round(seconds) % 60} s"
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def setting(value: Any) -> str:
    """Returns a setting as in run.toml; a number that needs many digits as a fraction, such as 2/3."""
    if isinstance(value, float) and len(repr(value)) > _MAX_DIGITS:
        simple = Fraction(value).limit_denominator(_MAX_DENOMINATOR)
        if float(simple) == value and simple:
            return str(simple)
    return value if isinstance(value, str) else json.dumps(value)


def natural(text: str) -> list[tuple[int, str]]:
    """Returns a key that sorts texts as people do: d2 before d10, and without regard to case."""
    return [(int(item), "") if item.isdecimal() else (-1, item) for item in re.split(r"([0-9]+)", text.casefold())]
