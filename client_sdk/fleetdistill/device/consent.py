"""Consent: the app decides which columns leave the device, and every answer is checked against that."""

from __future__ import annotations

from collections.abc import Sequence

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import Parts


def check_may_leave(parts: Parts, allow: Sequence[str]) -> None:
    """Stops an answer that holds a column which the app keeps back.

    Raises:
        ConfigurationError: Names the part and the column; or a part is of a kind that no column lets out.
    """
    for name, kind in parts.items():
        if kind.tells is None:
            raise ConfigurationError(f"part {name!r} is a {type(kind).__name__}, which never leaves; nothing was sent")
        for column in kind.columns():
            if column not in allow:
                raise ConfigurationError(f"part {name!r} holds {column}, which the app keeps back; nothing was sent")
