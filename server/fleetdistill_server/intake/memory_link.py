"""Implements the in-memory link, which passes a device's calls to the device API with the same checks as gRPC."""

from __future__ import annotations

from collections.abc import Iterator

from fleetdistill.wire.codec import Payload
from fleetdistill.wire.compression import offered
from fleetdistill.wire.payload import AnyChunk
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2
from fleetdistill_server.intake.device_api import DeviceApi

__all__ = ["MemoryLink", "SharedLink"]


class MemoryLink:
    """Implements `fleetdistill.link.base.Link` within one process; `next_ask` returns without waiting."""

    remote = False

    def __init__(self, api: DeviceApi) -> None:
        self._api = api

    def check_in(
        self, identity: service_pb2.Identity, profile: contract_pb2.DeviceProfile | None
    ) -> service_pb2.CheckInResponse:
        return self._api.check_in(service_pb2.CheckInRequest(identity=identity, profile=profile))

    def next_ask(self, identity: service_pb2.Identity, wait_seconds: float) -> service_pb2.NextAskResponse:
        nothing = service_pb2.NextAskResponse(come_back=service_pb2.ComeBack())
        return self._api.next_ask(identity) or nothing

    def heartbeat(self, identity: service_pb2.Identity) -> None:
        self._api.heartbeat(service_pb2.HeartbeatRequest(identity=identity))

    def leave(self, identity: service_pb2.Identity, *, forget: bool = False) -> bool:
        return self._api.leave(service_pb2.LeaveRequest(identity=identity, forget=forget)).forget_recorded

    def decline(self, request: service_pb2.DeclineRequest) -> None:
        self._api.decline(request)

    def upload_status(
        self, identity: service_pb2.Identity, name: service_pb2.UploadName
    ) -> service_pb2.UploadStatusResponse:
        return self._api.uploads.status(service_pb2.UploadStatusRequest(identity=identity, name=name))

    def upload(self, header: service_pb2.UploadHeader, chunks: Iterator[AnyChunk]) -> service_pb2.Receipt:
        session = self._api.uploads.begin(header)
        try:
            for chunk in chunks:
                session.feed(chunk)
            return session.finish()
        finally:
            session.abandon()

    def download(
        self, identity: service_pb2.Identity, sha256: bytes, first_byte: int
    ) -> tuple[knowledge_pb2.PayloadHeader, Iterator[AnyChunk]]:
        request = service_pb2.DownloadRequest(
            identity=identity, sha256=sha256, first_byte=first_byte, compressions=offered()
        )
        sending = self._api.downloads.open(request)
        return sending.payload.header(), sending

    def interrupt(self) -> None:
        return

    def close(self) -> None:
        return


class SharedLink(MemoryLink):
    """A `MemoryLink` that hands payloads over as they are, with the server's checks of their content.

    Implements `fleetdistill.link.base.HandsOver`.
    """

    def hand_over(self, identity: service_pb2.Identity, sha256: bytes) -> Payload:
        return self._api.downloads.hand_over(identity, sha256)

    def take(self, header: service_pb2.UploadHeader, payload: Payload) -> service_pb2.Receipt:
        return self._api.uploads.take(header, payload)
