"""How the engine's process ends, and what the supervisor makes of it; no process is started here."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetdistill.errors import (
    ConfigurationError,
    DamagedError,
    NoSpaceError,
    RunError,
    StoreError,
    StoreUnavailableError,
)
from fleetdistill_server.config.run_config import RunConfig, load_run_config
from fleetdistill_server.config.server_config import ServerConfig
from fleetdistill_server.engine import engine, process
from fleetdistill_server.event_kinds import ENGINE_FAILED
from fleetdistill_server.service import engine_process, run_changes
from fleetdistill_server.service.engine_process import MAX_FAILURES, MAX_KILLS, EngineSlot, Restarts
from fleetdistill_server.service.process_state import ProcessState
from fleetdistill_server.service.processes import EXIT_CONFIGURATION, EXIT_DAMAGED, EXIT_NO_SPACE, EXIT_STORE_AWAY
from fleetdistill_server.service.reconciliation import Reconciliation
from fleetdistill_server.service.registration import register, serve_run
from fleetdistill_server.service.supervisor import Supervisor
from fleetdistill_server.service.wakeups import Ends
from fleetdistill_server.store.records import Run
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store

RUN = "ends"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        f"[run]\nname = '{RUN}'\n[contract]\nclasses = 10\ninput_shape = [1, 8, 8]\n"
        f"[server]\nstore = {json.dumps(str(tmp_path / 'store'))}\n"
    )
    return path


def end_of(config: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> int:
    """Exit status of an engine that fails with this error."""

    async def fail(self: engine.Engine) -> None:
        raise error

    monkeypatch.setattr(engine.Engine, "run", fail)
    return engine_main(config, monkeypatch)


def engine_main(config: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(process, "end_with_parent", lambda parent: None)
    monkeypatch.setattr(process, "start_heartbeat", lambda directory: None)
    monkeypatch.setattr(sys, "argv", ["engine", str(config), *options])
    return process.main()


def failures(config: Path) -> list[str]:
    store = Store.open(config.parent / "store")
    texts = [row.text for row in store.history.events(RUN, ENGINE_FAILED)]
    store.close()
    return texts


@pytest.mark.parametrize(
    ("error", "status"),
    [(NoSpaceError("the disk is full"), EXIT_NO_SPACE), (StoreUnavailableError("no database"), EXIT_STORE_AWAY)],
)
def test_engine_waiting_has_own_exit_status_and_is_no_failure(
    config: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    assert end_of(config, monkeypatch, error) == status
    assert failures(config) == []


def test_full_disk_before_engine_begins_is_reported_once(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(directory: Path, **given: object) -> Store:
        raise NoSpaceError("the disk is full")

    monkeypatch.setattr(Store, "open", full)
    assert engine_main(config, monkeypatch) == EXIT_NO_SPACE
    assert capsys.readouterr().err.count("the disk is full") == 1
    assert engine_main(config, monkeypatch, "--waits") == EXIT_NO_SPACE
    assert capsys.readouterr().err == "", "its first process has said it"


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (RunStatus.CANCELLED, "the run is cancelled"),
        (RunStatus.STOPPED, "the run is stopped"),
        (RunStatus.PAUSED, "the run is paused"),
        (RunStatus.RUNNING, "another engine works on the run"),
    ],
)
def test_an_engine_whose_run_is_taken_says_why(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: RunStatus,
    why: str,
) -> None:
    store = Store.open(config.parent / "store")
    register(store, load_run_config(config))

    async def taken(self: engine.Engine) -> None:
        store.runs.set_status(RUN, status, "")
        raise RunError(f"run {RUN!r} was taken over by another engine")

    monkeypatch.setattr(engine.Engine, "run", taken)
    assert engine_main(config, monkeypatch, "--token", "of an earlier start") == 0
    assert failures(config) == []
    assert f"the engine stops: {why}" in capsys.readouterr().err
    store.close()


@pytest.mark.parametrize(
    "error",
    [RunError("taken over"), ConfigurationError("[method] x: unknown"), DamagedError(b"", "checkpoint 12 is damaged")],
)
def test_what_cannot_work_has_one_too(config: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    status = EXIT_DAMAGED if isinstance(error, DamagedError) else EXIT_CONFIGURATION
    assert end_of(config, monkeypatch, error) == status
    assert failures(config) == [str(error)], "the supervisor's error quotes it"


def test_a_failure_is_noted_in_the_store(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_of(config, monkeypatch, StoreError("the database failed")) == 1
    said = capsys.readouterr().err
    assert ("the engine failed: the database failed" in said, "Traceback" in said) == (True, False)
    assert end_of(config, monkeypatch, ZeroDivisionError("division")) == 1
    assert "Traceback" in capsys.readouterr().err, "nobody foresaw it"
    assert failures(config) == ["the database failed", "ZeroDivisionError: division"]


def test_what_nobody_foresaw_in_a_configuration_is_not_hidden(
    config: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path) -> RunConfig:
        raise RecursionError("so deep")

    monkeypatch.setattr(process, "load_run_config", fail)
    assert engine_main(config, monkeypatch) == 1
    assert "RecursionError: so deep" in capfd.readouterr().err


# --- the supervisor


class Ended:
    """A child whose process always ends with one exit status."""

    def __init__(self, code: int | None) -> None:
        self.process: Any = self
        self.arguments: list[str] = []
        self.restarts = 0
        self.started = time.monotonic()
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def end(self, grace_seconds: float = 0.0) -> bool:
        return True

    def state(self, name: str, run: str) -> ProcessState:
        return ProcessState(name, run, None if self.code is not None else 1, self.restarts)

    def stop(self, at_once: bool) -> None:
        pass

    @property
    def starts(self) -> int:
        return self.restarts

    def start_again(self) -> None:
        self.restarts += 1


class Seconds:
    """A clock that each look advances by a second."""

    def __init__(self, start: float) -> None:
        self.now = start

    def __call__(self) -> float:
        return self.now


@dataclass
class Service:
    """A service whose engines end as the test says."""

    start: Callable[[], Reconciliation]
    engines: Reconciliation
    store: Store
    seconds: Seconds
    failed: list[tuple[str, str]]
    child: Ended | None = None

    def look(self, code: int | None, times: int) -> Ended:
        """Looks once a second; the engine has always just ended with this code."""
        self.child = self.child or Ended(code)
        self.child.code = code
        for _ in range(times):
            self.seconds.now += 1
            self.engines.look()
        return self.child

    def run(self) -> Run:
        return self.store.runs.existing(RUN)

    def history(self) -> list[str]:
        return [f"{event.kind}: {event.text}" for event in self.store.history.events(RUN)]


@pytest.fixture
def service(config: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    loaded = load_run_config(config)
    store = Store.open(config.parent / "store")
    serve_run(store, loaded)
    seconds, failed = Seconds(time.monotonic()), list[tuple[str, str]]()
    settings = ServerConfig(server=loaded.server)
    told = lambda run, reason, is_damaged: failed.append((run, reason))  # noqa: E731
    start = lambda: Reconciliation(store, settings, [EngineSlot(Ends())], "", None, [], told)  # noqa: E731
    made = Service(start, start(), store, seconds, failed)
    monkeypatch.setattr(engine_process, "Child", lambda *_: made.child)
    monkeypatch.setattr(engine_process.time, "monotonic", seconds)  # type: ignore[attr-defined]
    yield made
    store.close()


@pytest.mark.parametrize(("code", "what"), [(EXIT_NO_SPACE, "disk space"), (EXIT_STORE_AWAY, "the database")])
def test_waiting_engine_starts_every_ten_seconds_and_logs_twice(
    service: Service, code: int, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    child = service.look(code, 1 + 11 * 20)
    assert child.starts == 20
    assert "--waits" in child.arguments, "the engine does not say again what it lacks"
    assert (service.run().status, service.history()) == ("preparing", [])
    child.code = None
    child.started = service.seconds.now
    service.look(None, 100)
    assert [record.getMessage() for record in caplog.records] == [
        f"the engine waits for {what}; it is started again every 10 s",
        f"the engine no longer waits for {what}",
    ]


def test_an_engine_that_waits_is_not_started_at_once(service: Service) -> None:
    child = service.look(EXIT_NO_SPACE, 9)
    assert child.starts == 0, "the front is looked after meanwhile"


def test_failures_of_an_engine_that_has_lived_long_do_not_add_up(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without an end may idle for months, with no round that would be completed between two failures."""
    monkeypatch.setattr(engine_process, "STEADY_SECONDS", 0.0)
    child = service.look(1, 12 * MAX_FAILURES)
    assert child.starts >= 4 * MAX_FAILURES
    assert service.failed == []


def test_run_whose_engine_is_given_up_stops_with_latest_reason(service: Service) -> None:
    old = "the engine hangs: it sent no heartbeat for 77 s and was killed"
    service.store.history.add_event(RUN, ENGINE_FAILED, old)
    child = service.look(9, 60)
    cause = "the engine exited with status 9"
    reason = f"the engine failed {MAX_FAILURES} times at the same point: {cause}"
    row = service.run()
    assert (row.status, row.reason, row.engine) == ("stopped", reason, None)
    assert child.starts == MAX_FAILURES - 1
    again = [f"{ENGINE_FAILED}: {cause}", "engine-restarted: the engine is started again after a failure"]
    assert service.history() == [
        f"{ENGINE_FAILED}: {old}",
        *again * (MAX_FAILURES - 1),
        f"{ENGINE_FAILED}: {cause}",
        f"stopped: {reason}",
    ]
    assert service.failed == [(RUN, reason)]
    assert service.engines.engines == {}, "its place is free for another run"


def test_six_quick_kills_stop_no_run_and_run_tells_restart_time(service: Service) -> None:
    cause = "the engine was killed by SIGKILL: by hand, or by the kernel because memory was short"
    child = service.look(-signal.SIGKILL, 1)
    while service.history().count(f"{ENGINE_FAILED}: {cause}") < 7:
        service.look(-signal.SIGKILL, 1)
    row = service.run()
    assert (row.status, service.failed) == ("preparing", [])
    again = re.fullmatch(rf"the engine (has failed and is started again at (\S+Z)): {re.escape(cause)}", row.reason)
    assert again is not None, row.reason
    time.strptime(again[2], "%Y-%m-%dT%H:%M:%SZ")
    assert [engine.state().waits for engine in service.engines.engines.values()] == [again[1]]
    started = run_changes.change(service.store, RUN, RunStatus.RUNNING).sentence
    assert started == f"run {RUN!r} is started: {row.reason}", "it runs no earlier"
    service.look(-signal.SIGKILL, 13)
    assert child.starts == 7
    told = rf"the engine has failed 7 times without progress, the last time at (\S+Z): {re.escape(cause)}"
    assert re.fullmatch(told, service.run().reason)
    service.look(-signal.SIGKILL, 1000)
    assert service.run().status == "stopped", "the kernel kills an engine that lacks memory each time"
    assert child.starts == MAX_KILLS - 1


@pytest.mark.parametrize("code", [1, EXIT_NO_SPACE])
def test_a_pause_ends_with_the_next_start_or_the_runs_need(service: Service, code: int) -> None:
    def waits() -> list[str]:
        return [engine.state().waits for engine in service.engines.engines.values()]

    service.look(None, 1)
    assert waits() == [""]
    service.look(code, 1)
    assert waits() != [""]
    service.look(None, 11)
    assert waits() == [""], "it works again"
    service.look(code, 1)
    run_changes.change(service.store, RUN, RunStatus.PAUSED)
    service.look(code, 1)
    assert waits() == [], "a run that is paused waits for no engine"


@pytest.mark.parametrize("done", ["a round", "a minute of waiting", "an hour"])
def test_repeated_failures_are_told_until_there_is_progress(
    service: Service, monkeypatch: pytest.MonkeyPatch, done: str
) -> None:
    def waits() -> str:
        (engine,) = service.engines.engines.values()
        return engine.state().waits

    service.look(1, 2)
    service.look(1, 2)
    service.look(None, 100)
    assert waits().startswith("has failed 2 times without progress, the last time at 20")
    assert service.run().reason == f"the engine {waits()}: the engine exited with status 1"
    if done == "a round":
        service.store.runs.start_round(RUN, [])
    elif done == "a minute of waiting":
        service.store.run_control.begin_wait(RUN, 0)
    else:
        monkeypatch.setattr(engine_process, "STEADY_SECONDS", 0.0)
    service.look(None, 1)
    assert (waits(), service.run().reason) == ("", "")


def test_restarts_are_counted_over_stops_of_the_run(service: Service) -> None:
    def restarts() -> list[int]:
        return [engine.state().restarts for engine in service.engines.engines.values()]

    service.look(1, 3)
    before = restarts()
    assert before != [0]
    run_changes.change(service.store, RUN, RunStatus.STOPPED)
    service.look(None, 2)
    assert restarts() == []
    service.child = None  # its next process is another one
    run_changes.change(service.store, RUN, RunStatus.RUNNING)
    service.look(None, 2)
    assert restarts() == before


def test_an_engine_says_why_it_failed_itself(service: Service) -> None:
    service.look(None, 1)
    service.store.history.add_event(RUN, ENGINE_FAILED, "ZeroDivisionError: division")
    service.look(1, 1)
    assert service.history() == [f"{ENGINE_FAILED}: ZeroDivisionError: division"]
    service.look(1, 1)
    service.look(-signal.SIGSEGV, 1)
    assert service.history()[2:] == [f"{ENGINE_FAILED}: the engine was killed by SIGSEGV"]


def test_engine_of_restarted_server_is_in_history_too(service: Service) -> None:
    service.look(None, 1)
    assert service.history() == []
    service.engines = service.start()  # as after a crash of the server
    service.look(None, 1)
    assert service.history() == ["engine-restarted: the server had crashed and was started again"]
    service.engines.stop(at_once=False)
    service.engines = service.start()
    service.look(None, 1)
    assert len(service.history()) == 1, "this one had ended in order"


def test_progress_of_the_run_forgets_earlier_failures(service: Service) -> None:
    for _ in range(3 * MAX_FAILURES):
        number = service.store.runs.start_round(RUN, [])
        service.look(1, 2)
        service.store.runs.close_short_round(RUN, number, "too few answers")
    assert service.run().status == "preparing"


def test_given_up_engine_is_reported_though_disk_is_full(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise NoSpaceError("the disk is full")

    monkeypatch.setattr(service.store.run_control, "stop_failed", full)
    monkeypatch.setattr(service.store.history, "add_event", full)
    service.look(EXIT_CONFIGURATION, 3)
    assert service.failed[0][1].startswith("the engine cannot run: the engine exited with status 2")
    assert list(service.engines.engines) == [RUN], "so that the reason is stored when there is space again"


@pytest.mark.parametrize(("code", "is_intact"), [(EXIT_CONFIGURATION, True), (EXIT_DAMAGED, False)])
def test_a_damaged_state_is_not_called_intact(
    config: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_intact: bool
) -> None:
    supervisor = Supervisor(load_run_config(config))
    monkeypatch.setattr(engine_process, "Child", lambda *_: Ended(code))
    with contextlib.closing(supervisor.store), contextlib.closing(supervisor.lock):
        supervisor.engines.look()  # starts the engine
        with pytest.raises(RunError) as error:
            supervisor.engines.look()
    assert ("The run's state is intact; start the server again" in str(error.value)) == is_intact


# --- when to start again


@given(
    failures=st.lists(
        st.tuples(
            st.sampled_from(["no memory at 0x2a: 17 bytes", "no memory at 0xb1: 9 bytes", "division"]),
            st.integers(0, 2),
        ),
        max_size=60,
    ),
    killed=st.booleans(),
)
def test_only_the_same_failure_at_the_same_point_stops_a_run(failures: list[tuple[str, int]], killed: bool) -> None:
    restarts, seen, before = Restarts(), list[str](), None
    most = MAX_KILLS if killed else MAX_FAILURES
    for cause, point in failures:
        pause = restarts.pause_after(cause, point, killed=killed)
        seen = [*(seen if point == before else []), cause[:9]]
        before = point
        assert restarts.repeated == seen.count(seen[-1])
        if restarts.repeated >= most:
            assert pause is None
        else:
            assert pause == min(0.2 * 2 ** (len(seen) - 1), 300)


def test_pauses_before_killed_engine_is_given_up_last_minutes() -> None:
    restarts = Restarts()
    pauses = [restarts.pause_after("killed", 1, killed=True) for _ in range(MAX_KILLS)]
    assert pauses[-1] is None
    assert sum(pauses[:-1]) > 300  # type: ignore[arg-type]
