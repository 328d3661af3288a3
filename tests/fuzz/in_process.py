"""Hostile messages through the server's own code without a network: a refusal of the table, or an answer, or a bug."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

import google_crc32c
import numpy as np
from fuzz.hostile import hostile, mangled_bytes, swollen
from fuzz.specimens import Specimen, contract_for, specimens
from support.wire_samples import make_identity, make_profile

from fleetdistill.errors import RefusedError, WireError
from fleetdistill.knowledge import SharedStatistics
from fleetdistill.methods.classstats.shared_statistics import from_wire
from fleetdistill.wire.codec import Payload, decode
from fleetdistill.wire.codes import Code
from fleetdistill.wire.digests import digest
from fleetdistill.wire.payload import Slot, slots
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.store.memory_blobs import MemoryBlobs
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store

RUN = "digits"
DEVICE = "d1"
_SPECIAL = np.array([np.nan, np.inf, -np.inf, 1e38, -1.0, 0.0], "<f4").view("<u4")
Chunk = knowledge_pb2.Chunk


class Bytes:
    """A payload's data, or what somebody says it is."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, start: int, size: int) -> bytes:
        """Returns `size` bytes from `start` on."""
        return self._data[start : start + size]


def upload_messages(random: Random, specimen: Specimen) -> tuple[knowledge_pb2.PayloadHeader, list[Chunk]]:
    """A hostile header, or hostile data under a header that fits them, and the chunks to send after it."""
    header, data = specimen.payload.header(), specimen.payload.source.read(0, specimen.payload.data_bytes)
    if random.random() < 0.6:
        header = swollen(random, header) if random.random() < 0.1 else hostile(random, header)
    if random.random() < 0.4:
        data = hostile_data(random, data)
    places = _slots(header)
    if random.random() < 0.7:  # somebody who knows how sizes are counted and digests are made
        header.data_bytes = min(places[-1].stop if places else 0, (1 << 64) - 1)
        header.sha256 = digest(header.parts, iter([data]))
    chunks = _chunks(random, data)
    return header, _disturbed(random, chunks) if random.random() < 0.4 else chunks


def hostile_data(random: Random, data: bytes) -> bytes:
    """Data with a number that is none, or with bytes changed."""
    if random.random() < 0.3:
        return mangled_bytes(random, data)
    words = np.frombuffer(data[: len(data) // 4 * 4], "<u4").copy()
    if len(words):
        words[random.randrange(len(words))] = random.choice(_SPECIAL.tolist())
    return words.tobytes() + data[len(words) * 4 :]


def _slots(header: knowledge_pb2.PayloadHeader) -> tuple[Slot, ...]:
    try:
        return slots(header.parts)
    except WireError:
        return ()


def hostile_chunks(random: Random, header: knowledge_pb2.PayloadHeader, data: bytes, rate: float) -> list[Chunk]:
    """The chunks of a download, disturbed now and then."""
    chunks = _chunks(random, data, [1 << 20] if len(data) > 1 << 14 else [1 << 20, 640])
    return _disturbed(random, chunks) if random.random() < 0.2 * rate else chunks


def _chunks(random: Random, data: bytes, sizes: Sequence[int] = (1 << 20, 64, 7)) -> list[Chunk]:
    """The data cut into pieces of one size."""
    size = random.choice(sizes)
    cut = [(start, data[start : start + size]) for start in range(0, len(data), size)]
    return [Chunk(offset=start, data=piece, crc32c=google_crc32c.value(piece)) for start, piece in cut]


def _disturbed(random: Random, chunks: list[Chunk]) -> list[Chunk]:
    """Chunks that are reordered, doubled, left out or changed."""
    result = list(chunks)
    for _ in range(random.choice([1, 1, 2, 4])):
        if not result:
            break
        at = random.randrange(len(result))
        deed = random.randrange(4)
        if deed == 0:
            result.insert(random.randrange(len(result)), result.pop(at))
        elif deed == 1:
            result.insert(at, result[at])
        elif deed == 2:
            del result[at]
        else:
            result[at] = hostile(random, result[at])
    return result


class IngestTarget:
    """The checks of uploads, directly. What they let through must be what the engine can read.

    Attributes:
        outcomes: How often an upload was accepted, and how often each code was the answer.
    """

    def __init__(self) -> None:
        self._specimens = specimens()
        self._contract = contract_for(self._specimens)
        self._names = sorted(self._specimens)
        self.outcomes: Counter[str] = Counter()

    def turn(self, random: Random) -> int:
        """Sends one upload; returns the number of its messages."""
        specimen = self._specimens[random.choice(self._names)]
        header, chunks = upload_messages(random, specimen)
        sent, refusal = self._send(specimen, header, chunks)
        self.outcomes[refusal or "accepted"] += 1
        return sent

    def _send(
        self, specimen: Specimen, header: knowledge_pb2.PayloadHeader, chunks: Iterable[Chunk]
    ) -> tuple[int, str | None]:
        sent = 1
        try:
            ingest = Ingest(DEVICE, header, self._contract, specimen.expects)
            staging = MemoryBlobs().stage("key", header.parts)
            ingest.start(staging)
            for chunk in chunks:
                sent += 1
                ingest.feed(chunk)
            ingest.finish()
        except RefusedError as refusal:
            return sent, Code(refusal.code).value
        _assert_readable(header, staging.read(0, staging.length))
        return sent, None


def _assert_readable(header: knowledge_pb2.PayloadHeader, data: bytes) -> None:
    """What was accepted is whole, finite, and decodes."""
    places = slots(header.parts)
    assert len(data) == (places[-1].stop if places else 0)
    decoded = decode(Payload(header.parts, places, Bytes(data), header.sha256))
    assert decoded.keys() == {part.name for part in header.parts.parts}
    for slot in places:
        if slot.dtype.kind == "f":
            assert np.isfinite(np.frombuffer(data[slot.start : slot.stop], slot.dtype)).all(), slot.path
    for part in decoded.values():
        if isinstance(part, SharedStatistics):
            assert np.isfinite(from_wire(part).covariance).all()


class ApiTarget:
    """Every call of a device, with a device that is checked in and has been asked for every kind of answer.

    Attributes:
        outcomes: How often there was an answer, and how often each code.
    """

    def __init__(self) -> None:
        self._specimens = specimens()
        self._names = sorted(self._specimens)
        self._store = Store.in_memory()
        self._store.runs.begin(RUN, {})
        self._store.runs.publish_contract(RUN, contract_for(self._specimens).SerializeToString())
        self._api = DeviceApi(self._store)
        self._identity = make_identity(DEVICE)
        profile = fitting_profile(self._api)
        self._identity.secret = self._api.check_in(
            service_pb2.CheckInRequest(identity=self._identity, profile=profile)
        ).secret
        self._profile = profile
        self._store.runs.start_round(RUN, [DEVICE])
        self._write_asks()
        self.outcomes: Counter[str] = Counter()
        self._calls: dict[str, Callable[[Random], int]] = {
            "check_in": self._unary(self._api.check_in, self._check_in_request),
            "next_ask": self._unary(lambda request: self._api.next_ask(request.identity), self._next_ask_request),
            "heartbeat": self._unary(self._api.heartbeat, self._heartbeat_request),
            "leave": self._unary(self._api.leave, self._leave_request),
            "decline": self._unary(self._api.decline, self._decline_request),
            "upload_status": self._unary(self._api.uploads.status, self._status_request),
            "download": self._unary(self._download, self._download_request),
            "upload": self._upload,
        }

    def turn(self, random: Random) -> int:
        """Makes one call; returns the number of its messages."""
        name = random.choice([*self._calls, "upload", "upload"])
        return self._calls[name](random)

    def close(self) -> None:
        """Closes the store."""
        self._store.close()

    def _write_asks(self) -> None:
        rows: list[dict[str, Any]] = [
            {
                "run": RUN,
                "round": 1,
                "step_number": number,
                "device": DEVICE,
                "step": name,
                "expects": self._specimens[name].expects,
                "payload": None,
                "payload_bytes": 0,
                "seed": 1,
                "deadline_at": time.time() + 86_400,
            }
            for number, name in enumerate(self._names, 1)
        ]
        self._store.asks.add([Ask(**row) for row in rows])

    def _reopen(self) -> None:
        """As if nobody had answered, so that a refusal or an accepted answer does not end the game."""
        with self._store.transaction():
            self._store.database.write("DELETE FROM uploads")
            self._store.database.write("DELETE FROM events")
            self._store.database.write("UPDATE asks SET status = 'open', reason = NULL")

    def _unary(self, call: Callable[[Any], Any], make: Callable[[Random], Any]) -> Callable[[Random], int]:
        def turn(random: Random) -> int:
            self._note(lambda: call(hostile(random, make(random))))
            self._reopen()
            return 1

        return turn

    def _note(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except RefusedError as refusal:
            self.outcomes[Code(refusal.code).value] += 1
        else:
            self.outcomes["answered"] += 1

    def _upload(self, random: Random) -> int:
        number = random.randrange(len(self._names))
        payload, chunks = upload_messages(random, self._specimens[self._names[number]])
        name = service_pb2.UploadName(round=1, step_number=number + 1, attempt=random.randrange(3))
        header = service_pb2.UploadHeader(identity=self._identity, name=name, payload=payload, samples=4)
        if random.random() < 0.3:
            header = hostile(random, header)

        def send() -> None:
            session = self._api.uploads.begin(header)
            for chunk in chunks:
                session.feed(chunk)
            session.finish()

        self._note(send)
        self._reopen()
        return 1 + len(chunks)

    def _check_in_request(self, random: Random) -> service_pb2.CheckInRequest:
        return service_pb2.CheckInRequest(identity=self._identity, profile=self._profile)

    def _next_ask_request(self, random: Random) -> service_pb2.NextAskRequest:
        return service_pb2.NextAskRequest(identity=self._identity, wait_seconds=0.0)

    def _heartbeat_request(self, random: Random) -> service_pb2.HeartbeatRequest:
        return service_pb2.HeartbeatRequest(identity=self._identity)

    def _leave_request(self, random: Random) -> service_pb2.LeaveRequest:
        return service_pb2.LeaveRequest(identity=self._identity)

    def _decline_request(self, random: Random) -> service_pb2.DeclineRequest:
        return service_pb2.DeclineRequest(identity=self._identity, round=1, step_number=2, reason="cannot")

    def _status_request(self, random: Random) -> service_pb2.UploadStatusRequest:
        name = service_pb2.UploadName(round=1, step_number=1, attempt=1)
        return service_pb2.UploadStatusRequest(identity=self._identity, name=name)

    def _download_request(self, random: Random) -> service_pb2.DownloadRequest:
        return service_pb2.DownloadRequest(identity=self._identity, sha256=bytes(32), first_byte=0)

    def _download(self, request: service_pb2.DownloadRequest) -> None:
        for _ in self._api.downloads.open(request):
            pass


def fitting_profile(api: DeviceApi) -> Any:
    """A profile that fits the run's contract."""
    contract = api.sessions.contract(RUN)
    return make_profile(features=contract.features, proxy_digest=contract.proxy_digest)
