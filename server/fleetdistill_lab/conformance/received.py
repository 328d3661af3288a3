"""Checks the streams with which a device sends one answer."""

from __future__ import annotations

from collections.abc import Iterable

import google_crc32c
import numpy as np

from fleetdistill.errors import WireError
from fleetdistill.wire.digests import digest
from fleetdistill.wire.payload import CHUNK_BYTES, DTYPES, Slot, slots
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2, tensor_pb2
from fleetdistill_lab.conformance.rules import Report
from fleetdistill_lab.conformance.script import SHAPES


class ReceivedAnswer:
    """The bytes of one attempt, over one or several streams.

    Attributes:
        data: The bytes that the kit counts as received.
        header: Header of the first stream; None before it.
    """

    def __init__(self, report: Report, step: str) -> None:
        self._expect = report.expect
        self._step = step
        self.data = b""
        self.header: knowledge_pb2.PayloadHeader | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all bytes have arrived."""
        return self.header is not None and len(self.data) == self.header.data_bytes

    def take_header(self, header: knowledge_pb2.PayloadHeader) -> bool:
        """Checks the header of a stream; returns whether the data can be read."""
        if self.header is not None:
            return self._expect("upload.same", header == self.header, "another header for the same attempt")
        try:
            result = slots(header.parts)
        except WireError as error:
            return self._expect("header", False, str(error))
        size = result[-1].stop if result else 0
        ok = header.data_bytes == size and len(header.sha256) == 32
        text = f"data_bytes {header.data_bytes}, but {size} bytes of tensors; a digest of {len(header.sha256)} bytes"
        self._expect("header", ok, text)
        self._check_parts(header.parts, result)
        self.header = header
        return ok

    def _check_parts(self, parts: knowledge_pb2.Parts, found: tuple[Slot, ...]) -> None:
        kinds = {part.name: part.WhichOneof("kind") for part in parts.parts}
        kinds.pop("metrics", None)
        if self._step == "deliver":
            self._expect("upload.empty", not kinds and not found, f"the parts {sorted(kinds)}")
            return
        self._expect("parts", kinds == {"parameters": "model_parameters"}, f"the parts {kinds}")
        tensors = {slot.path: (slot.shape, slot.dtype, slot.channels) for slot in found}
        float32 = DTYPES[tensor_pb2.ELEMENT_TYPE_FLOAT32]
        wanted = {f"parameters/parameters/{name}": (shape, float32, None) for name, shape in SHAPES.items()}
        self._expect("tensors", tensors == wanted, f"the tensors {sorted(tensors)}, or other types and shapes")

    def take_chunks(self, messages: Iterable[service_pb2.UploadRequest], most: int) -> bool:
        """Takes chunks until `most` bytes are received or the stream ends; returns whether all were correct."""
        assert self.header is not None
        total = sum(slot.nbytes for slot in slots(self.header.parts))
        for message in messages:
            if not self._expect("upload.header", message.HasField("chunk"), "a second header"):
                return False
            if not self._take(message.chunk, total):
                return False
            if len(self.data) > most:
                self.data = self.data[:most]
                return True
        return True

    def _take(self, chunk: knowledge_pb2.Chunk, total: int) -> bool:
        raw = self._expect("chunks.compression", not chunk.compression, f"compression {chunk.compression}")
        crc = google_crc32c.value(chunk.data)
        ok = self._expect("chunks.crc", crc == chunk.crc32c, f"crc32c {chunk.crc32c:#x}, the data have {crc:#x}")
        size, at = len(chunk.data), len(self.data)
        fits = chunk.offset == at and at + size <= total
        text = f"{size} bytes at {chunk.offset}, expected byte {at} of {total}"
        placed = self._expect("chunks.place", fits and 1 <= size <= CHUNK_BYTES, text)
        self.data += chunk.data if raw and ok and placed else b""
        return raw and ok and placed

    def check(self) -> None:
        """Checks the whole answer: its digest and its numbers."""
        assert self.header is not None
        result = digest(self.header.parts, iter([self.data]))
        text = f"{self.header.sha256.hex()[:16]}, parts and data have {result.hex()[:16]}"
        self._expect("digest", result == self.header.sha256, text)
        for slot in slots(self.header.parts):
            values = np.frombuffer(self.data[slot.start : slot.stop], slot.dtype)
            self._expect(
                "finite", values.dtype.kind != "f" or np.isfinite(values).all(), f"NaN or infinity in {slot.path}"
            )
