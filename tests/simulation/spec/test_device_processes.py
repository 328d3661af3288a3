"""The process that forks the devices of a simulation over gRPC."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from support.fleets import prepare
from support.fork_server import forked
from support.processes import PATIENCE_SECONDS, children, free_port, wait_until

from fleetdistill_server.simulation.spec.device import main, save_spec
from fleetdistill_server.simulation.spec.settings import Simulation


def run_devices(specs: list[Path], terminated_during_fork: bool) -> None:
    """Devices of a server that is not there, so that they try again for ever."""
    if terminated_during_fork:
        os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))
    sys.argv = ["device", *map(str, specs), "--server", f"127.0.0.1:{free_port()}", "--parent", str(os.getppid())]
    sys.exit(main())


@pytest.mark.parametrize("during_fork", [True, False])
def test_sigterm_ends_the_devices_whenever_it_arrives(tmp_path: Path, during_fork: bool) -> None:
    """Python discards an exception in a hook of `os.fork`, and forking a process with torch takes a while."""
    _, specs, _ = prepare(Simulation(devices=2, train_limit=40, test_limit=20), tmp_path / "work")
    group = forked(run_devices, [save_spec(spec) for spec in specs], during_fork)
    if not during_fork:
        assert group.pid is not None
        wait_until(lambda: len(children(group.pid or 0)) == 2, "both devices")
        group.terminate()
    group.join(PATIENCE_SECONDS)
    assert group.exitcode == 1
    assert children(group.pid or 0) == []
