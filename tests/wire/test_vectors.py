"""protos/vectors.json is what today's codec writes and reads; `tests/wire/golden/vectors.py` makes it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf import text_format
from wire.golden.vectors import FILE, error_of, vectors

from fleetdistill.link.enrolment import read_token
from fleetdistill.wire.payload import chunk_data
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2


@pytest.fixture(scope="module")
def written() -> Any:
    return json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("key", ["crc32c", "payloads", "quantised", "fingerprints", "tokens", "errors", "messages"])
def test_the_codec_writes_these_vectors(written: Any, key: str) -> None:
    assert written[key] == json.loads(json.dumps(vectors()[key]))


def test_a_zstandard_chunk_is_read(written: Any) -> None:
    for one in written["compressed"]:
        chunk = knowledge_pb2.TensorChunk.FromString(bytes.fromhex(one["chunk"]))
        assert chunk.compression == knowledge_pb2.COMPRESSION_ZSTD
        assert chunk_data(chunk).hex() == one["data"]


def test_errors_and_tokens_are_read(written: Any) -> None:
    for one in written["errors"]:
        found = error_of(bytes.fromhex(one["details"]))
        assert found == (one["status"], one["text"], one["code"], one["metadata"])
    for one in written["tokens"]:
        token = read_token(one["token"])
        assert (token.secret.hex(), token.ca.hex(), token.port) == (one["secret"], one["ca"], one["port"])


def test_messages_say_what_their_text_says(written: Any) -> None:
    for one in written["messages"]:
        message = getattr(service_pb2, one["type"].rpartition(".")[2]).FromString(bytes.fromhex(one["bytes"]))
        assert text_format.MessageToString(message) == one["text"]
