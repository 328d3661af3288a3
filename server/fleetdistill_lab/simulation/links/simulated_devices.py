"""The devices of an in-memory simulation: a limited number is open, and the states of the others are in the store."""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from fleetdistill import Device, Step
from fleetdistill.clock import Clock
from fleetdistill.compute.base import MakeCompute
from fleetdistill.link.base import Link
from fleetdistill.state.memory import MemoryStorage
from fleetdistill_lab.simulation.backends.remote_compute import RemoteCompute
from fleetdistill_lab.simulation.backends.remote_work import AHEAD, RemoteWork
from fleetdistill_lab.simulation.spec.compute import Shared
from fleetdistill_lab.simulation.spec.device import DeviceSpec, make_compute, make_device
from fleetdistill_server.store.round_store import RoundStore

MAX_OPEN = 256
"""Largest number of open devices. Opening one again takes milliseconds, so this exceeds a usual cohort."""
_COLLECTED = 256
"""Number of closed devices that are garbage-collected together; a collection takes tenths of a second."""


class SimulatedDevices:
    """Opens devices when they have work, and closes those that have had none for longest.

    Args:
        specs: The devices.
        link_of: Makes the link of a device, given its id.
        store: Store with the devices' states; None for devices with state directories, which all stay open.
        max_open: Largest number of open devices with saved states.
        clock: Clock of the devices in simulated time; None for the machine's.
        remote: Computes the devices' work in other processes; None for this process.

    Attributes:
        names: Ids of all devices, in the order of `specs`.
    """

    def __init__(
        self,
        specs: Sequence[DeviceSpec],
        link_of: Callable[[str], Link],
        store: RoundStore | None,
        max_open: int,
        clock: Clock | None = None,
        remote: RemoteWork | None = None,
    ) -> None:
        self._clock = clock
        self._specs = {spec.name: spec for spec in specs}
        self.names = tuple(self._specs)
        self._link_of = link_of
        self._store = store
        self._max_open = max_open
        self._remote = remote
        self._shared = Shared()
        self._closed = 0
        self._open: OrderedDict[str, tuple[Device, MemoryStorage | None]] = OrderedDict()

    def step(self, name: str) -> Step:
        """Runs one step of a device."""
        if name not in self._open:
            self._open[name] = self._opened(self._specs[name])
        self._open.move_to_end(name)
        result = self._open[name][0].step(0.0)
        while self._store is not None and len(self._open) > self._max_open:
            self._close_oldest()
        return result

    def _opened(self, spec: DeviceSpec) -> tuple[Device, MemoryStorage | None]:
        link = self._link_of(spec.name)
        if self._store is None:
            return make_device(spec, link, clock=self._clock), None
        state = MemoryStorage(Path(spec.state_dir), self._store.device_states.load(spec.name))
        return make_device(spec, link, state, self._compute_of(spec), self._clock), state

    def _compute_of(self, spec: DeviceSpec) -> MakeCompute:
        if self._remote is None:
            return partial(make_compute, spec, shared=self._shared)
        return partial(RemoteCompute, spec, self._remote)

    def ahead(self, names: Sequence[str]) -> Iterator[str]:
        """Yields devices to run, in order; the next ones' work has already started if it is computed elsewhere."""
        started: deque[str] = deque()
        for name in names:
            if self._remote is not None and self._store is not None:
                state = self._open[name][1] if name in self._open else None
                self._remote.start(
                    self._specs[name], self._store.device_states.load(name) if state is None else state.contents
                )
            started.append(name)
            if self._remote is None or len(started) > AHEAD:
                yield started.popleft()
        yield from started

    def _close_oldest(self) -> None:
        name, (device, state) = self._open.popitem(last=False)
        self._save(name, state)
        device.close(leave=False)
        self._closed += 1
        if self._closed % _COLLECTED == 0:
            gc.collect()  # a closed device is a cycle of references, and collections are rare during a simulation

    def _save(self, name: str, state: MemoryStorage | None) -> None:
        if self._store is not None and state is not None and state.changed:
            self._store.device_states.save(name, state.contents)
            state.changed = False

    def save(self) -> None:
        """Saves the run and the states of its devices; does nothing for devices with state directories."""
        if self._store is None:
            return
        for name, (_, state) in self._open.items():
            self._save(name, state)
        self._store.save()

    def finish(self) -> None:
        """Runs every device until it has noticed the end of the run."""
        for name in self.ahead(self.names):
            while self.step(name) is not Step.FINISHED:
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes all devices. After an error they do not leave the run, so that the open round waits for them."""
        for opened in self._open.values():
            opened[0].close(leave=kind is None)
