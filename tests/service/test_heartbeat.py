"""An engine that hangs is seen, and killed; one that starts, computes for long, or is watched by a sleeper is not."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.answering import AnsweringFleet
from support.processes import COMMAND, PATIENCE_SECONDS, is_alive, wait_until
from support.serving import ENGINE, FRONT, RUN, completed, serve, write_config
from typer.testing import CliRunner

from fleetdistill_server.cli.app import app
from fleetdistill_server.config.run_config import load_run_config
from fleetdistill_server.config.server_config import ServerConfig
from fleetdistill_server.event_kinds import ENGINE_FAILED, PROCESS_HANGS
from fleetdistill_server.service import engine_process, front_process, heartbeat, serve_lock
from fleetdistill_server.service.engine_files import engine_directory
from fleetdistill_server.service.engine_process import EngineProcess, EngineSlot
from fleetdistill_server.service.front_process import FrontProcess
from fleetdistill_server.service.heartbeat import (
    FILE,
    FRONT_FILE,
    SUPERVISOR_FILE,
    HeartbeatMonitor,
    clear_heartbeat,
    start_heartbeat,
)
from fleetdistill_server.service.process_state import ENGINE as ENGINE_PROCESS
from fleetdistill_server.service.process_state import ProcessFile, ProcessState
from fleetdistill_server.service.registration import serve_run
from fleetdistill_server.service.served import served
from fleetdistill_server.service.wakeups import Ends
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.views import runs as views
from fleetdistill_server.views.health import EngineHealth, problems
from fleetdistill_server.views.server import server as server_view


class Seconds:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


def beat(directory: Path, at: float, file: str = FILE) -> None:
    (directory / file).touch()
    os.utime(directory / file, (at, at))


# --- who watches


def test_seconds_without_beat_ignore_time_that_beats_report(tmp_path: Path, seconds: Seconds) -> None:
    beats = HeartbeatMonitor(tmp_path, seconds)
    for at in (1e9, 1e9 - 3600, 1e9 + 3600):  # the system's clock is set back and forward
        seconds.now += 1
        assert beats.silent_seconds() > 0
        beat(tmp_path, at)
        assert beats.silent_seconds() == 0
    for past in range(1, 31):
        seconds.now += 1
        assert beats.silent_seconds() == past


def test_who_stood_still_itself_takes_nobody_for_silent(tmp_path: Path, seconds: Seconds) -> None:
    beats = HeartbeatMonitor(tmp_path, seconds)
    seconds.now += 3600
    assert beats.silent_seconds() == 1


def test_what_an_earlier_engine_left_is_no_sign_of_life(tmp_path: Path, seconds: Seconds) -> None:
    beat(tmp_path, 1e9)
    beats = HeartbeatMonitor(tmp_path, seconds)
    seconds.now += 1
    assert (beats.silent_seconds(), beats.seen) == (1, False)
    beat(tmp_path, 1e9 + 1)
    assert (beats.silent_seconds(), beats.seen) == (0, True)
    clear_heartbeat(tmp_path)
    assert not (tmp_path / FILE).exists()


@pytest.mark.long
def test_an_engine_beats_while_it_computes(tmp_path: Path) -> None:
    code = f"from pathlib import Path\nfrom {start_heartbeat.__module__} import start_heartbeat\n"
    code += f"start_heartbeat(Path({str(tmp_path)!r}))\nwhile True: pass"  # no event loop would come to its turn
    beats, heard = HeartbeatMonitor(tmp_path), 0

    def beats_again() -> bool:
        return beats.silent_seconds() == 0 and beats.seen

    with subprocess.Popen([sys.executable, "-c", code]) as process:
        try:
            while heard < 3:
                wait_until(beats_again, "a beat")
                heard += 1
                time.sleep(0.01)
        finally:
            process.kill()


# --- the supervisor


class Hung:
    """A child that lives and does nothing."""

    def __init__(self) -> None:
        self.process: Any = self
        self.arguments: list[str] = []
        self.started, self.code, self.starts = time.monotonic(), None, 0
        self.stdout: list[str] = []
        self.restarts = 0

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -signal.SIGKILL  # type: ignore[assignment]

    def wait(self) -> None:
        return

    def state(self, name: str, run: str = "") -> ProcessState:
        return ProcessState(name, run, 1 if self.code is None else None, self.starts)

    def start_again(self) -> None:
        self.code, self.starts = None, self.starts + 1


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "store")
    serve_run(opened, load_run_config(write_config(tmp_path)))
    yield opened
    opened.close()


@pytest.fixture
def hung(store: Store, tmp_path: Path, seconds: Seconds, monkeypatch: pytest.MonkeyPatch) -> tuple[EngineProcess, Hung]:
    child = Hung()
    monkeypatch.setattr(engine_process, "HeartbeatMonitor", lambda directory: HeartbeatMonitor(directory, seconds))
    monkeypatch.setattr(engine_process, "Child", lambda *_: child)
    token = store.run_control.assign(RUN)
    assert token is not None
    config = ServerConfig(server=load_run_config(write_config(tmp_path)).server)
    return EngineProcess(RUN, token, store, config, EngineSlot(Ends()), None), child


def look(engine: EngineProcess, seconds: Seconds, times: int) -> None:
    for _ in range(times):
        seconds.now += 1
        engine.look()


def test_a_hung_engine_is_killed_and_started_again(
    hung: tuple[EngineProcess, Hung],
    store: Store,
    seconds: Seconds,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, child = hung
    monkeypatch.setattr(engine_process.time, "monotonic", seconds)  # type: ignore[attr-defined]
    beat(engine_directory(tmp_path / "store", RUN), 1e9)
    look(engine, seconds, 60)
    assert (child.code, engine.state().hangs) == (None, "2001-09-09T01:46:40Z")
    assert [record.getMessage() for record in caplog.records] == [
        "the engine hangs: it has sent no heartbeat since 2001-09-09T01:46:40Z"
    ]
    look(engine, seconds, 3)
    assert (child.code, child.starts, engine.state().hangs) == (None, 1, "")
    (event,) = store.history.events(RUN, ENGINE_FAILED)
    assert event.text == "the engine hangs: it sent no heartbeat for 60 s and was killed"
    assert [record.getMessage() for record in caplog.records].count(event.text) == 1
    look(engine, seconds, 117)
    assert engine.state().problems() == []
    look(engine, seconds, 3)
    assert engine.state().problems() == [f"the engine of run {RUN!r} has not started within 120 s"]
    look(engine, seconds, 177)
    assert child.starts == 1, "the new one is given the time that its start takes"
    look(engine, seconds, 3)
    assert child.starts == 2


def test_a_hung_front_is_reported_then_killed_and_replaced(
    tmp_path: Path, seconds: Seconds, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child = Hung()
    monkeypatch.setattr(
        front_process, "HeartbeatMonitor", lambda *_, **file: HeartbeatMonitor(tmp_path, seconds, **file)
    )
    monkeypatch.setattr(front_process, "Child", lambda *_, **__: child)
    front = FrontProcess([], tmp_path, Ends(), None, lambda port: None)
    store = Store.open(tmp_path)

    def after(times: int) -> list[str]:
        for _ in range(times):
            seconds.now += 1
            front.look()
        ProcessFile(tmp_path).write([front.state()])
        return problems(store, tmp_path)

    with serve_lock.take(tmp_path, ""):
        assert after(60) == [], "it starts"
        beat(tmp_path, 1e9, FRONT_FILE)
        assert after(10) == []
        said = "the front hangs: it has sent no heartbeat since 2001-09-09T01:46:40Z"
        (problem,) = after(49)
        assert problem.startswith(said)
        states = {row["process"]: row["state"] for row in server_view(store, tmp_path).lists["processes"]}
        assert (states["front"], child.code) == ("hangs", None)
        beat(tmp_path, 1e9 + 60, FRONT_FILE)
        assert after(1) == []
        assert [record.getMessage() for record in caplog.records] == [said, "the front no longer hangs"]
        assert after(59)
        assert child.starts == 0
        assert after(1) == [], "another one starts, on the same ports"
        assert child.starts == 1
        assert after(60) == []
        assert child.starts == 1, "it has sent no heartbeat yet"
    killed = "the front sent no heartbeat for 60 s and was killed; restarting it"
    assert killed in [record.getMessage() for record in caplog.records]
    store.close()


def test_each_start_of_an_engine_has_a_token_of_its_own(
    hung: tuple[EngineProcess, Hung], store: Store, seconds: Seconds, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, child = hung
    monkeypatch.setattr(engine_process.time, "monotonic", seconds)  # type: ignore[attr-defined]
    first = engine.token
    child.code = 1  # type: ignore[assignment]
    look(engine, seconds, 2)
    assert child.starts == 1
    assert engine.token != first
    assert child.arguments[2] == engine.token == store.runs.existing(RUN).engine


# --- what people see


def test_runs_list_says_that_an_engine_at_work_hangs(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.runs.begin(RUN, {})
    store.runs.set_status(RUN, RunStatus.RUNNING, "")
    file = ProcessFile(tmp_path)

    def status() -> str:
        return str(views.runs(store, served(tmp_path, store)).lists["runs"][0]["status"])

    assert status() == "running (no server)"
    with serve_lock.take(tmp_path, RUN):
        assert status() == "running", "its engine is about to start"
        file.write([ProcessState(ENGINE_PROCESS, RUN, 1, 0)])
        assert status() == "running"
        file.write([ProcessState(ENGINE_PROCESS, RUN, 1, 0, hangs="2026-11-24T06:00:00Z")])
        assert status() == "running (engine hangs)"
        listed = CliRunner().invoke(app, ["runs", "list", "--store", str(tmp_path), "--json"])
        assert json.loads(listed.stdout)[0]["status"] == "running (engine hangs)"
        assert "hangs: it has sent no heartbeat since 2026-11-24T06:00:00Z" in listed.stderr
    store.close()


def test_a_supervisor_on_a_full_disk_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeat needs no room, unlike the file of its processes."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = Store.open(tmp_path)
    file = ProcessFile(tmp_path)
    with serve_lock.take(tmp_path, ""):
        file.write([])
        for path in tmp_path.glob("*"):
            os.utime(path, (1e9, 1e9))
        monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.0)
        (problem,) = problems(store, tmp_path)
        said = f"the supervisor hangs (process {os.getpid()}): it has sent no heartbeat since 2001-09-09T01:46:40Z"
        assert problem.startswith(said)
        with monkeypatch.context() as disk:
            disk.setattr(Path, "write_text", full)
            file.write([ProcessState("front", "", 1, 0)])
        assert problems(store, tmp_path) == []
        ProcessFile(tmp_path)
        assert not (tmp_path / SUPERVISOR_FILE).exists(), "another supervisor starts"
    store.close()


def test_the_heartbeat_that_an_ended_engine_left_is_no_hang(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.runs.begin(RUN, {})
    directory = engine_directory(tmp_path, RUN)
    directory.mkdir(parents=True)
    beat(directory, time.time() - 60)
    for status in ("running", "paused", "stopped", "preparing", "finished"):
        store.runs.set_status(RUN, RunStatus(status), "")
        for run in (RUN, ""):
            with serve_lock.take(tmp_path, run):
                ProcessFile(tmp_path).write([])
                assert (status, problems(store, tmp_path)) == (status, [])
                assert not served(tmp_path, store).hanging
    store.close()


def health_of_engine(port: int) -> int:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = health_pb2.HealthCheckRequest(service="fleetdistill.engine")
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=PATIENCE_SECONDS).status)


@pytest.mark.long
@pytest.mark.slow
def test_a_stopped_engine_is_seen_killed_and_replaced(tmp_path: Path) -> None:
    """kill -STOP: SIGTERM would wait for ever."""
    answer = health_pb2.HealthCheckResponse
    with serve(write_config(tmp_path, server_engine_timeout_seconds=25.0)) as server:
        port = server.port()
        with AnsweringFleet(port, RUN, 2):
            store = Store.open(tmp_path / "store")
            wait_until(lambda: completed(store) >= 1, "a round")
            wait_until(lambda: health_of_engine(port) == answer.SERVING, "the engine's health")
            engine = server.child(ENGINE)
            os.kill(engine, signal.SIGSTOP)
            wait_until(lambda: health_of_engine(port) == answer.NOT_SERVING, "the hang to be seen", 60)
            wait_until(lambda: not is_alive(engine), "the engine to be killed", 120)
            before = completed(store)
            wait_until(lambda: completed(store) > before, "the next engine's round", 120)
            wait_until(lambda: health_of_engine(port) == answer.SERVING, "the engine's health")
            assert "sent no heartbeat" in store.history.events(RUN, ENGINE_FAILED)[0].text
            store.close()


@pytest.mark.long
@pytest.mark.slow
def test_a_stopped_front_is_seen_until_it_goes_on(tmp_path: Path) -> None:
    with serve(write_config(tmp_path)) as server:
        server.port()
        store, front = Store.open(tmp_path / "store"), server.child(FRONT)
        wait_until((tmp_path / "store" / FRONT_FILE).exists, "the front's heartbeat")
        os.kill(front, signal.SIGSTOP)
        wait_until(lambda: "the front hangs" in "".join(problems(store, tmp_path / "store")), "the hang to be seen", 60)
        os.kill(front, signal.SIGCONT)
        wait_until(lambda: not problems(store, tmp_path / "store"), "the front to go on", 60)
        wait_until(lambda: "the front no longer hangs" in "".join(server.said), "the log")
        assert "".join(server.said).count("the front hangs: ") == 1
        events = [event.text for event in store.history.events(RUN, PROCESS_HANGS)]
        assert (len(events), events[1]) == (2, "the front no longer hangs")
        store.close()


def test_one_hung_engine_is_seen_though_the_others_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path)
    for run in ("a", "b"):
        store.runs.begin(run, {})
        store.run_control.set_setup(run, {})
        engine_directory(tmp_path, run).mkdir(parents=True)
    monkeypatch.setattr(store.database, "is_listening", lambda role: True)
    health = EngineHealth(tmp_path, store)

    def look(*beating: str) -> bool:
        for run in beating:
            beat(engine_directory(tmp_path, run), time.time() + next(later))
        return not health.problems()

    later = itertools.count(1)
    with serve_lock.take(tmp_path, "", 2):
        assert health.problems() == [], "engines that start"
        assert look("a", "b")
        monkeypatch.setattr("fleetdistill_server.views.health.SILENT_SECONDS", 1e-9)
        assert look("a", "b")
        assert not look("a")
        assert look("a", "b")
    store.close()


def test_an_engine_that_starts_may_be_silent_for_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path)
    store.runs.begin(RUN, {})
    store.run_control.set_setup(RUN, {})
    store.run_control.activate(RUN)
    monkeypatch.setattr("fleetdistill_server.views.health.SILENT_SECONDS", 0.0)
    with serve_lock.take(tmp_path, "", 1):
        assert EngineHealth(tmp_path, store).problems() == [], "it has not sent any heartbeat yet"
        engine_directory(tmp_path, RUN).mkdir(parents=True)
        beat(engine_directory(tmp_path, RUN), time.time())
        assert EngineHealth(tmp_path, store).problems()
    store.close()


# --- a signal that comes early


def catches_sigterm(pid: int) -> bool:
    """As Linux tells it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    (caught,) = (int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def answers_signal(words: Sequence[str], number: int) -> tuple[int, str, str]:
    """Sends a signal as soon as a command handles it; returns its exit status and what it printed."""
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: catches_sigterm(process.pid) or process.poll() is not None, "the handler")
            process.send_signal(number)
            output, errors = process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            process.kill()
    return process.returncode, output, errors


@pytest.mark.cold_start
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_serve_with_0_from_its_first_moment(number: int, tmp_path: Path) -> None:
    """`start.main` is what the installed command calls; before it, Python itself is starting."""
    status, output, errors = answers_signal([*COMMAND, "serve", str(write_config(tmp_path))], number)
    assert (status, "Traceback" in output + errors) == (0, False)


SIGNAL_IN_A_CALLBACK = """
import os, signal, sys, weakref

class Value: pass

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "fleetdistill_server.cli.app":
            value = Value()
            reference = weakref.ref(value, lambda _: os.kill(os.getpid(), signal.{signal}))
            del value

sys.meta_path.insert(0, Finder())
sys.argv = ["fleetdistill", *{words}]
from fleetdistill_server.start import main
main()
"""
"""A module lock of Python's imports has such a callback; what a handler raises there is discarded."""


@pytest.mark.parametrize(
    ("words", "name", "status"),
    [
        (["serve", "none.toml"], "SIGTERM", 0),
        (["serve", "none.toml"], "SIGINT", 0),
        (["simulate", "--devices", "0"], "SIGINT", 130),
    ],
)
def test_a_signal_in_a_callback_of_an_import_is_not_lost(words: list[str], name: str, status: int) -> None:
    code = SIGNAL_IN_A_CALLBACK.format(signal=name, words=words)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert (ended.returncode, "Traceback" in ended.stderr) == (status, False)
