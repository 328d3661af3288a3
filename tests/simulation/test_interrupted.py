"""Ctrl-C and kill -9 in a simulation; another start ends as if nothing had happened. Nothing is overwritten unasked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.forked import ForkedProgram
from support.processes import wait_until
from typer.testing import CliRunner

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill_lab.simulation import show
from fleetdistill_lab.simulation.fleet import Interrupted, simulate
from fleetdistill_lab.simulation.folder import open_folder, saved_simulation
from fleetdistill_lab.simulation.progress import Progress
from fleetdistill_lab.simulation.show import interrupted_line
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.cli.app import app
from fleetdistill_server.store.checks import is_current
from fleetdistill_server.store.sqlite_database import SqliteDatabase
from fleetdistill_server.store.store import Store

FLEET = Simulation(
    method="feddkc", devices=2, rounds=3, train_limit=60, test_limit=20, torch_device="cpu", export="all"
)
SETTINGS = ("train_limit=60", "test_limit=20", "torch_device=cpu")
OPTIONS = [word for setting in SETTINGS for word in ("--set", f"simulation.{setting}")]
OPTIONS += ["--method", "feddkc", "--devices", "2", "--rounds", "3", "--export", "all"]


def results(out: Path) -> tuple[dict[str, Any], Mapping[str, bytes]]:
    """What a simulation leaves: its report but for times, and the link that it went over; and all models."""
    report = json.loads((out / "report.json").read_text())
    del report["seconds"], report["link"]
    return report, {path.name: path.read_bytes() for path in (out / "onnx").iterdir()}


def sent_bytes(report: Mapping[str, Any]) -> int:
    """What went over the link, both ways."""
    return sum(int(row["sent_bytes"]) for row in report["traffic"])


def but_for_bytes(report: Mapping[str, Any]) -> Any:
    """A report without what was sent: a device that is killed after a download makes it, and counts it, again."""

    def stripped(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: stripped(one) for name, one in value.items() if name not in BYTES}
        return [stripped(item) for item in value] if isinstance(value, list) else value

    return stripped(report)


BYTES = (
    *("bytes", "bytes_by_round", "bytes_down", "bytes_up", "sent_down", "sent_up", "traffic"),
    *("tensor_bytes_up", "tensor_bytes_down", "envelope_bytes_up", "envelope_bytes_down", "refused_bytes_up"),
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Mapping[str, bytes]]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    report = simulate(replace(FLEET, out=out))
    assert report.acknowledged_uploads == report.used_uploads + report.reported_uploads == 6
    assert {len(curve) for curve in report.accuracy_by_round.values()} == {3}
    assert all(device.sent_up < device.bytes_up for device in report.devices), "packed, over both links"
    up = [row for row in report.traffic if row["direction"] == "up"]
    assert sum(row["sent_bytes"] for row in up) == sum(device.sent_up for device in report.devices)
    kinds = {row["kind"] for row in report.traffic if row["tensor_bytes"]}
    assert kinds == {"model_parameters", "sample_knowledge", "refined_knowledge"}
    return results(out)


class Impatient:
    """Presses Ctrl-C at one of the moments that the progress tells."""

    def __init__(self, phase: str, completed: int) -> None:
        self._moment = (phase, completed)
        self.seen: list[tuple[str, int, int]] = []

    def __call__(self, done: Progress) -> None:
        self.seen.append((done.phase, done.completed, done.total))
        if (done.phase, done.completed) == self._moment:
            raise KeyboardInterrupt


@pytest.mark.long
def test_interrupted_simulation_writes_part_and_reaches_same_end(tmp_path: Path, undisturbed: object) -> None:
    wanted = replace(FLEET, out=tmp_path / "out")
    moments = {("fleet", 0): None, ("fleet", 1): 1, ("fleet", 3): 3, ("alone", 4): 3, ("fedavg", 2): 3}
    for moment, completed in moments.items():
        with pytest.raises(Interrupted) as result:
            simulate(wanted, Impatient(*moment), if_there="resume")
        report = result.value.report
        assert (report.completed_rounds if report else None) == completed, moment
        if report is not None:
            written = json.loads((wanted.out / "report.json").read_text())
            assert (written["finished"], written["completed_rounds"], written["rounds"]) == (False, completed, 3)
            assert {len(curve) for curve in report.accuracy_by_round.values()} == {completed}
            assert (report.mean_accuracy_alone is not None) == (moment[0] == "fedavg"), "the controls that are complete"
            assert (wanted.out / "fleet.png").is_file()
    watched = Impatient("never", 0)
    report = simulate(wanted, watched, if_there="resume")
    assert report.finished
    assert results(wanted.out) == undisturbed
    assert ("alone", 3, 6) in watched.seen, "a device that had been trained alone is not trained again"
    assert ("alone", 4, 6) not in watched.seen


def test_progress_moves_while_the_controls_run(tmp_path: Path) -> None:
    watched = Impatient("never", 0)
    simulate(replace(FLEET, rounds=2, out=tmp_path / "out"), watched)
    assert [item for item in watched.seen if item[0] == "alone"] == [("alone", number, 4) for number in (1, 2, 3, 4)]
    for phase in ("fleet", "fedavg"):
        assert [item for item in watched.seen if item[0] == phase] == [(phase, number, 2) for number in (0, 1, 2)]


def start(out: Path, *options: str) -> ForkedProgram:
    log = out.parent / f"log-{len(list(out.parent.glob('log-*')))}"
    program = ForkedProgram(["fleetdistill", "simulate", "--out", out, *options], log)
    program.start()
    return program


def has_tables(file: Path) -> bool:
    """Whether a store opens at once: without its tables, it waits for the transaction that lasts for a round."""
    if not file.exists():
        return False
    with closing(SqliteDatabase.open_for_reading(file)) as database:
        return is_current(database)


def interrupt(program: ForkedProgram, out: Path, rounds: int, number: signal.Signals) -> int | None:
    """Sends a signal once so many rounds are complete; returns the exit status."""
    store: list[Store] = []

    def there() -> bool:
        assert program.is_alive, program.said
        if not store and has_tables(out / "work" / "store" / "store.sqlite"):
            store.append(Store.open(out / "work" / "store"))
        row = store[0].runs.get(RUN) if store else None
        return row is not None and row.completed_rounds >= rounds

    try:
        wait_until(there, f"round {rounds}")
        program.send(number)
        return program.ended()
    finally:
        program.kill()
        for item in store:
            item.close()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("link", ["memory", "grpc"])
def test_interrupted_or_killed_process_continues_to_same_end(
    tmp_path: Path, undisturbed: tuple[dict[str, Any], Mapping[str, bytes]], link: str
) -> None:
    out = tmp_path / "out"
    first = start(out, "--link", link, *OPTIONS)
    assert interrupt(first, out, 1, signal.SIGINT) == 130, first.said
    assert f"continue with --resume --out {out}" in first.said
    assert "Traceback" not in first.said
    assert json.loads((out / "report.json").read_text())["completed_rounds"] >= 1
    assert interrupt(start(out, "--resume"), out, 2, signal.SIGKILL) == -signal.SIGKILL
    last = start(out, "--resume")
    assert last.ended() == 0, last.said
    (report, models), (expected, expected_models) = results(out), undisturbed
    assert models == expected_models
    assert but_for_bytes(report) == but_for_bytes(expected)
    assert sent_bytes(report) >= sent_bytes(expected)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("link", ["memory", "grpc"])
def test_ctrl_c_does_not_wait_for_the_work_that_goes_on(tmp_path: Path, link: str) -> None:
    """A device trains for hours on end: whoever waits for it ends long after this test's patience."""
    out = tmp_path / "out"
    program = start(out, "--link", link, *OPTIONS, "--set", "method.local_epochs=1000000")
    assert interrupt(program, out, 0, signal.SIGINT) == 130, program.said
    assert "interrupted before the first round was complete" in program.said


def test_ctrl_c_while_supervisor_starts_leaves_no_server_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Thread.start` waits for the thread, which already runs: that is where Ctrl-C arrives on a busy machine."""

    class InterruptedStart(threading.Thread):
        def start(self) -> None:
            super().start()
            if self.name == "supervisor":
                raise KeyboardInterrupt

    monkeypatch.setattr("fleetdistill_lab.simulation.links.links.threading.Thread", InterruptedStart)
    with pytest.raises(Interrupted):
        simulate(replace(FLEET, link="grpc", out=tmp_path / "out"))
    assert not any(thread.name == "supervisor" for thread in threading.enumerate())


# --- what is there


def test_an_earlier_simulation_is_not_overwritten_unasked(tmp_path: Path) -> None:
    wanted = replace(FLEET, rounds=1, with_alone=False, with_fedavg=False, out=tmp_path / "out")
    first = simulate(wanted)
    (wanted.out / "work" / "left-over").write_text("x")
    before = (wanted.out / "report.json").read_bytes()
    with pytest.raises(
        ConfigurationError, match=r"contains an earlier simulation; continue it with --resume.*--overwrite.*--out"
    ):
        simulate(wanted)
    with pytest.raises(
        ConfigurationError, match="began with other settings: seed was 0, is 1; use the original settings"
    ):
        simulate(replace(wanted, seed=1), if_there="resume")
    assert (wanted.out / "report.json").read_bytes() == before
    assert simulate(wanted, if_there="overwrite").accuracy_by_round == first.accuracy_by_round
    assert not (wanted.out / "work" / "left-over").exists()


def test_two_simulations_do_not_share_a_folder(tmp_path: Path) -> None:
    wanted = replace(FLEET, out=tmp_path / "out")
    with (
        open_folder(wanted, "refuse"),
        pytest.raises(DataError, match="another simulation is running in"),
        open_folder(wanted, "resume"),
    ):
        pass
    assert saved_simulation(wanted.out) == wanted


def test_the_command_resumes_with_the_settings_of_before(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    with open_folder(replace(FLEET, models=("digits_linear",), out=tmp_path / "out"), "refuse"):
        pass
    told = CliRunner().invoke(app, ["simulate", *out, "--resume", "--rounds", "5"])
    assert (told.exit_code, told.stdout) == (1, "")
    assert "rounds was 3, is 5" in told.stderr
    told = CliRunner().invoke(app, ["simulate", "--out", str(tmp_path / "none"), "--resume"])
    assert (told.exit_code, told.stdout) == (1, "")
    assert "contains no simulation to resume; start one without --resume" in told.stderr
    told = CliRunner().invoke(app, ["simulate", *out, "--resume", "--overwrite"])
    assert "--resume and --overwrite cannot be combined" in told.stderr


def test_what_is_said_after_ctrl_c_names_the_way_on(tmp_path: Path) -> None:
    assert interrupted_line(Interrupted(None, has_rounds=False), Path("out")) == (
        "interrupted before the first round was complete; continue with --resume --out out"
    )
    assert interrupted_line(Interrupted(None), Path("out")) == "interrupted; continue with --resume --out out"
    assert interrupted_line(Interrupted(None, begun=False), Path("out")) == (
        "interrupted before the simulation started; nothing was changed in out; run the command again"
    )


def files(folder: Path) -> dict[str, bytes]:
    return {str(item.relative_to(folder)): item.read_bytes() for item in folder.rglob("*") if item.is_file()}


WRONG = {
    "method": (["--method", "fedavgg"], "unknown method 'fedavgg'"),
    "setting": (["--set", "method.batch_size=0"], "batch_size must be >= 1"),
    "unknown setting": (["--set", "method.batchsize=3"], "unknown setting"),
    "model": (["--model", "digits_linaer"], "unknown device model 'digits_linaer'"),
    "dataset": (["--dataset", "digitss"], "unknown data set 'digitss'"),
    "partition": (["--set", "simulation.partition=dirichlet"], "unknown partition 'dirichlet'"),
    "alpha": (["--alpha", "-1"], "alpha"),
    "devices": (["--devices", "5000"], "5000 devices"),
    "model of other inputs": (["--method", "feddkc", "--model", "feddkd_vgg9"], "feddkd_vgg9"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused_simulation_leaves_no_trace_and_harms_no_other(name: str, tmp_path: Path) -> None:
    options, sentence = WRONG[name]
    out = ["--out", str(tmp_path / "out")]
    told = CliRunner().invoke(app, ["simulate", *out, *options])
    assert (told.exit_code, told.stdout) == (1, "")
    assert sentence in told.stderr
    assert not (tmp_path / "out").exists()
    with open_folder(replace(FLEET, out=tmp_path / "out"), "refuse") as work:
        (work / "something").write_text("of the earlier simulation")
    (tmp_path / "out" / "report.json").write_text("{}")
    before = files(tmp_path)
    told = CliRunner().invoke(app, ["simulate", *out, "--overwrite", *options])
    assert (told.exit_code, told.stdout) == (1, "")
    assert sentence in told.stderr
    assert files(tmp_path) == before


@pytest.mark.parametrize(("where", "begun"), [("load_dataset", False), ("check_plan", False), ("make_specs", True)])
def test_ctrl_c_before_the_first_round_says_how_to_go_on(
    where: str, begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"fleetdistill_lab.simulation.fleet.{where}", press)
    out = tmp_path / "out"
    told = CliRunner().invoke(app, ["simulate", "--out", str(out), *OPTIONS])
    assert (told.exit_code, told.stdout) == (130, "")
    if begun:
        assert told.stderr == (f"interrupted before the first round was complete; continue with --resume --out {out}\n")
        assert saved_simulation(out).rounds == 3
    else:
        assert "interrupted before the simulation started" in told.stderr
        assert not out.exists()


@pytest.mark.long
@pytest.mark.parametrize("where", ["fleet.make_report", "fleet.FinalModels.export", "show.show_run"])
def test_ctrl_c_after_rounds_does_not_deny_them(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the report of an earlier Ctrl-C is written, while models are exported, and while tables are printed."""

    def press(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    options = ["simulate", *OPTIONS, "--out", str(out), "--no-controls"]
    monkeypatch.setattr(f"fleetdistill_lab.simulation.{where}", press)
    if where == "fleet.make_report":
        monkeypatch.setattr(show.Bars, "show", Impatient("fleet", 1))
    expected = 130, f"interrupted; continue with --resume --out {out}"
    told = CliRunner().invoke(app, options)
    assert (told.exit_code, told.stderr.splitlines()[-1]) == expected
    monkeypatch.setattr("fleetdistill_lab.simulation.fleet._prepare", press)
    told = CliRunner().invoke(app, [*options, "--resume"])
    assert (told.exit_code, told.stderr.splitlines()[-1]) == expected
    with closing(Store.open(out / "work" / "store")) as store:
        assert store.runs.existing(RUN).completed_rounds >= 1


def test_folder_without_written_settings_is_begun_anew(tmp_path: Path) -> None:
    wanted = replace(FLEET, out=tmp_path / "out")
    with open_folder(wanted, "refuse") as work:
        (work / "simulation.json").unlink()
    with open_folder(wanted, "refuse"):
        pass
    assert saved_simulation(wanted.out) == wanted


PRESSES_WHILE_IMPORTED = """
import os, signal, sys
class Press:
    def find_spec(self, name, *rest):
        if name == "fleetdistill_server.cli.app":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Press())
sys.argv = ["fleetdistill", "simulate"]
from fleetdistill_server.start import main
main()
"""


def test_ctrl_c_while_the_command_is_imported_is_one_line() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PRESSES_WHILE_IMPORTED]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr == "interrupted before the simulation started; run the command again\n"
