"""The members of `Device` about what has left it and what may: columns, ledger, erasure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fleetdistill.device.ask_handler import AskHandler
from fleetdistill.device.forgetting import request_forgetting
from fleetdistill.device.loops import Loops
from fleetdistill.device.temporary_refusals import as_link_errors
from fleetdistill.state.directory import erase_directory
from fleetdistill.state.sent import Ledger
from fleetdistill.state.sent_ledger import LEDGER, read_ledger

if TYPE_CHECKING:
    from fleetdistill.device.preview import Preview


class Disclosure(Loops):
    """Base class of `Device` with the members about what leaves it."""

    _handler: AskHandler

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

    def preview(self) -> Preview:
        """Computes an answer as the run's first step requires, and returns what it contains. Nothing of it is sent.

        For the app's user, before `run`. Checks in as `step` does, because the run decides what an answer contains.
        Shapes, types and sizes are those of the first answer; values differ with the server's seed. In a private run
        the values have new noise, and no privacy is spent. The committed state does not change.

        Raises:
            ConfigurationError: The method or the `worker` does not support a preview, or the answer would contain a
                column that is not allowed.
            DeviceBusyError: Another call works on the device.
            DeviceClosedError: The device was closed.
            FleetDistillError: The check-in or the computation failed, as in `step`.
        """
        with self._working("preview"), as_link_errors(self._session):
            return self._handler.preview()

    @property
    def ledger(self) -> Ledger:
        """What this device has sent about its data, from all earlier processes too. Readable from any thread.

        Raises:
            StateError: The file cannot be read.
        """
        return read_ledger(self._session.storage.load(LEDGER) or b"")

    def forget(self) -> bool:
        """Asks the server to delete what this device has sent, erases the state directory, and closes the device.

        The server deletes before its next round, or at once if the run is over. Where only a front serves the store,
        nothing deletes until an engine's server runs, or the operator calls `fleetdistill devices forget`.

        The privacy ledger of private runs is kept, because a release stays spent. A new `Device` with this directory is
        a new device with a new id.

        Returns:
            Whether the server has recorded the request, or has no data of the device. If False, the server does not
            know the request: ask its operator for `fleetdistill devices forget`.

        Raises:
            LinkError: The server is unavailable; nothing is erased. Call it again later. A device that has never called
                a server needs none.
            RefusedError: The server refuses this device; nothing is erased.
            DeviceBusyError: Another call works on the device: call `stop` and wait for it first.
            DeviceClosedError: The device was closed.
            StateError: A file cannot be deleted. Opening the directory tries again.
        """
        with self._working("forget"):
            sent = self.ledger.totals.messages  # a device that has sent nothing needs no server
            recorded = not sent or request_forgetting(self._session.link, self._session.identity)
        self.close(leave=False)
        erase_directory(self._session.storage.directory)
        return recorded
