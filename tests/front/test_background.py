"""Work that nobody waits for outlives what goes wrong, and uploads do not make other calls wait."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import random
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from support.processes import PATIENCE_SECONDS
from support.secured import make_pki
from support.wire_samples import make_payload

from fleetdistill.errors import NoSpaceError, StoreError
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.payload import chunks
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.config.server_config import ServerSection
from fleetdistill_server.front import server, tls
from fleetdistill_server.front.device_service import WAKES_PER_SECOND, DeviceService
from fleetdistill_server.front.server import _guard
from fleetdistill_server.front.tls import log_not_valid
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.downloads import Downloads
from fleetdistill_server.logs import Interruption
from fleetdistill_server.store.group_commit import CommitThread
from fleetdistill_server.store.retention import sweep
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Counted, Sending

RUN = "run"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path)
    opened.runs.begin(RUN, {})
    yield opened
    opened.close()


@pytest.mark.long
def test_an_expired_certificate_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_pki(tmp_path).issue_server([], 1e-9)
    server = ServerSection(pki=str(tmp_path), enrol_listen="127.0.0.1:0")

    async def log() -> list[str]:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(log_not_valid(server), 5.0)  # it looks once a minute
        return [record.getMessage() for record in caplog.records if record.name == "fleetdistill.server.tls"]

    (text,) = asyncio.run(log())
    assert text.startswith("the certificate of the server has expired, so nobody can connect; renew it with")


def test_end_and_renewal_of_a_certificate_are_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    authority = make_pki(tmp_path)
    server = ServerSection(pki=str(tmp_path), enrol_listen="127.0.0.1:0")
    monkeypatch.setattr(tls, "EXPIRY_SECONDS", 0.01)

    def texts() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "fleetdistill.server.tls"]

    async def log() -> None:
        task = asyncio.create_task(log_not_valid(server))
        for number, days in enumerate((20.0, 1e-9, 30.0), 1):
            authority.issue_server([], days)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(texts()) < number:
                    await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # some more looks
        task.cancel()

    asyncio.run(log())
    soon, expired, again = texts()
    assert soon.startswith("the certificate of the server expires at ")
    assert expired.startswith("the certificate of the server has expired, so nobody can connect; ")
    assert again == "the certificates of the server can be used again"


# --- the commit thread


@pytest.mark.parametrize("point", ["front.commit.before", "front.commit.after"])
def test_unforeseen_commit_error_is_told_to_all_and_next_works(
    store: Store, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    fails = [point]

    def hit(name: str) -> None:
        if name in fails:
            fails.remove(name)
            raise MemoryError

    monkeypatch.setattr("fleetdistill_server.store.group_commit.failpoints.hit", hit)
    commits = CommitThread(store)
    with pytest.raises(StoreError, match="committing: MemoryError"):
        commits.commit(lambda one: one.history.add_event(RUN, "kind", "first"))
    commits.commit(lambda one: one.history.add_event(RUN, "kind", "second"))
    commits.close()
    assert store.history.events(RUN)[-1].text == "second"


def test_a_wake_up_that_fails_does_not_end_the_thread(store: Store) -> None:
    commits = CommitThread(store)

    def fail() -> None:
        raise RuntimeError("the loop is closed")

    commits.call(lambda: commits.after_commit(fail)).result(PATIENCE_SECONDS)()
    commits.commit(lambda one: one.history.add_event(RUN, "kind", "later"))
    commits.close()
    assert [event.text for event in store.history.events(RUN)] == ["later"]


DYING = """
import sys
from fleetdistill_server.store.group_commit import CommitThread
from fleetdistill_server.store.store import Store

class Broken(CommitThread):
    def _group(self):
        found = super()._group()
        raise MemoryError

Broken(Store.in_memory()).commit(lambda one: None)
"""


@pytest.mark.long
def test_a_front_does_not_outlive_its_commit_thread() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", DYING], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert ended.returncode == 1
    assert "the commit thread failed; the process exits" in ended.stderr


# --- what is done now and then


def test_a_background_task_goes_on_after_any_exception(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("non-hexadecimal number")

    asyncio.run(_guard(fail()))
    assert "a background task failed" in caplog.text


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), NoSpaceError("the database: the disk is full")]
)
def test_tasks_that_a_full_disk_ends_are_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def fail() -> None:
        raise error

    new = Interruption(server.logger, "background tasks fail and are repeated: %s", "background tasks work again")
    monkeypatch.setattr(server, "_away", new)  # that of the module may have logged the outage of another test
    for _ in range(3):
        asyncio.run(_guard(fail()))
    (record,) = caplog.records
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert re.fullmatch("background tasks fail and are repeated: .*: the disk is full", record.getMessage())


def test_files_that_are_none_of_ours_do_not_end_the_sweeps(store: Store, tmp_path: Path) -> None:
    payload = make_payload()
    store.blobs.put(payload)
    folder = tmp_path / "blobs" / payload.sha256.hex()[:2]
    strange = [folder / "._x.safetensors", folder / "Thumbs.db", tmp_path / "blobs" / "staging" / ".DS_Store"]
    for path in strange:
        path.write_bytes(b"?")
    assert [item.sha256 for item in store.blobs.held()] == [payload.sha256]
    assert store.blobs.staging() == []
    freed = sweep(store, 0.0)
    assert (freed.payloads, freed.staged) == (1, 0)
    assert all(path.exists() for path in strange)


# --- the front's pools


def test_uploads_holding_all_their_threads_block_no_other_call() -> None:
    began, go_on = threading.Event(), threading.Event()

    class SlowUploads:
        def begin(self, header: object) -> object:
            began.set()
            go_on.wait()
            raise StoreError("never mind")

    class SlowApi:
        uploads = SlowUploads()

        def heartbeat(self, request: object) -> service_pb2.HeartbeatResponse:
            return service_pb2.HeartbeatResponse(ask_open=True)

    async def messages() -> AsyncIterator[service_pb2.UploadRequest]:
        yield service_pb2.UploadRequest(header=service_pb2.UploadHeader())
        await asyncio.Event().wait()

    async def beat() -> None:
        with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as uploads:
            service = DeviceService(cast(DeviceApi, SlowApi()), pool, uploads=uploads)
            upload = asyncio.create_task(service.Upload(messages(), None))
            while not began.is_set():
                await asyncio.sleep(0.01)
            try:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    assert (await service.Heartbeat(service_pb2.HeartbeatRequest(), None)).ask_open
            finally:
                go_on.set()
                upload.cancel()
                await asyncio.gather(upload, return_exceptions=True)

    asyncio.run(beat())


class Link:
    """The context of a download; it breaks after some messages."""

    def __init__(self, most: int = 1000) -> None:
        self.messages: list[service_pb2.DownloadResponse] = []
        self._most = most

    async def write(self, message: bytes) -> None:
        if len(self.messages) == self._most:
            raise asyncio.CancelledError
        self.messages.append(service_pb2.DownloadResponse.FromString(message))


def download(payload: Payload, link: Link) -> list[Counted]:
    """Sends a payload over a link; returns what is counted."""
    counts: list[Counted] = []

    class OneDownload:
        def open(self, request: object) -> object:
            return Sending(payload, chunks(payload.source, payload.slots), counts.append)

    api = DeviceApi(Store.in_memory())
    api.downloads = cast(Downloads, OneDownload())

    async def send() -> None:
        with ThreadPoolExecutor(1) as pool:
            request = service_pb2.DownloadRequest(identity=service_pb2.Identity(run=RUN))
            await DeviceService(api, pool).Download(request, link)

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(send())
    return counts


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_a_download_that_breaks_is_counted_once(sent: int) -> None:
    link = Link(sent)
    assert len(download(make_payload(), link)) == 1
    assert [message.HasField("header") for message in link.messages] == [True, False, False][:sent]


@pytest.mark.parametrize("rows", [4, 200_000])
def test_a_download_sends_every_chunk_and_is_counted_once(rows: int) -> None:
    """The large payload is more than what is made ready at once."""
    payload, link = make_payload(rows), Link()
    (counted,) = download(payload, link)
    header, *others = link.messages
    assert header.header == payload.header()
    assert sum(len(message.chunk.data) for message in others) == payload.data_bytes == counted.tensor.total()
    places = [message.chunk.offset for message in others]
    assert places == sorted(set(places))


# --- waking devices


def test_wake_up_of_few_devices_is_not_delayed_for_waiting_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = 300
    bounds: list[tuple[float, float]] = []
    registered: list[object] = []

    def uniform(low: float, high: float) -> float:
        bounds.append((low, high))
        return 0.0

    def open_call(who: object) -> contextlib.AbstractContextManager[None]:
        registered.append(who)
        return contextlib.nullcontext()

    api = SimpleNamespace(
        next_ask=lambda identity: service_pb2.NextAskResponse() if bounds else None,
        sessions=SimpleNamespace(run_name=lambda run: RUN, lease_seconds=math.inf),
        limiter=SimpleNamespace(open_call=open_call),
        store=SimpleNamespace(
            runs=SimpleNamespace(status=lambda run: "running"),
            asks=SimpleNamespace(devices_with_open=lambda run: {"d1", "d2"}),
        ),
    )
    monkeypatch.setattr(random, "uniform", uniform)

    async def wake() -> None:
        with ThreadPoolExecutor(1) as pool:
            service = DeviceService(cast(DeviceApi, api), pool)
            names = [f"d{number}" for number in range(devices)]
            requests = [
                service_pb2.NextAskRequest(identity=service_pb2.Identity(device=name), wait_seconds=60)
                for name in names
            ]
            calls = {
                name: asyncio.create_task(service.NextAsk(request, None))
                for name, request in zip(names, requests, strict=True)
            }
            while len(registered) < devices:
                await asyncio.sleep(0.01)
            await service.wake_waiting()
            await asyncio.gather(calls["d1"], calls["d2"])
            assert {name for name, call in calls.items() if call.done()} == {"d1", "d2"}
            for call in calls.values():
                call.cancel()

    asyncio.run(asyncio.wait_for(wake(), PATIENCE_SECONDS))
    assert bounds == [(0, 2 / WAKES_PER_SECOND)] * 2
