"""What a device, a run or a person may be called: the one rule of the SDK and of the server; and a name of both."""

from __future__ import annotations

import re

NAME = r"[A-Za-z0-9._-]{1,64}"
"""As a regular expression."""
NAME_RULE = "1 to 64 letters, digits, '-', '_' or '.'"
"""As a sentence says it."""
USUAL_PREDICTOR = "space_mlp_64"
"""Of a device whose app names none, in `fleetdistill.models.space.PREDICTORS`; here, where no method is loaded."""
_NAME = re.compile(NAME)


def is_name(text: str) -> bool:
    """Whether a device, a run or a person may be called so."""
    return _NAME.fullmatch(text) is not None
