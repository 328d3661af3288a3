"""Compression of chunks in transit: Zstandard at its fastest level, if both ends support it.

Offsets, sizes, digests and stored bytes are those of the uncompressed data. The library `zstandard` is the extra `zstd`
of the SDK and a dependency of the server.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Collection
from typing import Any

from fleetdistill.errors import WireError
from fleetdistill.wire.v1 import knowledge_pb2

__all__ = ["compression_of"]

RAW = knowledge_pb2.COMPRESSION_UNSPECIFIED
ZSTD = knowledge_pb2.COMPRESSION_ZSTD

_LEVEL = 1
# Largest ratio at which compression is used; features shrink to 0.6, parameters to 0.93 (benchmarks/RESULTS.md).
_MAX_LEFT = 0.9
# Smaller chunks are not compressed, because the frame's overhead exceeds the saving.
_MIN_BYTES = 256


def compression_of(name: str) -> knowledge_pb2.Compression.ValueType:
    """Returns the compression for a setting, `zstd` or `none`."""
    return {"zstd": ZSTD, "none": RAW}[name]


@functools.cache
def offered() -> tuple[knowledge_pb2.Compression.ValueType, ...]:
    """Returns the compressions that this process supports; empty without the extra `zstd`."""
    return (ZSTD,) if importlib.util.find_spec("zstandard") is not None else ()


def choose(
    wanted: knowledge_pb2.Compression.ValueType, known: Collection[knowledge_pb2.Compression.ValueType]
) -> knowledge_pb2.Compression.ValueType:
    """Returns `wanted` if the other end and this process support it, else no compression."""
    return wanted if wanted in known and wanted in offered() else RAW


class Packer:
    """Compresses the chunks of one stream. A chunk that does not shrink enough is sent uncompressed.

    Args:
        compression: Compression that the receiver supports, as returned by `choose`.
    """

    def __init__(self, compression: knowledge_pb2.Compression.ValueType = RAW) -> None:
        self._zstd: Any = None
        self._worth = True
        if compression == ZSTD:
            import zstandard

            self._zstd = zstandard.ZstdCompressor(level=_LEVEL)

    def next_range(self) -> None:
        """Starts another range of bytes: tries compression again."""
        self._worth = True

    def pack(self, data: bytes | memoryview) -> tuple[bytes | memoryview, knowledge_pb2.Compression.ValueType]:
        """Returns the bytes to send and their compression; a poor ratio stops compression for this range."""
        if self._zstd is None or not self._worth or len(data) < _MIN_BYTES:
            return data, RAW
        packed: bytes = self._zstd.compress(data)
        self._worth = len(packed) <= _MAX_LEFT * len(data)
        return (packed, ZSTD) if self._worth else (data, RAW)


def unpacked_bytes(data: bytes | memoryview, compression: knowledge_pb2.Compression.ValueType) -> int:
    """Returns the size of the data of one of this process's own chunks."""
    if compression == RAW:
        return len(data)
    import zstandard

    return int(zstandard.frame_content_size(data))


def unpack(
    data: bytes | memoryview, compression: knowledge_pb2.Compression.ValueType, limit: int
) -> bytes | memoryview:
    """Decompresses a chunk.

    Raises:
        WireError: The compression is unsupported, the frame is damaged, or its content is larger than `limit` bytes.
            At most `limit` bytes are allocated.
    """
    if compression == RAW:
        return data
    if compression not in offered():
        expected = ", ".join(knowledge_pb2.Compression.Name(item) for item in (RAW, *offered()))
        raise WireError(f"a chunk has unsupported compression {compression}, expected one of {expected}")
    import zstandard

    try:
        size = zstandard.frame_content_size(data)
        if not 1 <= size <= limit:
            stated = f"states a size of {size} bytes" if size >= 0 else "does not state its size"
            raise WireError(f"a chunk's zstd frame {stated}, must be 1 to {limit}")
        result: bytes = zstandard.ZstdDecompressor().decompress(data, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"a chunk's zstd frame is damaged: {error}") from error
    if len(result) != size:
        raise WireError(f"a chunk's zstd frame contains {len(result)} bytes, but its header declares {size}")
    return result
