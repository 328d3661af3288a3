"""A store of this version, opened with a later one that has a migration more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.later_version import later_version, rows, schema
from support.parroting import ParrotDevice
from support.record_schema import DEVICES, RUN, make_store, recorded_config

from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.store import Store


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A store with a run in the middle of its third round."""
    make_store(tmp_path / "store")
    return tmp_path / "store"


def test_a_pending_migration_gives_the_tables_of_a_fresh_store(directory: Path, tmp_path: Path) -> None:
    before = schema(directory)
    with later_version():
        for path in (directory, tmp_path / "fresh"):
            Store.open(path).close()
        assert schema(directory) == schema(tmp_path / "fresh") != before
        Store.open(directory).close()  # once more changes nothing
        assert schema(directory) == schema(tmp_path / "fresh")


def test_a_migration_keeps_every_row(directory: Path) -> None:
    before = rows(directory)
    assert all(before[table] for table in ("runs", "devices", "rounds", "asks", "uploads", "events", "traffic"))
    with later_version():
        Store.open(directory).close()
    after = rows(directory)
    assert after.pop("later_sums") == [{"run": RUN, "rounds": 3}]
    assert [row.pop("later") for row in after["runs"]] == [7]
    assert after == before


class _Driver:
    """Implements the engine's `Waker`."""

    def __init__(self, devices: list[ParrotDevice]) -> None:
        self._devices = devices

    async def wait(self, seconds: float = 0.0) -> None:
        for device in self._devices:
            device.step()

    def wake_other(self) -> None:
        return


def test_the_run_of_a_migrated_store_goes_on_to_its_end(directory: Path) -> None:
    from fleetdistill_server.engine.engine import Engine

    with later_version():
        store = Store.open(directory)
    old = {row.receipt: row.status for row in store.asks.uploads(RUN)}
    assert sorted(old.values()) == ["acknowledged", "used", "used", "used", "used"]
    api = DeviceApi(store)
    devices = [ParrotDevice(MemoryLink(api), RUN, name) for name in DEVICES]
    asyncio.run(Engine(store, recorded_config(directory), _Driver(devices)).run())
    uploads = store.asks.uploads(RUN)
    assert {row.receipt: row.status for row in uploads if row.receipt in old} == dict.fromkeys(old, "used")
    answered = [(row.round, row.step_number, row.device) for row in uploads]
    assert len(set(answered)) == len(answered) == 2 * 4 + 2  # four rounds, and the delivery of the end result
    assert store.runs.existing(RUN).status == "finished"
    assert [row.status for row in store.runs.rounds(RUN)] == ["closed"] * 4
    store.close()
