"""What a device, a run or a person may be called: the one rule of the SDK and of the server."""

from __future__ import annotations

import re

NAME = r"[A-Za-z0-9._-]{1,64}"
"""As a regular expression."""
NAME_RULE = "1 to 64 letters, digits, '-', '_' or '.'"
"""As a sentence says it."""
USUAL_PREDICTOR = "space_mlp_64"
"""Name of the predictor that a device trains in class statistics where the app names none."""
_NAME = re.compile(NAME)


def is_name(text: str) -> bool:
    """Whether a device, a run or a person may be called so."""
    return _NAME.fullmatch(text) is not None
