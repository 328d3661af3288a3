"""`fleetdistill runs watch`: what is new in a run, said once, on a terminal, in a pipe and as JSON."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live
from support.processes import COMMAND, PATIENCE_SECONDS
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import Metric, Metrics
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_console.watch import LiveTable, sentence, show_changes
from fleetdistill_server.cli.app import app
from fleetdistill_server.operations.source import LocalStore
from fleetdistill_server.service import serve_lock
from fleetdistill_server.service.process_state import ProcessFile, ProcessState
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Counted
from fleetdistill_server.views import runs
from fleetdistill_server.views.watch import changes, follow

RUN = "r"
DEVICES = ("a", "b", "c")
CONFIG = {"run": {"name": RUN, "method": "feddkc", "rounds": 2}}


class Played:
    """A run of three devices, played move by move."""

    def __init__(self, store: Store) -> None:
        self.store = store
        store.runs.begin(RUN, CONFIG)
        for device in DEVICES:
            store.devices.register(RUN, device, b"", contract_pb2.DeviceProfile().SerializeToString())

    def moves(self) -> Iterator[str]:
        """Makes one move at a time, and names it."""
        store = self.store
        store.runs.publish_contract(RUN, b"")
        yield "started"
        store.runs.start_round(RUN, DEVICES)
        store.asks.add([Ask(**self._ask(device)) for device in DEVICES])
        yield "asked"
        self._answer("a", 1)
        yield "answered"
        store.history.add_event(RUN, "refused", "device b: NaN", number=1, device="b", code="bad-value")
        store.asks.close(2, "refused: NaN")
        self._answer("c", 3)
        store.history.add_event(RUN, "teacher-guard", "held back", number=1, device="c")
        yield "refused"
        store.runs.close_round(RUN, 1, b"c", [1, 3], {})
        store.runs.set_status(RUN, RunStatus.FINISHED, "all rounds done")
        yield "over"

    def _ask(self, device: str) -> Row:
        name = {"run": RUN, "round": 1, "step_number": 1, "device": device, "step": "train", "expects": {}}
        return {**name, "payload": None, "payload_bytes": 0, "seed": 1, "deadline_at": time.time() + 600}

    def _answer(self, device: str, ask: int) -> None:
        self.store.asks.accept_upload(ask, 1, device.encode() * 32, 10, 5)
        self.store.history.add_traffic(RUN, 1, device, "up", Counted(Counter(plan=900), Counter(plan=400)), 100)
        right = Metric(name="accuracy", split="test", sum=ask, count=4)
        self.store.history.add_figures(RUN, 1, device, Metrics(metrics=[right]))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path)


def directory(store: Store) -> Path:
    """Where the store is."""
    return Path(store.database.value("SELECT file FROM pragma_database_list WHERE name = 'main'")).parent


def found(store: Store) -> list[list[Row]]:
    """What is new after each move."""
    seen: dict[str, Row] = {}
    return [changes(store, directory(store), RUN, seen) for _ in Played(store).moves()]


# --- what is new


def test_every_move_is_told_and_told_once(store: Store) -> None:
    told = [[(item["kind"], item.get("status", item.get("event"))) for item in new] for new in found(store)]
    assert told == [
        [("run", "running (no server)")],
        [("round", "open"), ("step", None)],
        [("round", "open"), ("step", None)],
        [("round", "open"), ("step", None), ("event", "refused"), ("event", "teacher-guard")],
        [("round", "closed"), ("run", "finished")],
    ]


def test_a_round_has_answers_figures_bytes_and_guards(store: Store) -> None:
    last = found(store)[-1]
    (closed,) = [item for item in last if item["kind"] == "round"]
    seconds = closed.pop("seconds")
    assert seconds >= 0
    assert closed == {
        "kind": "round",
        "round": 1,
        "status": "closed",
        "reason": None,
        "devices": 3,
        "answers": 2,
        "used": 2,
        "reported": 0,
        "test_accuracy": 0.5,
        "guards": 1,
        "bytes_up": 2 * (400 + 100),
        "bytes_down": 0,
    }


def test_a_step_says_who_is_waited_for(store: Store) -> None:
    steps = [item for new in found(store) for item in new if item["kind"] == "step"]
    assert [(step["asked"], step["answered"], step["out"]) for step in steps] == [(3, 0, 0), (3, 1, 0), (3, 2, 1)]


def test_a_run_that_is_not_there_is_a_sentence(store: Store) -> None:
    store.runs.begin(RUN, CONFIG)
    with pytest.raises(ConfigurationError, match="there is no run 'x'; runs in the store: r"):
        changes(store, directory(store), "x", {})


def test_the_status_of_a_run_is_that_of_the_list(store: Store) -> None:
    store.runs.begin(RUN, CONFIG)
    store.runs.publish_contract(RUN, b"")

    def told() -> Row:
        (run,) = [item for item in changes(store, directory(store), RUN, {}) if item["kind"] == "run"]
        (row,) = LocalStore(directory(store)).runs().lists["runs"]
        assert {name: run[name] for name in ("status", "reason", "present")} == {
            name: row[name] for name in ("status", "reason", "present")
        }
        return run

    assert told()["status"] == "running (no server)"
    with serve_lock.take(directory(store), RUN):
        assert told()["status"] == "running"
        engine = ProcessState("engine", RUN, 1, 0, hangs="2026-01-01T00:00:00Z")
        ProcessFile(directory(store)).write([engine])
        assert told()["status"] == "running (engine hangs)"
        ProcessFile(directory(store)).write([])
        store.run_control.begin_wait(RUN, 2)
        assert told()["status"] == "waiting for devices"
        assert told()["reason"] == "needs 2 devices that are present"


def test_following_ends_with_run_and_looks_only_between_moves(store: Store) -> None:
    moves = Played(store).moves()
    told = list(follow(store, directory(store), RUN, wait=lambda: next(moves)))
    assert len(told) == 6  # once before the first move, and after each
    assert told[-1][-1]["status"] == "finished"
    assert next(moves, None) is None


# --- how it is shown


def shown(store: Store, **how: Any) -> str:
    console = Console(file=io.StringIO(), width=160, **how.pop("console", {}))
    show_changes(follow(store, directory(store), RUN), console=console, as_json=False, **how)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def over(store: Store) -> Store:
    """A run that is over, so that nobody waits."""
    for _ in Played(store).moves():
        pass
    return store


def test_a_pipe_gets_a_sentence_a_line(over: Store) -> None:
    lines = shown(over).splitlines()
    assert lines[0].startswith("round 1, train: 2 of 3 answers, 1 out")
    assert lines[1] == "round 1, refused (b bad-value): device b: NaN"
    assert lines[2] == "round 1, teacher-guard (c): held back"
    assert lines[3].startswith("round 1: closed, 3 devices, 2 answers, 2 used, 0 reported, ")
    assert lines[3].endswith(" s, test accuracy 50.0%, guards 1, 1.0 kB up, 0 B down")
    assert lines[4] == "run r (feddkc): finished: all rounds done, 1 of 2 rounds, 0 devices present"
    assert len(lines) == 5


def test_a_run_without_an_end_is_told_so(store: Store) -> None:
    store.runs.begin(RUN, {"run": {**CONFIG["run"], "rounds": 0}})
    (run,) = changes(store, directory(store), RUN, {})
    assert (
        sentence(run) == "run r (feddkc): preparing (no server), 0 rounds completed, until stopped, 0 devices present"
    )
    one = {**run, "completed_rounds": 1, "present": 1}
    assert sentence(one) == "run r (feddkc): preparing (no server), 1 round completed, until stopped, 1 device present"


def test_a_terminal_gets_a_table_that_stays(over: Store) -> None:
    text = shown(over, console={"force_terminal": True})
    assert "\x1b[" in text
    for word in ("test accuracy", "closed", "50.0%", "1.0 kB", "finished", "teacher-guard", "train: 2 of 3 answers"):
        assert word in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 24), (80, 10), (80, 60)])
def test_what_goes_on_now_stays_on_the_screen_above_the_rounds(width: int, height: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height)
    live = Live(console=console, auto_refresh=False)
    step = {"kind": "step", "round": 41, "step": "train", "answered": 3, "asked": 12, "out": 2}
    event = {"kind": "event", "event": "late", "round": 40, "device": "d1", "code": "", "text": "word " * 60}
    run = {"kind": "run", "run": RUN, "method": "feddkc", "status": "running", "reason": "", "present": 12}
    LiveTable(live).show(
        [*map(closed_round, range(1, 41)), *[event] * 9, step, {**run, "completed_rounds": 40, "wanted_rounds": 99}]
    )
    lines = ["".join(part.text for part in line).strip() for line in console.render_lines(live.renderable, pad=False)]
    assert len(lines) <= height
    assert lines[0].startswith("run r (feddkc): running, 40 of 99 rounds")
    assert lines[1] == "round 41, train: 3 of 12 answers, 2 out"
    events = min(8, height - 2)
    assert all(line.startswith("round 40, late (d1): word word") for line in lines[2 : 2 + events])
    rounds = [line.split()[0] for line in lines if "closed" in line]
    assert rounds == [str(number) for number in range(1, 41)][-len(rounds) :] if rounds else height == 10
    assert len(rounds) >= min(20, height - 13)


def closed_round(number: int) -> Row:
    figures = {"devices": 12, "answers": 12, "used": 12, "reported": 0, "test_accuracy": 0.9, "guards": 0}
    sizes = {"bytes_up": 123_456_789, "bytes_down": 12_345_678, "seconds": 123.4}
    return {"kind": "round", "round": number, "status": "closed", "reason": None, **figures, **sizes}


def test_each_figure_of_the_table_stands_under_its_name() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    live = Live(console=console, auto_refresh=False)
    run = {"kind": "run", "run": RUN, "method": "feddkc", "status": "running", "reason": "", "present": 12}
    row = {**closed_round(7), "devices": 12, "answers": 11, "used": 10, "guards": 2}
    LiveTable(live).show([{**run, "completed_rounds": 7, "wanted_rounds": 9}, row])
    *_, names, cells = ("".join(part.text for part in line) for line in console.render_lines(live.renderable))
    columns = ["round", "status", "devices", "answers", "used", "test accuracy", "guards", "up", "down", "seconds"]
    assert re.split("  +| (?!accuracy)", names.strip()) == columns
    values = ["7", "closed", "12", "11", "10", "90.0%", "2", "123.46 MB", "12.35 MB", "123.4"]
    assert re.split(" +(?!MB)", cells.strip()) == values


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_device_says_is_shown_and_never_obeyed(over: Store, terminal: bool) -> None:
    hostile = "[bold]x[/bold]\x1b]0;owned\x07\nround 9: all is well"
    over.history.add_event(RUN, "declined", hostile, number=1, device="a")
    text = shown(over, console={"force_terminal": terminal})
    assert "[bold]x[/bold]\\x1b]0;owned\\x07\\nround 9: all is well" in text


def test_a_servers_status_is_shown_and_never_obeyed() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    rounds = [{**closed_round(number), "status": "[bold]x[/bold]\x1b]0;owned"} for number in range(1, 1000)]
    run = {"kind": "run", "run": RUN, "method": "feddkc", "status": "finished", "reason": "", "present": 12}
    show_changes([[*rounds, {**run, "completed_rounds": 1, "wanted_rounds": 1}]], as_json=False, console=console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[bold]x[/bold]\\x1b]0;owned" in text
    assert "\x1b]0;" not in text


def test_the_command_gives_one_json_object_a_line(over: Store, tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["runs", "watch", RUN, "--store", str(tmp_path), "--json"])
    assert said.exit_code == 0
    assert [json.loads(line)["kind"] for line in said.stdout.splitlines()] == ["step", "event", "event", "round", "run"]
    said = CliRunner().invoke(app, ["runs", "watch", "x", "--store", str(tmp_path)])
    assert (said.exit_code, said.stdout) == (1, "")


def test_ctrl_c_ends_it_cleanly_in_mid_run(store: Store, tmp_path: Path) -> None:
    moves = Played(store).moves()
    next(moves)
    command = [*COMMAND, "runs", "watch", RUN, "--store", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("run r (feddkc): running")
            next(moves)
            assert process.stdout.readline().startswith("round 1: open, 3 devices, 0 answers")
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")
    assert "Traceback" not in rest


def test_an_event_of_the_run_has_no_round(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.runs.begin("digits", {"run": {"name": "digits", "method": "fedavg", "rounds": 3}})
    store.history.add_event("digits", "engine-failed", "the engine was killed")
    (event,) = [change for change in changes(store, tmp_path, "digits", {}) if change["kind"] == "event"]
    assert sentence(event) == "engine-failed: the engine was killed"
    (shown,) = runs.run(store, "digits").lists["events"]
    assert shown["round"] is None
    store.close()
