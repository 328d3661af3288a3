"""What a power cut may leave, at every moment, of what device and server have promised to keep; see `recorded_disk`."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reliability.recorded_disk import RecordedDisk, check_cut, check_every_cut
from support.wire_samples import EXPECTS, data_of, make_contract, make_identity, make_payload, make_profile

from fleetdistill.errors import StoreError
from fleetdistill.state import durable, failpoints
from fleetdistill.state.directory import Storage
from fleetdistill.state.outbox import Outcome, Pending
from fleetdistill.wire import payload as wire
from fleetdistill.wire.digests import digest
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store

Work = Callable[[RecordedDisk], None]
Check = Callable[[Path, tuple[Any, ...]], None]

# --- the device


@dataclass(frozen=True)
class Kept:
    """What a state directory holds."""

    identity: str = ""
    state: bytes | None = None
    delivered: bytes | None = None
    pending: Pending | None = None
    noted: bool = False  # the app is still to be told what became of `pending`


PAYLOAD = make_payload()
MODELS = {1: b"model 1", 2: b"model 2", 3: None}
"""What each answer delivers to the app."""
DROPPED = 2


def answer_of(number: int) -> Pending:
    return Pending(round=number, step_number=1, attempt=1, samples=4)


def promoted(kept: Kept, number: int) -> Kept:
    return replace(kept, state=b"state %d" % number, delivered=MODELS[number] or kept.delivered, pending=None)


def use_storage(disk: RecordedDisk) -> None:
    """Every way of a device through its state directory: check-in, answers with and without a model, refusals."""
    now = Kept()

    def then(after: Kept, call: Callable[[], None]) -> None:
        nonlocal now
        disk.say((now, after))
        call()
        now = after
        disk.say((now, now))

    with contextlib.closing(Storage(disk.root / "fleet" / "state")) as storage:
        for name in ("first", "second"):
            then(replace(now, identity=name), partial(storage.save_identity, {"device": name}))
        then(replace(now, delivered=b"model 0"), partial(storage.save, "delivered.safetensors", b"model 0"))
        then(replace(now, state=b"state 0"), partial(storage.save, "state.safetensors", b"state 0"))
        for number, model in MODELS.items():
            pending = answer_of(number)
            put = partial(storage.outbox.put, pending, PAYLOAD, b"state %d" % number, model)
            then(replace(now, pending=pending), put)
            then(replace(now, noted=True), partial(storage.outbox.save_outcome, Outcome(pending, "some receipt")))
            if number == DROPPED:
                then(replace(now, pending=None), storage.outbox.drop)
            else:
                then(promoted(now, number), partial(storage.outbox.promote, replaced=True))
            then(replace(now, noted=False), storage.outbox.mark_reported)


def check_storage(root: Path, said: tuple[Any, ...]) -> None:
    """It is as before or as after the call under way; an answer that waits is whole, and its receipt promotes it."""
    if not said:
        return
    before, after = said[-1]
    with contextlib.closing(Storage(root / "fleet" / "state")) as storage:
        if before.noted and after.noted:
            assert storage.outbox.outcome() is not None
        pending = storage.outbox.pending()
        if pending is None:
            assert contents(storage) in (shown(before), shown(after))
            return
        assert pending in (before.pending, after.pending)
        with storage.outbox.answer() as payload:
            assert digest(payload.parts, iter([data_of(payload)])) == PAYLOAD.sha256
        storage.outbox.promote(replaced=True)
        assert contents(storage) == shown(promoted(before, pending.round))


def shown(kept: Kept) -> Kept:
    """Without what may be told twice."""
    return replace(kept, noted=False)


def contents(storage: Storage) -> Kept:
    identity = storage.load_identity().get("device", "")
    state, delivered = storage.load("state.safetensors"), storage.load("delivered.safetensors")
    return Kept(identity, state, delivered, storage.outbox.pending())


# --- the server

RUN = "digits"
SHOWN = "receipt"


def serve(disk: RecordedDisk) -> None:
    """What engine and front write for one round: contract, checkpoint, ask, upload, receipt, close, collection."""
    with contextlib.closing(Store.open(disk.root / "data" / "store")) as store:
        store.runs.begin(RUN, {"made": "by hand"})
        initial, asked = make_payload(5), make_payload(6)
        with failpoints.switched_on("disk.before-directory-fsync=error"), pytest.raises(StoreError):
            store.blobs.put(initial)
        store.blobs.put(initial)  # it is there, but not yet for good
        store.runs.publish_contract(RUN, make_contract(run=RUN, initial_weights=initial.sha256).SerializeToString())
        store.runs.set_checkpoint(RUN, store.blobs.put_state(b"state 0"))
        api = DeviceApi(store)
        profile = make_profile()
        identity = make_identity(secret=b"s" * 32)
        api.check_in(service_pb2.CheckInRequest(identity=identity, profile=profile))
        number = store.runs.start_round(RUN, ["d1"])
        store.blobs.put(asked)
        store.asks.add([Ask(**ask_row(number, asked.sha256))])
        name = service_pb2.UploadName(round=number, step_number=1, attempt=1)
        session = api.uploads.begin(
            service_pb2.UploadHeader(identity=identity, name=name, payload=PAYLOAD.header(), samples=4)
        )
        for chunk in wire.chunks(PAYLOAD.source, PAYLOAD.slots, 0):
            session.feed(chunk)
        disk.say((SHOWN, session.finish().id))
        store.runs.close_round(RUN, number, store.blobs.put_state(b"state 1"), [1], {})
        disk.say(("closed", number))
        store.blobs.drop(asked.sha256)


def ask_row(number: int, payload: bytes) -> dict[str, Any]:
    row = {"run": RUN, "round": number, "step_number": 1, "device": "d1", "step": "train", "expects": EXPECTS}
    return {**row, "payload": payload, "payload_bytes": 1, "seed": 7, "deadline_at": 1e12}


def committed(root: Path) -> Mapping[str, bytes]:
    """The database as another process reads it: SQLite syncs what it commits, which the store asserts at each start."""
    path = root / "data" / "store" / "store.sqlite"
    if not path.exists():
        return {}
    with contextlib.closing(sqlite3.connect(path)) as reader, contextlib.closing(sqlite3.connect(":memory:")) as copy:
        reader.backup(copy)
        return {str(path.relative_to(root)): copy.serialize()}


def check_store(root: Path, said: tuple[Any, ...]) -> None:
    """Whatever a row speaks of is there and whole, and every receipt that was given has its row."""
    if not said and not (root / "data" / "store").exists():
        return
    with contextlib.closing(Store.open(root / "data" / "store")) as store:
        run = store.runs.get(RUN)
        uploads = store.asks.uploads(RUN)
        assert {receipt for word, receipt in said if word == SHOWN} <= {row.receipt for row in uploads}
        if run is None:
            return
        if run.checkpoint:
            assert store.blobs.get_state(run.checkpoint) in (b"state 0", b"state 1")
        spoken = [row.sha256 for row in uploads]
        if run.contract:
            spoken.append(make_contract().FromString(run.contract).initial_weights)
        if store.runs.open_round(RUN) is not None:
            spoken += [row.payload for row in store.asks.of_step(RUN, 1, 1)]
        for sha256 in spoken:
            payload = store.blobs.open(sha256)
            assert digest(payload.parts, iter([data_of(payload)])) == sha256


# --- the proof


@dataclass(frozen=True)
class Disks:
    """What both ends do."""

    recorded: dict[str, RecordedDisk] = field(repr=False)  # hypothesis prints it with each failure


CASES: dict[str, tuple[Work, Check]] = {"device": (use_storage, check_storage), "server": (serve, check_store)}
each_end = pytest.mark.parametrize("end", CASES)


def record(end: str, root: Path, deaf_to: int | None = None) -> RecordedDisk:
    root.mkdir()
    disk = RecordedDisk(
        root,
        committed=(lambda: committed(root)) if end == "server" else dict,
        ignored=lambda name: name == "lock" or name.startswith("store.sqlite"),
        deaf_to=deaf_to,
    )
    with disk.recording():
        CASES[end][0](disk)
    return disk


@each_end
def test_at_every_cut_all_that_was_promised_is_there(end: str, tmp_path: Path) -> None:
    disk = record(end, tmp_path / "disk")
    assert check_every_cut(disk.moments, tmp_path, CASES[end][1]) > 50


@pytest.mark.long
@each_end
def test_the_check_finds_each_fsync_that_is_left_out(end: str, tmp_path: Path) -> None:
    names = record(end, tmp_path / "whole").fsyncs
    unnoticed = []
    for number, name in enumerate(names):
        disk = record(end, tmp_path / f"without-{number}", deaf_to=number)
        try:
            check_every_cut(disk.moments[disk.deaf_since :], tmp_path, CASES[end][1])
        except AssertionError:
            continue
        unnoticed.append((number, name))
    assert not unnoticed


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Disks:
    return Disks({end: record(end, tmp_path_factory.mktemp(end) / "disk") for end in CASES})


@pytest.mark.long
@each_end
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_other_cut_takes_anything_either(end: str, disks: Disks, tmp_path: Path, data: st.DataObject) -> None:
    """Any of the unsynced names and any of the unsynced data, in any combination."""
    moments = disks.recorded[end].moments
    moment = moments[data.draw(st.integers(0, len(moments) - 1))]
    count = len(moment.pending)
    kept = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    tree = moment.cut(kept, lambda left: data.draw(st.sampled_from(left)))
    check_cut(tree, moment, "by chance", tmp_path, CASES[end][1])


@pytest.mark.parametrize("known", [True, False], ids=["known", "refused"])
def test_where_the_system_knows_a_full_fsync_it_is_used(
    known: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on macOS; a file system that refuses it gets an fsync."""
    calls: list[str] = []

    class Fcntl:
        @staticmethod
        def fcntl(descriptor: int, command: int) -> None:
            calls.append(f"fcntl {command}")
            if not known:
                raise OSError("not here")

    monkeypatch.setattr(durable, "fcntl", Fcntl)
    monkeypatch.setattr(durable, "_FULL", 51)
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    (tmp_path / "new").write_bytes(b"content")
    durable.rename_durably(tmp_path / "new", tmp_path / "name")
    assert calls == (["fcntl 51"] * 2 if known else ["fcntl 51", "fsync"] * 2)
    assert (tmp_path / "name").read_bytes() == b"content"
