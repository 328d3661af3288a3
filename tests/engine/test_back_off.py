"""A device that is present and never answers costs ever fewer rounds their deadline, whatever the method."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from engine.fragile import Crash
from engine.moved_clock import MovedClock
from support.answering import AnsweringDevice
from support.fleets import EVERY_METHOD, RUNS, assert_no_upload_lost, prepare
from support.long import long_except
from support.sqlite import tables_of

from fleetdistill import Device, Step
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_lab.simulation.spec.device import make_device
from fleetdistill_lab.simulation.spec.plan import NO_DEADLINE_SECONDS, RUN
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.back_off import available, rounds_left_out
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store

ROUNDS = 5


def test_a_device_is_left_out_for_ever_more_rounds_up_to_a_bound() -> None:
    assert [rounds_left_out(late) for late in range(11)] == [0, 0, 1, 2, 4, 8, 16, 32, 64, 64, 64]


@pytest.mark.parametrize(
    ("left_out", "least", "who"),
    [
        ({}, 2, "abcd"),
        ({"b": 7}, 2, "acd"),
        ({"b": 7, "gone": 3}, 2, "acd"),
        ({"b": 7, "c": 5, "d": 6}, 2, "ac"),
        ({"b": 5, "c": 5, "d": 6}, 3, "abc"),
        ({"a": 4, "b": 5, "c": 5, "d": 6}, 9, "abcd"),
    ],
)
def test_who_would_be_back_first_is_asked_where_too_few_are_left(
    left_out: dict[str, int], least: int, who: str
) -> None:
    assert list(available(dict.fromkeys("abcd", b""), left_out, least)) == list(who)


def test_devices_that_are_never_late_are_not_written() -> None:
    store = Store.in_memory()
    store.runs.begin(RUN, {})
    store.devices.register(RUN, "a", b"h", b"")
    number = store.runs.start_round(RUN, ["a"])
    ask = Ask(run=RUN, round=number, step_number=1, device="a", step="train", expects={}, deadline_at=4e9)
    store.asks.add([ask])
    store.asks.accept_upload(1, 1, bytes(32), 0, 1)
    texts: list[str] = []
    tables_of(store).conn.set_trace_callback(texts.append)
    store.runs.close_round(RUN, number, bytes(32), [1], {})
    assert [text for text in texts if text.startswith("UPDATE runs")]
    assert not [text for text in texts if text.startswith("UPDATE devices")]


@pytest.mark.parametrize(
    ("cohort", "answering", "left_out"),
    [("ab", "", set()), ("ab", "a", {"b"}), ("abc", "ab", {"c"}), ("a", "", {"a"})],
)
def test_rounds_without_any_answer_do_not_count(cohort: str, answering: str, left_out: set[str]) -> None:
    store = Store.in_memory()
    store.runs.begin(RUN, {})
    for device in cohort:
        store.devices.register(RUN, device, b"h", b"")
    for _ in range(2):
        number = store.runs.start_round(RUN, list(cohort))
        first = Ask(run=RUN, round=number, step_number=1, device="a", step="train", expects={}, deadline_at=4e9)
        store.asks.add([replace(first, device=device) for device in cohort])
        for ask in store.asks.all_open(RUN):
            if ask.device in answering:
                store.asks.accept_upload(ask.id, 1, bytes(32), 0, 1)
        store.asks.expire(RUN, 5e9)
        store.runs.close_short_round(RUN, number, "too few answers")
    assert set(store.devices.left_out(RUN, number + 1)) == left_out


class Turns:
    """Honest devices work; once they have nothing to do, and only the silent one is asked, its deadline passes."""

    def __init__(self, store: Store, honest: list[Device], silent: Device, clock: MovedClock) -> None:
        self._store, self._honest, self._silent, self._clock = store, honest, silent, clock

    async def wait(self, seconds: float = 0.0) -> None:
        self._clock.pass_time(seconds)
        done = [device.step(0.0) for device in [*self._honest, self._silent]]
        asked = self._store.asks.devices_with_open(RUN)
        if asked == {self._silent.device_id} and Step.ANSWERED not in done[:-1]:
            self._clock.pass_time(NO_DEADLINE_SECONDS)

    def wake_other(self) -> None:
        """Devices in this process need no wake-up."""


def decline_before(device: Device, number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device answers no ask before a round, and declines none at the server."""
    handler = device._handler
    handle = handler.handle

    def handle_from_then_on(ask: service_pb2.Ask, terms: service_pb2.CheckInResponse) -> tuple[Step, float]:
        return handle(ask, terms) if ask.round >= number else (Step.DECLINED, 0.0)

    monkeypatch.setattr(handler, "handle", handle_from_then_on)


@pytest.mark.long
@pytest.mark.parametrize("method", long_except(EVERY_METHOD, "classstats", "fedavg", "feddkc"))
def test_a_device_that_never_answers_is_asked_ever_less_often(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = 4 if RUNS[method].configuration().sums_securely else 3  # two of three are the quorum; a sum needs three
    config, specs, _ = prepare(replace(RUNS[method], devices=devices, rounds=ROUNDS, alpha=10.0), tmp_path / "work")
    store, clock = Store.in_memory(), MovedClock()
    store.asks.clock = clock.clock()
    api = DeviceApi(store)
    with ExitStack() as stack:
        *honest, silent = (stack.enter_context(make_device(spec, MemoryLink(api))) for spec in specs)
        decline_before(silent, float("inf"), monkeypatch)
        asyncio.run(Engine(store, config, Turns(store, honest, silent, clock)).run())
    rounds = store.runs.rounds(RUN)
    assert [row.status for row in rounds] == ["closed"] * ROUNDS
    late = {row.round for row in store.history.events(RUN, "late") if row.round < ROUNDS}
    assert late
    with_it = {row.number for row in rounds if silent.device_id in row.cohort}
    told = {row.round: row for row in store.history.events(RUN, "left-out")}
    assert {row.device for row in [*store.history.events(RUN, "late"), *told.values()]} <= {silent.device_id}
    if not RUNS[method].one_exchange:  # such a method asks a device only for what it lacks, and has a pause of its own
        assert (with_it, late) == ({1, 2, 4}, {1, 2, 4})
        assert [row.text for number, row in told.items() if number < ROUNDS] == [
            f"{silent.device_id} missed a deadline in {late} consecutive rounds; "
            f"it is left out until round {last} has ended"
            for late, last in ((2, 3), (3, 6))
        ]
    assert len(late) <= 3
    assert_no_upload_lost(store)
    store.close()


def test_device_without_which_no_sum_is_made_is_always_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, specs, _ = prepare(replace(RUNS["classstats_secure"], devices=3, rounds=1, alpha=10.0), tmp_path / "work")
    store, clock = Store.in_memory(), MovedClock()
    store.asks.clock = clock.clock()
    with ExitStack() as stack:
        *honest, silent = (stack.enter_context(make_device(spec, MemoryLink(DeviceApi(store)))) for spec in specs)
        decline_before(silent, 5, monkeypatch)
        asyncio.run(Engine(store, config, Turns(store, honest, silent, clock)).run())
    rounds = store.runs.rounds(RUN)
    assert [row.status for row in rounds] == ["short"] * 4 + ["closed"]
    assert {len(row.cohort) for row in rounds} == {3}
    store.close()


# --- restart, return, and too few


def config_for(**run: object) -> RunConfig:
    return run_config(
        {
            "run": {"name": RUN, "method": "feddkc", "rounds": 6, "min_devices": 2, "quorum": 0.5, **run},
            "contract": {"classes": 10, "input_shape": [1, 8, 8], "knowledge_type": "float32"},
            "method": {"server_epochs": 1},
            "server": {"torch_device": "cpu"},
        }
    )


class Away:
    """Answering devices of which one does nothing in some rounds; the engine dies at the first wait of one round."""

    def __init__(self, store: Store, clock: MovedClock, away: set[int], dies_in: int = 0) -> None:
        self._store, self._clock, self._away, self._dies_in = store, clock, away, dies_in
        api = DeviceApi(store)
        self.devices = [AnsweringDevice(MemoryLink(api), RUN, f"d{number}") for number in range(2)]

    async def wait(self, seconds: float = 0.0) -> None:
        self._clock.pass_time(seconds)
        opened = self._store.runs.open_round(RUN)
        if opened is not None and opened.number == self._dies_in:
            self._dies_in = 0
            raise Crash
        if opened is None or opened.number not in self._away:
            self.devices[1].step()
        elif self._store.asks.devices_with_open(RUN) == {"d1"}:
            self._clock.pass_time(1000.0)
        self.devices[0].step()

    def wake_other(self) -> None:
        """Devices in this process need no wake-up."""


def cohorts(config: RunConfig, away: set[int], dies_in: int = 0) -> list[list[str]]:
    store, clock = Store.in_memory(), MovedClock()
    store.asks.clock = clock.clock()
    waker = Away(store, clock, away, dies_in)
    with suppress(Crash):
        asyncio.run(Engine(store, config, waker).run())
    if dies_in:
        asyncio.run(Engine(store, config, waker).run())
    assert store.runs.existing(RUN).status == "finished"
    assert_no_upload_lost(store)
    return [list(row.cohort) for row in store.runs.rounds(RUN)]


BOTH, ONE = ["d0", "d1"], ["d0"]


def test_device_that_answers_again_is_asked_in_every_round_again() -> None:
    assert cohorts(config_for(), away={1, 2}) == [BOTH, BOTH, ONE, BOTH, BOTH, BOTH]


@pytest.mark.parametrize("dies_in", [2, 3, 4, 5])
def test_who_is_left_out_survives_the_death_of_the_engine(dies_in: int) -> None:
    assert cohorts(config_for(), away={1, 2, 4}, dies_in=dies_in) == [BOTH, BOTH, ONE, BOTH, ONE, ONE]


def test_device_needed_for_quorum_is_always_asked() -> None:
    assert cohorts(config_for(quorum=1.0, rounds=2), away={1, 2, 3}) == [BOTH] * 5
