"""The check that an answer contains only columns that the app allows to leave the device."""

from __future__ import annotations

from collections.abc import Sequence

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import Parts


def check_may_leave(parts: Parts, allow: Sequence[str]) -> None:
    """Checks the parts of an answer before they leave the device.

    Raises:
        ConfigurationError: A part contains a column that is not in `allow`, or its kind must not leave a device.
    """
    for name, kind in parts.items():
        if kind.possible_columns is None:
            raise ConfigurationError(
                f"part {name!r} is a {type(kind).__name__}, which must never leave a device; the answer was not sent"
            )
        for column in kind.columns():
            if column not in allow:
                raise ConfigurationError(
                    f"part {name!r} contains {column}, which is not in Device(allow=...); the answer was not sent"
                )
