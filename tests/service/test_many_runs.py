"""A server of many runs: which of them have an engine, as the store says and as real processes show."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.answering import AnsweringFleet
from support.processes import children, is_alive, wait_until
from support.serving import ENGINE, FRONT, call, serve, write_config

from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.config.server_config import ServerConfig, ServerSection
from fleetdistill_server.event_kinds import FRONT_RESTARTED
from fleetdistill_server.service import engine_process, run_changes, serve_lock
from fleetdistill_server.service.engine_process import EngineSlot, engines_at_once, make_slots, visible_gpus
from fleetdistill_server.service.processes import EXIT_CONFIGURATION
from fleetdistill_server.service.reconciliation import Reconciliation
from fleetdistill_server.service.run_changes import delete
from fleetdistill_server.service.served import served
from fleetdistill_server.service.wakeups import Ends, make_ends
from fleetdistill_server.store.run_control import WAIT_SECONDS
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import when
from fleetdistill_server.views import runs as views
from fleetdistill_server.views.reading import Query, read
from fleetdistill_server.views.server import server as server_view

# --- which runs have an engine, without processes


@dataclass
class FakeChild:
    """A child that runs until it is told to end, or has an exit status."""

    run: str
    code: int | None = None
    arguments: list[str] = field(default_factory=list)
    started: float = 0.0

    @property
    def process(self) -> Any:
        return self

    def poll(self) -> int | None:
        return self.code

    def end(self, grace_seconds: float = 0.0) -> bool:
        self.code = 0 if self.code is None else self.code
        return True


@dataclass
class Service:
    """A reconciliation with two places for engines."""

    directory: Path
    store: Store
    engines: Reconciliation
    children: list[FakeChild]
    failed: list[tuple[str, str]]

    def runs(self) -> list[str]:
        """The runs with an engine, after two looks: one ends engines, the next starts others in their places."""
        self.engines.look()
        self.engines.look()
        return sorted(self.engines.engines)

    def status(self) -> dict[str, str]:
        rows = views.runs(self.store, served(self.directory, self.store)).lists["runs"]
        return {row["run"]: row["status"] for row in rows}

    def reasons(self) -> dict[str, str]:
        rows = views.runs(self.store, served(self.directory, self.store)).lists["runs"]
        return {row["run"]: row["reason"] for row in rows}


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    directory = tmp_path / "store"
    store = Store.open(directory)
    made: list[FakeChild] = []
    failed: list[tuple[str, str]] = []

    def child(module: str, arguments: list[str], *_: object) -> FakeChild:
        made.append(FakeChild(Path(arguments[0]).parent.name.removeprefix("run-"), arguments=arguments))
        return made[-1]

    monkeypatch.setattr(engine_process, "Child", child)
    config = ServerConfig(server=ServerSection(store=str(directory)))
    told = lambda run, reason, is_damaged: failed.append((run, reason))  # noqa: E731
    engines = Reconciliation(store, config, [EngineSlot(Ends()), EngineSlot(Ends())], "", None, [], told)
    with serve_lock.take(directory, "", 2):
        yield Service(directory, store, engines, made, failed)
    store.close()


def create(store: Store, *names: str) -> None:
    for name in names:
        settings = {"run": {"name": name}, "contract": {"classes": 10, "input_shape": [1, 8, 8]}}
        run_changes.create(store, run_config(settings), start_it=True)


def test_first_of_queue_have_engines_and_others_wait_in_order(service: Service) -> None:
    create(service.store, "a", "b", "c", "d")
    assert service.runs() == ["a", "b"]
    assert service.status() == {"a": "preparing", "b": "preparing", "c": "queued (1 of 2)", "d": "queued (2 of 2)"}
    service.store.runs.set_status("a", RunStatus.FINISHED, "")
    assert service.runs() == ["b", "c"]
    assert service.status() == {"a": "finished", "b": "preparing", "c": "preparing", "d": "queued (1 of 1)"}


def test_a_paused_run_frees_its_place_and_comes_back_at_the_end(service: Service) -> None:
    create(service.store, "a", "b", "c")
    assert service.runs() == ["a", "b"]
    run_changes.change(service.store, "a", RunStatus.PAUSED)
    assert service.runs() == ["b", "c"]
    assert service.children[0].code == 0, "its process is told to end"
    assert service.status()["a"] == "paused"
    run_changes.change(service.store, "a", RunStatus.RUNNING)
    assert service.runs() == ["b", "c"]
    assert service.status()["a"] == "queued (1 of 1)"
    run_changes.change(service.store, "b", RunStatus.STOPPED)
    assert service.runs() == ["a", "c"]


def test_run_paused_and_resumed_between_looks_has_new_engine(service: Service) -> None:
    create(service.store, "a")
    assert service.runs() == ["a"]
    run_changes.change(service.store, "a", RunStatus.PAUSED)
    run_changes.change(service.store, "a", RunStatus.RUNNING)
    assert service.runs() == ["a"]
    assert [child.code for child in service.children] == [0, None]
    assert service.failed == []


def test_a_deleted_run_leaves_neither_process_nor_files(service: Service) -> None:
    create(service.store, "a", "b")
    assert service.runs() == ["a", "b"]
    assert (service.directory / "engines" / "run-a" / "run.toml").exists()
    delete(service.directory, service.store, "a")
    assert service.runs() == ["b"]
    assert service.children[0].code == 0
    assert [item.name for item in (service.directory / "engines").iterdir()] == ["run-b"]


def test_a_failing_run_stops_alone_with_its_reason(service: Service) -> None:
    create(service.store, "a", "b", "c")
    assert service.runs() == ["a", "b"]
    service.children[0].code = EXIT_CONFIGURATION
    service.store.history.add_event("a", "engine-failed", "[method] beta is -1, must be at least 0")
    assert service.runs() == ["b", "c"]
    shown = views.run(service.store, "a", served(service.directory, service.store)).facts
    reason = "the engine cannot run: [method] beta is -1, must be at least 0"
    assert (shown["status"], shown["reason"]) == ("stopped", f"{reason}; to continue: `fleetdistill runs start a`")
    assert service.failed == [("a", reason)]


def test_a_run_that_another_server_has_taken_is_left_to_it(service: Service) -> None:
    create(service.store, "a")
    assert service.runs() == ["a"]
    theirs = service.store.run_control.assign("a")
    assert service.runs() == []
    assert service.failed == [("a", "run 'a' was taken over by another server")]
    assert service.store.runs.existing("a").engine == theirs, "the two do not take it from each other for ever"
    run_changes.change(service.store, "a", RunStatus.PAUSED)
    run_changes.change(service.store, "a", RunStatus.RUNNING)
    assert service.runs() == ["a"]


def test_an_engine_reads_its_runs_settings_and_the_servers(service: Service) -> None:
    settings = {
        "run": {"name": "a"},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
        "server": {"torch_device": "cpu", "keep_rounds": 7, "listen": "127.0.0.1:1", "lease_seconds": 5.0},
    }
    run_changes.create(service.store, run_config(settings), start_it=True)
    service.runs()
    written = tomllib.loads((service.directory / "engines" / "run-a" / "run.toml").read_text())
    assert (written["server"]["torch_device"], written["server"]["keep_rounds"]) == ("cpu", 7)
    assert (written["server"]["listen"], written["server"]["lease_seconds"]) == ("127.0.0.1:50051", 60.0)
    assert written["server"]["store"] == str(service.directory)


def wait(service: Service, run: str, devices: int) -> None:
    """The run has waited for devices for longer than it keeps its engine."""
    service.store.run_control.begin_wait(run, devices)
    service.store.database.now = lambda: time.time() + WAIT_SECONDS


def check_in(service: Service, run: str, device: str) -> None:
    assert service.store.devices.register(run, device, b"secret", b"")


def test_run_without_devices_frees_engine_and_queues_on_return(service: Service) -> None:
    create(service.store, "a", "b", "c", "d")
    assert service.runs() == ["a", "b"]
    service.store.run_control.begin_wait("a", 2)
    assert service.runs() == ["a", "b"], "they may come at once"
    wait(service, "a", 2)
    assert service.runs() == ["b", "c"]
    assert service.status() == {
        "a": "waiting for devices",
        "b": "preparing",
        "c": "preparing",
        "d": "queued (1 of 1)",
    }
    assert service.reasons() == {"a": "needs 2 devices that are present", "b": "", "c": "", "d": ""}
    check_in(service, "a", "camera-1")
    assert service.status()["a"] == "waiting for devices"
    check_in(service, "a", "camera-2")
    assert service.status()["a"] == "queued (2 of 2)"
    assert service.runs() == ["b", "c"]
    service.store.runs.set_status("b", RunStatus.FINISHED, "")
    service.store.runs.set_status("c", RunStatus.FINISHED, "")
    assert service.runs() == ["a", "d"]
    assert service.failed == []


def test_a_run_that_waits_keeps_an_engine_that_nobody_else_needs(service: Service) -> None:
    create(service.store, "a", "b")
    assert service.runs() == ["a", "b"]
    wait(service, "a", 2)
    assert service.runs() == ["a", "b"]
    assert service.status()["a"] == "waiting for devices"
    create(service.store, "c")
    assert service.runs() == ["b", "c"]
    for run in ("b", "c"):
        wait(service, run, 1)
    assert service.runs() == ["b", "c"], "runs that wait do not take each other's engines"
    run_changes.change(service.store, "b", RunStatus.STOPPED)
    assert service.runs() == ["a", "c"]


def test_a_run_between_two_rounds_lends_its_engine(service: Service) -> None:
    clock = [time.time()]
    service.store.database.now = lambda: clock[0]
    create(service.store, "a", "b", "c")
    assert service.runs() == ["a", "b"]
    due = clock[0] + 3600
    service.store.run_control.begin_wait_until("a", due)
    assert service.runs() == ["a", "b"], "for a short pause it keeps its engine"
    clock[0] += WAIT_SECONDS
    assert service.runs() == ["b", "c"]
    assert service.status() == {"a": "idle", "b": "preparing", "c": "preparing"}
    assert service.reasons()["a"] == f"the next round starts at {when(due)}, because of min_round_seconds"
    check_in(service, "a", "camera-1")
    assert service.status()["a"] == "idle", "a device does not bring the round forward"
    service.store.run_control.begin_wait("b", 2)
    clock[0] = due - 1
    assert service.runs() == ["b", "c"]
    clock[0] = due + 1
    assert service.runs() == ["a", "c"]
    service.store.run_control.end_wait("a")
    assert service.status() == {"a": "preparing", "b": "waiting for devices", "c": "preparing"}


def test_a_run_keeps_its_engine_for_pauses_of_some_seconds(service: Service) -> None:
    """Each pause is shorter than what a run waits before it gives up its engine."""
    clock = [time.time()]
    service.store.database.now = lambda: clock[0]
    create(service.store, "a", "b", "c", "d")
    assert service.runs() == ["a", "b"]
    for _ in range(3):
        service.store.run_control.begin_wait_until("a", clock[0] + WAIT_SECONDS - 1)
        for _ in range(2):
            assert service.runs() == ["a", "b"]
            assert service.status() == {
                "a": "idle",
                "b": "preparing",
                "c": "queued (1 of 2)",
                "d": "queued (2 of 2)",
            }
            assert [row["engine"] for row in server_view(service.store, service.directory).lists["queue"]] == [
                *(True, True, False, False)
            ]
            clock[0] += 1
        service.store.run_control.end_wait("a")
        assert (service.runs(), service.status()["a"]) == (["a", "b"], "preparing")


def test_settings_that_wait_for_the_next_engine_are_told(service: Service) -> None:
    wanted: dict[str, Any] = {
        "run": {"name": "a", "method": "fedavg"},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
    }
    run_changes.create(service.store, run_config(wanted), start_it=True)
    query = partial(read, service.store, service.directory)

    def told() -> list[str]:
        return [
            query(Query("run", run="a")).facts["settings_not_in_use"],
            query(Query("settings", run="a")).facts["not_in_use"],
        ]

    assert service.runs() == ["a"]
    assert told() == ["", ""]
    changed = {**wanted, "run": {**wanted["run"], "deadline_seconds": 7.0}, "server": {"keep_rounds": 4}}
    run_changes.create(service.store, run_config(changed))
    assert told() == ["run.deadline_seconds was 600.0, is 7.0; server.keep_rounds was 1, is 4"] * 2
    run_changes.change(service.store, "a", RunStatus.PAUSED)
    assert (told(), service.runs()) == (["", ""], [])
    run_changes.change(service.store, "a", RunStatus.RUNNING)
    assert (service.runs(), told()) == (["a"], ["", ""])


def test_a_run_between_two_rounds_forgets_at_once(service: Service) -> None:
    create(service.store, "a", "b", "c")
    check_in(service, "a", "camera-1")
    assert service.runs() == ["a", "b"]
    service.store.run_control.begin_wait_until("a", time.time() + 3600)
    service.store.database.now = lambda: time.time() + WAIT_SECONDS
    assert service.runs() == ["b", "c"]
    service.store.devices.ask_to_forget("a", "camera-1")
    assert service.status()["a"] == "queued (1 of 1)"


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.devices.register("a", "camera-2", b"secret", b""),
        lambda store: store.devices.mark_absent("a", "camera-1", "device left"),
        lambda store: store.devices.ask_to_forget("a", "camera-1"),
    ],
    ids=["join", "leave", "forget"],
)
def test_an_idle_run_is_queued_by_any_change_of_its_devices(service: Service, change: Callable[[Store], None]) -> None:
    create(service.store, "a", "b", "c")
    check_in(service, "a", "camera-1")
    assert service.runs() == ["a", "b"]
    wait(service, "a", 0)
    assert service.runs() == ["b", "c"]
    assert service.status()["a"] == "idle"
    change(service.store)
    assert service.status()["a"] == "queued (1 of 1)"


def test_request_to_forget_device_queues_run_waiting_for_others(service: Service) -> None:
    create(service.store, "a", "b", "c")
    check_in(service, "a", "camera-1")
    assert service.runs() == ["a", "b"]
    wait(service, "a", 2)
    assert service.runs() == ["b", "c"]
    service.store.devices.ask_to_forget("a", "camera-1")
    assert service.status()["a"] == "queued (1 of 1)"


def test_engine_place_is_free_again_after_failed_start(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    start, attempts = engine_process.Child, itertools.count()  # type: ignore[attr-defined]

    def fail_twice(*given: Any) -> Any:
        if next(attempts) < 2:
            raise OSError("no more processes")
        return start(*given)

    monkeypatch.setattr(engine_process, "Child", fail_twice)
    create(service.store, "a", "b", "c")
    for _ in range(2):
        with pytest.raises(OSError, match="no more processes"):
            service.engines.look()
        assert service.engines.engines == {}
    assert service.runs() == ["a", "b"]


# --- how many at once


def test_by_default_each_gpu_has_one_engine_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert engines_at_once(0) == 2
    assert engines_at_once(7) == 7
    slots = make_slots([Ends()] * 3)
    assert [slot.environment()["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["3", "5", "3"]
    assert make_slots([Ends()])[0].environment() == {}, "a single engine may use them all"


@pytest.mark.parametrize(("cores", "engines"), [(1, 1), (2, 1), (8, 4), (None, 1)])
def test_without_a_gpu_there_is_one_for_two_cores(
    cores: int | None, engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(engine_process.os, "cpu_count", lambda: cores)  # type: ignore[attr-defined]
    assert engines_at_once(0) == engines


def test_gpus_are_counted_by_their_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == ["0", "1"]


def test_one_byte_of_the_front_wakes_every_engine() -> None:
    front, engines = make_ends(3)
    assert Ends.parse(str(front)) == front
    for end in front.writes:
        os.write(end, b"x")
    assert [os.read(engine.read, 9) for engine in engines] == [b"x"] * 3
    for number, one in enumerate(engines):
        os.write(one.writes[0], bytes([number]))
    assert os.read(front.read, 9) == bytes([0, 1, 2])


# --- real processes


def one_engine(folder: Path) -> Path:
    """A server.toml with one engine at once."""
    path = folder / "server.toml"
    path.write_text(
        f"[server]\nlisten = '127.0.0.1:0'\nstore = {json.dumps(str(folder / 'store'))}\nengines_at_once = 1\n"
    )
    return path


@pytest.mark.slow
@pytest.mark.long
def test_runs_are_created_paused_and_resumed_beside_a_server(tmp_path: Path) -> None:
    where = ["--store", str(tmp_path / "store")]
    server = one_engine(tmp_path)
    run = write_config(tmp_path, run_name="first", run_rounds=100_000)
    with serve(server) as running, contextlib.ExitStack() as stack:
        port = running.port()
        assert children(running.process.pid, ENGINE) == []
        assert call("runs", "create", str(run), "--start", *where).endswith("run 'first' is started\n")
        said = call("runs", "clone", "first", "second", "--set", "run.rounds=2", "--start", *where)
        assert said.startswith("run 'second' is started\nit is queued (1 of 1): all engines are at work")
        store = stack.enter_context(contextlib.closing(Store.open(tmp_path / "store")))
        for name in ("first", "second"):
            stack.enter_context(AnsweringFleet(port, name, 2))

        def completed(name: str) -> int:
            return store.runs.completed_rounds(name)

        def status(name: str) -> str:
            rows = json.loads(call("runs", "list", "--json", *where))
            return str(next(row["status"] for row in rows if row["run"] == name))

        wait_until(lambda: completed("first") >= 1, "a round of the first run")
        assert status("second") == "queued (1 of 1)"
        (engine,) = children(running.process.pid, ENGINE)
        assert call("runs", "pause", "first", *where) == "run 'first' is paused\n"
        before = completed("first"), store.runs.open_number("first")
        wait_until(lambda: not is_alive(engine), "the engine of a paused run to end")
        wait_until(lambda: status("second") == "finished", "the second run's turn, to its end")
        assert (completed("first"), store.runs.open_number("first")) == before
        wait_until(lambda: children(running.process.pid, ENGINE) == [], "no process without a run")
        call("runs", "start", "first", *where)
        wait_until(lambda: completed("first") > before[0], "the first run to go on")
        assert "short" not in [row.status for row in store.runs.rounds("first")]
        os.kill(running.child(FRONT), signal.SIGKILL)
        os.kill(running.child(ENGINE), signal.SIGKILL)
        before = completed("first"), None
        wait_until(lambda: completed("first") > before[0], "front and engine to be replaced")
        (restarted,) = store.history.events("first", FRONT_RESTARTED)
        killed = "the front was killed by SIGKILL: by hand, or by the kernel because memory was short"
        assert restarted.text == f"{killed}; it was started again"
        assert "is deleted" in call("runs", "delete", "first", "--yes", *where)
        wait_until(lambda: children(running.process.pid, ENGINE) == [], "the engine of a deleted run to end")
        wait_until(lambda: "DeleteRun: done" in "".join(running.said), "the deletion in the log")
        said = "".join(running.said)
        done = [f": {call}: done" for call in ("CreateRun", "ChangeRun start", "ChangeRun pause", "DeleteRun")]
        assert [line for line in done if line not in said] == []
        assert running.process.poll() is None


@pytest.mark.long
@pytest.mark.slow
def test_a_run_whose_devices_do_not_come_blocks_no_other(tmp_path: Path) -> None:
    where = ["--store", str(tmp_path / "store")]
    server = one_engine(tmp_path)
    run = write_config(tmp_path, run_name="first", run_rounds=2)
    with serve(server) as running, contextlib.ExitStack() as stack:
        port = running.port()
        store = stack.enter_context(contextlib.closing(Store.open(tmp_path / "store")))

        def status(name: str) -> str:
            rows = json.loads(call("runs", "list", "--json", *where))
            return str(next(row["status"] for row in rows if row["run"] == name))

        call("runs", "create", str(run), "--start", *where)
        wait_until(lambda: status("first") == "waiting for devices", "the first run to wait")
        call("runs", "clone", "first", "second", "--start", *where)
        stack.enter_context(AnsweringFleet(port, "second", 2))
        wait_until(lambda: status("second") == "finished", "the second run's turn, to its end")
        assert store.runs.completed_rounds("first") == 0
        stack.enter_context(AnsweringFleet(port, "first", 2))
        wait_until(lambda: status("first") == "finished", "the first run, whose devices have come")
        lines = [line for line in "".join(running.said).splitlines() if "run=first" in line]
    begins, ends = "waiting for 2 devices to be present", "a round is due after a wait"
    for text in (begins, "the run gives up its engine while it waits", ends):
        assert sum(text in line for line in lines) == 1, text


@pytest.mark.long
@pytest.mark.slow
def test_a_run_between_two_rounds_blocks_no_other(tmp_path: Path) -> None:
    where = ["--store", str(tmp_path / "store")]
    server = one_engine(tmp_path)
    run = write_config(tmp_path, run_name="first", run_rounds=2, run_min_round_seconds=30.0)
    with serve(server) as running, contextlib.ExitStack() as stack:
        port = running.port()
        call("runs", "create", str(run), "--start", *where)
        stack.enter_context(AnsweringFleet(port, "first", 2))

        def row(name: str) -> dict[str, Any]:
            rows = json.loads(call("runs", "list", "--json", *where))
            return dict(next(row for row in rows if row["run"] == name))

        wait_until(lambda: row("first")["status"] == "idle", "the first run's pause")
        assert re.fullmatch(r"the next round starts at \S+Z, because of min_round_seconds", row("first")["reason"])
        call("runs", "clone", "first", "second", "--set", "run.min_round_seconds=0", "--start", *where)
        stack.enter_context(AnsweringFleet(port, "second", 2))
        wait_until(lambda: row("second")["status"] == "finished", "the second run's turn, to its end")
        assert row("first")["completed_rounds"] == 1
        wait_until(lambda: row("first")["status"] == "finished", "the first run's second round")
        assert running.process.poll() is None
