"""The host of the processes of devices in a simulation over gRPC."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest
from support.fleets import prepare
from support.forked import forked_host
from support.processes import PATIENCE_SECONDS, children, free_port, wait_until

from fleetdistill_lab.simulation.links.device_host import MAX_RESTARTS
from fleetdistill_lab.simulation.spec.settings import Simulation


@pytest.mark.parametrize("during_fork", [True, False])
def test_sigterm_ends_the_devices_whenever_it_arrives(tmp_path: Path, during_fork: bool) -> None:
    """Python discards an exception in a hook of `os.fork`, and forking a process with torch takes a while."""
    _, specs, _ = prepare(Simulation(method="feddkc", devices=2, train_limit=40, test_limit=20), tmp_path / "work")
    hook = tmp_path / "hook" if during_fork else None
    group = forked_host(specs, free_port(), hook)  # no server is there: the devices try again for ever
    assert group.pid is not None
    if hook is None:
        wait_until(lambda: len(children(group.pid or 0)) == 2, "both processes")
        group.terminate()
    group.join(PATIENCE_SECONDS)
    assert group.exitcode == 1
    assert hook is None or hook.exists()
    assert children(group.pid) == []


def differ(pid: int, before: list[int]) -> bool:
    return children(pid) != before


def test_process_killed_again_and_again_ends_simulation(tmp_path: Path) -> None:
    _, specs, _ = prepare(Simulation(method="feddkc", devices=2, train_limit=40, test_limit=20), tmp_path / "work")
    host = forked_host(specs, free_port())  # no server is there: the devices try again for ever
    pid = host.pid
    assert pid is not None
    for _ in range(MAX_RESTARTS + 1):
        wait_until(lambda: len(children(pid)) == 2, "both processes")
        before = children(pid)
        os.kill(before[-1], signal.SIGKILL)
        wait_until(partial(differ, pid, before), "the end of the killed process")
    host.join(PATIENCE_SECONDS)
    assert host.exitcode == 1
    assert children(pid) == []


def test_failed_device_ends_simulation_while_another_works_on(tmp_path: Path) -> None:
    _, specs, _ = prepare(Simulation(method="feddkc", devices=3, train_limit=60, test_limit=20), tmp_path / "work")
    endless, failing = Path(specs[0].state_dir), Path(specs[2].state_dir)  # in one process; the other is in the second
    endless.mkdir()
    os.mkfifo(endless / "device.json")  # reading it takes for ever
    failing.touch()
    host = forked_host(specs, free_port())
    host.join(PATIENCE_SECONDS)
    assert host.exitcode == 1
    assert host.pid is not None
    assert children(host.pid) == []
