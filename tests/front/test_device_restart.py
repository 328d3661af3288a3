"""kill -9 of a device in the middle of a transfer: the next process goes on at the byte where the last one stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.live_front import RUN, Client, LiveFront, open_round, write_asks
from support.processes import PATIENCE_SECONDS, wait_until
from support.small_device import small_device
from support.wire_samples import data_of, make_payload

from fleetdistill import Step
from fleetdistill.link.downloads import Downloads
from fleetdistill.link.grpc_link import GrpcLink
from fleetdistill.state.directory import Storage
from fleetdistill.testing import EventLog
from fleetdistill_server.store.store import Store

ROWS = 150_000
"""About 6 MB in 7 chunks."""
ROOM = 1 << 30
PHONE = "phone"


class DyingLink(GrpcLink):
    """Ends its own process by SIGKILL after some chunks of a transfer; of an upload once the server holds some."""

    def __init__(self, port: int, way: str, chunks: int) -> None:
        super().__init__(f"127.0.0.1:{port}")
        self._way, self._chunks_left = way, chunks
        self.first_bytes: list[int] = []

    def upload(self, header: Any, chunks: Any, *more: Any, **named: Any) -> Any:
        self.first_bytes.append(header.first_byte)
        self._header = header
        return super().upload(header, self._counted(chunks) if self._way == "up" else chunks, *more, **named)

    def download(self, identity: Any, sha256: bytes, first_byte: int, *more: Any, **named: Any) -> Any:
        self.first_bytes.append(first_byte)
        header, chunks = super().download(identity, sha256, first_byte, *more, **named)
        return header, self._counted(chunks) if self._way == "down" else chunks

    def _counted(self, chunks: Iterator[Any]) -> Iterator[Any]:
        for chunk in chunks:
            if self._chunks_left == 0:
                if self._way == "up":
                    wait_until(self._server_holds_some, "the server to hold what was sent")
                os.kill(os.getpid(), signal.SIGKILL)
            self._chunks_left -= 1
            yield chunk

    def _server_holds_some(self) -> bool:
        return self.upload_status(self._header.identity, self._header.name).next_byte > 0


def run_and_die(function: str, *arguments: object) -> None:
    """Runs a function of this file in a process of its own, which must die of SIGKILL."""
    code = f"from front import test_device_restart as own; own.{function}({', '.join(map(repr, arguments))})"
    paths = os.pathsep.join(str(Path(__file__).parents[1] / name) for name in (".", "../client_sdk", "../server"))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def fetch(port: int, folder: str, device: str, secret: str, sha256: str, chunks: int) -> None:
    """A device's download, until it dies."""
    link = DyingLink(port, "down", chunks)
    client = Client(port, device, bytes.fromhex(secret))
    Downloads(Path(folder), ROOM).fetch(link, client.identity, bytes.fromhex(sha256))


def answer(port: int, state_dir: str, chunks: int) -> None:
    """A device's turn, until it dies in its upload."""
    device = small_device(port, Path(state_dir), EventLog(), DyingLink(port, "up", chunks), rows=ROWS, device_id=PHONE)
    device.step(0)
    device.step(0)


@pytest.mark.long
def test_a_download_goes_on_after_the_death_of_the_device(
    client: Client, front: LiveFront, store: Store, tmp_path: Path
) -> None:
    payload = make_payload(ROWS)
    number = open_round(store, client.device)
    write_asks(store, number, client.device, payload=payload)
    given = (front.port, str(tmp_path), client.device, client.secret.hex(), payload.sha256.hex())
    run_and_die("fetch", *given, 2)
    run_and_die("fetch", *given, 1)
    link = DyingLink(front.port, "", -1)
    result = Downloads(tmp_path, ROOM).fetch(link, client.identity, payload.sha256)
    assert data_of(result) == data_of(payload)
    (first,) = link.first_bytes
    assert first >= 2 << 20, "what two processes had fetched was not fetched again"
    assert [path.suffix for path in tmp_path.iterdir()] == [".payload"]
    link.close()


@pytest.mark.long
def test_an_upload_goes_on_after_the_death_of_the_device(front: LiveFront, store: Store, tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    with small_device(front.port, state_dir, EventLog(), device_id=PHONE) as device:
        assert device.step(0) is Step.WAITED
    store.devices.mark_present(RUN, PHONE)
    number = open_round(store, PHONE)
    write_asks(store, number, PHONE)
    run_and_die("answer", front.port, str(state_dir), 3)
    kept = Storage(state_dir)
    pending = kept.outbox.pending()
    assert pending is not None
    assert (pending.name, kept.outbox.tries) == ((number, 1, 1), 1)
    kept.close()
    events, link = EventLog(), DyingLink(front.port, "", -1)
    with small_device(front.port, state_dir, events, link, rows=ROWS, device_id=PHONE) as device:
        assert device.step(0) is Step.ANSWERED
    (first,) = link.first_bytes
    assert first > 0, "what the dead process had sent was not sent again"
    (row,) = [row for row in store.asks.uploads(RUN) if row.device == PHONE]
    assert events.kinds() == ["checked-in", "answered", "delivered"], "nothing was computed again"
    assert events.of("answered").values == {"receipt": row.receipt, "tries": 2}
