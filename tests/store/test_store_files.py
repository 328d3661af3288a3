"""What only a store on disk must do: last, be shared, be readable by others, and say so when the disk is full."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from support.processes import PATIENCE_SECONDS
from support.sqlite import tables_of
from support.wire_samples import (
    data_of,
    in_pieces,
    make_chunk,
    make_contract,
    make_identity,
    make_knowledge,
    make_payload,
    make_profile,
    raw_payload,
    with_blake3,
)

from fleetdistill.errors import DamagedError, StoreError, StoreUnavailableError
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.payload import DTYPES
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.store.blobs import stated
from fleetdistill_server.store.file_blobs import FileBlobs
from fleetdistill_server.store.group_commit import CommitThread
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.round_store import RoundStore
from fleetdistill_server.store.sqlite_database import SqliteDatabase
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Counted

RUN = "digits"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(directory: Path) -> Iterator[Store]:
    opened = Store.open(directory)
    opened.runs.begin(RUN, {})
    yield opened
    opened.close()


def ask_device(store: Store, device: str = "d1") -> int:
    row: dict[str, Any] = {"run": RUN, "round": 1, "step_number": 1, "device": device, "step": "train"}
    row |= {"expects": {"knowledge": "sample_knowledge"}, "payload": None, "payload_bytes": 0, "seed": 1}
    store.asks.add([Ask(**row, deadline_at=4e9)])
    return int(store.asks.of_step(RUN, 1, 1)[-1].id)


def blob_path(directory: Path, sha256: bytes) -> Path:
    (path,) = (directory / "blobs").rglob(f"{sha256.hex()}.safetensors")
    return path


# --- durability


def test_the_database_is_opened_so_that_a_commit_is_on_the_disk(store: Store) -> None:
    connection = tables_of(store).conn
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    assert connection.execute("PRAGMA fullfsync").fetchone() == (1,)


def test_a_database_that_cannot_be_made_durable_is_refused(directory: Path) -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)  # has no journal on a disk
    with pytest.raises(StoreError) as error:
        SqliteDatabase(connection, "wal")
    assert str(error.value) == (
        "the database opened with (journal_mode, synchronous) = ('memory', 2), expected ('wal', 2); "
        "put the store on a local file system"
    )


def test_a_database_that_ignores_synchronous_is_refused(tmp_path: Path) -> None:
    class Careless(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            return super().execute(sql.replace("synchronous=FULL", "synchronous=NORMAL"), *values)

    connection = sqlite3.connect(tmp_path / "db", isolation_level=None, factory=Careless)
    connection.execute("PRAGMA journal_mode=WAL")
    with pytest.raises(StoreError, match=r"\('wal', 1\), expected \('wal', 2\)"):
        SqliteDatabase(connection, "wal")


def test_a_blob_is_synced_with_its_directory_before_it_counts(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Content, then name, then the directory: a kill test cannot see a missing fsync, a power cut can."""
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(descriptor: int) -> None:
        steps.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def noted_replace(self: Path, target: Path) -> Path:
        steps.append("rename")
        return replace(self, target)

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to see which file is synced")
    payload = make_payload()
    blobs = FileBlobs(directory)
    staging = blobs.stage("key", payload.parts)
    staging.append(data_of(payload))
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    staging.commit(payload.sha256)
    part, *rest = steps
    assert part.endswith(".part")
    assert rest == ["rename", f"fsync {payload.sha256.hex()[:2]}", f"fsync {directory.name}"]


# --- reopening and sharing


def test_everything_is_there_after_reopening(directory: Path) -> None:
    store = Store.open(directory)
    store.runs.begin(RUN, {"a": 1})
    store.runs.publish_contract(RUN, b"contract")
    store.devices.register(RUN, "d1", b"hash", b"profile")
    store.runs.start_round(RUN, ["d1"])
    accepted = store.asks.accept_upload(ask_device(store), 1, b"s" * 32, 10, 5)
    assert accepted is not None
    row = accepted.upload
    store.history.add_event(RUN, "kind", "text")
    store.history.add_traffic(RUN, 1, "d1", "up", Counted(Counter(plan=10), Counter(plan=10)), 1)
    payload = make_payload()
    store.blobs.put(payload)
    state = store.blobs.put_state(b"state")
    before = [
        store.runs.all(),
        store.devices.all(RUN),
        store.runs.open_round(RUN),
        store.asks.uploads(RUN),
        store.history.events(RUN),
    ]
    store.close()

    again = Store.open(directory)
    assert before == [
        again.runs.all(),
        again.devices.all(RUN),
        again.runs.open_round(RUN),
        again.asks.uploads(RUN),
        again.history.events(RUN),
    ]
    assert again.asks.upload_of(1) == row
    assert data_of(again.blobs.open(payload.sha256)) == data_of(payload)
    assert again.blobs.get_state(state) == b"state"
    again.close()


def test_two_stores_in_one_directory_see_only_committed_changes(store: Store, directory: Path) -> None:
    other = Store.open(directory)
    with store.transaction():
        store.history.add_event(RUN, "kind", "text")
        assert other.history.events(RUN) == []
    assert len(other.history.events(RUN)) == 1
    other.devices.register(RUN, "d1", b"hash", b"")
    assert store.devices.present(RUN) == ["d1"]
    payload = make_payload()
    other.blobs.put(payload)
    assert data_of(store.blobs.open(payload.sha256)) == data_of(payload)
    other.close()


def test_one_answer_wins_whichever_process_takes_it(store: Store, directory: Path) -> None:
    ask = ask_device(store)
    others = [Store.open(directory) for _ in range(4)]
    rows: list[Any] = []
    threads = [
        threading.Thread(target=lambda one=one, n=n: rows.append(one.asks.accept_upload(ask, n, b"s" * 32, 1, 1)))
        for n, one in enumerate(others)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({row.upload.receipt for row in rows}) == 1
    assert sum(row.is_new for row in rows) == 1
    assert len(store.asks.uploads(RUN)) == 1
    for other in others:
        other.close()


def _open_and_register(directory: Path, barrier: Any, device: str, answers: Any) -> None:
    barrier.wait()
    try:
        opened = Store.open(directory)
        opened.runs.begin(RUN, {})
        opened.devices.register(RUN, device, b"hash", b"")
        answers.put(None)
    except BaseException as error:
        answers.put(repr(error))


def test_processes_opening_new_store_at_same_moment_all_succeed(tmp_path: Path) -> None:
    """Front and engine start together: one makes the tables, the other waits."""
    context = multiprocessing.get_context("fork")
    for attempt in range(5):
        barrier, answers = context.Barrier(3), context.Queue()
        directory = tmp_path / str(attempt)
        processes = [
            context.Process(target=_open_and_register, args=(directory, barrier, f"d{n}", answers)) for n in range(3)
        ]
        for process in processes:
            process.start()
        assert [answers.get(timeout=PATIENCE_SECONDS) for _ in processes] == [None] * 3
        for process in processes:
            process.join()
        opened = Store.open(directory)
        assert opened.devices.present(RUN) == ["d0", "d1", "d2"]
        opened.close()


class _Busy(sqlite3.Connection):
    """A database that another process switches to WAL at this moment; SQLite says BUSY without waiting."""

    refusals = 3

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql == "PRAGMA journal_mode=WAL" and self.refusals:
            self.refusals -= 1
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise error
        return super().execute(sql, *values)


def test_a_database_that_another_process_switches_is_waited_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **kwargs: connect(*args, factory=_Busy, **kwargs))
    Store.open(directory).close()


def test_a_database_that_stays_locked_is_not_available(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **kwargs: connect(*args, **{**kwargs, "timeout": 0.05}))
    with closing(Store.open(directory)) as store, closing(Store.open(directory)) as stopped:
        store.runs.begin(RUN, {})
        locked = pytest.raises(StoreUnavailableError, match="another process has held the write lock for 30 s")
        with stopped.transaction(), locked:
            store.devices.register(RUN, "d0", b"s" * 32, b"")
        store.devices.register(RUN, "d0", b"s" * 32, b"")


def test_reader_opens_store_while_simulation_creates_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader finds no tables and waits for the lock, which the simulation then holds until its first save."""
    connect = sqlite3.connect
    simulations: list[RoundStore] = []

    class Late(sqlite3.Connection):
        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            if sql == "BEGIN IMMEDIATE" and not simulations:
                monkeypatch.setattr(sqlite3, "connect", connect)
                simulations.append(RoundStore(directory))
            return super().execute(sql, *values)

    monkeypatch.setattr(
        sqlite3, "connect", lambda *args, **given: connect(*args, **{**given, "timeout": 0.01}, factory=Late)
    )
    reader = Store.open(directory)
    simulations[0].runs.begin(RUN, {})
    simulations[0].save()
    assert reader.runs.get(RUN) is not None
    for store in (reader, *simulations):
        store.close()


# --- blobs that others can read


def test_a_blob_is_a_safetensors_file_with_the_payload_s_tensors(store: Store, directory: Path) -> None:
    knowledge = make_knowledge(3)
    payload = encode({"knowledge": knowledge}, np.float16)
    store.blobs.put(payload)
    with safe_open(blob_path(directory, payload.sha256), "np") as file:
        assert sorted(file.keys()) == sorted(slot.path for slot in payload.slots)
        np.testing.assert_array_equal(file.get_tensor("knowledge/sample_ids"), knowledge.sample_ids)
        assert knowledge.labels is not None
        np.testing.assert_array_equal(file.get_tensor("knowledge/labels"), knowledge.labels)
        features = file.get_tensor("knowledge/features/cut")
        assert features.dtype == np.float16
        np.testing.assert_array_equal(features, knowledge.features["cut"].astype(np.float16))


def test_a_blob_may_hold_every_type_of_the_wire(store: Store, directory: Path) -> None:
    arrays = {dtype.name: np.array([0, 1, 1], dtype) for dtype in DTYPES.values()}
    payload = raw_payload(arrays)
    store.blobs.put(payload)
    with safe_open(blob_path(directory, payload.sha256), "np") as file:
        for name, array in arrays.items():
            result = file.get_tensor(f"raw/buffers/{name}")
            assert (result.dtype, result.tolist()) == (array.dtype, array.tolist())


def test_an_uploaded_blob_is_the_same_file_as_one_put_whole(tmp_path: Path) -> None:
    payload = with_blake3(make_payload())
    whole, staged = FileBlobs(tmp_path / "whole"), FileBlobs(tmp_path / "staged")
    whole.put(payload)
    staging = staged.stage("key", payload.parts, stated(payload.sha256, payload.blake3))
    for chunk in in_pieces(payload, 7):
        staging.append(chunk.data)
    staging.commit(payload.sha256)
    (one,), (other,) = ((tmp_path / name).rglob("*.safetensors") for name in ("whole", "staged"))
    assert one.read_bytes() == other.read_bytes()
    assert (one.stat().st_size - payload.data_bytes) % 64 == 0  # data begin aligned, for mapping


def test_staging_goes_on_in_another_process_s_store(store: Store, directory: Path) -> None:
    payload, data = make_payload(), data_of(make_payload())
    staging = store.blobs.stage("key", payload.parts)
    staging.append(data[:33])
    staging.close()
    store.close()
    again = Store.open(directory)
    assert again.blobs.staged("key") == 33
    staging = again.blobs.stage("key", payload.parts)
    staging.append(data[33:])
    staging.commit(payload.sha256)
    assert data_of(again.blobs.open(payload.sha256)) == data
    again.close()


def test_what_a_crash_left_of_a_put_is_not_trusted(tmp_path: Path) -> None:
    """After a power cut a file may have its length and zeros; nobody checks a put against its digest again."""
    payload = make_payload()
    blobs = FileBlobs(tmp_path)
    staging = blobs.stage(f"put-{payload.sha256.hex()}-{os.getpid()}", payload.parts)
    staging.append(bytes(20))
    staging.close()
    blobs.put(payload)
    assert data_of(blobs.open(payload.sha256)) == data_of(payload)


# --- damage


def test_a_damaged_checkpoint_is_found(store: Store, directory: Path) -> None:
    sha256 = store.blobs.put_state(b"state of the server")
    path = blob_path(directory, sha256)
    path.write_bytes(path.read_bytes().replace(b"server", b"sErver"))
    with pytest.raises(StoreError) as error:
        store.blobs.get_state(sha256)
    assert str(error.value) == f"checkpoint {sha256.hex()} is damaged: its SHA-256 does not match"


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut in its header": lambda data: data[:100],
    "cut at its end": lambda data: data[:-1],
    "overwritten": lambda data: b"\xff" * len(data),
    "no JSON": lambda data: data[:8] + b"#" + data[9:],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_blob_is_a_store_error(store: Store, directory: Path, name: str) -> None:
    payload = make_payload()
    store.blobs.put(payload)
    path = blob_path(directory, payload.sha256)
    path.write_bytes(DAMAGES[name](path.read_bytes()))
    with pytest.raises(StoreError, match=f"payload {payload.sha256.hex()} is damaged: "):
        store.blobs.open(payload.sha256)


@pytest.mark.parametrize("content", [b"not a database at all, but long enough to be one" * 100, None])
def test_a_damaged_database_is_a_store_error(directory: Path, content: bytes | None) -> None:
    store = Store.open(directory)
    store.runs.begin(RUN, {})
    store.close()
    path = directory / "store.sqlite"
    path.write_bytes(content or path.read_bytes()[:5000] + b"\xff" * 20_000)

    def use() -> None:
        opened = Store.open(directory)
        try:
            opened.runs.begin("another", {})
            opened.runs.all()
        finally:
            opened.close()

    damaged = (
        r"the database store.sqlite is damaged \((file is not a database|database disk image is malformed)\)\. Move"
    )
    with pytest.raises(StoreError, match=damaged):
        use()


def test_a_directory_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="opening the store"):
        Store.open(tmp_path / "file")


# --- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mounted)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("only root can mount a small file system")
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def fill(directory: Path) -> Path:
    """Takes all the space that is left, to the last byte."""
    path = directory / "ballast"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return path


class _Sender:
    """A device at a device API, with one ask and an answer to it."""

    def __init__(self, store: Store, payload: Payload) -> None:
        self.api = DeviceApi(store)
        store.runs.publish_contract(RUN, make_contract(max_upload_bytes=8 << 20).SerializeToString())
        request = service_pb2.CheckInRequest(identity=make_identity(), profile=make_profile())
        self.identity = make_identity(secret=self.api.check_in(request).secret)
        ask_device(store)
        self.name = service_pb2.UploadName(round=1, step_number=1, attempt=1)
        self.payload = payload

    def status(self) -> service_pb2.UploadStatusResponse:
        return self.api.uploads.status(service_pb2.UploadStatusRequest(identity=self.identity, name=self.name))

    def send(self) -> service_pb2.Receipt:
        """Goes on where the server stands."""
        first = self.status().next_byte
        header = service_pb2.UploadHeader(
            identity=self.identity, name=self.name, payload=self.payload.header(), samples=1, first_byte=first
        )
        session = self.api.uploads.begin(header)
        try:
            for chunk in in_pieces(self.payload, 100_000):
                if chunk.offset + len(chunk.data) > first:
                    known = max(first - chunk.offset, 0)
                    session.feed(make_chunk(chunk.offset + known, chunk.data[known:]))
            return session.finish()
        finally:
            session.abandon()


def test_upload_to_full_disk_gets_receipt_only_once_space_exists(small_disk: Path) -> None:
    store = Store.open(small_disk / "store")
    store.runs.begin(RUN, {})
    sender = _Sender(store, make_payload(20_000))  # 880 kB
    ballast = fill(small_disk)
    with pytest.raises(StoreError) as error:
        sender.send()
    assert "the disk is full" in str(error.value)
    assert store.asks.uploads(RUN) == []
    assert not list((small_disk / "store").rglob("*.safetensors"))
    ballast.unlink()
    assert sender.status().ask_open  # a full disk is not the device's fault
    receipt = sender.send()
    assert receipt.sha256 == sender.payload.sha256
    assert data_of(store.blobs.open(receipt.sha256)) == data_of(sender.payload)
    assert len(store.asks.uploads(RUN)) == 1
    store.close()


def test_disk_filling_during_upload_loses_nothing_already_taken(small_disk: Path) -> None:
    store = Store.open(small_disk / "store")
    store.runs.begin(RUN, {})
    sender = _Sender(store, make_payload(60_000))  # 2.6 MB, more than the disk
    with pytest.raises(StoreError, match="writing an upload: the disk is full"):
        sender.send()
    first = sender.status().next_byte
    assert 500_000 < first < sender.payload.data_bytes
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert sender.send().sha256 == sender.payload.sha256
    assert data_of(store.blobs.open(sender.payload.sha256)) == data_of(sender.payload)
    store.close()


def test_commit_on_full_disk_is_store_error_and_store_continues(small_disk: Path) -> None:
    store = Store.open(small_disk / "store")
    store.runs.begin(RUN, {})
    ask = ask_device(store)
    ballast = fill(small_disk)

    def write() -> None:
        with store.transaction():
            store.asks.accept_upload(ask, 1, b"s" * 32, 1, 1)
            store.history.add_event(RUN, "kind", "x" * (4 << 20))

    with pytest.raises(StoreError, match="cannot write the database: the disk is full"):
        write()
    assert store.asks.upload_of(ask) is None
    ballast.unlink()
    assert store.asks.accept_upload(ask, 1, b"s" * 32, 1, 1) is not None
    store.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_at_the_last_step_leaves_the_upload_staged(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The data are there, their fsync fails; the next stream has nothing left to send."""
    sender = _Sender(store, make_payload())

    def no_space(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_space)
        with pytest.raises(StoreError, match="making an upload durable: the disk is full"):
            sender.send()
    assert store.asks.uploads(RUN) == []
    assert sender.status().next_byte == sender.payload.data_bytes
    assert sender.send().data_bytes == sender.payload.data_bytes


def test_statements_of_nested_transactions_are_always_the_same(store: Store) -> None:
    """SQLite parses a new text each time, and the connection keeps it in the place of one that is used again."""
    texts: list[str] = []
    tables_of(store).conn.set_trace_callback(texts.append)
    for _ in range(2):
        with store.transaction(), store.transaction(), store.transaction():
            pass
    assert Counter(texts) == {"BEGIN IMMEDIATE": 2, "SAVEPOINT part": 4, "RELEASE part": 4, "COMMIT": 2}


def test_a_payload_in_use_is_opened_once_unless_its_file_changes(tmp_path: Path) -> None:
    payload = make_payload()
    blobs = FileBlobs(tmp_path / "blobs")
    blobs.put(payload)
    first = blobs.open(payload.digest)
    assert blobs.open(payload.digest) is first
    assert blobs.open(payload.digest, verify=True) is not first
    blobs.drop(payload.digest)
    with pytest.raises(DamagedError, match="is not in the store"):
        blobs.open(payload.digest)
    blobs.put(payload)
    second = blobs.open(payload.digest)
    assert second is not first
    with blob_path(tmp_path, payload.digest).open("r+b") as file:
        file.truncate(200)
    with pytest.raises(DamagedError, match="is damaged"):
        blobs.open(payload.digest)


def test_a_folder_of_payloads_is_made_durable_when_it_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("fleetdistill_server.store.file_blobs.sync_directory", synced.append)
    states = [number.to_bytes(2) for number in range(5000)]
    of_one = [item for item in states if sha256(item).hexdigest()[:2] == "00"]
    blobs = FileBlobs(tmp_path / "blobs")
    for state in of_one[:2]:
        blobs.put_state(state)
    assert synced == [tmp_path / "blobs"], "the second one finds the folder"
    shutil.rmtree(tmp_path / "blobs" / "00")
    blobs.put_state(of_one[2])
    assert synced == [tmp_path / "blobs"] * 2
    FileBlobs(tmp_path / "blobs").put_state(of_one[3])
    assert len(synced) == 3, "another process may not have come to it"


def test_commit_failing_after_payload_is_stored_gives_no_receipt(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = _Sender(store, make_payload())

    def no_space(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(store.asks, "accept_upload", no_space)
        with pytest.raises(StoreError, match="database error: database or disk is full"):
            sender.send()
    assert not sender.status().HasField("receipt")
    assert sender.send().sha256 == sender.payload.sha256
    assert len(store.history.traffic(RUN)) == 1


# --- the writer thread


@pytest.fixture
def commits(store: Store) -> Iterator[CommitThread]:
    thread = CommitThread(store)
    yield thread
    thread.close()


def test_many_threads_jobs_are_all_committed(store: Store, directory: Path, commits: CommitThread) -> None:
    asks: list[int] = []
    for number in range(200):
        asks.append(ask_device(store, f"d{number:03}"))
    answers: dict[int, Any] = {}
    seen: dict[int, bool] = {}
    reader = Store.open(directory)

    def send(ask: int) -> None:
        answers[ask] = commits.commit(lambda one: one.asks.accept_upload(ask, 1, b"s" * 32, 1, ask))
        seen[ask] = reader.asks.upload_of(ask) is not None  # durable before the yes

    threads = [threading.Thread(target=send, args=(ask,)) for ask in asks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answers[ask].upload.samples == ask for ask in asks)
    assert all(seen.values())
    assert len(store.asks.uploads(RUN)) == 200
    reader.close()


def in_one_group(commits: CommitThread, store: Store, *jobs: Callable[[Store], Any]) -> list[Any]:
    """Hands jobs in while the thread is busy, so that they share a transaction; returns results or errors."""
    busy, go_on, answers = threading.Event(), threading.Event(), [None] * len(jobs)

    def occupy(_: Store) -> None:
        busy.set()
        go_on.wait(PATIENCE_SECONDS)

    def run(number: int) -> None:
        try:
            answers[number] = commits.commit(jobs[number])
        except Exception as error:
            answers[number] = error  # type: ignore[call-overload]

    first = threading.Thread(target=lambda: commits.commit(occupy))
    first.start()
    busy.wait(PATIENCE_SECONDS)
    threads = []
    for number in range(len(jobs)):
        threads.append(threading.Thread(target=run, args=(number,)))
        threads[-1].start()
        while commits._jobs.qsize() <= number:
            pass  # so that they queue in this order
    go_on.set()
    for thread in [first, *threads]:
        thread.join(PATIENCE_SECONDS)
    return answers


def _note(text: str) -> Callable[[Store], str]:
    def job(store: Store) -> str:
        store.history.add_event(RUN, "kind", text)
        return text

    return job


def test_failing_job_raises_its_own_error_and_spares_its_group(store: Store, commits: CommitThread) -> None:
    def fail(one: Store) -> None:
        one.history.add_event(RUN, "kind", "never")
        raise ZeroDivisionError("its own error")

    first, second, third = in_one_group(commits, store, _note("first"), fail, _note("third"))
    assert (first, third) == ("first", "third")
    assert isinstance(second, ZeroDivisionError)
    assert [event.text for event in store.history.events(RUN)] == ["first", "third"]


def test_jobs_run_in_the_order_they_were_handed_in(store: Store, commits: CommitThread) -> None:
    texts = [str(number) for number in range(20)]
    assert in_one_group(commits, store, *(_note(text) for text in texts)) == texts
    assert [event.text for event in store.history.events(RUN)] == texts


def test_jobs_handed_in_together_share_one_transaction(store: Store, commits: CommitThread) -> None:
    statements: list[str] = []
    tables_of(store).conn.set_trace_callback(statements.append)
    in_one_group(commits, store, *(_note(str(number)) for number in range(50)))
    assert statements.count("COMMIT") == 2  # the one that kept the thread busy, and the group


def test_nobody_gets_success_if_database_undoes_whole_group(
    store: Store, directory: Path, commits: CommitThread
) -> None:
    """SQLite may undo the whole transaction on an error such as a full disk."""

    def lose_everything(one: Store) -> None:
        tables_of(one).conn.execute("ROLLBACK")
        raise StoreError("cannot write the database: the disk is full")

    answers = in_one_group(commits, store, _note("first"), lose_everything, _note("third"))
    assert isinstance(answers[0], StoreError)
    assert isinstance(answers[1], StoreError)
    assert commits.commit(_note("later")) == "later"  # the thread lives on
    kept = {event.text for event in store.history.events(RUN)}
    assert "first" not in kept
    assert {answer for answer in answers if isinstance(answer, str)} <= kept


def test_a_closed_thread_refuses_what_comes_after(store: Store) -> None:
    commits = CommitThread(store)
    commits.close()
    with pytest.raises(StoreError, match="the store is closing"):
        commits.commit(_note("too late"))
    with pytest.raises(StoreError, match="the store is closing"):
        commits.call(lambda: None)
    commits.close()
    assert store.history.events(RUN) == []


def test_closing_finishes_what_was_handed_in(store: Store) -> None:
    commits = CommitThread(store)
    answers: list[str] = []
    threads = [threading.Thread(target=lambda n=n: answers.append(commits.commit(_note(str(n))))) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    commits.close()
    assert len(answers) == len(store.history.events(RUN)) == 20
    assert not commits._thread.is_alive()


def test_a_new_store_is_for_its_user_only(tmp_path: Path) -> None:
    """It holds labels and models in the clear. A directory that is there already keeps what its owner chose."""
    Store.open(tmp_path / "above" / "store").close()
    assert (tmp_path / "above" / "store").stat().st_mode & 0o077 == 0
    (tmp_path / "shared").mkdir(mode=0o755)
    Store.open(tmp_path / "shared").close()
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755


def test_a_database_that_cannot_be_opened_has_its_cause(tmp_path: Path) -> None:
    """A directory in its place stands for a file of another user, which root may read."""
    path = tmp_path / "store.sqlite"
    path.mkdir()
    with pytest.raises(StoreError, match=f"cannot open the database {path}: Is a directory; run this as the user"):
        SqliteDatabase.open(path)
