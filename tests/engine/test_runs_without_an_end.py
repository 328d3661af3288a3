"""`[run] rounds = 0`: rounds when the method has something to do, and nothing at all in between.

Devices and engine play in one process. A method writes down which version of whose rows its state has; `Acts` changes
the fleet whenever the engine has nothing to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine.fragile import Crash, Fragile, Fuse
from support.answering import AnsweringDevice
from support.fleets import SMALL, prepare
from support.forked import ForkedEngine
from support.processes import wait_until
from support.sqlite import tables_of

from fleetdistill.knowledge import SampleKnowledge
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_lab.simulation.spec.device import make_device
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.engine.forgetting import ask_to_forget
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.methods.base import Notes, ServerMethod  # type: ignore[attr-defined]
from fleetdistill_server.methods.cohort import Cohort
from fleetdistill_server.methods.traffic import Exchange, Sizes
from fleetdistill_server.store.clock import Clock
from fleetdistill_server.store.states import UploadStatus
from fleetdistill_server.store.store import Store

RUN = "open"
_LOOKS = 5
"""So often in a row the engine finds nothing to do before the next act."""


class Keeping(ServerMethod):
    """Keeps whose rows it has, in which version; asks everybody once more where somebody was forgotten."""

    picks_devices = True

    def __init__(self, other: ServerMethod) -> None:
        super().__init__(other.config, other.context)
        self.parts: dict[str, str] = {}
        self.merged: list[str] = []
        self.looks = 0

    @classmethod
    def exchanges(cls, config: Any, sizes: Sizes) -> Sequence[Exchange]:
        rows = SampleKnowledge.schema(rows=sizes.samples, features={}, columns=())
        return [Exchange(step="train", up={"knowledge": rows})]

    def is_due(self, present: Mapping[str, str]) -> bool:
        self.looks += 1
        return any(self.parts.get(device) != version for device, version in present.items()) or self._is_old

    @property
    def _is_old(self) -> bool:
        return self.merged != sorted(self.parts)

    async def round(self, cohort: Cohort) -> None:
        lacking = [device for device in cohort.devices if self.parts.get(device) != cohort.data_versions[device]]
        async for answer in cohort.ask("train", to=lacking or cohort.devices):
            self.parts[answer.device] = cohort.data_versions[answer.device]
        self.merged = sorted(self.parts)

    def forget(self, device: str, notes: Notes) -> None:
        self.parts.pop(device, None)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self.parts, "merged": self.merged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.parts, self.merged = dict(state.get("parts", {})), list(state.get("merged", []))


class Over(Exception):
    """There are no acts left."""


class Fleet:
    """A store, its devices, and the waker of its engine.

    Attributes:
        devices: Those that call; the others are away.
        acts: What is still to happen, each when the engine has nothing to do.
    """

    def __init__(self, count: int = 2) -> None:
        self.store = Store.in_memory()
        self.api = DeviceApi(self.store)
        self.devices: dict[str, AnsweringDevice] = {}
        self.acts: list[Callable[[], None]] = []
        self.fuse = Fuse()
        self._quiet = 0
        for number in range(count):
            self.come(f"d{number}", b"first")

    def come(self, name: str, version: bytes = b"") -> None:
        self.devices[name] = AnsweringDevice(MemoryLink(self.api), RUN, name, data_version=version)

    def leave(self, name: str) -> None:
        device = self.devices.pop(name)
        self.api.leave(service_pb2.LeaveRequest(identity=device.identity))

    def forget(self, name: str) -> None:
        ask_to_forget(self.store, RUN, name, served=True)

    async def wait(self, seconds: float = 0.0) -> None:
        self.fuse.touch()
        for device in self.devices.values():
            device.step()
        self._quiet = 0 if self.store.runs.open_round(RUN) is not None else self._quiet + 1
        if self._quiet == _LOOKS:
            self._quiet = 0
            if not self.acts:
                raise Over
            self.acts.pop(0)()

    def wake_other(self) -> None:
        self.fuse.touch()

    def play(self, *acts: Callable[[], None], method: type[Keeping] = Keeping, **run: Any) -> Keeping:
        """Runs an engine until it has nothing to do and no act is left; returns its method."""
        self.acts = [*acts]
        return self.go_on(self.store, method, **run)

    def go_on(self, store: Any, method: type[Keeping] = Keeping, **run: Any) -> Keeping:
        engine = Engine(store, config_for(**run), self)
        made = method(engine.method)
        engine.method = made
        with contextlib.suppress(Over):
            asyncio.run(engine.run())
        return made

    def asked(self) -> list[list[str]]:
        """Whom each round has asked."""
        numbers = [row.number for row in self.store.runs.rounds(RUN)]
        return [[ask.device for ask in self.store.asks.of_step(RUN, number, 1)] for number in numbers]

    def statuses(self) -> list[str]:
        return [row.status for row in self.store.runs.rounds(RUN)]


def config_for(**run: Any) -> RunConfig:
    return run_config(
        {
            "run": {"name": RUN, "method": "feddkc", "rounds": 0, "min_devices": 2, **run},
            "contract": {"classes": 10, "input_shape": [1, 8, 8], "knowledge_type": "float32"},
            "server": {"torch_device": "cpu"},
        }
    )


def hexed(**versions: bytes) -> dict[str, str]:
    return {device: version.hex() for device, version in versions.items()}


# --- who is there


def test_a_method_learns_that_too_few_devices_are_left() -> None:
    """Else a device that leaves alone and returns would not be asked again after an ask that it missed."""
    seen: list[list[str]] = []

    class Seeing(Keeping):
        def update_present(self, present: Collection[str]) -> None:
            seen.append(sorted(present))

    fleet = Fleet()
    returns = partial(fleet.devices.update, d0=fleet.devices["d0"])
    fleet.play(partial(fleet.leave, "d1"), partial(fleet.leave, "d0"), returns, method=Seeing)
    assert seen[-3:] == [["d0"], [], ["d0"]]
    assert fleet.statuses() == ["closed"]


# --- idle


def test_an_idle_run_computes_nothing_and_writes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fleet = Fleet()
    seen: list[tuple[int, int]] = []
    method: list[Keeping] = []

    class Watched(Keeping):
        def __init__(self, other: ServerMethod) -> None:
            super().__init__(other)
            method.append(self)

    def look() -> None:
        seen.append((tables_of(fleet.store).conn.total_changes, method[0].looks))

    fleet.play(*[look] * 10, method=Watched)
    assert fleet.asked() == [["d0", "d1"]]
    assert len(seen) == 10
    assert len(set(seen)) == 1
    assert sum("no round is due until" in record.message for record in caplog.records) == 1
    assert fleet.store.runs.existing(RUN).status == "running"


def test_method_with_endless_work_goes_on_until_stopped() -> None:
    class Always(Keeping):
        def is_due(self, present: Mapping[str, str]) -> bool:
            return ServerMethod.is_due(self, present)

        async def round(self, cohort: Cohort) -> None:
            if cohort.completed == 7:
                raise Over
            await super().round(cohort)

    fleet = Fleet()
    fleet.play(method=Always)
    assert fleet.statuses() == ["closed"] * 7 + ["open"]


# --- what a round is due for


def test_a_newcomer_is_asked_and_nobody_else() -> None:
    fleet = Fleet()
    method = fleet.play(lambda: fleet.come("d2", b"its own"))
    assert fleet.asked() == [["d0", "d1"], ["d2"]]
    assert method.parts == hexed(d0=b"first", d1=b"first", d2=b"its own")


def test_device_is_asked_again_for_other_rows_not_for_returning() -> None:
    fleet = Fleet()

    def back() -> None:
        fleet.come("d1", b"first")
        fleet.devices["d1"].identity.CopyFrom(left)

    left = fleet.devices["d1"].identity
    fleet.play(
        lambda: fleet.devices["d0"].change_data(b"second"),
        lambda: fleet.leave("d1"),
        back,
        lambda: fleet.devices["d0"].change_data(b"second"),
    )
    assert fleet.asked() == [["d0", "d1"], ["d0"]]


def test_after_a_device_was_forgotten_the_others_are_told() -> None:
    fleet = Fleet(3)
    method = fleet.play(lambda: fleet.forget("d1"))
    assert fleet.asked() == [["d0", "d1", "d2"], ["d0", "d2"]]
    assert method.parts == hexed(d0=b"first", d2=b"first")
    assert fleet.store.devices.to_forget(RUN) == []


def test_a_device_is_forgotten_while_nothing_is_due() -> None:
    fleet = Fleet()
    method = fleet.play(lambda: fleet.leave("d0"), lambda: fleet.leave("d1"), lambda: fleet.forget("d0"))
    assert method.parts == hexed(d1=b"first")
    assert len(fleet.asked()) == 1, "nobody is there who could be told"
    row = fleet.store.devices.get(RUN, "d0")
    assert row is not None
    assert row.forgotten_at is not None


# --- who must be there


def test_first_round_waits_for_min_devices_and_others_for_one() -> None:
    fleet = Fleet(1)
    fleet.play(
        lambda: fleet.come("d1", b"first"),
        lambda: fleet.leave("d0"),
        lambda: fleet.leave("d1"),
        lambda: fleet.come("d2", b"alone"),
    )
    assert fleet.asked() == [["d0", "d1"], ["d2"]]


def test_method_asking_everybody_always_waits_for_min_devices() -> None:
    class Everybody(Keeping):
        picks_devices = False

    fleet = Fleet()
    fleet.play(
        lambda: fleet.leave("d0"), lambda: fleet.leave("d1"), lambda: fleet.come("d2", b"alone"), method=Everybody
    )
    assert fleet.asked() == [["d0", "d1"]]


def test_a_newcomer_is_of_the_cohort_whatever_a_round_would_draw() -> None:
    fleet = Fleet(6)
    fleet.play(lambda: fleet.come("d7", b"late"), devices_per_round=2, min_devices=6)
    assert fleet.asked()[-1] == ["d7"]
    assert [len(row.cohort) for row in fleet.store.runs.rounds(RUN)] == [6, 7]


# --- stops and kills


def test_a_run_that_was_stopped_goes_on_without_a_round() -> None:
    fleet = Fleet()
    before = fleet.play()
    after = fleet.play()
    assert after.parts == before.parts == hexed(d0=b"first", d1=b"first")
    assert fleet.asked() == [["d0", "d1"]]


class Hasty(AnsweringDevice):
    """Has other rows as soon as it has answered, and checks in with them before the engine has taken the answer."""

    made_of: bytes = b""

    def _answer(self, ask: service_pb2.Ask) -> None:
        super()._answer(ask)
        self.made_of = self.data_version
        if self.data_version == b"first":
            self.change_data(b"second")
            self._check_in()


def with_a_hasty_device(fuse: Fuse) -> Fleet:
    fleet = Fleet()
    fleet.fuse = fuse
    fleet.devices["d0"] = Hasty(MemoryLink(fleet.api), RUN, "d0", data_version=b"first")
    with contextlib.suppress(Crash):
        fleet.go_on(Fragile(fleet.store, fuse))
    fleet.fuse = Fuse()
    return fleet


@pytest.mark.long
@pytest.mark.slow
def test_engine_dying_at_any_step_never_takes_old_rows_for_new() -> None:
    """A replayed round sees the versions of its start, though a device has others by now."""
    undisturbed = Fuse()
    with_a_hasty_device(undisturbed)
    assert undisturbed.touched > 40
    for moment in range(1, undisturbed.touched + 1, 2):  # each call is touched before and after
        fleet = with_a_hasty_device(Fuse(blows_at=moment))
        method = fleet.play()
        device = fleet.devices["d0"]
        assert isinstance(device, Hasty)
        assert method.parts == hexed(d0=b"second", d1=b"first"), f"step {moment} of {undisturbed.touched}"
        assert device.made_of == b"second"
        assert [ask for ask in fleet.asked() if "d0" in ask] == [["d0", "d1"], ["d0"]]
        assert fleet.store.history.events(RUN, "replay-differs") == []
        fleet.store.close()


def test_the_versions_of_a_round_that_is_over_are_not_kept() -> None:
    fleet = Fleet()
    fleet.play()
    assert [row.data_versions for row in fleet.store.runs.rounds(RUN)] == [{}]


class Lenient(Keeping):
    """Always has something to ask, and completes a round without answers."""

    async def round(self, cohort: Cohort) -> None:
        async for _ in cohort.ask("train", quorum=0.0):
            pass


class Declining(Fleet):
    """Devices that decline all rounds but some; the time passes while the engine pauses.

    Attributes:
        pauses: Seconds of pause after each round.
    """

    def __init__(self, rounds: int, answers: Collection[int] = ()) -> None:
        super().__init__()
        self.rounds, self.answers = rounds, answers
        self.now, self.pauses = 0.0, dict[int, float]()
        self.store.asks.clock = Clock(lambda: self.now, lambda: self.now)

    async def wait(self, seconds: float = 1.0) -> None:
        rounds = len(self.store.runs.rounds(RUN))
        if self.store.runs.open_round(RUN) is None:
            self.pauses[rounds] = self.pauses.get(rounds, 0.0) + seconds
            self.now += seconds
            if rounds == self.rounds:
                raise Over
            if not rounds:
                await super().wait()
        elif rounds in self.answers:
            await super().wait()
        else:
            for device in self.store.asks.devices_with_open(RUN):
                ask = self.store.asks.next_open(RUN, device)
                assert ask is not None
                self.store.asks.close(ask.id, "declined")


def test_rounds_that_nobody_answers_come_ever_more_rarely() -> None:
    """Devices that decline are not asked once more at once, though the round was completed without them."""
    fleet = Declining(12)
    fleet.play(method=Lenient)
    assert fleet.statuses() == ["closed"] * 12
    pauses = [fleet.pauses[number] for number in range(1, 12)]
    assert pauses == pytest.approx([min(0.1 * 2**number, 60.0) for number in range(11)])


def test_an_answer_ends_the_pauses_after_unanswered_rounds() -> None:
    fleet = Declining(7, answers=(3, 4))
    fleet.play(method=Lenient)
    assert fleet.statuses() == ["closed"] * 7
    pauses = [fleet.pauses.get(number, 0.0) for number in range(1, 7)]
    assert pauses == pytest.approx([0.1, 0.2, 0.0, 0.0, 0.1, 0.2])


@pytest.mark.slow
@pytest.mark.long
def test_killed_engine_process_goes_on_and_ends_well_at_stop(tmp_path: Path) -> None:
    """FedAvg, which always has something to do, so there are rounds to be killed in."""
    config, specs, work = prepare(replace(SMALL, method="fedavg"), tmp_path / "work")
    config = config.model_copy(update={"run": config.run.model_copy(update={"rounds": 0})})
    with ExitStack() as stack:
        engine = ForkedEngine((config, specs, work))
        stack.callback(engine.kill)
        store = Store.open(Path(config.server.store))
        stack.callback(store.close)
        link = MemoryLink(DeviceApi(store, wake_engine=engine.pipe.poke))
        devices = [stack.enter_context(make_device(spec, link)) for spec in specs]

        def closed_rounds() -> int:
            return store.runs.completed_rounds(config.run.name)

        def close_two_rounds() -> None:
            """Counted from the last engine's: it may have closed one more before it was killed."""
            before = closed_rounds()
            engine.start()

            def are_closed() -> bool:
                run = store.runs.get(config.run.name)
                if run is not None and run.contract:
                    for device in devices:
                        device.step(0.0)
                return closed_rounds() >= before + 2

            wait_until(are_closed, "two closed rounds")

        for _ in range(2):
            close_two_rounds()
            engine.kill()
        close_two_rounds()
        assert engine.process is not None
        assert engine.process.pid is not None
        os.kill(engine.process.pid, signal.SIGTERM)
        engine.wait_for_the_end()
        assert store.runs.existing(config.run.name).status == "running"
        assert {row.status for row in store.runs.rounds(config.run.name)} <= {"closed", "open"}
        used = [row.status for row in store.asks.uploads(config.run.name)]
        assert set(used) <= {"used", "acknowledged"}
        assert used.count(UploadStatus.USED) >= 5 * len(devices)
