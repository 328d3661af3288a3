"""Durable replay, over the table of methods: an engine that dies between any two waits changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from pathlib import Path

import pytest
from support.driving import DriveDevices
from support.fleets import (
    HOSTILE,
    MECHANISMS,
    REPRODUCIBLE,
    RUN,
    RUNS,
    Prepared,
    assert_no_upload_lost,
    prepare,
    record,
    run_in_memory,
)
from support.long import long_except
from support.stores import runs_apart
from support.undisturbed import Undisturbed

from fleetdistill import Device, Step
from fleetdistill_lab.simulation.spec.device import make_compute, make_device
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.location import Location, set_location
from fleetdistill_server.store.store import Store

MAX_RESTARTS = 1000


class DiesAfterEveryWait(DriveDevices):
    """Lets one device take one step, and ends the engine then."""

    async def wait(self, seconds: float = 0.0) -> None:
        await super().wait(seconds)
        raise asyncio.CancelledError


def run_with_a_new_engine_after_every_wait(prepared: Prepared, store: Store) -> int:
    """How many engines the run took."""
    config, specs, _ = prepared
    api = DeviceApi(store)
    with contextlib.ExitStack() as stack:
        devices = [
            stack.enter_context(make_device(spec, MemoryLink(api), compute=partial(make_compute, spec)))
            for spec in specs
        ]
        engines = _drive(store, config, devices)
        for device in devices:
            while device.step(0.0) is not Step.FINISHED:
                pass
    return engines


def _drive(store: Store, config: object, devices: list[Device]) -> int:
    waker = DiesAfterEveryWait(devices, lambda: None)
    for number in range(1, MAX_RESTARTS):
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(Engine(store, config, waker).run())  # type: ignore[arg-type]
            return number
    raise AssertionError(f"the run was not over after {MAX_RESTARTS} engines")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", long_except(REPRODUCIBLE, "fedavg", "feddkc", "classstats in one exchange", long=MECHANISMS)
)
def test_engine_dying_between_any_two_waits_ends_in_same_state(
    name: str, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    fleet = RUNS[name]
    disturbed = Store.in_memory()
    engines = run_with_a_new_engine_after_every_wait(prepare(fleet, tmp_path / "disturbed"), disturbed)
    assert engines > fleet.rounds * fleet.devices  # type: ignore[operator]
    assert record(disturbed) == undisturbed(name).record
    assert_no_upload_lost(disturbed)


def test_who_is_left_out_is_the_same_after_every_death(tmp_path: Path) -> None:
    undisturbed = run_in_memory(prepare(HOSTILE, tmp_path / "undisturbed"))
    disturbed = Store.in_memory()
    run_with_a_new_engine_after_every_wait(prepare(HOSTILE, tmp_path / "disturbed"), disturbed)
    assert [row.device for row in disturbed.history.events(RUN, "update-left-out")] == ["device-0"] * HOSTILE.rounds  # type: ignore[operator]
    assert record(disturbed) == record(undisturbed)


@pytest.mark.long
@runs_apart(REPRODUCIBLE, usual="fedavg")
def test_run_in_postgres_and_object_store_equals_one_in_memory(
    name: str, undisturbed: Undisturbed, database_url: str, blobs_url: str, tmp_path: Path
) -> None:
    prepared = prepare(RUNS[name], tmp_path / "disturbed")
    set_location(tmp_path / "store", Location(database_url, blobs_url))
    store = Store.open(tmp_path / "store")
    run_with_a_new_engine_after_every_wait(prepared, store)
    assert record(store) == undisturbed(name).record
    assert_no_upload_lost(store)
    store.close()
