"""Lets the engine of an in-memory simulation run the devices instead of waiting for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_lab.simulation.links.simulated_devices import SimulatedDevices
from fleetdistill_server.store.store import Store


class DriveFleet:
    """Implements the engine's `Waker`: a wait runs one step of the next device that has work.

    Args:
        store: The run's store.
        run: Name of the run.
        devices: The devices.
        after_step: Called after every step.
    """

    def __init__(self, store: Store, run: str, devices: SimulatedDevices, after_step: Callable[[], None]) -> None:
        self._store = store
        self._run = run
        self._devices = devices
        self._after_step = after_step
        self._joined = False
        self._due: Iterator[str] = iter(())
        self._round = 0

    async def wait(self, seconds: float = 0.0) -> None:
        """Runs one step of the next device with an open ask, or first registers all devices; ignores `seconds`."""
        self._save_after_round()
        if not self._joined:
            self._devices.join(self._devices.names)
            self._after_step()
            self._joined = True
            return
        self._step(next(self._due, None) or self._next_due())

    def _next_due(self) -> str:
        if self._delivers():
            self._devices.end_deliveries()
        names = sorted(self._store.asks.devices_with_open(self._run)) or self._devices.names
        self._due = self._devices.ahead(names)
        return next(self._due)

    def _delivers(self) -> bool:
        """Returns whether the run has trained its last round, so that open asks can be final deliveries."""
        run = self._store.runs.existing(self._run)
        return run.completed_rounds + 1 == contract_pb2.Contract.FromString(run.contract).rounds

    def _step(self, name: str) -> None:
        self._devices.step(name)
        self._after_step()

    def _save_after_round(self) -> None:
        """Saves at the first wait after a round. The next round may be open then, but it has no answers yet."""
        number = self._store.runs.open_number(self._run) or 0
        if number != self._round:
            self._round = number
            self.save()

    def end(self) -> None:
        """Saves the run after its end."""
        self.save()

    def save(self) -> None:
        """Saves the run and its devices."""
        self._devices.save()

    def wake_other(self) -> None:
        """Does nothing, because devices in this process need no wake-up."""
