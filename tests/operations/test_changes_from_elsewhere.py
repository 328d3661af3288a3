"""A run led only from elsewhere: a server with TLS, devices of the SDK, a front that is killed during calls."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from operations.conftest import DEVICES, take_part
from support.processes import free_port, is_alive, wait_until
from support.secured import make_pki
from support.served import RUN
from support.serving import FRONT, Served, serve
from typer.testing import CliRunner

from fleetdistill.errors import FleetDistillError
from fleetdistill.state.failpoints import VARIABLE
from fleetdistill_server.cli.app import app
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.store.store import Store

pytestmark = pytest.mark.slow

KILLS = "runs.change.before-commit=kill@9;runs.delete.after-commit=kill"
"""Where fronts are killed: at the second pause, which is the ninth call of the first front, and at each deletion."""


@dataclass
class Elsewhere:
    """A machine with the certificates of an operator and a viewer, and nothing else."""

    work: Path
    server: Served
    address: str

    def call(self, *words: str, who: str = "operator") -> tuple[int, str]:
        given = ["--server", self.address, "--identity", str(self.work / who)]
        done = CliRunner().invoke(app, [*words, *given])
        return done.exit_code, done.output

    def said(self, *words: str) -> str:
        code, output = self.call(*words)
        assert code == 0, output
        return output

    def twice(self, *words: str) -> str:
        first = self.said(*words)
        assert self.said(*words) == first
        return first

    def through_a_kill(self, *words: str) -> str:
        """Makes a call during which the front is killed, and repeats it until a front answers."""
        killed = self.server.child(FRONT)
        self.call(*words)
        wait_until(lambda: not is_alive(killed), "the front to be killed")
        return wait_until(lambda: answer[1] if not (answer := self.call(*words))[0] else "", "a front that answers")

    def rows(self) -> dict[str, dict[str, Any]]:
        said = self.said("runs", "list", "--json")  # and warnings, of a front that was killed twice in ten seconds
        rows, _ = json.JSONDecoder().raw_decode(said[said.index("[") :])
        return {row["run"]: row for row in rows}

    def advances(self) -> None:
        """Waits for a round more."""
        before = self.rows()[RUN]["completed_rounds"]
        wait_until(lambda: self.rows()[RUN]["completed_rounds"] != before, "another round")

    def calls(self) -> list[dict[str, Any]]:
        return json.loads(self.said("operators", "--json"))[::-1]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    authority = make_pki(tmp_path / "pki")
    for role in (Role.OPERATOR, Role.VIEWER):
        authority.issue_person(role, f"the-{role}", 1.0, tmp_path / str(role))
    section: dict[str, Any] = {
        "listen": f"127.0.0.1:{free_port()}",
        "enrol_listen": "127.0.0.1:0",
        "pki": str(tmp_path / "pki"),
    }
    section |= {"store": str(tmp_path / "store"), "torch_device": "cpu", "keep_free_bytes": 0}
    (tmp_path / "server.toml").write_text(toml_of({"server": section}))
    monkeypatch.setenv(VARIABLE, KILLS)
    with serve(tmp_path / "server.toml") as server:
        monkeypatch.delenv(VARIABLE)
        server.port()
        yield Elsewhere(tmp_path, server, section["listen"])


def toml_of(settings: dict[str, dict[str, Any]]) -> str:
    sections = (
        (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in own.items())) for name, own in settings.items()
    )
    return "\n".join(line for section in sections for line in section)


def write_run(folder: Path) -> Path:
    """A run.toml without [server], as an operator elsewhere has it."""
    path = folder / "run.toml"
    settings: dict[str, dict[str, Any]] = {
        "run": {"name": RUN, "method": "fedavg", "rounds": 100_000, "min_devices": 2, "deadline_seconds": 120.0},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
        "model": {"extractor": "", "server": "", "device": "digits_linear"},
    }
    path.write_text(toml_of(settings))
    return path


@contextlib.contextmanager
def devices(place: Elsewhere) -> Iterator[None]:
    """Two devices, which take part until the run is deleted."""
    tokens = place.said("enrol", "--count", "2", "--run", RUN).split()

    def part(number: int) -> None:
        with contextlib.suppress(FleetDistillError):  # the run is deleted
            take_part(place.work, place.address, DEVICES[number], number, tokens[number])

    ways = [threading.Thread(target=part, args=(number,), daemon=True) for number in range(2)]
    for way in ways:
        way.start()
    yield
    for way in ways:
        way.join()


@pytest.mark.long
def test_an_operator_leads_a_run_and_a_viewer_does_not(elsewhere: Elsewhere) -> None:
    run = str(write_run(elsewhere.work))
    assert elsewhere.twice("runs", "create", run, "--start") == f"run {RUN!r} is started\n"
    with devices(elsewhere):
        elsewhere.advances()
        assert elsewhere.twice("runs", "pause", RUN) == f"run {RUN!r} is paused\n"
        assert elsewhere.rows()[RUN]["status"] == "paused"
        assert elsewhere.twice("runs", "start", RUN) == f"run {RUN!r} is started\n"
        elsewhere.advances()
        assert elsewhere.twice("runs", "stop", RUN) == f"run {RUN!r} is stopped\n"
        assert elsewhere.rows()[RUN]["status"] == "stopped"
        assert "by operator the-operator" in elsewhere.call("runs", "show", RUN)[1]
        with contextlib.closing(Store.open(elsewhere.work / "store")) as store:
            to = store.runs.checkpoints(RUN)[0].completed_rounds
        number = elsewhere.rows()[RUN]["completed_rounds"] - to
        said = elsewhere.said("runs", "rollback", RUN, "--to", str(to))
        assert said.startswith(f"run {RUN!r} is rolled back to round {to}: {number} round")
        assert (elsewhere.rows()[RUN]["status"], elsewhere.rows()[RUN]["completed_rounds"]) == ("stopped", to)
        code, refused = elsewhere.call("runs", "rollback", RUN, "--to", str(to + 1))
        assert (code, f"has no checkpoint of round {to + 1}" in refused) == (1, True)
        assert elsewhere.twice("runs", "start", RUN) == f"run {RUN!r} is started\n"
        elsewhere.advances()
        code, refused = elsewhere.call("runs", "stop", RUN, who="viewer")
        assert (code, "may not change a run" in refused) == (1, True)
        assert elsewhere.through_a_kill("runs", "pause", RUN) == f"run {RUN!r} is paused\n"
        assert elsewhere.rows()[RUN]["status"] == "paused"
        assert elsewhere.twice("runs", "clone", RUN, "copy") == "run 'copy' is created\n"
        for name in ("copy", RUN):
            assert name in elsewhere.through_a_kill("runs", "delete", name, "--yes")
            assert name not in elsewhere.rows()
    changes = [(row["call"], row["name"]) for row in elsewhere.calls() if row["result"].startswith("done")]
    for call, count in (("CreateRun", 4), ("ChangeRun", 9), ("DeleteRun", 2)):
        assert changes.count((call, "the-operator")) >= count, f"{call}, once for each call"
    (one,) = [row for row in elsewhere.calls() if row["name"] == "the-viewer"]
    assert (one["call"], one["result"].startswith("refused: not-allowed")) == ("ChangeRun", True)
    assert json.loads(one["arguments"]) == {"run": RUN, "status": "stopped"}, "what the viewer wanted"
    created = [row for row in elsewhere.calls() if row["call"] == "CreateRun"]
    assert {json.loads(row["arguments"])["run"] for row in created} == {RUN, "copy"}
    assert [row["call"] for row in elsewhere.calls() if row["result"] == "begun"] == ["DeleteRun", "DeleteRun"]
