"""The process that forks the devices of a simulation over gRPC."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fleets import prepare
from support.forked import forked_grpc_devices
from support.processes import PATIENCE_SECONDS, children, free_port, wait_until

from fleetdistill_server.simulation.spec.settings import Simulation


@pytest.mark.parametrize("during_fork", [True, False])
def test_sigterm_ends_the_devices_whenever_it_arrives(tmp_path: Path, during_fork: bool) -> None:
    """Python discards an exception in a hook of `os.fork`, and forking a process with torch takes a while."""
    _, specs, _ = prepare(Simulation(devices=2, train_limit=40, test_limit=20), tmp_path / "work")
    hook = tmp_path / "hook" if during_fork else None
    group = forked_grpc_devices(specs, free_port(), hook)  # no server is there: the devices try again for ever
    assert group.pid is not None
    if hook is None:
        wait_until(lambda: len(children(group.pid or 0)) == 2, "both devices")
        group.terminate()
    group.join(PATIENCE_SECONDS)
    assert group.exitcode == 1
    assert hook is None or hook.exists()
    assert children(group.pid) == []
