"""In-memory blobs for simulation and tests."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Collection

from fleetdistill.errors import DamagedError
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import ArraySource, Payload
from fleetdistill.wire.v1 import knowledge_pb2
from fleetdistill_server.store.blobs import NO_DIGESTS, Digests, Space, Staged, StoredBlob, check_digests


class MemoryBlobs:
    """Payloads and checkpoints in dictionaries, for simulation and tests. Implements `Blobs`."""

    def __init__(self) -> None:
        self.space: Space | None = None
        self._payloads: dict[bytes, Payload] = {}
        self._states: dict[bytes, bytes] = {}
        self._staging: dict[str, _MemoryStaging] = {}

    def check(self) -> None:
        return

    def stage(self, key: str, parts: knowledge_pb2.Parts, digests: Digests = NO_DIGESTS) -> _MemoryStaging:
        known = self._staging.get(key)
        if known is None or (known.parts, known.digests) != (parts, digests):
            self._staging.pop(key, None)
            known = _MemoryStaging(self, key, parts, digests)
        return known

    def staged(self, key: str) -> int:
        return self._staging[key].length if key in self._staging else 0

    def open(self, sha256: bytes, *, verify: bool = False) -> Payload:
        if sha256 not in self._payloads:
            raise DamagedError(sha256, f"payload {sha256.hex()} is not in the store")
        return self._payloads[sha256]

    def has(self, sha256: bytes) -> bool:
        return sha256 in self._payloads or sha256 in self._states

    def trim(self) -> None:
        return

    def forget_verified(self) -> None:
        return

    def quarantine(self, sha256: bytes) -> None:
        self._payloads.pop(sha256, None)

    def drop_quarantined(self, digests: Collection[bytes]) -> None:
        return

    def held(self) -> list[StoredBlob]:
        payloads = [StoredBlob(sha256, one.data_bytes, math.inf) for sha256, one in self._payloads.items()]
        return [*payloads, *(StoredBlob(sha256, len(data), math.inf) for sha256, data in self._states.items())]

    def age_seconds(self, sha256: bytes) -> float:
        return math.inf

    def staging(self) -> list[Staged]:
        return [Staged(key, one.length, math.inf) for key, one in self._staging.items()]

    def discard(self, key: str) -> None:
        self._staging.pop(key, None)

    def exclusive(self) -> contextlib.AbstractContextManager[bool]:
        return contextlib.nullcontext(True)

    def put(self, payload: Payload) -> None:
        self._payloads[payload.digest] = payload if isinstance(payload.source, ArraySource) else _copy(payload)

    def drop(self, sha256: bytes) -> None:
        self._payloads.pop(sha256, None)
        self._states.pop(sha256, None)

    def put_state(self, data: bytes) -> bytes:
        sha256 = hashlib.sha256(data).digest()
        self._states[sha256] = data
        return sha256

    def get_state(self, sha256: bytes) -> bytes:
        if sha256 not in self._states:
            raise DamagedError(sha256, f"checkpoint {sha256.hex()} is not in the store")
        return self._states[sha256]


class _MemoryStaging:
    def __init__(self, blobs: MemoryBlobs, key: str, parts: knowledge_pb2.Parts, digests: Digests) -> None:
        self.parts, self.digests = parts, digests
        self.length = 0
        self._blobs = blobs
        self._key = key
        self._data = bytearray()

    def append(self, data: bytes | memoryview) -> None:
        self._blobs._staging[self._key] = self  # only now: an answer that is handed over whole appends nothing
        self._data += data
        self.length = len(self._data)

    def read(self, start: int, size: int) -> bytes:
        return bytes(self._data[start : start + size])

    def commit(self, sha256: bytes) -> None:
        self._blobs._payloads[sha256] = _payload(self.parts, bytes(self._data), *check_digests(sha256, self.digests))
        self.discard()

    def discard(self) -> None:
        self._blobs._staging.pop(self._key, None)

    def close(self) -> None:
        return


def _copy(payload: Payload) -> Payload:
    data = b"".join(wire.pieces(payload.source, 0, payload.data_bytes))
    return _payload(payload.parts, data, payload.sha256, payload.blake3)


def _payload(parts: knowledge_pb2.Parts, data: bytes, sha256: bytes, blake3: bytes) -> Payload:
    return Payload(parts, wire.slots(parts), _BytesSource(data), sha256, blake3)


class _BytesSource:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, start: int, size: int) -> bytes:
        return self._data[start : start + size]
