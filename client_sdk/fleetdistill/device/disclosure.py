"""The members of `Device` about what leaves it: the allowed columns, and the ledger."""

from __future__ import annotations

from collections.abc import Sequence

from fleetdistill.device.session import Session
from fleetdistill.state.sent import Ledger
from fleetdistill.state.sent_ledger import LEDGER, read_ledger


class Disclosure:
    """Base class of `Device`."""

    _session: Session

    @property
    def allow(self) -> tuple[str, ...]:
        """Columns that may leave the device. Assign fewer to withdraw consent, from any thread and at any time.

        No answer that is sent after the assignment contains a withdrawn column; a stored one is dropped unless sending
        has begun. The next `step` checks in again, and raises RefusedError if the run's method needs the column.

        Raises:
            ConfigurationError: A column is unknown, or not allowed at present. Open a new device to allow more.
        """
        return self._session.consent.columns

    @allow.setter
    def allow(self, columns: Sequence[str]) -> None:
        self._session.consent.narrow(columns)

    @property
    def ledger(self) -> Ledger:
        """What this device has sent about its data, from all earlier processes too. Readable from any thread.

        Raises:
            StateError: The file cannot be read.
        """
        return read_ledger(self._session.storage.load(LEDGER) or b"")
