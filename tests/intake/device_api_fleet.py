"""A device API with a published run, and what devices and the engine would do with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from support.wire_samples import (
    EXPECTS,
    in_pieces,
    make_contract,
    make_identity,
    make_profile,
)

from fleetdistill.testing import ManualClock
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.uploads import UploadSession
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store

RUN = "digits"

T = TypeVar("T")

WHOLE = 1 << 20


class Fleet:
    """A device API with a published run, and what devices and the engine would do."""

    def __init__(self, store: Store, **contract: Any) -> None:
        self.store = store
        self.wakes = 0
        self.before_commit: Callable[[], None] = lambda: None
        self.clock = ManualClock()
        self.api = DeviceApi(store, self._commit, self._wake, lease_seconds=60.0, clock=self.clock.now)
        store.runs.begin(RUN, {})
        store.runs.publish_contract(RUN, make_contract(**contract).SerializeToString())

    def _commit(self, job: Callable[[Store], T]) -> T:
        self.before_commit()
        with self.store.transaction():
            return job(self.store)

    def _wake(self) -> None:
        self.wakes += 1

    def check_in(
        self, device: str = "d1", secret: bytes = b"", profile: contract_pb2.DeviceProfile | None = None
    ) -> service_pb2.CheckInResponse:
        identity = make_identity(device, secret)
        return self.api.check_in(service_pb2.CheckInRequest(identity=identity, profile=profile or make_profile()))

    def join(self, device: str = "d1") -> service_pb2.Identity:
        """Checks a device in; returns who it is from then on."""
        return make_identity(device, self.check_in(device).secret)

    def ask(self, *devices: str, step_number: int = 1, payload: Payload | None = None) -> None:
        """What the engine writes."""
        if payload is not None:
            self.store.blobs.put(payload)
        row: Row = {"run": RUN, "round": 1, "step_number": step_number, "step": "train", "expects": EXPECTS, "seed": 7}
        row |= {"payload": payload.sha256 if payload else None, "payload_bytes": payload.data_bytes if payload else 0}
        row["deadline_at"] = time.time() + 600
        self.store.asks.add([Ask(**row, device=device) for device in devices or ("d1",)])

    def begin(
        self,
        identity: service_pb2.Identity,
        payload: Payload,
        *,
        attempt: int = 1,
        first_byte: int = 0,
        samples: int = 4,
        step_number: int = 1,
        number: int = 1,
    ) -> UploadSession:
        return self.api.uploads.begin(  # type: ignore[return-value]
            service_pb2.UploadHeader(
                identity=identity,
                name=service_pb2.UploadName(round=number, step_number=step_number, attempt=attempt),
                payload=payload.header(),
                samples=samples,
                first_byte=first_byte,
            )
        )

    def send(self, identity: service_pb2.Identity, payload: Payload, **how: Any) -> service_pb2.Receipt:
        session = self.begin(identity, payload, **how)
        feed(session, in_pieces(payload, WHOLE))
        return session.finish()

    def status(
        self, identity: service_pb2.Identity, attempt: int = 1, number: int = 1, step_number: int = 1
    ) -> service_pb2.UploadStatusResponse:
        name = service_pb2.UploadName(round=number, step_number=step_number, attempt=attempt)
        return self.api.uploads.status(service_pb2.UploadStatusRequest(identity=identity, name=name))

    def refused(self) -> list[tuple[str, str]]:
        """Device and code of every refusal that `runs show` would list."""
        return [(event.device, event.code) for event in self.store.history.events(RUN, "refused")]

    def ask_state(self, device: str = "d1") -> tuple[str, str | None]:
        row = self.store.asks.get(RUN, 1, 1, device)
        assert row is not None
        return row.status, row.reason


def feed(session: UploadSession, chunks: Iterable[knowledge_pb2.Chunk]) -> None:
    for chunk in chunks:
        session.feed(chunk)


def refused_bytes(fleet: Fleet, device: str = "d1") -> int:
    """What has travelled in vain to the server; no answer was made of it."""
    counted = fleet.store.history.traffic_by_kind(RUN)
    rows = [row for row in counted if (row.device, row.kind) == (device, "refused")]
    assert all((row.direction, row.round, row.tensor_bytes) == ("up", 1, 0) for row in rows)
    return sum(row.sent_bytes for row in rows)


def silence(fleet: Fleet, *devices: str) -> None:
    """Lets the leases of these devices run out."""
    for device in devices:
        fleet.api.sessions._leases[RUN, device] = fleet.clock.now() - 1
