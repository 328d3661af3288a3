"""Chunks as bytes are the messages that protobuf would write."""

from __future__ import annotations

import google_crc32c
from hypothesis import example, given
from hypothesis import strategies as st

from fleetdistill.wire.compression import RAW, ZSTD
from fleetdistill.wire.framing import framed
from fleetdistill.wire.payload import CHUNK_BYTES, Chunk
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2

FULL = bytes(CHUNK_BYTES)
made = st.builds(
    Chunk,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.one_of(st.binary(max_size=300), st.integers(0, CHUNK_BYTES).map(bytes)),
    st.integers(0, 2**32 - 1),
    st.sampled_from([RAW, ZSTD]),
)


@given(made)
@example(Chunk(0, 0, FULL, google_crc32c.value(FULL)))
@example(Chunk(0, 0, b"", 0))
@example(Chunk(2**32 - 1, 2**64 - 1, FULL, 2**32 - 1, ZSTD))
@example(Chunk(0, 0, bytes(127), 0))
@example(Chunk(0, 0, bytes(128), 0))
def test_the_bytes_of_a_chunk_are_those_of_both_messages(chunk: Chunk) -> None:
    message = knowledge_pb2.TensorChunk(**chunk._asdict())
    upload, download = service_pb2.UploadRequest(chunk=message), service_pb2.DownloadResponse(chunk=message)
    assert service_pb2.UploadRequest.FromString(framed(chunk)) == upload
    assert service_pb2.DownloadResponse.FromString(framed(chunk)) == download
    assert framed(message) == framed(chunk)
    assert len(framed(chunk)) == upload.ByteSize() + 2 * (not chunk.data)  # an empty field may be left out
