"""The devices of an in-memory simulation, their registration, and the engine's wait, in which they run.

A limited number is open, and the states of the others are in the store.
"""

from __future__ import annotations

import gc
import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Self

from fleetdistill import Device, Step
from fleetdistill.clock import Clock
from fleetdistill.compute.base import MakeCompute
from fleetdistill.device.identity import save_identity
from fleetdistill.knowledge import DELIVER
from fleetdistill.link.base import Link
from fleetdistill.state.memory import MemoryStorage
from fleetdistill.state.saved_profile import data_version, save_profile
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_lab.simulation.backends.remote_work import AHEAD, RemoteCompute, RemoteWork
from fleetdistill_lab.simulation.spec.compute import Shared
from fleetdistill_lab.simulation.spec.device import DeviceSpec, make_compute, make_device
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.store.round_store import RoundStore
from fleetdistill_server.store.store import Store

MAX_OPEN = 256
"""Largest number of open devices. Opening one again takes milliseconds, so this exceeds a usual cohort."""
_COLLECTED = 256
"""Number of closed devices that are garbage-collected together; a collection takes tenths of a second."""
NOT_DELIVERED = "the simulation delivers its final model only to the devices that need it"
"""Reason of an ask that ends without a delivery."""


class Recipients(Enum):
    """Devices that take the final model of a run. To the others it is not delivered, and only its bytes are counted."""

    ALL = auto()
    PARTICIPANTS = auto()
    """Devices that a round has asked."""
    LAST_ROUND = auto()
    """Devices that the last round has asked; enough if all devices get the same model."""


class SimulatedDevices:
    """Makes devices when they have work, and closes those that have had none for longest.

    Args:
        specs: The devices.
        link_of: Makes the link of a device, given its id.
        api: The server's side of the device API.
        run: Name of the run.
        store: Store with the devices' states; None for devices with state directories, which are all made and stay
            open.
        max_open: Largest number of open devices with saved states.
        clock: Clock of the devices in simulated time; None for the machine's.
        remote: Computes the devices' work in other processes; None for this process.
        recipients: Which devices take the run's final model.
        min_ask_seconds: Mean seconds of an ask in the first round from which `remote` computes the later ones; 0: it
            computes all of them.
        on_measured: Called once with the mean seconds of an ask in the first round, unless `min_ask_seconds` is 0.

    Attributes:
        names: Ids of all devices, in the order of `specs`.
    """

    def __init__(
        self,
        specs: Sequence[DeviceSpec],
        link_of: Callable[[str], Link],
        api: DeviceApi,
        run: str,
        store: RoundStore | None,
        max_open: int,
        clock: Clock | None = None,
        remote: RemoteWork | None = None,
        *,
        recipients: Recipients = Recipients.PARTICIPANTS,
        min_ask_seconds: float = 0.0,
        on_measured: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._on_measured = on_measured
        self._recipients = recipients
        self._clock = clock
        self._specs = {spec.name: spec for spec in specs}
        self.names = tuple(self._specs)
        self._link_of = link_of
        self._api, self._run = api, run
        self._store = store
        self._max_open = max_open
        self._remote = None if min_ask_seconds else remote
        self._later = (min_ask_seconds, remote) if min_ask_seconds else None
        self._shared = Shared()
        self._closed = 0
        self._open: OrderedDict[str, tuple[Device, MemoryStorage | None]] = OrderedDict()
        self._saved = set() if store is None else store.device_states.names()
        self._registration = Registration(api, run, self._shared, lambda spec: self.step(spec.name))

    def join(self, names: Sequence[str]) -> None:
        """Registers devices at the server, unless they are since an earlier start; see `registration`."""
        if self._store is None:
            for name in names:
                self.step(name)
            return
        registered = self._api.store.devices.ids(self._run)
        self._registration.register([self._specs[name] for name in names if name not in registered])

    def end_deliveries(self) -> None:
        """Ends the final deliveries to devices that are no recipients, and counts the bytes of their downloads."""
        if self._store is None or self._recipients is Recipients.ALL:
            return
        asks = self._api.store.asks
        asked = asks.devices_with_open(self._run, DELIVER)
        last = self._api.store.runs.open_number(self._run) or 0
        since = last if self._recipients is Recipients.LAST_ROUND else 0
        needed = asks.devices_asked(self._run, without=DELIVER, since=since)
        if asked - needed:
            ended = asks.close_step(self._run, DELIVER, asked - needed, NOT_DELIVERED)
            self._api.downloads.count(self._run, ended)

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
        link, compute = self._link_of(spec.name), self._compute_of(spec)
        if self._store is None:
            return make_device(spec, link, compute=compute, clock=self._clock), None
        state = MemoryStorage(Path(spec.state_dir), self._contents(spec))
        return make_device(spec, link, state, compute, self._clock), state

    def _contents(self, spec: DeviceSpec) -> Mapping[str, bytes]:
        """Returns the state of a closed or registered device; empty for one that has not checked in."""
        if self._store is not None and spec.name in self._saved:
            return self._store.device_states.load(spec.name)
        is_registered = self._api.store.devices.get(self._run, spec.name) is not None
        return self._registration.contents(spec) if is_registered else {}

    def _compute_of(self, spec: DeviceSpec) -> MakeCompute:
        if self._remote is None:
            return partial(make_compute, spec, shared=self._shared)
        return partial(RemoteCompute, spec, self._remote)

    def ahead(self, names: Sequence[str]) -> Iterator[str]:
        """Yields devices to run, in order; the next ones' work has already started if it is computed elsewhere."""
        started: deque[str] = deque()
        for name in names:
            if self._remote is not None:
                state = self._open[name][1] if name in self._open else None
                contents = self._contents(self._specs[name]) if state is None else state.contents
                self._remote.start(self._specs[name], contents)
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
            self._saved.add(name)
            state.changed = False

    def save(self) -> None:
        """Saves the run and the states of its devices; does nothing for devices with state directories."""
        if self._store is None:
            return
        for name, (_, state) in self._open.items():
            self._save(name, state)
        self._store.save()
        if self._later is not None and self._shared.asks:
            (seconds, remote), self._later = self._later, None
            measured = self._shared.seconds / self._shared.asks
            self._on_measured(measured)
            if remote is not None and measured >= seconds:
                self._remote = remote
                while self._open:  # devices that are made again compute elsewhere
                    self._close_oldest()

    def finish(self) -> None:
        """Runs every open device until it has noticed the end of the run."""
        for name in list(self._open):
            while self.step(name) is not Step.FINISHED:
                pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes all devices. After an error they do not leave the run, so that the open round waits for them."""
        for opened in self._open.values():
            opened[0].close(leave=kind is None)


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


Kind = tuple[str, str, str]
"""Model, predictor and attack: what a profile depends on besides the rows."""


class Registration:
    """Registers devices of one run at the server without making them.

    One device of each kind checks in. What the others would report differs from it in their rows only, so they are
    entered from its profile in one transaction. A device is made when a round first draws it; it then checks in itself,
    with the profile that is registered.

    Args:
        api: The server's side of the device API.
        run: Name of the run.
        shared: What the devices of this process share, with their data.
        check_in: Makes a device and lets it check in.
    """

    def __init__(self, api: DeviceApi, run: str, shared: Shared, check_in: Callable[[DeviceSpec], object]) -> None:
        self._api = api
        self._run = run
        self._shared = shared
        self._check_in = check_in
        self._first: dict[Kind, DeviceSpec] = {}

    def register(self, specs: Sequence[DeviceSpec]) -> None:
        """Registers devices: the first one of each kind checks in, the others are entered in one transaction."""
        others = []
        for spec in specs:
            if _kind(spec) in self._first:
                others.append(spec)
            else:
                self._first[_kind(spec)] = spec
                self._check_in(spec)
        profiles = {kind: self._profile(first) for kind, first in self._first.items()}
        self._api.register(
            self._run,
            ((spec.name, self._secret(spec), self._profile_like(profiles[_kind(spec)], spec)) for spec in others),
        )

    def contents(self, spec: DeviceSpec) -> dict[str, bytes]:
        """Returns the state of a registered device that has not been made, by file name.

        It is that of a device that has checked in: its identity, and the profile that the server has.
        """
        state = MemoryStorage(Path(spec.state_dir))
        save_identity(state, service_pb2.Identity(run=self._run, device=spec.name, secret=self._secret(spec)))
        state.save_identity({"data_key": self._data_key(spec).hex()})
        save_profile(state, self._profile(spec))
        return state.contents

    def _profile(self, spec: DeviceSpec) -> contract_pb2.DeviceProfile:
        """Returns a registered device's profile from the store."""
        known = self._api.store.devices.get(self._run, spec.name)
        assert known is not None  # registered
        return contract_pb2.DeviceProfile.FromString(known.profile)

    def _profile_like(self, first: contract_pb2.DeviceProfile, spec: DeviceSpec) -> contract_pb2.DeviceProfile:
        """Returns the profile of a device of the kind whose first device has the profile `first`."""
        profile = contract_pb2.DeviceProfile()
        profile.CopyFrom(first)
        of_first = self._first[_kind(spec)]
        if first.samples == of_first.rows and first.data_version:  # else the run or an attack hides them
            profile.samples = spec.rows
        if first.data_version:
            profile.data_version = data_version(self._data_key(spec), self._shared.samples(spec.data_file).digest)
        return profile

    def _secret(self, spec: DeviceSpec) -> bytes:
        return _derive(spec, "secret")

    def _data_key(self, spec: DeviceSpec) -> bytes:
        return _derive(spec, "data key")


def _kind(spec: DeviceSpec) -> Kind:
    return spec.model, spec.predictor, spec.attack


def _derive(spec: DeviceSpec, purpose: str) -> bytes:
    """Returns 32 bytes that are the same after a resume; nobody is kept out of a simulation by them."""
    return hashlib.blake2b(f"{spec.seed} {purpose} {spec.name}".encode(), digest_size=32).digest()
