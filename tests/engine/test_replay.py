"""Durable replay in one process: an engine that dies between any two steps is replaced, and ends in the same state."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.driving import Drive, run_engine
from engine.fragile import Crash, Fragile, Fuse
from support.answering import AnsweringDevice
from support.fleets import assert_no_upload_lost, prepare

from fleetdistill import Device, Step
from fleetdistill.errors import NoSpaceError, RefusedError, RunError
from fleetdistill.knowledge import SampleKnowledge
from fleetdistill.state.state_file import pack_state
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2
from fleetdistill_lab.simulation.spec.device import DeviceSpec, make_device
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.methods.cohort import Cohort
from fleetdistill_server.methods.traffic import Exchange, Sizes
from fleetdistill_server.store.clock import Clock
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.sums import EVERY

ROUNDS = 2


def used(store: Store) -> list[int]:
    """Number of used answers of each round."""
    return [answers.used for _, answers in store.summaries.rounds(RUN, 0, EVERY)]


def config_for(**run: Any) -> RunConfig:
    """A run for random knowledge."""
    return run_config(
        {
            "run": {"name": RUN, "method": "feddkc", "rounds": ROUNDS, "min_devices": 2, **run},
            "contract": {"classes": 10, "input_shape": [1, 8, 8], "knowledge_type": "float32"},
            "method": {"server_epochs": 1},
            "server": {"torch_device": "cpu"},
        }
    )


def answering(store: Store, count: int = 2) -> list[AnsweringDevice]:
    api = DeviceApi(store)
    return [AnsweringDevice(MemoryLink(api), RUN, f"d{number}") for number in range(count)]


def run_with_crash(fuse: Fuse) -> Store:
    """A run whose engine dies when the fuse blows; a second one ends it over the same store."""
    store, config = Store.in_memory(), config_for()
    devices = answering(store)
    with contextlib.suppress(Crash):
        run_engine(Fragile(store, fuse), config, Drive(devices, fuse))
    run_engine(store, config, Drive(devices))
    return store


def checkpoint(store: Store) -> bytes:
    row = store.runs.get(RUN)
    assert row is not None
    assert (row.status, row.completed_rounds) == ("finished", ROUNDS)
    return bytes(row.checkpoint)


@pytest.mark.long
@pytest.mark.slow
def test_an_engine_may_die_between_any_two_steps() -> None:
    undisturbed = Fuse()
    expected = run_with_crash(undisturbed)
    assert undisturbed.touched > 50
    for moment in range(1, undisturbed.touched + 1):
        store = run_with_crash(Fuse(blows_at=moment))
        assert checkpoint(store) == checkpoint(expected), f"step {moment} of {undisturbed.touched}"
        assert_no_upload_lost(store)
        assert [row.status for row in store.asks.uploads(RUN)] == ["used"] * (2 * ROUNDS)
        assert [(row.number, row.status) for row in store.runs.rounds(RUN)] == [(1, "closed"), (2, "closed")]
        assert store.history.events(RUN, "replay-differs") == []
        store.close()


def test_an_engine_may_die_again_and_again() -> None:
    undisturbed = Fuse()
    expected = checkpoint(run_with_crash(undisturbed))
    most = undisturbed.touched // 3  # a little more than a start with a replay needs
    store, config = Store.in_memory(), config_for()
    devices = answering(store)
    deaths = 0
    while store.runs.status(RUN) != "finished":
        with contextlib.suppress(Crash):
            run_engine(Fragile(store, Fuse(blows_at=most)), config, Drive(devices))
        deaths += 1
        assert deaths < 100
    assert deaths > 2
    assert checkpoint(store) == expected


# --- with the devices of the SDK

TINY = Simulation(
    method="feddkc",
    devices=2,
    rounds=ROUNDS,
    train_limit=40,
    test_limit=20,
    alpha=10.0,
    models=("digits_linear", "digits_mlp_small"),
)


@contextlib.contextmanager
def sdk_devices(store: Store, specs: list[DeviceSpec]) -> Iterator[list[Device]]:
    api = DeviceApi(store)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(make_device(spec, MemoryLink(api))) for spec in specs]


def run_sdk_fleet(work: Path, blows_at: int = -1) -> tuple[Store, int]:
    """The same with real models; returns the store and the number of steps until the run was over."""
    config, specs, _ = prepare(TINY, work)
    store, fuse = Store.in_memory(), Fuse(blows_at)
    with sdk_devices(store, specs) as devices:
        with contextlib.suppress(Crash):
            run_engine(store, config, Drive(devices, fuse))
        if fuse.blows_at > 0:
            run_engine(store, config, Drive(devices))
    return store, fuse.touched


@pytest.mark.long
def test_sdk_fleet_survives_death_of_engine_at_every_wait(tmp_path: Path) -> None:
    expected, steps = run_sdk_fleet(tmp_path / "undisturbed")
    assert steps > 6
    for moment in range(1, steps + 1):
        store, _ = run_sdk_fleet(tmp_path / f"crash-{moment}", moment)
        assert checkpoint(store) == checkpoint(expected), f"step {moment} of {steps}"
        assert store.history.figures(RUN, "accuracy", "test") == expected.history.figures(RUN, "accuracy", "test")
        assert_no_upload_lost(store)
        store.close()


def test_devices_restarted_in_every_round_change_nothing(tmp_path: Path) -> None:
    expected, _ = run_sdk_fleet(tmp_path / "undisturbed")
    config, specs, _ = prepare(TINY, tmp_path / "restarted")
    store = Store.in_memory()

    class Restarting:
        """An SDK device that is opened for one step at a time; nothing but its state directory stays."""

        def __init__(self, spec: DeviceSpec) -> None:
            self._spec = spec

        def step(self, wait_seconds: float) -> Step:
            device = make_device(self._spec, MemoryLink(DeviceApi(store)))
            try:
                return device.step(wait_seconds)
            finally:
                device.close(leave=False)  # as a kill does: it does not say goodbye

    run_engine(store, config, Drive([Restarting(spec) for spec in specs]))
    assert checkpoint(store) == checkpoint(expected)
    assert_no_upload_lost(store)


# --- short rounds


class Adding(ServerMethod):
    """Changes its state with every answer, so that a round that falls short leaves something to take back."""

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        rows = SampleKnowledge.schema(rows=sizes.samples, features={}, columns=())
        return [Exchange(step="train", up={"knowledge": rows})]

    def __init__(self, other: ServerMethod) -> None:
        super().__init__(other.config, other.context)
        self.total = torch.zeros((), dtype=torch.int64)

    @staticmethod
    def requirements() -> contract_pb2.Requirements:
        return contract_pb2.Requirements()

    async def round(self, cohort: Cohort) -> None:
        async for answer in cohort.ask("train"):
            self.total = self.total + answer.samples

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total = state["total"]


def test_a_short_round_is_taken_back_and_the_next_one_counts() -> None:
    store = Store.in_memory()
    drive = Drive(answering(store))
    engine = Engine(store, config_for(quorum=1.0), drive)
    method = engine.method = Adding(engine.method)
    totals: dict[int, int] = {}  # at the first wait of each round

    def look() -> None:
        row = store.runs.open_round(RUN)
        if row is not None:
            totals.setdefault(row.number, int(method.total))
            drive.away = {1} if row.number == 1 else set()
            if row.number == 1 and store.asks.uploads(RUN):
                store.asks.expire(RUN, time.time() + 1e6)  # d1 has had all the time there is

    drive.on_wait = look
    asyncio.run(engine.run())

    first, *others = store.runs.rounds(RUN)
    assert first.status == "short"
    assert first.reason == "step 'train': 1 device answered, the quorum is 2; out of the round: deadline passed (1)"
    closed = [row.number for row in others if row.status == "closed"]
    assert len(closed) == ROUNDS
    (lost,) = [row for row in store.asks.uploads(RUN) if row.round == 1]
    assert (lost.device, lost.status) == ("d0", "reported")
    assert lost.reason.startswith("round short")
    late = store.history.events(RUN, "late")
    assert (late[0].round, late[0].device) == (1, "d1")
    assert_no_upload_lost(store)
    assert totals[2] == 0  # what d0 had added is gone
    assert int(method.total) == ROUNDS * 2 * 6
    assert checkpoint(store) == hashlib.sha256(pack_state(method.state_dict())).digest()


def test_a_device_that_leaves_does_not_hold_the_round_up() -> None:
    """Its lease ends, and the quorum of the others is enough."""
    store = Store.in_memory()
    devices = answering(store, 3)
    drive = Drive(devices)
    engine = Engine(store, config_for(min_devices=3, quorum=2 / 3), drive)
    method = engine.method = Adding(engine.method)

    def leave() -> None:
        row = store.runs.open_round(RUN)
        if row is not None and row.number == 1 and 2 not in drive.away:
            drive.away.add(2)
            store.devices.mark_absent(RUN, "d2", "lease ended")
        elif row is None and 2 in drive.away:
            drive.away.clear()

    drive.on_wait = leave
    asyncio.run(engine.run())
    assert [row.status for row in store.runs.rounds(RUN)] == ["closed"] * ROUNDS
    assert used(store) == [2, 3]
    assert int(method.total) == 5 * 6


def test_two_runs_of_one_seed_do_not_take_each_others_checkpoint() -> None:
    """They begin with equal states, which are one blob."""
    store = Store.in_memory()
    with contextlib.suppress(Crash):  # the first wait: its first checkpoint is stored, no round has begun
        run_engine(store, config_for(name="other"), Drive([None], Fuse(blows_at=1)))
    run_engine(store, config_for(), Drive(answering(store)))
    other, ours = store.runs.get("other"), store.runs.get(RUN)
    assert other is not None
    assert ours is not None
    assert store.blobs.get_state(other.checkpoint)
    assert store.blobs.get_state(ours.checkpoint)


def test_device_downloading_after_round_end_stays_in_run(tmp_path: Path) -> None:
    config, specs, _ = prepare(TINY, tmp_path / "work")
    store = Store.in_memory()
    refused: list[bytes] = []

    class LateLink(MemoryLink):
        """The first payload of an ask is gone when it is fetched."""

        def download(
            self, identity: service_pb2.Identity, sha256: bytes, first_byte: int
        ) -> tuple[knowledge_pb2.PayloadHeader, Iterator[knowledge_pb2.Chunk]]:
            ask = store.asks.next_open(RUN, identity.device)
            if ask is not None and ask.payload == sha256 and not refused:
                refused.append(sha256)
                raise RefusedError(Code.NOT_FOUND, "the round that it belonged to is over")
            return super().download(identity, sha256, first_byte)  # type: ignore[return-value]

    api = DeviceApi(store)
    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(make_device(spec, LateLink(api))) for spec in specs]
        run_engine(store, config, Drive(devices))
    assert len(refused) == 1
    assert used(store) == [2] * ROUNDS


def test_an_engine_that_was_replaced_writes_nothing_more() -> None:
    store, config = Store.in_memory(), config_for()
    drive = Drive(answering(store))
    old = Engine(store, config, drive)
    Engine(store, config, drive)
    with pytest.raises(RunError, match="taken over"):
        asyncio.run(old.run())
    assert store.runs.rounds(RUN) == []


class Failing(Drive):
    """Nobody answers: every ask is closed at once, as if its device had declined, until `answers` is called.

    Attributes:
        store: Of the run.
        fails: Whether they still do.
        now: A clock that waiting moves on.
        waited: The seconds of every wait between two rounds, by how many rounds had fallen short in a row.
    """

    store: Store
    fails = True
    now = 0.0
    waited: dict[int, float]

    async def wait(self, seconds: float = 1.0) -> None:
        row = self.store.runs.open_round(RUN)
        if row is not None and self.fails:
            self.fuse.touch()
            for device in self.store.asks.devices_with_open(RUN):
                ask = self.store.asks.next_open(RUN, device)
                assert ask is not None
                self.store.asks.close(ask.id, "declined")
            return
        if row is None and (short := self.store.runs.short_rounds_in_a_row(RUN)):
            self.waited[short] = self.waited.get(short, 0.0) + seconds
        self.now += seconds
        await super().wait()


def failing(count: int = 2) -> Failing:
    store = Store.in_memory()
    drive = Failing(answering(store, count))
    drive.store, drive.waited = store, {}
    store.asks.clock = Clock(lambda: drive.now, lambda: drive.now)
    return drive


@pytest.mark.long
def test_rounds_that_fall_short_never_end_a_service(caplog: pytest.LogCaptureFixture) -> None:
    drive = failing()
    store, told = drive.store, []

    def look() -> None:
        run = store.runs.existing(RUN)
        told.append((run.status, run.reason))
        drive.fails = drive.fails and store.runs.short_rounds_in_a_row(RUN) < 130

    drive.on_wait = look
    run_engine(store, config_for(), drive)
    assert [row.status for row in store.runs.rounds(RUN)] == ["short"] * 130 + ["closed"] * ROUNDS
    assert store.runs.existing(RUN).status == "finished"
    assert {status for status, _ in told} == {"running"}
    (last,) = [reason for _, reason in told if reason.startswith("130 rounds in a row fell short")][:1]
    assert "run `fleetdistill runs show` for details" in last
    assert told[-1] == ("running", ""), "once a round is completed, nothing is told any more"
    assert [record.message.split()[0] for record in caplog.records if "rounds in a row" in record.message] == [
        str(number) for number in range(10, 131, 10)
    ]


def test_a_completed_round_ends_what_is_told_of_short_ones() -> None:
    drive = failing()
    reasons = []

    def look() -> None:
        reasons.append(drive.store.runs.existing(RUN).reason)
        drive.fails = drive.fails and drive.store.runs.short_rounds_in_a_row(RUN) < 3

    drive.on_wait = look
    run_engine(drive.store, config_for(), drive)
    assert any(reason.startswith("3 rounds in a row fell short of the quorum; ") for reason in reasons)
    assert reasons[-1] == ""


def test_pauses_between_short_rounds_grow_to_a_bound() -> None:
    drive = failing()

    def look() -> None:
        drive.fails = drive.fails and drive.store.runs.short_rounds_in_a_row(RUN) < 20

    drive.on_wait = look
    run_engine(drive.store, config_for(), drive)
    pauses = [drive.waited[number] for number in range(1, 21)]
    assert pauses == pytest.approx([min(0.1 * 2**number, 60.0) for number in range(20)])


def test_a_device_that_comes_ends_the_pause() -> None:
    drive = failing(3)
    drive.away = {2}
    store = drive.store

    def come() -> None:
        if store.runs.short_rounds_in_a_row(RUN) == 12 and store.runs.open_round(RUN) is None:
            drive.away, drive.fails = set(), False

    drive.on_wait = come
    run_engine(store, config_for(), drive)
    assert drive.waited[11] == pytest.approx(60.0)
    assert drive.waited[12] < 10.0
    assert store.runs.rounds(RUN)[12].cohort == ["d0", "d1", "d2"]


def test_simulation_ends_with_sentence_after_many_short_rounds() -> None:
    drive = failing()
    engine = Engine(drive.store, config_for(), drive, max_short_rounds=5)
    with pytest.raises(RunError, match="5 rounds in a row fell short of the quorum; run `fleetdistill"):
        asyncio.run(engine.run())
    run = drive.store.runs.existing(RUN)
    assert run.status == "stopped"
    assert run.reason.startswith("5 rounds in a row fell short of the quorum")
    assert drive.waited == {}, "nobody else will come, so nobody is waited for"


def test_the_number_of_short_rounds_outlives_the_engine() -> None:
    drive = failing()
    drive.fuse.blows_at = 5
    deaths = 0
    while True:
        drive.fuse.touched = 0
        engine = Engine(drive.store, config_for(), drive, max_short_rounds=5)
        try:
            asyncio.run(engine.run())
        except Crash:
            deaths += 1
        except RunError:
            break
    assert deaths > 1
    assert len(drive.store.runs.rounds(RUN)) == 5


@pytest.mark.long
@pytest.mark.slow
def test_full_disk_at_any_step_ends_engine_and_next_one_goes_on() -> None:
    """Only then does the supervisor know that it is no failure."""

    class Full(Fuse):
        def touch(self) -> None:
            try:
                super().touch()
            except Crash:
                raise NoSpaceError("the disk is full") from None

    expected = checkpoint(run_with_crash(Fuse()))
    undisturbed = Fuse()
    run_with_crash(undisturbed)
    for moment in range(1, undisturbed.touched + 1, 3):
        store, config = Store.in_memory(), config_for()
        devices = answering(store)
        fuse = Full(blows_at=moment)
        with contextlib.suppress(NoSpaceError):
            run_engine(Fragile(store, fuse), config, Drive(devices, fuse))
        run_engine(store, config, Drive(devices))
        assert checkpoint(store) == expected, f"step {moment} of {undisturbed.touched}"
        assert_no_upload_lost(store)
        store.close()


# --- over-selection


def assert_no_round_is_short(store: Store) -> None:
    """Called between the steps of a run, which would otherwise try again for ever."""
    assert "short" not in [row.status for row in store.runs.rounds(RUN)]


def test_round_asks_extra_devices_and_ends_with_enough_answers() -> None:
    """Of four devices three are asked for two answers; whoever has not answered by then is out, and loses nothing."""
    store = Store.in_memory()
    drive = Drive(answering(store, 4), on_wait=lambda: assert_no_round_is_short(store))
    settings = {"min_devices": 4, "devices_per_round": 2, "over_selection": 1.5, "quorum": 1.0, "rounds": 6}
    engine = Engine(store, config_for(**settings), drive)
    method = engine.method = Adding(engine.method)
    asyncio.run(engine.run())

    rounds = store.runs.rounds(RUN)
    assert [row.status for row in rounds] == ["closed"] * 6
    assert [tuple(answers) for _, answers in store.summaries.rounds(RUN, 0, EVERY)] == [(2, 0, 2)] * 6
    cohorts = [tuple(row.cohort) for row in rounds]
    assert {len(cohort) for cohort in cohorts} == {3}
    assert len(set(cohorts)) > 1  # chosen anew in every round
    (surplus,) = [row for row in store.asks.of_step(RUN, 1, 1) if row.status == "out"]
    assert surplus.reason == "enough devices answered"
    assert int(method.total) == 6 * 2 * 6
    assert_no_upload_lost(store)


@pytest.mark.long
def test_a_replayed_round_keeps_the_devices_that_it_asked() -> None:
    """The engine dies at every step of a run with over-selection and the end is the same."""

    def run(fuse: Fuse) -> tuple[Store, list[list[str]]]:
        config = config_for(min_devices=3, devices_per_round=2, over_selection=1.5)
        store = Store.in_memory()
        devices = answering(store, 3)
        with contextlib.suppress(Crash):
            run_engine(Fragile(store, fuse), config, Drive(devices, fuse))
        run_engine(store, config, Drive(devices))
        return store, [list(row.cohort) for row in store.runs.rounds(RUN)]

    undisturbed = Fuse()
    run(undisturbed)
    for moment in range(1, undisturbed.touched + 1, 7):
        store, cohorts = run(Fuse(blows_at=moment))
        assert len(cohorts) == ROUNDS
        assert used(store) == [2] * ROUNDS
        assert_no_upload_lost(store)


def test_the_quorum_counts_the_devices_that_a_round_wants() -> None:
    """Two of three must answer with a quorum of all of two, although three are asked."""
    store = Store.in_memory()
    drive = Drive(answering(store, 3))
    settings = {"min_devices": 3, "devices_per_round": 2, "over_selection": 1.5, "quorum": 1.0}
    engine = Engine(store, config_for(**settings), drive)
    engine.method = Adding(engine.method)

    def look() -> None:
        assert_no_round_is_short(store)
        drive.away = {2} if store.runs.open_round(RUN) is not None else set()

    drive.on_wait = look
    asyncio.run(engine.run())
    assert [row.status for row in store.runs.rounds(RUN)] == ["closed"] * ROUNDS


def test_end_result_goes_to_devices_not_asked_in_last_round() -> None:
    class Telling(Adding):
        async def finish(self, cohort: Cohort) -> None:
            told.extend(cohort.remaining)

    told: list[str] = []
    store = Store.in_memory()
    drive = Drive(answering(store, 4))
    engine = Engine(store, config_for(min_devices=4, devices_per_round=2, rounds=1), drive)
    engine.method = Telling(engine.method)
    asyncio.run(engine.run())
    assert len(store.runs.rounds(RUN)[0].cohort) == 2
    assert told == ["d0", "d1", "d2", "d3"]
