"""The link of a device in simulated time, whose answers are sent when the simulated work has ended."""

from __future__ import annotations

from collections.abc import Callable

from fleetdistill.interruption import Hold
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.simulation.links.memory_link import SharedLink


class HeldLink(SharedLink):
    """An in-memory link that holds back a device's answer while the device is at work in simulated time.

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
            raise Hold("simulated work", f"the device works for {seconds:g} more simulated seconds", seconds).error()
