"""What a device, a run or a person may be called: the one rule of the SDK and of the server; and names mistyped."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

NAME = r"[A-Za-z0-9._-]{1,64}"
"""As a regular expression."""
NAME_RULE = "1 to 64 letters, digits, '-', '_' or '.'"
"""As a sentence says it."""
_NAME = re.compile(NAME)


def is_name(text: str) -> bool:
    """Whether a device, a run or a person may be called so."""
    return _NAME.fullmatch(text) is not None


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """A question after the known name that is closest to a given one; empty where none is close."""
    close = difflib.get_close_matches(str(given), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def unknown_name(what: str, given: object, known: Iterable[str]) -> str:
    """The sentence about a name that is not known.

    Args:
        what: What it names, such as "method".
        given: The name.
        known: Those that there are, in the order in which they are listed.
    """
    names = list(known)
    meant = did_you_mean(given, names)
    return f"unknown {what} {given!r}{f'{meant} Expected' if meant else ', expected'} one of {', '.join(names)}"
