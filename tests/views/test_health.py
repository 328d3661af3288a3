"""What `health`, the dashboard and `runs list` say is wrong with a server, from what its supervisor writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetdistill_server.service import serve_lock
from fleetdistill_server.service.process_state import ENGINE, FRONT, ProcessFile, ProcessState
from fleetdistill_server.store.store import Store
from fleetdistill_server.views.health import problems


@pytest.mark.parametrize(
    ("front", "engine", "says"),
    [
        (1, 2, []),
        (1, None, []),  # of a run that was paused, perhaps
        (None, 2, ["the front does not run, so no device can call; the supervisor starts it again"]),
    ],
)
def test_a_process_that_does_not_run_is_a_problem(
    tmp_path: Path, front: int | None, engine: int | None, says: list[str]
) -> None:
    store = Store.open(tmp_path)
    with serve_lock.take(tmp_path, ""):
        ProcessFile(tmp_path).write([ProcessState(FRONT, "", front, 0), ProcessState(ENGINE, "r", engine, 1)])
        assert problems(store, tmp_path) == says
    store.close()
