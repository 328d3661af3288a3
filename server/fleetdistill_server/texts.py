"""Texts in the store: their length, since most of them come from devices, and times."""

from __future__ import annotations

import time

LONGEST = 1000
"""Largest number of characters in a stored text."""


def shortened(text: str, longest: int = LONGEST) -> str:
    """Returns the text, truncated to at most `longest` characters with an ellipsis at the end."""
    return text if len(text) <= longest else f"{text[: longest - 1]}\N{HORIZONTAL ELLIPSIS}"


def when(seconds: float) -> str:
    """Formats Unix time in seconds as ISO 8601 in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
