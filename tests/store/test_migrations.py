"""Stores of every released version, opened with this one. `record_schema.py` adds a file for each release."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from store.test_sums import assert_sums_are_true
from support.parroting import ParrotDevice
from support.record_schema import DEVICES, RUN, recorded_config

from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.simulation.links.memory_link import MemoryLink
from fleetdistill_server.store.store import Store

GOLDEN = sorted((Path(__file__).parent / "golden").glob("schema-*.sql"))
every_release = pytest.mark.parametrize("recorded", GOLDEN, ids=[path.stem for path in GOLDEN])
Tables = dict[str, list[dict[str, Any]]]


def restore(recorded: Path, directory: Path) -> Path:
    """The store that was recorded, as its release left it on the disk."""
    (directory / "blobs").mkdir(parents=True)
    with closing(sqlite3.connect(directory / "store.sqlite")) as database:
        database.executescript(recorded.read_text())
        for name, data in database.execute("SELECT path, data FROM golden_blobs").fetchall():
            (directory / "blobs" / name).parent.mkdir(exist_ok=True)
            (directory / "blobs" / name).write_bytes(data)
        database.execute("DROP TABLE golden_blobs")
        database.commit()
    return directory


def schema(directory: Path) -> dict[str, str]:
    with closing(sqlite3.connect(directory / "store.sqlite")) as database:
        return dict(database.execute("SELECT type || ' ' || name, sql FROM sqlite_master WHERE sql IS NOT NULL"))


def rows(directory: Path) -> Tables:
    """Every row of every table but for the migrations' own."""
    with closing(sqlite3.connect(directory / "store.sqlite")) as database:
        database.row_factory = sqlite3.Row
        names = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        mine = [name for name in names if not name.startswith(("sqlite_", "_sqlite"))]
        return {name: [dict(row) for row in database.execute(f"SELECT * FROM {name}")] for name in mine}


def test_there_is_a_recording_of_every_release() -> None:
    assert "schema-0.1.0" in [path.stem for path in GOLDEN]


@every_release
def test_an_old_store_has_the_tables_and_indexes_of_a_fresh_one(recorded: Path, tmp_path: Path) -> None:
    old, fresh = restore(recorded, tmp_path / "old"), tmp_path / "fresh"
    for directory in (old, fresh):
        Store.open(directory).close()
    assert schema(old) == schema(fresh)
    Store.open(old).close()  # once more changes nothing
    assert schema(old) == schema(fresh)


@every_release
def test_every_row_of_an_old_store_is_kept(recorded: Path, tmp_path: Path) -> None:
    directory = restore(recorded, tmp_path / "store")
    before = rows(directory)
    assert all(before.values()), "the recording has rows in every table"
    Store.open(directory).close()
    after = rows(directory)
    assert _traffic(after) == _traffic(before)
    for table in before.keys() - {"traffic"}:
        kept = [{name: new[name] for name in was} for was, new in zip(before[table], after[table], strict=True)]
        assert kept == before[table]


@every_release
def test_the_sums_of_an_old_store_are_those_of_its_answers(recorded: Path, tmp_path: Path) -> None:
    with closing(Store.open(restore(recorded, tmp_path / "store"))) as store:
        assert_sums_are_true(store, RUN)


def _traffic(tables: Tables) -> tuple[int, int]:
    """What may be split otherwise, but not be changed."""
    found = tables["traffic"]
    return sum(row["tensor_bytes"] for row in found), sum(row["envelope_bytes"] for row in found)


class _Driver:
    """Implements the engine's `Waker`."""

    def __init__(self, devices: list[ParrotDevice]) -> None:
        self._devices = devices

    async def wait(self, seconds: float = 0.0) -> None:
        for device in self._devices:
            device.step()

    def wake_other(self) -> None:
        return


@every_release
def test_the_run_of_an_old_store_goes_on_to_its_end(recorded: Path, tmp_path: Path) -> None:
    from fleetdistill_server.engine.engine import Engine

    directory = restore(recorded, tmp_path / "store")
    store = Store.open(directory)
    old = {row["receipt"]: row["status"] for row in store.asks.uploads(RUN)}
    assert sorted(old.values()) == ["acknowledged", "used", "used", "used", "used"]
    api = DeviceApi(store)
    devices = [ParrotDevice(MemoryLink(api), RUN, name) for name in DEVICES]
    asyncio.run(Engine(store, recorded_config(directory), _Driver(devices)).run())
    uploads = store.asks.uploads(RUN)
    assert {row["receipt"]: row["status"] for row in uploads if row["receipt"] in old} == dict.fromkeys(old, "used")
    answered = [(row["round"], row["step_number"], row["device"]) for row in uploads]
    assert len(set(answered)) == len(answered) == 2 * 4 + 2  # four rounds, and the delivery of the end result
    assert (store.runs.get(RUN) or {})["status"] == "finished"
    assert [row["status"] for row in store.runs.rounds(RUN)] == ["closed"] * 4
    store.close()
