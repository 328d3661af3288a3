"""How long a sentence may be that the store keeps: devices have a hand in most of them."""

from __future__ import annotations

LONGEST = 1000
"""Characters."""


def shortened(text: str, longest: int = LONGEST) -> str:
    """The text, or its beginning with an ellipsis at the end: at most `longest` characters."""
    return text if len(text) <= longest else f"{text[: longest - 1]}\N{HORIZONTAL ELLIPSIS}"
