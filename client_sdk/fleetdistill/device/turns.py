"""Lets one thread at a time work on a device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetdistill.errors import DeviceBusyError, DeviceClosedError

_NO_THREAD = -1
"""Identifier of a thread that has not started yet."""


class Turns:
    """Ensures that one thread at a time works on a device, and none after the device was closed.

    Args:
        state_dir: State directory of the device, for the errors.
    """

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._changed = threading.Condition()
        self._holder: int | None = None  # identifier of the thread that works on the device
        self._held_by = ""
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the device was closed."""
        return self._closed

    def take(self, call: str, *, for_other_thread: bool = False) -> None:
        """Reserves the device for the calling thread, or for one that calls `hand_over`, until `give_back`.

        Args:
            call: Name of the method that works on the device, for the errors.
            for_other_thread: Whether another thread will work on the device.

        Raises:
            DeviceBusyError: A thread works on the device, also if it is the calling one.
            DeviceClosedError: The device was closed.
        """
        with self._changed:
            self.check_open(call)
            if self._holder is not None:
                raise DeviceBusyError(call, self._held_by)
            self._holder = _NO_THREAD if for_other_thread else threading.get_ident()
            self._held_by = call

    def hand_over(self) -> None:
        """Makes the calling thread the one that works on the device."""
        self._holder = threading.get_ident()

    def give_back(self) -> None:
        """Ends the reservation."""
        with self._changed:
            self._holder = None
            self._changed.notify_all()

    @contextmanager
    def taken(self, call: str) -> Iterator[None]:
        """Reserves the device within the block; raises the errors of `take`."""
        self.take(call)
        try:
            yield
        finally:
            self.give_back()

    def is_mine(self) -> bool:
        """Returns whether the calling thread works on the device."""
        return self._holder == threading.get_ident()

    def check_open(self, call: str) -> None:
        """Raises DeviceClosedError if the device was closed."""
        if self._closed:
            raise DeviceClosedError(call, self._state_dir)

    def close(self) -> bool:
        """Waits until no thread works on the device and closes it; returns False if it was closed before."""
        with self._changed:
            self._changed.wait_for(lambda: self._holder is None)
            first, self._closed = not self._closed, True
        return first
