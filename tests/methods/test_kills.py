"""kill -9 over the table of methods: engine and devices die in every gap, and nothing is different at the end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.fleets import (
    EVERY_METHOD,
    MECHANISMS,
    REPRODUCIBLE,
    RUNS,
    Prepared,
    assert_no_upload_lost,
    device_files,
    prepare,
    record,
)
from support.forked import ForkedEngine, forked_device
from support.long import long_except
from support.stores import runs_apart
from support.undisturbed import Played, Undisturbed

from fleetdistill import Device, Step
from fleetdistill_lab.simulation.spec.device import make_compute, make_device
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.location import Location, set_location
from fleetdistill_server.store.store import Store

pytestmark = pytest.mark.slow
every_method = pytest.mark.parametrize(
    "name", long_except(sorted(set(EVERY_METHOD) & set(REPRODUCIBLE)), "fedavg", long=MECHANISMS)
)
State = tuple[int, int, int]
"""(round, step number, answers to that step), what a store shows in mid-run."""


class Fleet:
    """An engine process over a store on the disk, and devices that the test lets work."""

    def __init__(self, prepared: Prepared, stack: ExitStack) -> None:
        self.store = Store.open(Path(prepared[0].server.store))
        self.engine = ForkedEngine(prepared)
        stack.callback(self.store.close)
        stack.callback(self.engine.kill)
        link = MemoryLink(DeviceApi(self.store, wake_engine=self.engine.pipe.poke))
        self.devices: list[Device] = [
            stack.enter_context(make_device(spec, link, compute=partial(make_compute, spec))) for spec in prepared[1]
        ]

    @property
    def is_over(self) -> bool:
        row = self.store.runs.get(RUN)
        return row is not None and row.status == "finished"

    @property
    def state(self) -> State:
        """Where the run is; zeros while no step is open."""
        row = self.store.runs.open_round(RUN)
        if row is None:
            return 0, 0, 0
        number, last = row.number, 0
        while self.store.asks.of_step(RUN, number, last + 1):
            last += 1
        return number, last, sum(ask.status == "answered" for ask in self.store.asks.of_step(RUN, number, last))

    def answer_one(self) -> None:
        """One device answers, or all have nothing to do."""
        row = self.store.runs.get(RUN)
        if row is not None and row.contract:
            any(device.step(0.0) is Step.ANSWERED for device in self.devices)

    def finish(self) -> None:
        for device in self.devices:
            while device.step(0.0) is not Step.FINISHED:
                pass


@contextmanager
def fleet_of(prepared: Prepared) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(prepared, stack)


def assert_like(peaceful: Played, prepared: Prepared, store: Store) -> set[State]:
    """Compares with the same run in peace; returns every state in which an engine can wait in it."""
    assert record(store) == peaceful.record
    assert device_files(prepared) == peaceful.files
    assert_no_upload_lost(store)
    asks = peaceful.record["asks"]
    steps = {(number, step) for number, step, *_ in asks}
    return {(*step, answers) for step in steps for answers in range(sum(ask[:2] == step for ask in asks))}


@pytest.mark.long
@pytest.mark.parametrize("name", long_except(REPRODUCIBLE, "classstats", "fedavg", "fedd2s", long=MECHANISMS))
def test_engine_killed_between_any_two_answers_changes_nothing(
    name: str, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    _kill_between_any_two_answers(name, undisturbed, prepare(RUNS[name], tmp_path / "work"))


@pytest.mark.long
@runs_apart(REPRODUCIBLE, usual="fedavg")
def test_remote_engine_killed_between_answers_changes_nothing(
    name: str, undisturbed: Undisturbed, database_url: str, blobs_url: str, tmp_path: Path
) -> None:
    prepared = prepare(RUNS[name], tmp_path / "work")
    set_location(Path(prepared[0].server.store), Location(database_url, blobs_url))
    _kill_between_any_two_answers(name, undisturbed, prepared)


def _kill_between_any_two_answers(name: str, undisturbed: Undisturbed, prepared: Prepared) -> None:
    killed_in = set()
    with fleet_of(prepared) as fleet:
        while not fleet.is_over:
            fleet.engine.start()
            fleet.engine.wait_until_it_waits()
            assert fleet.engine.is_alive or fleet.is_over
            killed_in.add(fleet.state)
            fleet.engine.kill()
            fleet.answer_one()  # while no engine lives: the last answer to a step is found by an engine that starts
        fleet.finish()
        assert assert_like(undisturbed(name), prepared, fleet.store) <= killed_in


@pytest.mark.long
@every_method
def test_engine_killed_at_each_failpoint_changes_nothing(name: str, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Each life of the engine gets one write further than the one before; as few rounds as have all of them."""
    _kill_at_each_failpoint(name, undisturbed, prepare(replace(RUNS[name], rounds=1), tmp_path / "work"))


@pytest.mark.long
@runs_apart(sorted(set(EVERY_METHOD) & set(REPRODUCIBLE)), usual="fedavg")
def test_remote_engine_killed_at_each_failpoint_changes_nothing(
    name: str, undisturbed: Undisturbed, database_url: str, blobs_url: str, tmp_path: Path
) -> None:
    prepared = prepare(replace(RUNS[name], rounds=1), tmp_path / "work")
    set_location(Path(prepared[0].server.store), Location(database_url, blobs_url))
    _kill_at_each_failpoint(name, undisturbed, prepared)


def _kill_at_each_failpoint(name: str, undisturbed: Undisturbed, prepared: Prepared) -> None:
    with fleet_of(prepared) as fleet:
        while not fleet.is_over:
            fleet.engine.start(f"*=kill@{fleet.engine.lives + 1}")
            fleet.engine.work(fleet.answer_one)
            assert fleet.engine.was_killed or fleet.is_over
        fleet.finish()
        assert fleet.engine.lives >= 10
        assert_like(undisturbed(name, rounds=1), prepared, fleet.store)


DEATHS = (
    "device.outbox.before-data",
    "device.outbox.after-manifest",
    "device.upload.after-receipt",
    "device.promote.between-renames",
    "device.drop.after-files",
)
"""Moments of a device between an ask and the next one, in their order; tests/reliability has all of them."""


@pytest.mark.long
@every_method
def test_device_killed_at_any_moment_of_answer_changes_nothing(
    name: str, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    prepared = prepare(RUNS[name], tmp_path / "work")
    with fleet_of(prepared) as fleet:
        fragile = forked_device(prepared[1][0], prepared[0].server.store, fleet.engine.pipe)
        fleet.devices.pop(0).close()
        fleet.engine.start()
        fleet.engine.wait_until_it_waits()
        for death in itertools.cycle(DEATHS):
            fragile.start(f"{death}=kill")
            while fragile.is_alive:
                fleet.answer_one()
            if not fragile.was_killed:
                break
        fleet.finish()
        answers = sum(row.device == prepared[1][0].name for row in fleet.store.asks.uploads(RUN))
        assert fragile.lives > len(DEATHS) * answers
        assert_like(undisturbed(name), prepared, fleet.store)
