"""`fleetdistill runs watch --server`: the same as beside the store, over real TLS."""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.live_front import RUN, prepare_store, write_asks
from support.processes import COMMAND, PATIENCE_SECONDS
from support.secured import make_pki, secured_front
from typer.testing import CliRunner

from fleetdistill.knowledge import Metric, Metrics
from fleetdistill_server.cli.app import app
from fleetdistill_server.front.operations_service import MAX_CHANGES
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.service import serve_lock
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Counted

DEVICES = ("a", "b")


@dataclass
class Watched:
    """A run, and how it is named on this machine and from another one."""

    store: Store
    here: list[str]
    there: list[str]

    def begin_round(self) -> int:
        """Both devices are asked."""
        number = self.store.runs.start_round(RUN, DEVICES)
        write_asks(self.store, number, *DEVICES)
        return number

    def end_round(self, number: int) -> None:
        """One has answered, the other has not."""
        first, second = self.store.asks.of_step(RUN, number, 1)
        self.store.asks.accept_upload(first.id, 1, b"u" * 32, 10, 5)
        self.store.history.add_traffic(RUN, number, "a", "up", Counted(Counter(plan=900), Counter(plan=400)), 100)
        right = Metric(name="accuracy", split="test", sum=1, count=3)
        self.store.history.add_figures(RUN, number, "a", Metrics(metrics=[right]))
        self.store.asks.close(second.id, "refused: NaN")
        self.store.history.add_event(RUN, "refused", "device b: NaN", number=number, device="b", code="bad-value")
        self.store.runs.close_round(RUN, number, b"c", [first.id], {})


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    make_pki(tmp_path / "pki").issue_person(Role.VIEWER, "vera", 1.0, tmp_path / "vera")
    store = prepare_store(tmp_path / "store")
    for device in DEVICES:
        store.devices.register(RUN, device, b"", b"")
    served = serve_lock.take(tmp_path / "store", RUN)
    with served, secured_front(tmp_path / "store", tmp_path / "pki") as front:
        there = ["--server", f"127.0.0.1:{front.port}", "--identity", str(tmp_path / "vera")]
        yield Watched(store, ["--store", str(tmp_path / "store")], there)
    store.close()


def said(*words: str) -> str:
    done = CliRunner().invoke(app, ["runs", "watch", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["lines", "json"])
def test_run_is_followed_over_network_as_on_server_machine(watched: Watched, form: list[str]) -> None:
    watched.end_round(watched.begin_round())
    watched.begin_round()
    watched.store.runs.close_short_round(RUN, 2, "too few answered")
    with watched.store.transaction():
        for number in range(MAX_CHANGES):  # more than one message takes
            watched.store.history.add_event(RUN, "late", f"event {number}", number=2, device="a")
    watched.store.runs.set_status(RUN, RunStatus.FINISHED, "all rounds done")
    here = said(RUN, *watched.here, *form)
    assert said(RUN, *watched.there, *form) == here
    assert len(here.splitlines()) == 1 + MAX_CHANGES + 4
    if form:
        kinds = Counter(json.loads(line)["kind"] for line in here.splitlines())
        assert kinds == {"run": 1, "round": 2, "step": 1, "event": 1 + MAX_CHANGES}


def test_a_run_that_is_not_there_is_a_sentence(watched: Watched) -> None:
    done = CliRunner().invoke(app, ["runs", "watch", "nope", *watched.there])
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"there is no run 'nope'; runs in the store: {RUN}" in done.stderr


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("ending", ["the run", "Ctrl-C"])
def test_following_over_the_network_ends_cleanly(watched: Watched, ending: str) -> None:
    command = [*COMMAND, "runs", "watch", RUN, *watched.there]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(
                f"run {RUN} (): running, 0 rounds completed, until stopped, 2 devices present"
            )
            number = watched.begin_round()
            assert process.stdout.readline().startswith("round 1: open, 2 devices, 0 answers")
            assert process.stdout.readline() == "round 1, train: 0 of 2 answers\n"
            if ending == "the run":
                watched.end_round(number)
                watched.store.runs.set_status(RUN, RunStatus.FINISHED, "all rounds done")
            else:
                process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")
    assert ("finished: all rounds done" in rest) == (ending == "the run")
