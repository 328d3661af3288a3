"""Length limits of the texts in the store, most of which come from devices."""

from __future__ import annotations

LONGEST = 1000
"""Largest number of characters in a stored text."""


def shortened(text: str, longest: int = LONGEST) -> str:
    """Returns the text, truncated to at most `longest` characters with an ellipsis at the end."""
    return text if len(text) <= longest else f"{text[: longest - 1]}\N{HORIZONTAL ELLIPSIS}"
