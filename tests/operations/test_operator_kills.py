"""kill -9 around a change's commit: no change without its entry, and no entry `done` without its change."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
from service.test_leading_kills import run_command, write_config
from support.live_front import RUN, prepare_store
from support.processes import COMMAND
from support.secured import make_pki, secured_front

from fleetdistill.state.failpoints import VARIABLE
from fleetdistill_server.config.run_config import load_run_config
from fleetdistill_server.operations.source import LocalStore
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.service import leading
from fleetdistill_server.store.operator_calls import BEGUN
from fleetdistill_server.store.store import Store

pytestmark = pytest.mark.slow

KILLED_BEFORE, KILLED_AFTER = "before", "after"


def entries(directory: Path) -> list[tuple[str, str]]:
    """Calls and their results, oldest first."""
    rows: list[Any] = LocalStore(directory).operators().lists["operators"]
    return [(row["call"], row["result"]) for row in reversed(rows)]


@pytest.mark.parametrize("moment", [KILLED_BEFORE, KILLED_AFTER])
def test_a_local_change_is_never_without_its_entry(tmp_path: Path, moment: str) -> None:
    with contextlib.closing(Store.open(tmp_path / "store")) as store:
        leading.create(store, load_run_config(write_config(tmp_path)), start_it=True)
        (run,) = store.runs.names()

        def paused() -> bool:
            return (store.runs.get(run) or {})["status"] == "paused"

        assert run_command(tmp_path, ["pause", run], f"runs.lead.{moment}-commit=kill").returncode == -9
        assert paused() == (moment == KILLED_AFTER)
        assert entries(tmp_path / "store") == [("PauseRun", BEGUN)], "not `done`, whether it was done or not"
        assert run_command(tmp_path, ["pause", run]).returncode == 0
        assert paused()
        assert [result.partition(":")[0] for _, result in entries(tmp_path / "store")] == [BEGUN, "done"]


@pytest.mark.parametrize("moment", [KILLED_BEFORE, KILLED_AFTER])
def test_a_remote_change_and_its_entry_are_both_there_or_neither(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = tmp_path / "olga"
    make_pki(tmp_path / "pki").issue_person(Role.OPERATOR, "olga", 1.0, identity)
    with contextlib.closing(prepare_store(tmp_path / "store")) as store:
        assert store.runs.names() == [RUN]
        monkeypatch.setenv(VARIABLE, f"front.commit.{moment}=kill")
        with secured_front(tmp_path / "store", tmp_path / "pki") as front:
            words = ["devices", "revoke", "camera-7", "--server", f"127.0.0.1:{front.port}", "--identity"]
            monkeypatch.delenv(VARIABLE)
            revoking = subprocess.Popen([*COMMAND, *words, str(identity)], stderr=subprocess.DEVNULL)
            try:
                assert front.process.wait(60.0) == -9
            finally:
                revoking.kill()
                revoking.wait()
        done = [("RevokeDevice", "done")] if moment == KILLED_AFTER else []
        assert entries(tmp_path / "store") == done
        assert len(store.credentials.revocations()) == len(done)
