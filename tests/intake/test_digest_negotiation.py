"""Answers that BLAKE3 or SHA-256 identifies, from the check-in to the store, and asks' payloads with both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from intake.device_api_fleet import RUN, WHOLE, Fleet, feed
from support.wire_samples import by_blake3, data_of, in_pieces, make_payload, with_blake3

from fleetdistill.errors import DamagedError, RefusedError
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.intake import device_api
from fleetdistill_server.store.blobs import stated
from fleetdistill_server.store.file_blobs import FileBlobs
from fleetdistill_server.store.store import Store


def test_the_server_accepts_blake3_if_it_can_compute_it(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fleet.check_in().blake3
    monkeypatch.setattr(device_api, "has_blake3", lambda: False)
    assert not fleet.check_in("d2").blake3


def test_an_answer_is_received_under_its_blake3(any_fleet: Fleet) -> None:
    identity, payload = any_fleet.join(), by_blake3(make_payload())
    any_fleet.ask()
    receipt = any_fleet.send(identity, payload)
    assert receipt.sha256 == payload.blake3
    assert any_fleet.send(identity, payload) == receipt
    stored = any_fleet.store.blobs.open(payload.blake3, verify=True)
    assert (stored.header(), data_of(stored)) == (payload.header(), data_of(payload))
    assert any_fleet.store.asks.uploads(RUN)[0].sha256 == payload.blake3


def test_an_answer_under_its_blake3_is_resumed(any_fleet: Fleet) -> None:
    identity, payload = any_fleet.join(), by_blake3(make_payload())
    any_fleet.ask()
    session = any_fleet.begin(identity, payload)
    sent = list(in_pieces(payload, 7))
    feed(session, sent[:5])
    session.abandon()
    held = any_fleet.status(identity).next_byte
    assert held == sum(len(chunk.data) for chunk in sent[:5])
    session = any_fleet.begin(identity, payload, first_byte=held)
    feed(session, sent[5:])
    assert session.finish().sha256 == payload.blake3


def test_staged_bytes_of_another_digest_are_not_continued(tmp_path: Path) -> None:
    payload, blobs = make_payload(), FileBlobs(tmp_path)
    staging = blobs.stage("key", payload.parts)
    staging.append(data_of(payload)[:8])
    staging.close()
    other = blobs.stage("key", payload.parts, stated(b"", with_blake3(payload).blake3))
    assert other.length == 0


def test_damaged_data_do_not_match_the_blake3(any_fleet: Fleet) -> None:
    identity, payload = any_fleet.join(), by_blake3(make_payload())
    any_fleet.ask()
    session = any_fleet.begin(identity, replace(payload, blake3=bytes(32)))
    feed(session, in_pieces(payload, WHOLE))
    with pytest.raises(RefusedError, match="the BLAKE3 of parts and data does not match the header") as caught:
        session.finish()
    assert caught.value.code == Code.CHECKSUM
    assert not any_fleet.store.blobs.held()


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (with_blake3(make_payload()), "the header has a SHA-256 and a BLAKE3, expected one of them"),
        (replace(by_blake3(make_payload()), blake3=b"short"), "the header's BLAKE3 has 5 bytes, expected 32"),
        (replace(make_payload(), sha256=b""), "the header's SHA-256 has 0 bytes, expected 32"),
    ],
)
def test_a_header_has_one_digest(fleet: Fleet, payload: Payload, text: str) -> None:
    """With two, a device could store its answer under another payload's name."""
    identity = fleet.join()
    fleet.ask()
    with pytest.raises(RefusedError, match=text) as caught:
        fleet.begin(identity, payload)
    assert caught.value.code == Code.BAD_MESSAGE


@pytest.fixture
def files(tmp_path: Path) -> Fleet:
    return Fleet(Store.open(tmp_path))


def test_the_payload_of_an_ask_is_downloaded_with_both_digests(files: Fleet) -> None:
    identity, payload = files.join(), make_payload()
    files.ask(payload=payload)
    sending = files.api.downloads.open(service_pb2.DownloadRequest(identity=identity, sha256=payload.sha256))
    assert sending.payload.header() == with_blake3(payload).header()
    files.store.close()


def test_a_payload_of_an_older_server_has_its_sha256_alone(files: Fleet) -> None:
    """A file without digests is one that a release before BLAKE3 has written."""
    identity, payload = files.join(), make_payload()
    staging = files.store.blobs.stage("put-old", payload.parts)
    staging.append(data_of(payload))
    staging.commit(payload.sha256)
    files.ask(payload=payload)
    sending = files.api.downloads.open(service_pb2.DownloadRequest(identity=identity, sha256=payload.sha256))
    assert sending.payload.header() == payload.header()
    assert files.store.blobs.open(payload.sha256, verify=True).header() == payload.header()
    files.store.close()


def test_a_file_under_another_name_is_damaged(tmp_path: Path) -> None:
    payload, other, blobs = make_payload(), make_payload(5), FileBlobs(tmp_path)
    blobs.put(payload)
    blobs.put(other)
    blobs.path_of(payload.sha256).write_bytes(blobs.path_of(other.sha256).read_bytes())
    with pytest.raises(DamagedError, match="is damaged: it is another payload"):
        blobs.open(payload.sha256)


def test_a_stored_payload_is_verified_by_its_blake3(tmp_path: Path) -> None:
    payload, blobs = make_payload(), FileBlobs(tmp_path)
    blobs.put(payload)
    path = blobs.path_of(payload.sha256)
    content = bytearray(path.read_bytes())
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    assert metadata["sha256"] == payload.sha256.hex()
    assert metadata["blake3"] == with_blake3(payload).blake3.hex()
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedError, match="its BLAKE3 does not match"):
        FileBlobs(tmp_path).open(payload.sha256, verify=True)
