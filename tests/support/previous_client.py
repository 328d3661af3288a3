"""A device of an earlier release: it speaks the recorded protocol of that release and nothing newer.

Its messages are made from the recorded descriptors, in a pool of their own, so no field and no value of today's
protocol can slip in. It does what the SDK of that release did, in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import grpc
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message
from support.processes import PATIENCE_SECONDS

GOLDEN = Path(__file__).parents[1] / "wire" / "golden"
PACKAGE = "fleetdistill.wire.v1"
CHUNK_BYTES = 1 << 20
_SECONDS = PATIENCE_SECONDS
_ITEM_BYTES = {1: 4, 2: 2, 3: 8, 4: 4, 5: 8, 6: 1, 7: 1}  # by element type


class Protocol:
    """The messages and calls of a recorded release."""

    def __init__(self, release: str) -> None:
        recorded = (GOLDEN / release / "descriptors.binpb").read_bytes()
        self._pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(recorded).file:
            self._pool.Add(file)
        self.service = self._pool.FindServiceByName(f"{PACKAGE}.DeviceService")

    def __getattr__(self, name: str) -> type[Message]:
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))

    def call(self, channel: grpc.Channel, method: str) -> Callable[..., Any]:
        """One call of the service over a channel, with this release's serializers."""
        found = self.service.methods_by_name[method]
        kind = (
            ("stream" if found.client_streaming else "unary") + "_" + ("stream" if found.server_streaming else "unary")
        )
        output = message_factory.GetMessageClass(found.output_type)
        make = getattr(channel, kind)
        multicallable = make(
            f"/{PACKAGE}.DeviceService/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=output.FromString,
        )
        return lambda request: multicallable(request, timeout=_SECONDS)


class PreviousClient:
    """One device of the release."""

    def __init__(self, port: int, run: str, device: str, release: str = "v0.1.0") -> None:
        self.protocol = Protocol(release)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self.identity: Any = self.protocol.Identity(run=run, device=device)
        self.contract: Any = None

    def _call(self, method: str, request: Any) -> Any:
        return self.protocol.call(self.channel, method)(request)

    def check_in(self, **changes: Any) -> Any:
        """Asks for the contract, then introduces itself with a profile that fits it but for the changes."""
        asked = self._call("CheckIn", self.protocol.CheckInRequest(identity=self.identity))
        contract = self.contract = asked.contract
        settings = {
            "model_name": "previous",
            "parameters": 3,
            "samples": 1 << 22,  # no test sends as many rows
            "classes": len(contract.classes),
            "input_shape": list(contract.input_shape),
            "features": list(contract.features),
            "extractor_fingerprint": contract.extractor_fingerprint,
            "model_fingerprint": contract.model_fingerprint,
            "knowledge_types": [1, 2],  # all that the release knew to send: float32 and float16
            "allowed_columns": list(contract.requirements.columns),
            "proxy_digest": contract.proxy_digest,
            "sdk_version": "0.1.0",
            **changes,
        }
        profile = self.protocol.DeviceProfile(**settings)
        taken = self._call("CheckIn", self.protocol.CheckInRequest(identity=self.identity, profile=profile))
        self.identity.secret = taken.secret or self.identity.secret
        return taken

    def next_ask(self, wait_seconds: float = 0.0) -> Any:
        return self._call("NextAsk", self.protocol.NextAskRequest(identity=self.identity, wait_seconds=wait_seconds))

    def heartbeat(self) -> Any:
        return self._call("Heartbeat", self.protocol.HeartbeatRequest(identity=self.identity))

    def leave(self) -> Any:
        return self._call("Leave", self.protocol.LeaveRequest(identity=self.identity))

    def decline(self, ask: Any, reason: str) -> Any:
        request = self.protocol.DeclineRequest(
            identity=self.identity, round=ask.round, step_number=ask.step_number, reason=reason
        )
        return self._call("Decline", request)

    def name(self, ask: Any, attempt: int = 1) -> Any:
        return self.protocol.UploadName(round=ask.round, step_number=ask.step_number, attempt=attempt)

    def status(self, ask: Any, attempt: int = 1) -> Any:
        request = self.protocol.UploadStatusRequest(identity=self.identity, name=self.name(ask, attempt))
        return self._call("UploadStatus", request)

    def download(self, sha256: bytes, first_byte: int = 0) -> tuple[Any, bytes]:
        """Header and data from a byte on; every chunk's checksum and, of a whole one, the digest are checked."""
        request = self.protocol.DownloadRequest(identity=self.identity, sha256=sha256, first_byte=first_byte)
        stream = self._call("Download", request)
        header, data = next(stream).header, b""
        for message in stream:
            assert google_crc32c.value(message.chunk.data) == message.chunk.crc32c
            data += message.chunk.data
        assert first_byte + len(data) == header.data_bytes
        if not first_byte:
            parts = header.parts.SerializeToString(deterministic=True)
            assert hashlib.sha256(parts + data).digest() == sha256
        return header, data

    def upload(self, ask: Any, parts: Any, data: bytes, samples: int = 4, stop_after: int | None = None) -> Any:
        """Sends what the server lacks; with `stop_after` only so many chunks of it."""
        sha256 = hashlib.sha256(parts.SerializeToString(deterministic=True) + data).digest()
        payload = self.protocol.PayloadHeader(parts=parts, data_bytes=len(data), sha256=sha256)
        first = self.status(ask).next_byte
        header = self.protocol.UploadHeader(
            identity=self.identity, name=self.name(ask), payload=payload, samples=samples, first_byte=first
        )
        chunks = list(self._chunks(parts, data, first))[:stop_after]
        messages = [self.protocol.UploadRequest(header=header), *chunks]
        return self._call("Upload", iter(messages)).receipt

    def _chunks(self, parts: Any, data: bytes, first: int) -> Iterator[Any]:
        start = 0
        for number, tensor in enumerate(_tensors(parts)):
            stop = start + int(np.prod(tensor.shape, dtype=np.int64)) * _ITEM_BYTES[tensor.element_type]
            for at in range(max(start, first), stop, CHUNK_BYTES):
                piece = data[at : min(at + CHUNK_BYTES, stop)]
                crc = google_crc32c.value(piece)
                chunk = self.protocol.TensorChunk(tensor=number, offset=at - start, data=piece, crc32c=crc)
                yield self.protocol.UploadRequest(chunk=chunk)
            start = stop

    def knowledge(self, rows: int = 4) -> tuple[Any, bytes]:
        """An answer of one part `knowledge` that fits the contract: features, logits and labels of so many samples."""
        element_type = self.contract.knowledge_type
        dtype = {1: np.float32, 2: np.float16}[element_type]
        part = self.protocol.Part(name="knowledge")
        arrays: list[np.ndarray[Any, Any]] = []

        def describe(tensor: Any, array: np.ndarray[Any, Any], kind: int) -> None:
            tensor.element_type, tensor.encoding = kind, 1
            tensor.shape.extend(array.shape)
            arrays.append(array)

        told: Any = part.sample_knowledge  # type: ignore[attr-defined]
        describe(told.sample_ids, np.arange(rows, dtype=np.int64), 5)
        for feature in self.contract.features:
            ones = np.ones((rows, *feature.shape), dtype)
            describe(told.features.add(name=feature.name).tensor, ones, element_type)
        describe(told.logits, np.ones((rows, len(self.contract.classes)), dtype), element_type)
        describe(told.labels, np.zeros(rows, np.int32), 4)
        return self.protocol.Parts(parts=[part]), b"".join(one.tobytes() for one in arrays)


def _tensors(parts: Any) -> Iterator[Any]:
    for part in parts.parts:
        told = part.sample_knowledge
        yield from (told.sample_ids, *(one.tensor for one in told.features), told.logits, told.labels)
