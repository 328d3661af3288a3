"""The members of `Device` about what has left it and what may: columns, ledger, erasure."""

from __future__ import annotations

from collections.abc import Sequence

from fleetdistill.device.forgetting import request_forgetting
from fleetdistill.device.loops import Loops
from fleetdistill.state.directory import erase_directory
from fleetdistill.state.sent import Ledger
from fleetdistill.state.sent_ledger import LEDGER, read_ledger


class Disclosure(Loops):
    """Base class of `Device` with the members about what leaves it."""

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

    def forget(self) -> bool:
        """Asks the server to delete what this device has sent, erases the state directory, and closes the device.

        The privacy ledger of private runs is kept, because a release
        stays spent. A new `Device` with this directory is a new device with a new id.

        Returns:
            Whether the server has recorded the request, or has no data of the device. If False, the server is of an
            earlier version: ask its operator for `fleetdistill devices forget`.

        Raises:
            LinkError: The server is unavailable; nothing is erased. Call it again later.
            RefusedError: The server refuses this device; nothing is erased.
            DeviceBusyError: Another call works on the device: call `stop` and wait for it first.
            DeviceClosedError: The device was closed.
            StateError: A file cannot be deleted. Opening the directory tries again.
        """
        with self._working("forget"):
            recorded = request_forgetting(self._session.link, self._session.identity)
        self.close(leave=False)
        erase_directory(self._session.storage.directory)
        return recorded
