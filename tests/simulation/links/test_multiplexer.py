"""Many devices in one process: how many are open, and what happens to the others."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from support.fleets import prepare
from support.forked import ForkedEngine
from support.live_front import live_front
from support.processes import free_port

from fleetdistill import Device
from fleetdistill.link.grpc_link import Connection
from fleetdistill_lab.simulation.links import multiplexer
from fleetdistill_lab.simulation.links.multiplexer import THREADS, ParkingLink, WaitingDevices, run_devices
from fleetdistill_lab.simulation.spec.device import DeviceSpec, make_device
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.service.wakeups import Ends
from fleetdistill_server.store.store import Store


def test_the_device_that_has_waited_longest_is_closed_first(tmp_path: Path) -> None:
    _, specs, _ = prepare(Simulation(method="feddkc", devices=4, train_limit=80, test_limit=20), tmp_path / "work")
    server = f"127.0.0.1:{free_port()}"
    shared = Connection(server)

    def opened(spec: DeviceSpec) -> Device:
        return make_device(spec, ParkingLink(server, shared))

    waiting = WaitingDevices(max_bytes=1 << 30, most=2)
    devices = [opened(spec) for spec in specs]
    for spec, device in zip(specs, devices, strict=True):
        waiting.put(spec.name, device)
    assert [waiting.take(spec.name) for spec in specs] == [None, None, *devices[2:]]
    for device in [opened(spec) for spec in specs[:2]] + devices[2:]:  # the closed ones do not hold their directories
        device.close(leave=False)
    shared.close()


def test_devices_that_were_closed_have_no_open_files(tmp_path: Path) -> None:
    _, specs, _ = prepare(Simulation(method="feddkc", devices=5, train_limit=80, test_limit=20), tmp_path / "work")
    server = f"127.0.0.1:{free_port()}"
    shared, waiting = Connection(server), WaitingDevices(max_bytes=1 << 30, most=1)
    for spec in specs:
        waiting.put(spec.name, make_device(spec, ParkingLink(server, shared)))
    for spec in specs[:-1]:
        assert files_in_use(spec.state_dir) == []
    last = waiting.take(specs[-1].name)
    assert last is not None
    assert files_in_use(specs[-1].state_dir) != []
    last.close(leave=False)
    shared.close()


def files_in_use(prefix: str) -> list[str]:
    """Open files of this process whose paths begin so."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    paths = [os.readlink(link) for link in links if os.path.lexists(link)]
    return [path for path in paths if path.startswith(prefix)]


@pytest.mark.long
def test_only_the_devices_that_work_are_open_if_none_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are asked at the same time, and each has two turns in the round: its answer, and the next wait."""
    fleet = Simulation(
        method="feddkc", devices=3 * THREADS, rounds=1, train_limit=240, test_limit=20, torch_device="cpu"
    )
    prepared = prepare(fleet, tmp_path / "work")
    config, specs, _ = prepared
    count, most, lock = 0, 0, threading.Lock()

    def change(by: int) -> None:
        nonlocal count, most
        with lock:
            count += by
            most = max(most, count)

    def counted(*given: Any, **named: Any) -> Device:
        device = make_device(*given, **named)
        close = device.close

        def closed(*, leave: bool = True) -> None:
            close(leave=leave)
            change(-1)

        device.close = closed  # type: ignore[method-assign]
        change(1)
        return device

    monkeypatch.setattr(multiplexer, "make_device", counted)
    engine, store = ForkedEngine(prepared), Store.open(Path(config.server.store))
    store.runs.begin(RUN, config.fixed_part())
    ends = Ends(engine.front_pipe.end, (engine.pipe.end,))
    with live_front(Path(config.server.store), config.server.lease_seconds, ends) as front:
        engine.start()
        try:
            assert run_devices(specs, f"127.0.0.1:{front.port}", max_waiting_bytes=0) == 0
            engine.wait_for_the_end()
        finally:
            engine.kill()
    assert len(store.asks.uploads(RUN)) == len(specs)
    store.close()
    assert count == 0
    assert most <= THREADS
