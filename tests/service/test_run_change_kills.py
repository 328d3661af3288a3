"""kill -9 of commands that change runs and of a server's processes, at every durable step and at random moments."""

from __future__ import annotations

import contextlib
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos.run_changes import CHANGED, Killer, checkpoint_of, server_toml
from chaos.run_commands import COMMANDS, prepare, run_command, state_of
from support.answering import AnsweringFleet
from support.long import long_except
from support.processes import COMMAND, children, is_alive, wait_until
from support.serving import serve, write_config

from fleetdistill.state.failpoints import VARIABLE
from fleetdistill_server.store.store import Store

# --- the commands, without a server

CHANGES, DELETES = "runs.change", "runs.delete"
CASES = [
    (command, f"{DELETES if command == 'delete' else CHANGES}.{point}")
    for command in COMMANDS
    for point in ("before-commit", "after-commit")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "point"),
    [case if case[0] in ("create", "pause") else pytest.param(*case, marks=pytest.mark.long) for case in CASES],
)
def test_a_killed_command_is_repeated_and_ends_the_same(command: str, point: str, tmp_path: Path) -> None:
    actions, words = COMMANDS[command]
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    for folder in (undisturbed, killed):
        prepare(folder, actions)
    before = state_of(killed)
    assert run_command(undisturbed, words).returncode == 0
    after = state_of(undisturbed)
    assert before != after
    assert run_command(killed, words, f"{point}=kill").returncode != 0
    assert state_of(killed) == (before if point.endswith("before-commit") else after)
    repeated = run_command(killed, words)
    assert repeated.returncode == 0, repeated.stderr
    assert state_of(killed) == after
    assert run_command(killed, words).stdout == repeated.stdout or command == "delete"
    assert state_of(killed) == after


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.cold_start
def test_nothing_is_created_once_the_command_was_killed(tmp_path: Path) -> None:
    """The process that creates the run is still importing torch; a command after this one would not expect the run."""
    write_config(tmp_path, run_name=CHANGED)
    command = subprocess.Popen([*COMMAND, "runs", "create", "run.toml", "--store", "store"], cwd=tmp_path)
    (creating,) = wait_until(lambda: children(command.pid, "fleetdistill_server.engine.creation"), "the process")
    command.kill()
    command.wait()
    wait_until(lambda: not is_alive(creating), "the process to end")
    with contextlib.closing(Store.open(tmp_path / "store")) as store:
        assert store.runs.names() == []


# --- the supervisor


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The checkpoint of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with serve(server_toml(folder)) as server, AnsweringFleet(server.port(), CHANGED, 2):
        create(folder)
        return finish(folder)


def create(folder: Path) -> None:
    write_config(folder, run_name=CHANGED, run_rounds=4)
    assert run_command(folder, ["create", "run.toml", "--start"]).returncode == 0


def finish(folder: Path) -> bytes:
    with contextlib.closing(Store.open(folder / "store")) as store:
        wait_until(lambda: store.runs.existing(CHANGED).status == "finished", "the run to finish")
        return checkpoint_of(store)


@pytest.fixture
def failpoint(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def switch(text: str) -> None:
        if text:
            monkeypatch.setenv(VARIABLE, text)
        else:
            monkeypatch.delenv(VARIABLE)

    return switch


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "point",
    long_except(
        ["supervisor.engine.before-token", "supervisor.engine.after-token", "supervisor.engine.after-start"],
        "supervisor.engine.after-token",
    ),
)
def test_a_killed_supervisor_is_replaced_and_the_run_goes_on(
    point: str, tmp_path: Path, undisturbed: bytes, failpoint: Callable[[str], None]
) -> None:
    config = server_toml(tmp_path)
    failpoint(f"{point}=kill")
    with serve(config) as server:
        server.port()
        failpoint("")
        create(tmp_path)
        assert wait_until(lambda: server.process.poll(), "the supervisor to be killed") == -9
    with serve(config) as server, AnsweringFleet(server.port(), CHANGED, 2):
        assert finish(tmp_path) == undisturbed


# --- everything, at random moments


@pytest.mark.long
@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(tmp_path: Path, undisturbed: bytes) -> None:
    """The short form of `make run-kills`."""
    with Killer(tmp_path, random.Random(1)) as killer:
        create(tmp_path)
        killer.kill(8)
        killer.repeat(["start", CHANGED])
        assert finish(tmp_path) == undisturbed
    assert killer.rounds() == ["closed"] * 4
    assert sum(killer.kills.values()) == 8
