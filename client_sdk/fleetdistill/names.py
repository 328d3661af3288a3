"""Valid names of devices, runs and people, and suggestions for mistyped names."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["unknown_name"]

NAME = r"(?!(?i:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\.|\Z))[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?"
"""Regular expression of a valid name: a file name on every system, and no option of a command."""
NAME_RULE = (
    "1 to 64 letters, digits, '-', '_' or '.', beginning with a letter or digit, not ending with '.', and no device of "
    "Windows such as CON or COM1"
)
"""The rule for valid names, for messages."""
_NAME = re.compile(NAME)


def is_name(text: str) -> bool:
    """Returns whether a text is a valid name of a device, a run or a person."""
    return _NAME.fullmatch(text) is not None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns `; did you mean NAME?` with the most similar known name; empty if none is similar."""
    import difflib  # only for this error

    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {str(close[0])!r}?" if close else ""


def unknown_name(what: str, name: object, known: Iterable[str]) -> str:
    """Returns the message for an unknown name, with a suggestion.

    Args:
        what: Kind of the name, such as "method".
        name: The unknown name.
        known: All known names, in the order in which they are listed.
    """
    names = list(known)
    meant = did_you_mean(name, names)
    return f"unknown {what} {name!r}{f'{meant} Expected' if meant else ', expected'} one of {', '.join(names)}"
