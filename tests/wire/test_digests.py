"""Digests of payloads: which algorithm is compared, and that both cover the same bytes."""

from __future__ import annotations

import pytest
from support.wire_samples import by_blake3, data_of, make_payload, with_blake3

from fleetdistill.errors import WireError
from fleetdistill.wire import digests
from fleetdistill.wire.codec import encode, with_sha256
from fleetdistill.wire.digests import Algorithm, Check, digest, identity
from fleetdistill.wire.v1 import knowledge_pb2

# Of no input, from the test vectors of the BLAKE3 team, and from FIPS 180-4.
NOTHING = {
    Algorithm.BLAKE3: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    Algorithm.SHA256: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
}


@pytest.mark.parametrize("algorithm", Algorithm)
def test_a_digest_covers_parts_and_data(algorithm: Algorithm) -> None:
    assert digest(knowledge_pb2.Parts(), [], algorithm).hex() == NOTHING[algorithm]
    payload = make_payload()
    whole = payload.parts.SerializeToString(deterministic=True) + data_of(payload)
    pieces = [whole[:7], whole[7:]]
    assert digest(knowledge_pb2.Parts(), pieces, algorithm) == digest(payload.parts, [data_of(payload)], algorithm)


@pytest.mark.parametrize("algorithm", Algorithm)
def test_a_payload_is_encoded_with_one_digest(algorithm: Algorithm) -> None:
    payload = encode({}, algorithm=algorithm)
    assert payload.digest.hex() == NOTHING[algorithm] == identity(payload.header()).hex()
    assert [item for item in Algorithm if getattr(payload.header(), item)] == [algorithm]


def test_blake3_is_compared_if_the_header_has_it() -> None:
    payload = make_payload()
    for header, algorithm in (
        (payload.header(), Algorithm.SHA256),
        (with_blake3(payload).header(), Algorithm.BLAKE3),
        (by_blake3(payload).header(), Algorithm.BLAKE3),
    ):
        check = Check(header)
        assert check.algorithm is algorithm
        assert not check.matches()
        check.update(data_of(payload))
        assert check.matches()


def test_without_the_package_sha256_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "has_blake3", lambda: False)
    payload = make_payload()
    assert Check(with_blake3(payload).header()).algorithm is Algorithm.SHA256
    with pytest.raises(WireError, match="has only a BLAKE3 digest, which this process cannot compute; pip install"):
        Check(by_blake3(payload).header())


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_digest_has_32_bytes(size: int) -> None:
    header = make_payload().header()
    header.sha256 = bytes(size)
    with pytest.raises(WireError, match=f"the header's SHA-256 has {size} bytes, expected 32"):
        Check(header)


def test_a_payload_gets_its_sha256_for_a_server_without_blake3() -> None:
    payload = make_payload()
    assert with_sha256(payload) is payload
    assert with_sha256(by_blake3(payload)).header() == payload.header()
