"""Packing the bytes of chunks for the way: Zstandard at its fastest level, where both ends have it.

Only the way is packed: offsets, sizes, digests and what is stored are those of the bytes before. The `zstandard`
library is an extra of the SDK (`zstd`) and part of the server's.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Collection
from typing import Any

from fleetdistill.errors import WireError
from fleetdistill.wire.v1 import knowledge_pb2

RAW = knowledge_pb2.COMPRESSION_UNSPECIFIED
ZSTD = knowledge_pb2.COMPRESSION_ZSTD

_LEVEL = 1
# Less is not worth the receiver's time; features shrink to 0.6, parameters to 0.93 (benchmarks/RESULTS.md).
_MOST_LEFT = 0.9
# Below it the frame's own bytes weigh more than what is saved.
_LEAST_BYTES = 256


def compression_of(name: str) -> knowledge_pb2.Compression.ValueType:
    """The compression of a setting, `zstd` or `none`."""
    return {"zstd": ZSTD, "none": RAW}[name]


@functools.cache
def offered() -> tuple[knowledge_pb2.Compression.ValueType, ...]:
    """What this process can pack and unpack; nothing without the extra `zstd`."""
    return (ZSTD,) if importlib.util.find_spec("zstandard") is not None else ()


def choose(
    wanted: knowledge_pb2.Compression.ValueType, known: Collection[knowledge_pb2.Compression.ValueType]
) -> knowledge_pb2.Compression.ValueType:
    """What two ends use: what one wants where the other, and this process, knows it; else no compression."""
    return wanted if wanted in known and wanted in offered() else RAW


class Packer:
    """Packs the chunks of one stream. A chunk that does not get smaller is sent as it is.

    Args:
        compression: What the receiver takes, such as `choose` gives.
    """

    def __init__(self, compression: knowledge_pb2.Compression.ValueType = RAW) -> None:
        self._zstd: Any = None
        self._worth = True
        if compression == ZSTD:
            import zstandard

            self._zstd = zstandard.ZstdCompressor(level=_LEVEL)

    def next_tensor(self) -> None:
        """Another tensor begins, which may shrink where the last did not."""
        self._worth = True

    def pack(self, data: bytes) -> tuple[bytes, knowledge_pb2.Compression.ValueType]:
        """Returns what to send and how it is packed; once one hardly shrank, its tensor's others are not tried."""
        if self._zstd is None or not self._worth or len(data) < _LEAST_BYTES:
            return data, RAW
        packed: bytes = self._zstd.compress(data)
        self._worth = len(packed) <= _MOST_LEFT * len(data)
        return (packed, ZSTD) if self._worth else (data, RAW)


def unpacked(data: bytes, compression: knowledge_pb2.Compression.ValueType, limit: int) -> bytes:
    """The bytes before packing.

    Raises:
        WireError: The compression is unknown here, the frame is damaged, or says that it holds more than `limit` bytes;
            no more than that is ever allocated.
    """
    if compression == RAW:
        return data
    if compression not in offered():
        raise WireError(f"a chunk is packed with compression {compression}, which this side has not offered")
    import zstandard

    try:
        size = zstandard.frame_content_size(data)
        if not 1 <= size <= limit:
            stated = f"says that it holds {size} bytes" if size >= 0 else "does not say how many bytes it holds"
            raise WireError(f"a chunk's zstd frame {stated}, must be 1 to {limit}")
        found: bytes = zstandard.ZstdDecompressor().decompress(data, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"a chunk's zstd frame is damaged: {error}") from error
    if len(found) != size:
        raise WireError(f"a chunk's zstd frame holds {len(found)} bytes, it says {size}")
    return found
