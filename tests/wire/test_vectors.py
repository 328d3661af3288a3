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
    for item in written["compressed"]:
        chunk = knowledge_pb2.Chunk.FromString(bytes.fromhex(item["chunk"]))
        assert chunk.compression == knowledge_pb2.COMPRESSION_ZSTD
        assert chunk_data(chunk).hex() == item["data"]


def test_errors_and_tokens_are_read(written: Any) -> None:
    for item in written["errors"]:
        result = error_of(bytes.fromhex(item["details"]))
        assert result == (item["status"], item["text"], item["code"], item["metadata"])
    for item in written["tokens"]:
        token = read_token(item["token"])
        assert (token.secret.hex(), token.ca.hex(), token.port) == (item["secret"], item["ca"], item["port"])


def test_messages_say_what_their_text_says(written: Any) -> None:
    for item in written["messages"]:
        message = getattr(service_pb2, item["type"].rpartition(".")[2]).FromString(bytes.fromhex(item["bytes"]))
        assert text_format.MessageToString(message) == item["text"]
