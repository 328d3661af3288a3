"""What `health`, the dashboard and `runs list` say is wrong with a server, from what its supervisor writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetdistill_server.service import serve_lock
from fleetdistill_server.service.engine_health import EngineHealth
from fleetdistill_server.service.process_state import ENGINE, FRONT, ProcessFile, ProcessState
from fleetdistill_server.store.store import Store
from fleetdistill_server.views.health import problems
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
        (None, 2, "", ["the front does not run, so no device can call; the supervisor starts it again"]),
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
        assert EngineHealth(tmp_path, store).is_good() == (not waits), "as `fleetdistill health` says it"
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
            "keep_free_bytes = 0\ndisk_budget_bytes = 1000",
            "so uploads are refused; [server] disk_budget_bytes is 1.0 kB",
        ),
        (
            "keep_free_bytes = 1000000000000000000",
            "so uploads are refused; [server] keep_free_bytes is 1000000000.00 GB",
        ),
    ],
)
def test_a_limit_of_the_disk_that_is_reached_is_a_problem(tmp_path: Path, settings: str, says: str) -> None:
    store = Store.open(tmp_path)
    (tmp_path / serve_lock.SERVED_FILE).write_text(f"[server]\n{settings}\n")
    with serve_lock.take(tmp_path, ""):
        found = problems(store, tmp_path)
    store.close()
    assert len(found) == bool(says)
    assert all(one.endswith(says) for one in found)
