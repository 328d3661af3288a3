"""Devices that a test has opened, run by the engine that waits for them."""

from __future__ import annotations

from collections.abc import Callable

from fleetdistill import Device


class DriveDevices:
    """Implements the engine's `Waker` by running one step of the next device instead of waiting."""

    def __init__(self, devices: list[Device], after_step: Callable[[], None]) -> None:
        self._devices = devices
        self._after_step = after_step
        self._next = 0

    async def wait(self, seconds: float = 0.0) -> None:
        """Runs one step of the next device and returns; ignores `seconds`."""
        self._devices[self._next % len(self._devices)].step(0.0)
        self._next += 1
        self._after_step()

    def wake_other(self) -> None:
        """Does nothing, because devices in this process need no wake-up."""
