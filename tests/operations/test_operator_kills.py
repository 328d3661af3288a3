"""kill -9 around the entries of operators' calls: no change without an entry, no entry `done` without a change."""

from __future__ import annotations

import contextlib
import random
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chaos.operators import OperatorKiller
from chaos.run_changes import CHANGED
from chaos.run_commands import COMMANDS, prepare, run_command, state_of
from support.live_front import RUN, prepare_store
from support.processes import COMMAND, wait_until
from support.secured import SecuredFront, make_pki, secured_front
from support.serving import write_config

from fleetdistill.state.failpoints import VARIABLE
from fleetdistill_server.operations.source import LocalStore
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.store.operator_calls import BEGUN
from fleetdistill_server.store.store import Store

pytestmark = pytest.mark.slow

ONE_TRANSACTION = {"operators.before-entry": [], "operators.before-commit": [], "operators.after-result": ["done"]}
BEGUN_FIRST = {
    "operators.before-entry": [],
    "operators.after-begun": [BEGUN],
    "operators.before-result": [BEGUN],
    "operators.after-result": ["done"],
}
"""Points at which a call is killed, and the results that its entries have then."""
UNCHANGED = ("operators.before-entry", "operators.before-commit", "operators.after-begun")
CASES = [
    (command, point)
    for command in ("create", "pause", "clone", "delete")
    for point in (BEGUN_FIRST if command == "delete" else ONE_TRANSACTION)
]


def entries(directory: Path) -> list[tuple[str, str]]:
    """Calls that did not fail with their results in a word, oldest first."""
    rows: list[Any] = LocalStore(directory).operators().lists["operators"]
    result = [(row["call"], row["result"].partition(":")[0]) for row in reversed(rows)]
    return [item for item in result if item[1] not in ("failed", "refused")]


def results(folder: Path) -> list[str]:
    return [result for _, result in entries(folder / "store")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The state of a store after a command that nobody disturbed."""

    @cache
    def state(command: str) -> Any:
        folder = tmp_path_factory.mktemp("undisturbed") / command
        actions, words = COMMANDS[command]
        prepare(folder, actions)
        assert run_command(folder, words).returncode == 0
        return state_of(folder)

    return state


@pytest.mark.long
@pytest.mark.parametrize(("command", "point"), CASES)
def test_a_local_change_is_never_without_its_entry(
    command: str, point: str, undisturbed: Callable[[str], Any], tmp_path: Path
) -> None:
    actions, words = COMMANDS[command]
    folder = tmp_path / "killed"
    prepare(folder, actions)
    before = state_of(folder)
    assert run_command(folder, words, f"{point}=kill").returncode != 0
    assert results(folder) == (expected := {**ONE_TRANSACTION, **BEGUN_FIRST}[point])
    assert state_of(folder) == (before if point in UNCHANGED else undisturbed(command))
    repeated = run_command(folder, words)
    assert repeated.returncode == 0, repeated.stderr
    assert results(folder) == [*expected, "done"]
    assert state_of(folder) == undisturbed(command)


@pytest.mark.long
@pytest.mark.parametrize("point", [*ONE_TRANSACTION, "runs.change.before-commit", "runs.change.after-commit"])
def test_the_first_run_of_a_store_is_never_without_its_entry(point: str, tmp_path: Path) -> None:
    write_config(tmp_path, run_name=CHANGED)
    words = ["create", "run.toml"]
    assert run_command(tmp_path, words, f"{point}=kill").returncode != 0
    created = point.rpartition(".")[2].startswith("after")
    with contextlib.closing(Store.open(tmp_path / "store")) as store:
        assert store.runs.names() == [CHANGED] * created
        assert entries(tmp_path / "store") == [("CreateRun", "done")] * created
        assert run_command(tmp_path, words).returncode == 0
        assert store.runs.names() == [CHANGED]
        assert entries(tmp_path / "store") == [("CreateRun", "done")] * (created + 1)


# --- from elsewhere


def kill_while(words: list[str], front: SecuredFront, identity: Path) -> None:
    """Makes a call from elsewhere until the front or the process that does its work is killed; then kills both ends."""
    calling = ask(words, front, identity)
    try:
        wait_until(lambda: calling.poll() is not None or front.process.poll() is not None, "a process to be killed")
    finally:
        for item in (calling, front.process):
            item.kill()
            item.wait()
    assert calling.returncode != 0, "the call was answered"


def ask(words: list[str], front: SecuredFront, identity: Path) -> subprocess.Popen[bytes]:
    where = ["--server", f"127.0.0.1:{front.port}", "--identity", str(identity)]
    return subprocess.Popen([*COMMAND, *words, *where], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture
def olga(tmp_path: Path) -> Path:
    """The certificate of an operator, signed by the CA in `pki`."""
    make_pki(tmp_path / "pki").issue_person(Role.OPERATOR, "olga", 1.0, tmp_path / "olga")
    return tmp_path / "olga"


@pytest.mark.long
@pytest.mark.parametrize(("command", "point"), [case for case in CASES if case[0] != "create"])
def test_a_remote_change_is_never_without_its_entry(
    command: str,
    point: str,
    undisturbed: Callable[[str], Any],
    tmp_path: Path,
    olga: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actions, words = COMMANDS[command]
    folder = tmp_path / "killed"
    prepare(folder, actions)
    before = state_of(folder)
    monkeypatch.setenv(VARIABLE, f"{point}=kill")
    with secured_front(folder / "store", tmp_path / "pki") as front:
        monkeypatch.delenv(VARIABLE)
        kill_while(["runs", *words], front, olga)
        assert results(folder) == (expected := {**ONE_TRANSACTION, **BEGUN_FIRST}[point])
        assert state_of(folder) == (before if point in UNCHANGED else undisturbed(command))
        front.start()
        assert ask(["runs", *words], front, olga).wait() == 0
        assert results(folder) == [*expected, "done"]
        assert state_of(folder) == undisturbed(command)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_remote_change_and_its_entry_are_in_one_group(
    moment: str, tmp_path: Path, olga: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(prepare_store(tmp_path / "store")) as store:
        assert store.runs.names() == [RUN]
        monkeypatch.setenv(VARIABLE, f"front.commit.{moment}=kill")
        with secured_front(tmp_path / "store", tmp_path / "pki") as front:
            monkeypatch.delenv(VARIABLE)
            kill_while(["devices", "revoke", "camera-7", "--yes"], front, olga)
            assert front.process.returncode == -9
        done = [("RevokeDevice", "done")] if moment == "after" else []
        assert entries(tmp_path / "store") == done
        assert len(store.credentials.revocations()) == len(done)


@pytest.mark.long
def test_kills_at_random_moments_lose_no_entry(tmp_path: Path) -> None:
    """The short form of the operators' part of `make run-kills`, without creations and deletions."""
    prepare(tmp_path / "changed", ["create"])
    with OperatorKiller(tmp_path / "changed", random.Random(1), [CHANGED, "other"]) as killer:
        killer.kill(3)
    assert sum(killer.kills.values()) == 3
