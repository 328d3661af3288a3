"""Puts a simulated run into simulated time: clock, links, devices' work and the engine's waker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fleetdistill.interruption import Hold
from fleetdistill.link.base import Link
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_lab.simulation.links.simulated_devices import SimulatedDevices
from fleetdistill_lab.simulation.spec.device import DeviceSpec
from fleetdistill_lab.simulation.timing.behaviour import FleetBehaviour, FleetTraces
from fleetdistill_lab.simulation.timing.clock import START, SimulatedClock
from fleetdistill_lab.simulation.timing.drive import SimulatedTime
from fleetdistill_lab.simulation.timing.work_log import WorkLog
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import SharedLink


class HeldLink(SharedLink):
    """An in-memory link that holds back an answer while the device, which does not know for how long, is at work.

    Args:
        api: Server side of the device API.
        seconds_left: Returns the simulated seconds until a device may send its answer to an ask, given the device and
            the ask's round and step number; at most 0 if it may.
    """

    def __init__(self, api: DeviceApi, seconds_left: Callable[[str, int, int], float]) -> None:
        super().__init__(api)
        self._seconds_left = seconds_left

    def upload_status(
        self, identity: service_pb2.Identity, name: service_pb2.UploadName
    ) -> service_pb2.UploadStatusResponse:
        """Returns an upload's status. Raises WorkInterrupted while the device is at work; it keeps the answer."""
        self._check_finished(identity.device, name)
        return super().upload_status(identity, name)

    def take(self, header: service_pb2.UploadHeader, payload: Payload) -> service_pb2.Receipt:
        """Gives the server an answer. Raises WorkInterrupted while the device is at work; it keeps the answer."""
        self._check_finished(header.identity.device, header.name)
        return super().take(header, payload)

    def _check_finished(self, device: str, name: service_pb2.UploadName) -> None:
        seconds = self._seconds_left(device, name.round, name.step_number)
        if seconds > 0:
            raise Hold("simulated work", f"the device works for {seconds:g} more simulated seconds").error()


class Timing:
    """Simulated time of one run.

    Args:
        behaviour: Behaviour of the fleet.
        config: Configuration of the run.
        specs: The devices.

    Attributes:
        clock: The simulated time of server and devices.
    """

    def __init__(self, behaviour: FleetBehaviour, config: RunConfig, specs: Sequence[DeviceSpec]) -> None:
        self.clock = SimulatedClock()
        self._run = config.run.name
        self._log_path = work_log_path(config)
        self._traces = fleet_traces(behaviour, specs)
        self._specs: Mapping[str, DeviceSpec] = {spec.name: spec for spec in specs}
        self._rows: dict[str, int] = {}
        self._drive: SimulatedTime | None = None

    def link(self, api: DeviceApi, device: str) -> Link:
        """Returns the link of a device."""
        return HeldLink(api, self._seconds_left)

    def _seconds_left(self, device: str, number: int, step_number: int) -> float:
        assert self._drive is not None  # devices send only while it runs
        return self._drive.seconds_left(device, number, step_number)

    def drive(self, api: DeviceApi, devices: SimulatedDevices, after_step: Callable[[], None]) -> SimulatedTime:
        """Returns the engine's waker, which continues at the time of the store's last row."""
        at = api.store.latest_time() or START
        log = WorkLog(self._log_path, at - self.clock.now())
        drive = SimulatedTime(api, self._run, devices, after_step, self._traces, self._samples, self.clock, log)
        self._drive = drive
        drive.start(at)
        return drive

    def _samples(self, device: str) -> int:
        if device not in self._rows:
            self._rows[device] = self._specs[device].rows
        return self._rows[device]


def fleet_traces(behaviour: FleetBehaviour, specs: Sequence[DeviceSpec]) -> FleetTraces:
    """Returns the traces of a simulation's devices, the same for its controls."""
    return FleetTraces(behaviour, [spec.name for spec in specs], specs[0].seed)


def work_log_path(config: RunConfig) -> Path:
    """Returns the path of the work log of a run, beside its store."""
    return Path(f"{config.server.store}-work.csv")
