"""What `health`, the dashboard and `runs list` say is wrong with a server, from what its supervisor writes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from support.live_front import prepare_store
from typer.testing import CliRunner

from fleetdistill_console.dashboard.pages.server import sentence, tiles
from fleetdistill_server.cli.app import app
from fleetdistill_server.operations.source import LocalStore
from fleetdistill_server.service import run_changes, serve_lock
from fleetdistill_server.service.engine_files import engine_directory
from fleetdistill_server.service.heartbeat import FILE as HEARTBEAT
from fleetdistill_server.service.process_state import ENGINE, FRONT, ProcessFile, ProcessState
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.views.health import EngineHealth, problems
from fleetdistill_server.views.server import server


@pytest.mark.parametrize(
    ("front", "engine", "waits", "says"),
    [
        (1, 2, "", []),
        (1, None, "", []),  # of a run that was paused
        (
            1,
            None,
            "has failed and is started again at 12",
            ["the engine of run 'r' has failed and is started again at 12"],
        ),
        (
            None,
            2,
            "",
            ["the front does not run, so no device can call, or not for long; the supervisor starts it again"],
        ),
    ],
)
def test_a_process_that_does_not_run_is_a_problem(
    tmp_path: Path, front: int | None, engine: int | None, waits: str, says: list[str]
) -> None:
    store = Store.open(tmp_path)
    with serve_lock.take(tmp_path, ""):
        ProcessFile(tmp_path).write(
            [ProcessState(FRONT, "", front, 0), ProcessState(ENGINE, "r", engine, 1, waits=waits)]
        )
        assert problems(store, tmp_path) == says
        assert EngineHealth(tmp_path, store).problems() == (says if waits else []), "as `fleetdistill health` says it"
        states = {row["process"]: row["state"] for row in server(store, tmp_path).lists["processes"]}
        ended = "starts again" if waits else "ends"
        assert states["engine"] == ("works" if engine else ended)
    store.close()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("keep_free_bytes = 0", ""),
        ("keep_free_bytes = 0\ndisk_budget_bytes = 1000000000000", ""),
        (
            "keep_free_bytes = 0\ndisk_budget_bytes = 5000000",
            "`fleetdistill runs prune RUN`, or raise [server] disk_budget_bytes, which is 5.00 MB",
        ),
        (
            "keep_free_bytes = 1000000000000000000",
            "free some space, or lower [server] keep_free_bytes, which is 1000000000.00 GB",
        ),
    ],
)
def test_a_limit_of_the_disk_that_is_reached_is_a_problem(tmp_path: Path, settings: str, says: str) -> None:
    store = Store.open(tmp_path)
    (tmp_path / "payload").write_bytes(bytes(5_000_000))
    (tmp_path / serve_lock.SERVED_FILE).write_text(f"[server]\n{settings}\n")
    with serve_lock.take(tmp_path, ""):
        result = problems(store, tmp_path)
    store.close()
    assert len(result) == bool(says)
    assert all("so uploads are refused: " in item and item.endswith(says) for item in result)


def test_a_run_that_waits_for_an_engine_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two runs, whose engines have sent a heartbeat once, the server's only engine is that of the first."""
    store, clock = Store.open(tmp_path), [0.0]
    store.database.now = lambda: clock[0]
    for run in ("first", "second"):
        clock[0] += 1
        store.runs.begin(run, {})
        store.run_control.set_setup(run, {})
        store.run_control.activate(run)
        engine_directory(tmp_path, run).mkdir(parents=True)
        (engine_directory(tmp_path, run) / HEARTBEAT).touch()
    monkeypatch.setattr("fleetdistill_server.views.health.SILENT_SECONDS", 0.0)
    with serve_lock.take(tmp_path, "", 1):
        (said,) = EngineHealth(tmp_path, store).problems()
    assert "'first'" in said
    store.close()


@pytest.mark.parametrize("restarted", [True, False])
def test_a_restarted_engine_is_not_its_predecessor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """The heartbeat in the run's folder is of an engine that hung; the supervisor lists the one in its place."""
    store = Store.open(tmp_path)
    store.runs.begin("r", {})
    store.run_control.set_setup("r", {})
    store.run_control.activate("r")
    engine_directory(tmp_path, "r").mkdir(parents=True)
    (engine_directory(tmp_path, "r") / HEARTBEAT).touch()
    monkeypatch.setattr("fleetdistill_server.views.health.SILENT_SECONDS", 0.0)
    with serve_lock.take(tmp_path, "", 1):
        ProcessFile(tmp_path).write([ProcessState(ENGINE, "r", os.getpid(), 1)] if restarted else [])
        said = EngineHealth(tmp_path, store).problems()
    assert ["'r'" in text for text in said] == ([] if restarted else [True])
    store.close()


def test_a_run_that_failed_is_told_until_it_is_started(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.runs.begin("r", {})
    store.run_control.set_setup("r", {})
    source = LocalStore(tmp_path)

    def says() -> list[str]:
        listed = CliRunner().invoke(app, ["runs", "list", "--store", str(tmp_path)]).stderr
        result = source.server().facts["failed_runs"]
        severity, text = sentence(source.server(), "")
        assert all(item in text and item in listed and severity == "bad" for item in result)
        assert (source.warnings(), source.problems()) == (result, [])
        return result

    run_changes.change(store, "r", RunStatus.RUNNING)
    run_changes.change(store, "r", RunStatus.STOPPED)
    assert says() == [], "an operator stopped it"
    for _ in range(2):
        run_changes.change(store, "r", RunStatus.RUNNING)
        assert says() == []
        store.run_control.stop_failed(
            "r", store.run_control.assign("r") or "", "the engine failed 6 times at the same point: no space"
        )
        (said,) = says()
        assert re.match(
            "run 'r' stopped after a failure at 20.*: the engine failed 6 times.*`fleetdistill runs start r`", said
        )
    store.close()


def test_without_a_server_nobody_is_present_and_runs_say_so(tmp_path: Path) -> None:
    """As after kill -9 of the supervisor, which ends its processes before they can write anything."""
    store = prepare_store(tmp_path)
    (run,) = store.runs.names()
    store.run_control.set_setup(run, {})
    for device in ("a", "b"):
        store.devices.register(run, device, b"", b"")
    store.run_control.begin_wait(run, 3)
    source = LocalStore(tmp_path)

    def says() -> tuple[str, int, set[bool], str]:
        (row,), present = source.overview().lists["runs"], set[bool]()
        assert row["status"] == source.runs().lists["runs"][0]["status"]
        for view in (source.devices(run), source.participants(run)):
            present |= {item["present"] for item in view.lists["devices"]}
        present.add(source.device(run, "a").facts["present"])
        return row["status"], row["present"], present, tiles(source.server(), [row])["Runs"]

    with serve_lock.take(tmp_path, ""):
        assert says() == ("waiting for devices", 2, {True}, "1 waiting for devices")
    assert says() == ("waiting for devices (no server)", 0, {False}, "1 without a server")
    with serve_lock.take(tmp_path, "another"):
        assert says()[0] == "waiting for devices (no server)"
    severity, text = sentence(source.server(), "")
    assert (severity, "fleetdistill serve" in text) == ("warn", True)
    store.close()
