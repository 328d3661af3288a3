"""`--track` of `serve` and `simulate`: processes that are killed, and a tracking server that is away."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.answering import AnsweringFleet
from support.processes import COMMAND, PATIENCE_SECONDS, children, free_port, is_alive, wait_until
from tracking.event_files import events_in, steps_in

from fleetdistill_console.tracking.run_figures import points_since
from fleetdistill_console.tracking.targets import Tracking, read_targets
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.store.store import Store

pytestmark = pytest.mark.slow

RUN, ROUNDS = "tracked", 6
TRACKER = "fleetdistill_console.tracking"
NEW_RUN = """
[run]
name = "first"
method = "feddkc"
rounds = 1
min_devices = 2
[contract]
classes = 10
input_shape = [1, 8, 8]
[method]
server_epochs = 1
"""


@contextlib.contextmanager
def serve(folder: Path, port: int, log: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Serves a run of random knowledge; at the end the server is killed, and what it has started ends."""
    config = {
        "run": {"name": RUN, "method": "feddkc", "rounds": ROUNDS, "min_devices": 2},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
        "method": {"server_epochs": 1},
        "server": {"listen": f"127.0.0.1:{port}", "store": str(folder / "store"), "torch_device": "cpu"},
    }
    (folder / "run.toml").write_text(as_toml(run_config(config)))
    with log.open("ab") as file:
        process = subprocess.Popen([*COMMAND, "serve", str(folder / "run.toml"), *words], stdout=file, stderr=file)
    try:
        yield process
    finally:
        started = children(process.pid)
        process.kill()
        process.wait(PATIENCE_SECONDS)
        wait_until(lambda: not [pid for pid in started if is_alive(pid)], "the processes of the server to end")


def directories(events: Path) -> list[Path]:
    return sorted(events.iterdir()) if events.exists() else []


def written(events: Path) -> int:
    """Number of rounds in the event files."""
    result = [
        directory for directory in directories(events) if "round/seconds" in events_in(directory).Tags()["scalars"]
    ]
    return sum(len(steps_in(item, "round/seconds")) for item in result)


@pytest.mark.long
def test_kills_repeat_no_round_and_absent_tracker_stops_nothing(tmp_path: Path) -> None:
    port, events, log = free_port(), tmp_path / "events", tmp_path / "log"
    away = f"http://ann:s3cret@127.0.0.1:{free_port()}"
    words = ["--track", f"tensorboard:{events}", "--track", f"mlflow:{away}"]
    with AnsweringFleet(port, RUN, 2):
        with serve(tmp_path, port, log, *words) as server:
            wait_until(lambda: written(events) >= 1, "a round in the event files")
            os.kill(wait_until(lambda: children(server.pid, TRACKER), "the tracking process")[0], signal.SIGKILL)
        with serve(tmp_path, port, log, "--until-finished", *words) as server:
            assert server.wait(PATIENCE_SECONDS) == 0
    (directory,) = directories(events)
    store = Store.open(tmp_path / "store")
    ended = [item.step for item in points_since(store, RUN, 0)]
    store.close()
    assert len(ended) >= ROUNDS
    for name in ("round/seconds", "bytes/up", "server/teacher_accuracy"):
        assert steps_in(directory, name) == ended
    assert (directory / "onnx" / "server.onnx").stat().st_size > 0
    said = log.read_text()
    assert "cannot write figures to mlflow:http://127.0.0.1" in said
    assert "s3cret" not in said


def test_event_files_have_simulation_figures_controls_and_models(tmp_path: Path) -> None:
    wanted = Simulation(
        method="fedavg",
        devices=2,
        models=("digits_mlp_small",),
        rounds=2,
        train_limit=150,
        test_limit=60,
        export="all",
        out=tmp_path / "out",
    )
    tracking = Tracking(read_targets([f"tensorboard:{tmp_path / 'events'}"]), "methods", "fedavg, seed 0")
    report = simulate(wanted, tracking=tracking)
    own, alone = sorted(directories(tmp_path / "events" / "methods"), key=lambda one: "local" in one.name)
    assert steps_in(own, "loss/train") == [1, 2]
    assert [Scalar.value for Scalar in events_in(own).Scalars("simulation/accuracy")] == pytest.approx(
        report.curves[0].accuracy
    )
    assert steps_in(alone, "simulation/accuracy") == [1, 2]
    (settings,) = events_in(own).Tensors("settings/text_summary")
    assert b"| simulation.seed | `0` |" in settings.tensor_proto.string_val[0]
    models = {path.relative_to(own).as_posix() for path in own.rglob("*.onnx")}
    assert models == {"onnx/server.onnx", *(device.onnx_file for device in report.devices)}


@pytest.mark.long
def test_all_runs_of_server_are_tracked_also_later_ones(tmp_path: Path) -> None:
    port, events, store = free_port(), tmp_path / "events", tmp_path / "store"
    server, run = tmp_path / "server.toml", tmp_path / "new.toml"
    server.write_text(
        f"[server]\nlisten = '127.0.0.1:{port}'\nstore = '{store}'\ntorch_device = 'cpu'\nengines_at_once = 2\n"
    )
    run.write_text(NEW_RUN)
    words = [*COMMAND, "serve", str(server), "--track", f"tensorboard:{events}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        wait_until(lambda: "is served on" in (tmp_path / "log").read_text(), "the server")
        for change in (["create", str(run), "--start"], ["clone", "first", "second", "--start"]):
            subprocess.run([*COMMAND, "runs", *change, "--store", str(store)], check=True)
            with AnsweringFleet(port, "first" if change[0] == "create" else "second", 2) as fleet:
                wait_until(lambda: all(device.finished for device in fleet.devices), "the devices to hear of the end")
        wait_until(lambda: written(events) >= 2, "the rounds of both runs in the event files")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_SECONDS)
    assert [directory.name.partition("-")[0] for directory in directories(events)] == ["first", "second"]
    assert all(steps_in(directory, "round/seconds") for directory in directories(events))
