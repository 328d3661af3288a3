"""Chunks as bytes are the messages that protobuf would write."""

from __future__ import annotations

import google_crc32c
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from fleetdistill.wire.compression import RAW, ZSTD
from fleetdistill.wire.framing import frame, unframe
from fleetdistill.wire.payload import CHUNK_BYTES, Chunk, checksum
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2

FULL = bytes(CHUNK_BYTES)
made = st.builds(
    Chunk,
    st.integers(0, 2**64 - 1),
    st.one_of(st.binary(max_size=300), st.integers(0, CHUNK_BYTES).map(bytes)),
    st.integers(0, 2**32 - 1),
    st.sampled_from([RAW, ZSTD]),
)


@given(made)
@example(Chunk(0, FULL, google_crc32c.value(FULL)))
@example(Chunk(0, b"", 0))
@example(Chunk(2**64 - 1, FULL, 2**32 - 1, ZSTD))
@example(Chunk(0, bytes(127), 0))
@example(Chunk(0, bytes(128), 0))
def test_the_bytes_of_a_chunk_are_those_of_both_messages(chunk: Chunk) -> None:
    message = knowledge_pb2.Chunk(**chunk._asdict())
    upload, download = service_pb2.UploadRequest(chunk=message), service_pb2.DownloadResponse(chunk=message)
    assert service_pb2.UploadRequest.FromString(frame(chunk)) == upload
    assert service_pb2.DownloadResponse.FromString(frame(chunk)) == download
    assert frame(message) == frame(chunk)
    assert len(frame(chunk)) == upload.ByteSize() + 2 * (not chunk.data)  # an empty field may be left out


@st.composite
def odd_messages(draw: st.DrawFn) -> bytes:
    """A framed chunk after a few edits: truncated, repeated, or with bytes inserted or changed."""
    message = frame(draw(made))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, min(len(message), 40)))
        inserted = draw(st.one_of(st.binary(max_size=8), st.sampled_from([message, message[:at], message[at:]])))
        message = message[:at] + inserted + message[at + draw(st.integers(0, 8)) :]
    return message


@given(st.one_of(odd_messages(), st.binary(max_size=60)))
@example(b"")
@example(b"\x12")
@example(b"\x12\x00")
@example(b"\x12\x02\x12\x00")
@example(b"\x12\x04\x12\x00\x12\x00")
@example(b"\x12\x05\x12\x01a\x12\x00")
@example(b"\x12\x05\x12\x83\x80\x00abc")
@example(b"\x0a\x00\x12\x03\x12\x01a")
@example(b"\x12\x03\x12\x01a\x12\x02\x08\x07")
def test_a_message_is_parsed_as_protobuf_parses_it(message: bytes) -> None:
    try:
        expected = service_pb2.UploadRequest.FromString(message)
    except DecodeError:
        with pytest.raises(DecodeError):
            unframe(message, service_pb2.UploadRequest)
        return
    result = unframe(message, service_pb2.UploadRequest)
    if isinstance(result, Chunk):
        fields = result._replace(data=bytes(result.data))._asdict()
        assert expected.WhichOneof("message") == "chunk"
        assert {name: getattr(expected.chunk, name) for name in fields} == fields
    else:
        assert result == expected
        assert not result.HasField("chunk")


def test_the_data_of_a_received_chunk_are_not_copied() -> None:
    message = frame(Chunk(5, FULL, google_crc32c.value(FULL)))
    result = unframe(message, service_pb2.DownloadResponse)
    assert isinstance(result, Chunk)
    assert isinstance(result.data, memoryview)
    assert result.data.obj is message
    assert result.data == FULL
    assert checksum(result.data) == result.crc32c
