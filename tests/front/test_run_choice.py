"""A device that names no run, at a server whose store has several."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.live_front import RUN, LiveFront
from support.small_device import small_device

from fleetdistill.errors import RefusedError
from fleetdistill.testing import EventLog
from fleetdistill_server.service import serve_lock
from fleetdistill_server.store.store import Store


def test_a_device_without_a_run_joins_the_served_one(
    front: LiveFront, store: Store, directory: Path, tmp_path: Path
) -> None:
    store.runs.begin("interrupted", {})
    with small_device(front.port, tmp_path / "a", EventLog(), run="") as device:
        with pytest.raises(RefusedError, match="the server has several runs"):
            device.step(0)
        with serve_lock.take(directory, RUN):
            device.step(0)
    assert store.devices.get(RUN, "d1") is not None
