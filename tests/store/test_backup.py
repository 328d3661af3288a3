"""Backups of a store that is in use, and stores made of them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fleets import SMALL, assert_no_upload_lost, prepare
from support.parroting import ParrotDevice
from support.record_schema import DEVICES, RUN, recorded_config
from support.wire_samples import data_of, make_payload

from fleetdistill import Step
from fleetdistill.errors import ConfigurationError, LinkError, NoSpaceError, RefusedError, StoreError
from fleetdistill.knowledge import NetworkFile
from fleetdistill.state import failpoints
from fleetdistill_lab.simulation.spec.device import make_device
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.methods.fedavg import FedAvgServer
from fleetdistill_server.store import backup as backups
from fleetdistill_server.store.backup import backup, restore
from fleetdistill_server.store.retention import needed, sweep
from fleetdistill_server.store.store import Store


class Interrupt(BaseException):
    """Ends an engine in mid-round."""


class Server:
    """An engine and its device API over a store on the disk; the engine's `Waker`."""

    def __init__(self, directory: Path, devices: list[ParrotDevice] | None = None) -> None:
        self.directory = directory
        self.store = Store.open(directory)
        self.link = MemoryLink(DeviceApi(self.store))
        self.devices = devices or [ParrotDevice(self.link, RUN, name) for name in DEVICES]
        for device in self.devices:
            device.link = self.link
        self.after_step: Callable[[], None] = lambda: None

    async def wait(self, seconds: float = 0.0) -> None:
        for device in self.devices:
            device.step()
            self.after_step()

    def wake_other(self) -> None:
        return

    def run(self) -> None:
        asyncio.run(Engine(self.store, recorded_config(self.directory), self).run())

    def run_until(self, uploads: int) -> None:
        """Runs until so many uploads are acknowledged, and dies."""

        def look() -> None:
            if len(self.store.asks.uploads(RUN)) == uploads:
                raise Interrupt

        self.after_step = look
        with pytest.raises(Interrupt):
            self.run()
        self.after_step = lambda: None

    def receipts(self) -> set[str]:
        return {row.receipt for row in self.store.asks.uploads(RUN)}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """In its third round, with one of two answers."""
    made = Server(tmp_path / "store")
    made.run_until(5)
    yield made
    made.store.close()


def everything_is_readable(directory: Path) -> int:
    """How many payloads and checkpoints a store needs; all of them are there and whole."""
    store = Store.open(directory)
    result = needed(store)
    for sha256 in result.payloads:
        store.blobs.open(sha256, verify=True)
    for sha256 in result.checkpoints:
        store.blobs.get_state(sha256)
    store.close()
    return len(result.payloads | result.checkpoints)


def test_a_restored_run_goes_on_and_no_receipt_of_before_is_lost(server: Server, tmp_path: Path) -> None:
    receipts = server.receipts()
    made = backup(server.directory, tmp_path / "backup")
    assert made.lost == []
    assert restore(tmp_path / "backup", tmp_path / "restored") == made.payloads
    assert everything_is_readable(tmp_path / "restored") == made.payloads
    again = Server(tmp_path / "restored", server.devices)
    again.run()
    assert again.store.runs.existing(RUN).status == "finished"
    assert receipts <= again.receipts()
    assert_no_upload_lost(again.store, receipts, RUN)
    event = again.store.history.events(RUN, "restored")[0].text
    assert event.startswith("restored from the backup of ")
    assert event.endswith("; receipts, revocations and deletions of devices since then are void")
    again.store.close()


def test_engines_and_devices_of_then_are_not_in_a_restored_store(server: Server, tmp_path: Path) -> None:
    asked = [(row.device, row.status) for row in server.store.asks.of_step(RUN, 3, 1)]
    assert server.store.runs.existing(RUN).engine is not None
    assert server.store.devices.present(RUN) == list(DEVICES)
    backup(server.directory, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "restored")
    store = Store.open(tmp_path / "restored")
    assert store.runs.existing(RUN).engine is None, "no server of this store has crashed"
    assert store.devices.present(RUN) == []
    assert [(row.device, row.status) for row in store.asks.of_step(RUN, 3, 1)] == asked != []
    store.close()


def test_a_backup_has_what_the_contract_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = NetworkFile(onnx=np.arange(50, dtype=np.uint8))
    monkeypatch.setattr(FedAvgServer, "extractor_file", lambda self: file)
    made = Server(tmp_path / "store")
    made.run_until(1)
    backup(made.directory, tmp_path / "backup")
    made.store.close()
    restore(tmp_path / "backup", tmp_path / "restored")
    store = Store.open(tmp_path / "restored")
    contract = DeviceApi(store).sessions.contract(RUN)
    for sha256 in (contract.initial_weights, contract.extractor_file):
        assert store.blobs.open(sha256, verify=True).sha256 == sha256
    store.close()


def test_devices_that_are_ahead_of_a_restored_server_go_on(server: Server, tmp_path: Path) -> None:
    """They hold receipts for rounds that the server does not know; one is even new to it."""
    backup(server.directory, tmp_path / "backup")
    ahead = server.devices
    newcomer = ParrotDevice(server.link, RUN, "d2")
    server.devices = [*ahead, newcomer]
    server.run_until(9)
    last = ahead[0].receipts[-1]
    assert last.name.round == 4
    restore(tmp_path / "backup", tmp_path / "restored")
    again = Server(tmp_path / "restored", [*ahead, newcomer])
    with pytest.raises(RefusedError) as error:
        again.link.upload_status(ahead[0].identity, last.name)
    assert error.value.code == "not-asked"
    with pytest.raises(RefusedError) as error:
        again.link.next_ask(newcomer.identity, 0.0)
    assert (error.value.code, error.value.details) == ("bad-identity", {"check_in": "again"})
    newcomer.check_in()
    again.run()
    assert again.store.runs.existing(RUN).status == "finished"
    assert {device.receipts[-1].name.round for device in again.devices} == {4}
    assert_no_upload_lost(again.store, run=RUN)
    again.store.close()


def test_sdk_device_checks_in_again_at_restored_server(tmp_path: Path) -> None:
    config, (spec, *_), work = prepare(replace(SMALL, method="fedavg"), tmp_path / "work")
    before = Store.open(work / "store")
    engine = Engine(before, config, _Nobody())
    engine.prepare()
    backup(work / "store", tmp_path / "backup")
    link = MemoryLink(DeviceApi(before))
    with make_device(spec, link) as device:
        assert device.step(0.0) is Step.WAITED
        restore(tmp_path / "backup", tmp_path / "restored")
        after = Store.open(tmp_path / "restored")
        link._api = DeviceApi(after)
        with pytest.raises(LinkError, match="the server has no check-in of device"):
            device.step(0.0)
        assert device.step(0.0) is Step.WAITED
        assert after.devices.present(config.run.name) == before.devices.present(config.run.name) == [spec.name]
    before.close()
    after.close()


class _Nobody:
    """A waker where nobody answers."""

    async def wait(self, seconds: float = 0.0) -> None:
        raise Interrupt

    def wake_other(self) -> None:
        return


def test_a_backup_of_a_store_in_use_holds_all_that_it_speaks_of(server: Server, tmp_path: Path) -> None:
    """An engine runs on, drops what it no longer needs and sweeps, while backups are made."""
    over = threading.Event()

    def work() -> None:
        busy = Server(server.directory, server.devices)
        busy.after_step = lambda: sweep(busy.store, 0.0) and None  # type: ignore[assignment]
        busy.run()
        busy.store.close()
        over.set()

    working = threading.Thread(target=work)
    working.start()
    made = 0
    while not over.is_set() or not made:
        made += 1
        assert backup(server.directory, tmp_path / f"backup-{made}").lost == []
        everything_is_readable(tmp_path / f"backup-{made}")
    working.join()
    assert server.store.runs.existing(RUN).status == "finished"


def test_nothing_is_deleted_while_a_backup_is_made(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the snapshot and the copies the round closes, and what the snapshot speaks of is needed no more."""
    hit = failpoints.hit

    def look(name: str) -> None:
        if name == "backup.after-snapshot":
            server.store.runs.close_round(RUN, 3, server.store.blobs.put_state(b"next"), [], {})
            server.store.runs.start_round(RUN, [])
            server.store.runs.close_round(RUN, 4, server.store.blobs.put_state(b"after it"), [], {})
            assert sweep(server.store, 0.0).payloads == 0
        hit(name)

    monkeypatch.setattr(failpoints, "hit", look)
    backup(server.directory, tmp_path / "backup")
    monkeypatch.undo()
    everything_is_readable(tmp_path / "backup")
    assert sweep(server.store, 0.0).payloads > 0


def test_what_the_store_has_lost_is_named_and_the_rest_is_kept(server: Server, tmp_path: Path) -> None:
    upload = server.store.asks.uploads(RUN)[-1]
    path = server.store.blobs.path_of(upload.sha256)  # type: ignore[attr-defined]
    path.write_bytes(path.read_bytes()[:-1] + b"#")
    made = backup(server.directory, tmp_path / "backup")
    assert made.lost == [f"payload {upload.sha256.hex()} is damaged: its SHA-256 does not match"]
    restore(tmp_path / "backup", tmp_path / "restored")
    again = Server(tmp_path / "restored", server.devices)
    again.run()  # asks the device again
    assert len(again.store.history.events(RUN, "quarantined")) == 1
    assert_no_upload_lost(again.store, run=RUN)
    again.store.close()


def test_damage_to_a_store_does_not_reach_its_backups(server: Server, tmp_path: Path) -> None:
    backup(server.directory, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "restored")
    for path in (server.directory / "blobs").rglob("*.safetensors"):
        with path.open("r+b") as file:
            file.truncate(10)
    everything_is_readable(tmp_path / "backup")
    for path in (tmp_path / "backup" / "blobs").rglob("*.safetensors"):
        with path.open("r+b") as file:
            file.truncate(10)
    everything_is_readable(tmp_path / "restored")


# --- refusals


def test_only_an_empty_place_is_written_to(server: Server, tmp_path: Path) -> None:
    backup(server.directory, tmp_path / "backup")
    for target in (tmp_path / "backup", server.directory):
        for make in (lambda: backup(server.directory, target), lambda: restore(tmp_path / "backup", target)):  # noqa: B023
            with pytest.raises(ConfigurationError, match="is not an empty directory"):
                make()
    with pytest.raises(ConfigurationError, match="would be in the store that it copies"):
        backup(server.directory, server.directory / "inner")
    assert not (server.directory / "inner").exists()
    with pytest.raises(ConfigurationError, match="there is no store in"):
        backup(tmp_path / "nowhere", tmp_path / "other")


@pytest.mark.parametrize("point", ["after-snapshot", "before-manifest"])
@pytest.mark.parametrize("existed", [False, True])
def test_a_failed_backup_leaves_nothing_and_can_be_repeated(
    server: Server, tmp_path: Path, point: str, existed: bool
) -> None:
    target = tmp_path / "backup"
    if existed:
        target.mkdir()
    said = f"making the backup {target}: the disk is full$"
    with failpoints.switched_on(f"backup.{point}=error:ENOSPC"), pytest.raises(NoSpaceError, match=said):
        backup(server.directory, target)
    assert (target.exists(), list(target.rglob("*"))) == (existed, [])
    backup(server.directory, target)
    restore(target, tmp_path / "restored")


def test_a_snapshot_on_a_full_disk_names_the_backup(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite itself reports that the file of the copy cannot grow."""

    class Small(sqlite3.Connection):
        def backup(self, target: sqlite3.Connection, **options: Any) -> None:
            target.execute("PRAGMA max_page_count = 1")
            target.execute("CREATE TABLE too_much (a)")

    connect = partial(sqlite3.connect, factory=Small)
    monkeypatch.setattr(backups, "sqlite3", SimpleNamespace(**{**vars(sqlite3), "connect": connect}))
    target = tmp_path / "backup"
    with pytest.raises(NoSpaceError, match=f"^making the backup {target}: the disk is full$"):
        backup(server.directory, target)
    assert not target.exists()


def test_a_backup_that_was_not_finished_is_none(server: Server, tmp_path: Path) -> None:
    target = tmp_path / "backup"
    backup(server.directory, target)
    (target / "manifest.json").unlink()  # it is written last
    with pytest.raises(ConfigurationError, match="is not a complete backup"):
        restore(target, tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


def test_dying_restore_leaves_no_half_store_and_can_be_repeated(server: Server, tmp_path: Path) -> None:
    backup(server.directory, tmp_path / "backup")
    with failpoints.switched_on("restore.before-rename=error:EIO"), pytest.raises(StoreError, match="a failpoint"):
        restore(tmp_path / "backup", tmp_path / "restored")
    assert not (tmp_path / "restored").exists()
    restore(tmp_path / "backup", tmp_path / "restored")
    everything_is_readable(tmp_path / "restored")


def test_a_restore_leaves_nothing_of_an_interrupted_one(server: Server, tmp_path: Path) -> None:
    Store.open(tmp_path / "empty").close()
    for store, target in ((server.directory, "backup"), (tmp_path / "empty", "other")):
        backup(store, tmp_path / target)
    with failpoints.switched_on("restore.before-rename=error:EIO"), pytest.raises(StoreError, match="a failpoint"):
        restore(tmp_path / "backup", tmp_path / "restored")
    assert restore(tmp_path / "other", tmp_path / "restored") == 0
    restored = Store.open(tmp_path / "restored")
    assert (restored.runs.names(), list(restored.blobs.held())) == ([], [])
    restored.close()


def damage_a_payload(target: Path) -> str:
    path = max((target / "blobs").rglob("*.safetensors"), key=lambda one: one.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1])
    return f"{path.stem} is damaged"


def remove_a_payload(target: Path) -> str:
    path = next((target / "blobs").rglob("*.safetensors"))
    path.unlink()
    return f"{path.stem} is not in the store"


def damage_the_database(target: Path) -> str:
    path = target / "store.sqlite"
    path.write_bytes(path.read_bytes() + b"#")
    return "store.sqlite does not match its digest in manifest.json"


def damage_a_page(database: Path) -> None:
    """Overwrites the page of an index, which no query of a backup reads."""
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = connection.execute("SELECT max(rootpage) FROM sqlite_schema WHERE type = 'index'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    with database.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"#" * size)


def test_a_damaged_database_is_not_backed_up(server: Server, tmp_path: Path) -> None:
    server.store.close()
    damage_a_page(server.directory / "store.sqlite")
    with pytest.raises(StoreError, match=r"the database of the store .* is damaged .* so there is no backup"):
        backup(server.directory, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


def damage_before_the_backup(target: Path) -> str:
    """Its manifest has the digest of the damaged database."""
    damage_a_page(target / "store.sqlite")
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["database"] = hashlib.sha256((target / "store.sqlite").read_bytes()).hexdigest()
    (target / "manifest.json").write_text(json.dumps(manifest))
    return "store.sqlite was damaged when the backup was made"


@pytest.mark.parametrize("damage", [damage_a_payload, remove_a_payload, damage_the_database, damage_before_the_backup])
def test_a_damaged_backup_is_refused_and_named(server: Server, tmp_path: Path, damage: Callable[[Path], str]) -> None:
    target = tmp_path / "backup"
    backup(server.directory, target)
    wrong = damage(target)
    with pytest.raises(StoreError, match=wrong):
        restore(target, tmp_path / "restored")
    assert not (tmp_path / "restored").exists()


def test_a_backup_of_a_newer_version_is_refused(server: Server, tmp_path: Path) -> None:
    target = tmp_path / "backup"
    backup(server.directory, target)
    manifest = json.loads((target / "manifest.json").read_text())
    (target / "manifest.json").write_text(json.dumps({**manifest, "format": 9, "version": "7.0.0"}))
    with pytest.raises(
        ConfigurationError, match=r"has format 9, written by version 7\.0\.0; this version reads format 1"
    ):
        restore(target, tmp_path / "restored")


def test_an_empty_directory_can_be_restored_into(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    payload = make_payload()
    store.blobs.put(payload)
    backup(tmp_path / "store", tmp_path / "backup")
    (tmp_path / "restored").mkdir()
    assert restore(tmp_path / "backup", tmp_path / "restored") == 0, "nothing speaks of the payload"
    assert data_of(store.blobs.open(payload.sha256)) == data_of(payload)
    store.close()
