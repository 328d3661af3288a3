"""Counts the bytes sent over the link by kind of part: tensor bytes, and bytes sent after compression."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.compression import unpacked_bytes
from fleetdistill.wire.payload import Chunk, Slot
from fleetdistill.wire.v1 import knowledge_pb2

__all__ = ["REFUSED"]

ENVELOPE = "envelope"
"""Value used instead of a kind for the bytes of payload headers."""

REFUSED = "refused"
"""Value used instead of a kind for received bytes that were not accepted: refused or repeated uploads."""


@dataclass(frozen=True)
class Counted:
    """Byte counts of a payload, or of the part of it that was sent, by kind of part.

    Attributes:
        tensor: Uncompressed tensor bytes; the methods' formulas predict these.
        sent: Bytes sent over the link.
    """

    tensor: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)


def tensor_bytes(slots: Sequence[Slot], stop: int | None = None) -> Counter[str]:
    """Returns the uncompressed tensor bytes of a payload by kind; with `stop`, only of the bytes before it."""
    result: Counter[str] = Counter()
    for slot in slots:
        result[slot.kind] += slot.nbytes if stop is None else min(max(stop - slot.start, 0), slot.nbytes)
    return result


def counted(payload: Payload, compression: knowledge_pb2.Compression.ValueType) -> Counted:
    """Returns the byte counts of a payload that is handed over in one process, as if it were sent in chunks."""
    result = Counted(tensor_bytes(payload.slots))
    for start, data, _ in wire.packed(payload.source, payload.slots, 0, compression):
        result.sent[kind_at(payload.slots, start)] += len(data)
    return result


def kind_at(slots: Sequence[Slot], offset: int) -> str:
    """Returns the kind of part that a chunk counts for, that of its first byte."""
    slot = wire.slot_at(slots, offset)
    assert slot is not None
    return slot.kind


class Sending(Iterator[Chunk]):
    """Iterator over the chunks of a download that counts the bytes taken.

    Args:
        payload: The payload.
        chunks: Its chunks, from `fleetdistill.wire.payload.chunks`.
        done: Called exactly once with the byte counts, when there are no more chunks or `end` is called.
        first_byte: Offset of the first chunk in the payload's data.

    Attributes:
        payload: As in the arguments.
        left: Number of bytes of the payload's data that are not taken yet.
    """

    def __init__(
        self, payload: Payload, chunks: Iterator[Chunk], done: Callable[[Counted], None], first_byte: int = 0
    ) -> None:
        self.payload = payload
        self.left = payload.data_bytes - first_byte
        self._chunks = chunks
        self._done = done
        self._counted = Counted()
        self._lock = threading.Lock()
        self._ended = False

    def __next__(self) -> Chunk:
        with self._lock:
            chunk = None if self._ended else next(self._chunks, None)
            if chunk is not None:
                self._count(chunk)
        if chunk is None:
            self.end()
            raise StopIteration
        return chunk

    def _count(self, chunk: Chunk) -> None:
        kind = kind_at(self.payload.slots, chunk.offset)
        size = unpacked_bytes(chunk.data, chunk.compression)
        self.left -= size
        self._counted.tensor[kind] += size
        self._counted.sent[kind] += len(chunk.data)

    def end(self) -> None:
        """Ends the iteration, also of a broken stream, and reports the byte counts. Further calls have no effect."""
        with self._lock:
            ended, self._ended = self._ended, True
        if not ended:
            self._done(self._counted)
