"""Uploads and asks are refused before the disk is full, and taken again once there is space."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.live_front import Client, live_front, open_round, prepare_store, refused, upload_name, write_asks
from support.parroting import ParrotDevice
from support.processes import PATIENCE_SECONDS
from support.record_schema import DEVICES, RUN, recorded_config
from support.wire_samples import in_pieces, make_contract, make_identity, make_payload, make_profile

from fleetdistill.errors import NoSpaceError, RefusedError
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.engine.cohort import RoundTerms, StoreCohort
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.intake.uploads import UploadSession
from fleetdistill_server.store.disk_space import Bounds, DiskSpace
from fleetdistill_server.store.retention import sweep
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import readable_bytes

PAYLOAD = make_payload(5000)  # 220 kB
SIZE = PAYLOAD.data_bytes


class Sender:
    """Devices with an open ask each at a device API that has a budget."""

    def __init__(self, directory: Path, room_for: float, make_room: Callable[[], object] = lambda: None) -> None:
        self.store = Store.open(directory)
        self.store.runs.begin("digits", {})
        self.store.runs.publish_contract("digits", make_contract().SerializeToString())
        self.api = DeviceApi(self.store)
        self.secrets = {}
        number = open_round(self.store, "d1", "d2")
        write_asks(self.store, number, "d1", "d2")
        for device in ("d1", "d2"):
            request = service_pb2.CheckInRequest(identity=make_identity(device), profile=make_profile())
            self.secrets[device] = self.api.check_in(request).secret
        taken = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        bounds = Bounds(disk_budget_bytes=int(taken + room_for * SIZE + 400_000))  # the database grows too
        self.api.uploads.space = DiskSpace(directory, self.store.blobs, bounds, make_room)

    def begin(self, device: str, payload: Payload = PAYLOAD) -> UploadSession:
        name = service_pb2.UploadName(round=1, step_number=1, attempt=1)
        identity = make_identity(device, self.secrets[device])
        request = service_pb2.UploadStatusRequest(identity=identity, name=name)
        first = self.api.uploads.status(request).next_byte
        return self.api.uploads.begin(  # type: ignore[return-value]
            service_pb2.UploadHeader(
                identity=identity, name=name, payload=payload.header(), samples=1, first_byte=first
            )
        )

    def events(self) -> list[str]:
        return [row.text for row in self.store.history.events("digits", "no-space")]


def finish(session: UploadSession, payload: Payload = PAYLOAD) -> None:
    for chunk in in_pieces(payload, 1 << 20):
        session.feed(chunk)
    session.finish()


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    """With room for one payload and a half."""
    made = Sender(tmp_path / "store", 1.5)
    yield made
    made.store.close()


LARGE = make_payload(23_000)  # 1 MB, the contract's limit


def test_what_is_in_flight_counts(tmp_path: Path) -> None:
    """Each alone would fit, both do not."""
    sender = Sender(tmp_path / "store", 3.0)
    first = sender.begin("d1", LARGE)
    told = rf"\({readable_bytes(LARGE.data_bytes)} for uploads in progress\); \[server\] disk_budget_bytes is [\d.]+ MB"
    with pytest.raises(NoSpaceError, match=told):
        sender.begin("d2", LARGE)
    finish(first, LARGE)
    with pytest.raises(NoSpaceError):
        sender.begin("d2", LARGE)
    sender.store.close()


def test_an_upload_that_ends_gives_its_room_back(tmp_path: Path) -> None:
    sender = Sender(tmp_path / "store", 3.0)
    first = sender.begin("d1", LARGE)
    with pytest.raises(NoSpaceError):
        sender.begin("d2", LARGE)
    first.abandon()
    assert sender.api.uploads.space is not None
    sender.api.uploads.space.looked = -1e9  # the next look at the disk
    sender.begin("d2", LARGE).abandon()
    assert len(sender.events()) == 1
    sender.store.close()


def test_broken_off_upload_takes_no_room_from_others(tmp_path: Path) -> None:
    """It had declared a megabyte and brought nothing, or a little again and again."""
    sender = Sender(tmp_path / "store", 3.0)
    for _ in range(5):
        sender.begin("d1", LARGE).abandon()
    session = sender.begin("d1", LARGE)
    session.feed(in_pieces(LARGE, 50_000)[0])
    session.abandon()
    for _ in range(20):
        sender.begin("d1", LARGE).abandon()
    sender.begin("d2", LARGE).abandon()
    assert sender.events() == []
    finish(sender.begin("d2", LARGE), LARGE)
    with pytest.raises(NoSpaceError):  # what is at rest counts at once, before the next look
        sender.begin("d1", LARGE)
    sender.store.close()


def test_making_room_holds_up_nobody_who_has_room(tmp_path: Path) -> None:
    at_work, go_on = threading.Event(), threading.Event()

    def make_room() -> None:
        at_work.set()
        go_on.wait()

    sender = Sender(tmp_path / "store", 1.5, make_room)
    refused_late: list[str] = []

    def begin() -> None:
        try:
            sender.begin("d1", LARGE)
        except NoSpaceError as error:
            refused_late.append(str(error))

    waiting = threading.Thread(target=begin)
    small = threading.Thread(target=lambda: sender.begin("d2").abandon(), daemon=True)
    waiting.start()
    assert at_work.wait(PATIENCE_SECONDS)
    small.start()
    small.join(PATIENCE_SECONDS)
    held_up = small.is_alive()
    go_on.set()
    waiting.join(PATIENCE_SECONDS)
    small.join(PATIENCE_SECONDS)
    assert not held_up
    assert len(refused_late) == 1
    sender.store.close()


def test_a_begun_upload_needs_room_only_for_what_is_missing(tmp_path: Path) -> None:
    sender = Sender(tmp_path / "store", 3.0)
    session = sender.begin("d1", LARGE)
    for chunk in in_pieces(LARGE, 1 << 20)[:-1]:
        session.feed(chunk)
    session.abandon()
    assert sender.api.uploads.space is not None
    sender.api.uploads.space.looked = -1e9
    sender.begin("d1", LARGE).abandon()
    sender.store.close()


def test_what_nobody_needs_goes_before_anything_is_refused(tmp_path: Path) -> None:
    swept: list[Any] = []
    sender = Sender(tmp_path / "store", 3.0, make_room=lambda: swept.append(sweep(sender.store, 0.0)))  # type: ignore[attr-defined]
    for rows in (22_000, 21_000):  # two orphans of a megabyte
        sender.store.blobs.put(make_payload(rows))
    sender.begin("d2", LARGE).abandon()
    assert [item.payloads for item in swept] == [2]
    assert sender.events() == []
    sender.store.close()


def test_refusing_is_told_once_and_again_after_it_was_over(sender: Sender) -> None:
    for _ in range(3):
        with pytest.raises(NoSpaceError):
            sender.begin("d1", LARGE)
    finish(sender.begin("d2"))
    with pytest.raises(NoSpaceError):
        sender.begin("d1", LARGE)
    assert len(sender.events()) == 2
    assert sender.events()[0].startswith("uploads are refused: storing ")


def test_the_disk_is_to_blame_for_an_answer_past_its_deadline(sender: Sender) -> None:
    """The device answered in time: it is neither late nor left out of later rounds."""
    store = sender.store
    for _ in range(2):
        with pytest.raises(NoSpaceError):
            sender.begin("d1", LARGE)
    finish(sender.begin("d2"))
    store.asks.expire("digits", 1e12)
    assert [row.device for row in store.history.events("digits", "no-space")] == ["", "d1"]
    assert store.history.events("digits", "late") == []
    with pytest.raises(RefusedError, match=r"no longer accepts answers \(refused: no space on the disk\)"):
        sender.begin("d1", LARGE)
    store.runs.close_short_round("digits", 1, "too few")
    device = store.devices.get("digits", "d1")
    assert device is not None
    assert device.late_rounds == 0


def test_the_floor_is_of_the_file_system(sender: Sender, tmp_path: Path) -> None:
    result = os.statvfs(tmp_path)
    free = result.f_bavail * result.f_frsize
    space = DiskSpace(tmp_path, sender.store.blobs, Bounds(keep_free_bytes=2 * free), lambda: None)
    with pytest.raises(
        NoSpaceError, match=r"would leave [\d.]+ GB free on the disk; \[server\] keep_free_bytes is [\d.]+ GB$"
    ):
        space.reserve("ask-1-attempt-1", 1)
    DiskSpace(tmp_path, sender.store.blobs, Bounds(keep_free_bytes=1), lambda: None).reserve("ask-1-attempt-1", 1)


# --- the engine


def test_an_engine_waits_for_space_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "store"
    store = Store.open(directory)
    ballast = directory / "ballast"
    api = DeviceApi(store)
    devices = [ParrotDevice(MemoryLink(api), RUN, name) for name in DEVICES]
    waited = 0

    class Driver:
        async def wait(self, seconds: float = 0.0) -> None:
            nonlocal waited
            if ballast.exists() and store.history.events(RUN, "no-space"):
                waited += 1
                if waited == 3:
                    ballast.unlink()
            assert store.blobs.space is not None
            store.blobs.space.looked = -1e9  # type: ignore[attr-defined]
            for device in devices:
                device.step()
            if store.runs.open_number(RUN) == 2 and not waited:
                ballast.write_bytes(bytes(30_000_000))

        def wake_other(self) -> None:
            return

    bounds = Bounds(disk_budget_bytes=20_000_000)
    store.blobs.space = DiskSpace(directory, store.blobs, bounds, lambda: sweep(store))
    asyncio.run(Engine(store, recorded_config(directory), Driver()).run())
    assert waited >= 3
    assert store.runs.existing(RUN).status == "finished"
    assert [row.status for row in store.runs.rounds(RUN)] == ["closed"] * 4
    (event,) = store.history.events(RUN, "no-space")
    assert event.text == "step 'train' cannot be sent to the devices until the disk has space"
    lines = [record.getMessage() for record in caplog.records if "for disk space" in record.getMessage()]
    assert [line.partition(":")[0] for line in lines] == [
        "step 'train' waits for disk space",
        "step 'train' no longer waits for disk space",
    ]
    store.close()


class FullDisk:
    """Has room again after some looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def check(self, size: int) -> None:
        self.looks -= 1
        if self.looks >= 0:
            raise NoSpaceError("the store's disk is full")


@pytest.mark.parametrize("looks", [0, 3])
def test_nobody_is_asked_while_no_answer_can_be_stored(looks: int) -> None:
    """The ask has no payload, so it needs no space; the device would train, be refused, and be late."""
    store = Store.in_memory()
    store.runs.begin(RUN, {})
    store.runs.start_round(RUN, DEVICES)
    terms = RoundTerms(RUN, 1, 0.5, 1000.0, 0, np.dtype("float32"), {})
    store.blobs.space = FullDisk(looks)
    asked = []

    class Waiting:
        async def wait(self, seconds: float = 0.0) -> None:
            asked.append(len(store.asks.of_step(RUN, 1, 1)))
            for ask in store.asks.of_step(RUN, 1, 1):
                store.asks.close(ask.id, "declined")

        def wake_other(self) -> None:
            return

    async def play() -> None:
        cohort = StoreCohort(store, terms, Waiting(), number=1, completed=0, devices=DEVICES)
        assert [answer async for answer in cohort.ask("train", quorum=0.0)] == []

    asyncio.run(play())
    assert asked[:looks] == [0] * looks
    assert set(asked[looks:]) == {len(DEVICES)}
    assert len(store.history.events(RUN, "no-space")) == (looks > 0)
    store.close()


# --- a real front, and a disk that is really small


@pytest.mark.long
def test_front_says_no_space_and_takes_answer_once_there_is_some(tmp_path: Path) -> None:
    store = prepare_store(tmp_path / "store")
    number = open_round(store, "d1")
    write_asks(store, number, "d1")
    ballast = tmp_path / "store" / "ballast"
    ballast.write_bytes(bytes(20_000_000))
    with live_front(tmp_path / "store", disk_budget_bytes=20_000_000) as front:
        client = Client(front.port)
        client.check_in()
        with refused() as result:
            client.upload(upload_name(number), PAYLOAD)
        assert (result[0].status.name, result[0].reason) == ("RESOURCE_EXHAUSTED", "no-space")
        assert client.status(upload_name(number)).ask_open, "the answer may come later"
        ballast.unlink()
        receipt = _until_taken(client, number)
        client.channel.close()
    assert receipt.sha256 == PAYLOAD.sha256
    assert len(store.history.events("digits", "no-space")) == 1
    store.close()


def _until_taken(client: Client, number: int) -> service_pb2.Receipt:
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        with contextlib.suppress(Exception):
            return client.upload(upload_name(number), PAYLOAD)
        assert time.monotonic() < until, "the front still refuses"
        time.sleep(0.2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mounted)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small file system")
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def test_uploads_never_fill_a_small_disk_and_none_is_lost(small_disk: Path) -> None:
    """Eight devices send at once what would not fit twice over; each is acknowledged or told that there is no space."""
    store = prepare_store(small_disk / "store")
    names = [f"d{number}" for number in range(8)]
    number = open_round(store, *names)
    write_asks(store, number, *names)
    payloads = {name: make_payload(20_000 - place) for place, name in enumerate(names)}  # 880 kB each, no two alike
    outcomes: dict[str, str] = {}

    def send(port: int, name: str) -> None:
        client = Client(port, name)
        client.check_in()
        with contextlib.suppress(AssertionError), refused() as result:
            outcomes[name] = client.upload(upload_name(number), payloads[name]).id
        if name not in outcomes:
            outcomes[name] = result[0].reason
        client.channel.close()

    with live_front(small_disk / "store", keep_free_bytes=1_000_000) as front:
        threads = [threading.Thread(target=send, args=(front.port, name)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    result = os.statvfs(small_disk)
    assert result.f_bavail * result.f_frsize >= 900_000, "but for what the database wrote, the floor held"
    refusals = [outcome for outcome in outcomes.values() if outcome == "no-space"]
    receipts = {outcome for outcome in outcomes.values() if outcome != "no-space"}
    assert len(refusals) >= 5
    assert receipts == {row.receipt for row in store.asks.uploads("digits")}
    assert receipts
    for row in store.asks.uploads("digits"):
        store.blobs.open(row.sha256, verify=True)
    store.close()
