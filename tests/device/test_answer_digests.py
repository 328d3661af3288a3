"""The digest that identifies a device's answer: BLAKE3 if device and server have it, SHA-256 otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from device.sdk_fleet import RUN, Fleet, make_device
from support.devices import answer_waits

from fleetdistill import Step
from fleetdistill.errors import LinkError
from fleetdistill.link import terms
from fleetdistill.testing import EventLog, FaultyLink, lost, lost_reply
from fleetdistill.wire import digests
from fleetdistill.wire.payload import AnyChunk
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.intake.memory_link import MemoryLink


class Recording(MemoryLink):
    """Keeps the headers of uploads; an older server does not offer BLAKE3."""

    def __init__(self, fleet: Fleet, older: bool = False) -> None:
        super().__init__(fleet.api)
        self.older = older
        self.headers: list[Any] = []

    def check_in(self, identity: Any, profile: Any) -> service_pb2.CheckInResponse:
        response = super().check_in(identity, profile)
        response.blake3 = response.blake3 and not self.older
        return response

    def upload(self, header: service_pb2.UploadHeader, chunks: Iterator[AnyChunk]) -> service_pb2.Receipt:
        self.headers.append(header.payload)
        return super().upload(header, chunks)


def without_blake3(patch: pytest.MonkeyPatch) -> None:
    """As on a device without the package; the server has it."""
    for module in (digests, terms):
        patch.setattr(module, "has_blake3", lambda: False)


def test_device_and_server_agree_on_blake3(fleet: Fleet, tmp_path: Path) -> None:
    link = Recording(fleet)
    with make_device(fleet, tmp_path, link=link) as device:
        fleet.ask("d")
        assert device.step(0) is Step.ANSWERED
        (header,), (upload,), entries = link.headers, fleet.store.asks.uploads(RUN), device.ledger.entries
        assert (len(header.blake3), header.sha256) == (32, b"")
        assert upload.sha256 == header.blake3
        assert fleet.store.blobs.open(header.blake3, verify=True).blake3 == header.blake3
        assert header.blake3.hex() in {entry.sha256 for entry in entries}


@pytest.mark.parametrize("missing", ["server", "device"])
def test_an_end_without_blake3_gets_sha256(
    missing: str, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Recording(fleet, older=missing == "server")
    if missing == "device":
        monkeypatch.setattr(terms, "has_blake3", lambda: False)
    with make_device(fleet, tmp_path, link=link) as device:
        fleet.ask("d")
        assert device.step(0) is Step.ANSWERED
    (header,), (upload,) = link.headers, fleet.store.asks.uploads(RUN)
    assert (len(header.sha256), header.blake3) == (32, b"")
    assert upload.sha256 == header.sha256


def test_blake3_answer_goes_to_older_server_under_sha256(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path, link=FaultyLink(MemoryLink(fleet.api), lost("upload"))) as device:
        fleet.ask("d")
        with pytest.raises(LinkError):
            device.step(0)
        assert answer_waits(device)
    link, events = Recording(fleet, older=True), EventLog()
    with make_device(fleet, tmp_path, events, link=FaultyLink(link, lost_reply("upload"))) as device:
        with pytest.raises(LinkError):
            device.step(0)
        assert device.step(0) is Step.ANSWERED  # the status has the receipt
    (header,), (upload,) = link.headers, fleet.store.asks.uploads(RUN)
    assert (len(header.sha256), header.blake3) == (32, b"")
    assert upload.sha256 == header.sha256
    assert "answered" in events.kinds()


def test_answer_that_cannot_be_verified_is_computed_again(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package was removed while an answer waited."""
    with make_device(fleet, tmp_path, link=FaultyLink(MemoryLink(fleet.api), lost("upload"))) as device:
        fleet.ask("d")
        with pytest.raises(LinkError):
            device.step(0)
        assert answer_waits(device)
    link, events = Recording(fleet), EventLog()
    without_blake3(monkeypatch)
    with make_device(fleet, tmp_path, events, link=link) as device:
        assert device.step(0) is Step.ANSWERED
    assert "damaged" in events.kinds()
    (header,) = link.headers
    assert (len(header.sha256), header.blake3) == (32, b"")
