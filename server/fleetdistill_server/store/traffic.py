"""Counting what goes over the link, by kind of part: tensor bytes as they are, and as they travelled, packed or not."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fleetdistill.wire.payload import CHUNK_BYTES, Chunk, Slot

ENVELOPE = "envelope"
"""Stands in the place of a kind for the headers of payloads."""

REFUSED = "refused"
"""Stands in the place of a kind for what came of uploads, or of answers sent again, and was not taken."""


@dataclass(frozen=True)
class Counted:
    """Bytes of one payload, or of what was sent of it, by kind of part.

    Attributes:
        tensor: As they are: what the methods' formulas predict.
        sent: As they travelled.
    """

    tensor: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)


def tensor_bytes(slots: Sequence[Slot], stop: int | None = None) -> Counter[str]:
    """Bytes of a payload's tensors, all or those before byte `stop`."""
    found: Counter[str] = Counter()
    for slot in slots:
        found[slot.kind] += slot.nbytes if stop is None else min(max(stop - slot.start, 0), slot.nbytes)
    return found


class Sending(Iterator[Chunk]):
    """The chunks of a download, counted as they are taken; ends itself after the last.

    Args:
        chunks: As `fleetdistill.wire.payload.chunks` cuts them.
        slots: Where the payload's tensors stand.
        done: Called once with what was taken, by whoever ends it.
    """

    def __init__(self, chunks: Iterator[Chunk], slots: Sequence[Slot], done: Callable[[Counted], None]) -> None:
        self._chunks = chunks
        self._slots = slots
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
        slot = self._slots[chunk.tensor]
        size = min(CHUNK_BYTES, slot.nbytes - chunk.offset)
        self._counted.tensor[slot.kind] += size
        self._counted.sent[slot.kind] += len(chunk.data)

    def end(self) -> None:
        """Counts what was taken, also where the stream broke; again it does nothing. No chunk comes after it."""
        with self._lock:
            ended, self._ended = self._ended, True
        if not ended:
            self._done(self._counted)
