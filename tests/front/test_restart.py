"""kill -9 of the front around an upload: it goes on where it stood, and is counted exactly once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from support.live_front import RUN, Client, LiveFront, as_messages, open_round, upload_name, write_asks
from support.processes import PATIENCE_SECONDS, wait_until
from support.wire_samples import data_of, make_payload

from fleetdistill.link.downloads import download
from fleetdistill.link.grpc_link import GrpcLink
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import service_pb2
from fleetdistill.wire.v1.knowledge_pb2 import Chunk, PayloadHeader
from fleetdistill_server.store.records import Upload
from fleetdistill_server.store.store import Store

pytestmark = pytest.mark.slow


def ask(store: Store, client: Client, payload: Payload | None = None) -> service_pb2.UploadName:
    number = open_round(store, client.device)
    write_asks(store, number, client.device, payload=payload)
    return upload_name(number)


def uploads_of(store: Store, client: Client) -> list[Upload]:
    return [row for row in store.asks.uploads(RUN) if row.device == client.device]


def chunks_of(payload: Payload, first_byte: int = 0) -> list[service_pb2.UploadRequest]:
    return as_messages(wire.chunks(payload.source, payload.slots, first_byte))


def bytes_of(messages: list[service_pb2.UploadRequest]) -> int:
    return sum(len(message.chunk.data) for message in messages)


def large_payload() -> Payload:
    """7 MB in 9 chunks."""
    return make_payload(rows=180_000)


@pytest.mark.parametrize("kills", [1, 3])
def test_an_upload_survives_kills_of_the_front(client: Client, front: LiveFront, store: Store, kills: int) -> None:
    name, payload = ask(store, client), large_payload()
    sent = 0
    for _ in range(kills):
        some = chunks_of(payload, sent)[:2]
        with stream(client, [client.header(name, payload, first_byte=sent), *some]) as call:
            sent += bytes_of(some)
            client.staged(name, sent)
            front.kill()
            assert call.exception() is not None
        front.start_again()
        assert client.status(name).next_byte == sent  # what the killed process had told is not forgotten
    rest = chunks_of(payload, sent)
    receipt = client.send([client.header(name, payload, first_byte=sent), *rest])
    assert sent + bytes_of(rest) == payload.data_bytes  # nothing went twice
    (row,) = uploads_of(store, client)
    assert (row.receipt, row.status) == (receipt.id, "acknowledged")
    assert data_of(store.blobs.open(payload.sha256)) == data_of(payload)


def test_the_receipt_is_found_again_when_its_reply_was_lost(client: Client, front: LiveFront, store: Store) -> None:
    name, payload = ask(store, client), make_payload()
    with stream(client, [client.header(name, payload), *chunks_of(payload)], keep_open=False):
        wait_until(lambda: uploads_of(store, client), "the commit")
        front.kill()  # the reply, if it was sent at all, is never read
    front.start_again()
    (row,) = uploads_of(store, client)
    assert client.status(name).receipt.id == row.receipt
    assert client.upload(name, payload).id == row.receipt
    assert len(uploads_of(store, client)) == 1


def test_a_restarted_front_knows_its_devices(client: Client, front: LiveFront, store: Store) -> None:
    name = ask(store, client)
    front.kill()
    front.start_again()
    assert client.device in store.devices.present(RUN)
    assert client.next_ask(0.0).ask.round == name.round


def test_the_sdk_takes_up_a_download_after_a_restart(client: Client, front: LiveFront, store: Store) -> None:
    payload = make_payload(rows=1_000_000)  # 39 MB, more than can be on its way when the front is killed
    ask(store, client, payload)
    link = RestartingLink(front)
    assert data_of(download(link, client.identity, payload.sha256)) == data_of(payload)
    assert link.first_bytes[0] == 0
    assert link.first_bytes[-1] > 0
    link.close()


class RestartingLink(GrpcLink):
    """Kills and restarts the front once, after the first chunk of the first download."""

    def __init__(self, front: LiveFront) -> None:
        super().__init__(f"127.0.0.1:{front.port}")
        self._front = front
        self.first_bytes: list[int] = []

    def download(
        self, identity: service_pb2.Identity, sha256: bytes, first_byte: int
    ) -> tuple[PayloadHeader, Iterator[Chunk]]:
        self.first_bytes.append(first_byte)
        header, chunks = super().download(identity, sha256, first_byte)
        return header, self._killing(chunks) if len(self.first_bytes) == 1 else chunks  # type: ignore[arg-type, return-value]

    def _killing(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        yield next(chunks)
        self._front.kill()
        try:
            yield from chunks
        finally:
            self._front.start_again()


class stream:
    """An upload that runs in the background; it stays open after its messages unless told otherwise."""

    def __init__(self, client: Client, messages: list[service_pb2.UploadRequest], keep_open: bool = True) -> None:
        self._over = threading.Event()
        self._call = client.stub.Upload.future(
            itertools.chain(messages, self._hold() if keep_open else ()), timeout=PATIENCE_SECONDS
        )

    def _hold(self) -> Iterator[service_pb2.UploadRequest]:
        self._over.wait(PATIENCE_SECONDS)
        yield from ()

    def __enter__(self) -> Any:
        return self._call

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._call.cancel()
