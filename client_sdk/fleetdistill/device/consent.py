"""The columns that the app allows to leave the device, and the check of every answer against them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from fleetdistill.device.arguments import check_columns
from fleetdistill.errors import ConfigurationError
from fleetdistill.wire.kind import Parts, allow_line


class ColumnWithdrawn(ConfigurationError):
    """A stored answer contains a column that the app no longer allows."""


class Consent:
    """The columns that may leave the device. Thread-safe.

    Args:
        columns: Columns from `Device(allow=...)`, already checked.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)
        self._lock = threading.Lock()

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that may leave the device from now on."""
        return self._columns

    def narrow(self, columns: Sequence[str]) -> None:
        """Reduces the columns. Raises ConfigurationError for an unknown column, or one that is not allowed now."""
        check_columns(columns)
        with self._lock:
            if added := sorted(set(columns) - set(self._columns)):
                raise ConfigurationError(
                    f"allow can only be narrowed while the device is open, but {', '.join(added)} would be added; "
                    "close the device and open a new one with Device(allow=...)"
                )
            self._columns = tuple(columns)

    def check_stored(self, columns: Mapping[str, Sequence[str]]) -> None:
        """Checks a stored answer before it is sent.

        Args:
            columns: Columns of each part, by name of the part.

        Raises:
            ColumnWithdrawn: A column is not allowed any more.
        """
        allowed = self._columns
        for name, part in columns.items():
            for column in part:
                if column not in allowed:
                    raise ColumnWithdrawn(
                        f"part {name!r} contains {column}, which the app no longer allows; the answer is not sent"
                    )


def check_may_leave(parts: Parts, allow: Sequence[str]) -> None:
    """Checks the parts of an answer before they leave the device.

    Raises:
        ConfigurationError: A part contains a column that is not in `allow`, or its kind must not leave a device.
    """
    for name, kind in parts.items():
        if kind.possible_columns is None:
            raise ConfigurationError(
                f"part {name!r} is a {type(kind).__name__}, which must never leave a device; nothing is sent"
            )
    missing = [(name, column) for name, kind in parts.items() for column in kind.columns() if column not in allow]
    if missing:
        name, column = missing[0]
        raise ConfigurationError(
            f"part {name!r} contains {column}, which the app does not allow; nothing is sent; "
            f"{allow_line({*allow, *(column for _, column in missing)})}"
        )
