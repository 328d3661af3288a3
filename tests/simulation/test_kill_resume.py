"""kill -9 of engine, front or device in mid-round: the run ends as if nothing had happened, to the bit."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fleets import Prepared, assert_no_upload_lost, outcome, prepare, run_in_memory
from support.processes import PATIENCE_SECONDS, children, kill_in, wait_until

from fleetdistill_server.service.supervisor import Supervisor
from fleetdistill_server.simulation.links.links import device_processes
from fleetdistill_server.simulation.spec.device import DeviceSpec
from fleetdistill_server.simulation.spec.plan import RUN
from fleetdistill_server.simulation.spec.settings import Simulation
from fleetdistill_server.store.store import Store

pytestmark = pytest.mark.slow

ENGINE, FRONT = "fleetdistill_server.engine", "fleetdistill_server.front"
ROUNDS, DEVICES = 4, 3
# So many local epochs that a round lasts long enough to be met in its middle.
FLEET = Simulation(
    devices=DEVICES,
    rounds=ROUNDS,
    train_limit=120,
    test_limit=60,
    alpha=1.0,
    settings={"local_epochs": 10, "server_epochs": 5},
    torch_device="cpu",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[tuple[int, str, float, int]]]:
    store = run_in_memory(prepare(FLEET, tmp_path_factory.mktemp("undisturbed") / "work"))
    found = outcome(store)
    assert len(found[1]) == ROUNDS * DEVICES
    store.close()
    return found


class Fleet:
    """Supervisor and devices of a run, all processes of their own, to be killed by the test."""

    def __init__(self, prepared: Prepared) -> None:
        self._config, self._specs, work = prepared
        self.supervisor = Supervisor(self._config, log=work / "server.log")
        self.store = self.supervisor.store
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = contextlib.ExitStack()
        self._serving = threading.Thread(target=self.supervisor.serve)

    def __enter__(self) -> Fleet:
        self._serving.start()
        try:
            self.port = wait_until(lambda: self.supervisor.port or 0, "the front to listen")
            for spec in self._specs:
                self.start(spec)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self.supervisor.stop()
        self._serving.join()

    def start(self, spec: DeviceSpec) -> None:
        """Starts a device's process, again on the same state directory if it ran before."""
        (self._processes[spec.name],) = self._stack.enter_context(device_processes([spec], self.port))

    def kill_device(self, number: int) -> None:
        """Kills a device while it owes an answer, and starts it again."""
        spec = self._specs[number]
        process = self._processes[spec.name]
        self._kill(process.pid, lambda: spec.name in self.store.asks.devices_with_open(RUN))
        process.wait()
        self.start(spec)

    def kill_child(self, module: str) -> None:
        """Kills front or engine while asks are open; the supervisor starts it again."""
        (pid,) = wait_until(lambda: children(os.getpid(), module), f"a process of {module}")
        self._kill(pid, lambda: bool(self.store.asks.devices_with_open(RUN)))

    def _kill(self, pid: int, owing: Callable[[], bool]) -> None:
        wait_until(lambda: kill_in(lambda: self.store.runs.open_round(RUN) is not None and owing(), pid), "mid-round")

    def wait_for_rounds(self, count: int) -> None:
        def there() -> bool:
            row = self.store.runs.get(RUN)
            return row is not None and row["completed_rounds"] >= count

        wait_until(there, f"{count} rounds")

    def wait_for_the_end(self) -> None:
        self.wait_for_rounds(ROUNDS)
        for name, process in self._processes.items():
            assert process.wait(PATIENCE_SECONDS) == 0, name


@contextlib.contextmanager
def running(directory: Path) -> Iterator[tuple[Fleet, Path]]:
    prepared = prepare(FLEET, directory / "work")
    with Fleet(prepared) as fleet:
        yield fleet, Path(prepared[0].server.store)


def test_killed_processes_change_nothing(tmp_path: Path, undisturbed: object) -> None:
    """Engine, front and two devices in one run; every kill hits an open round."""
    with running(tmp_path) as (fleet, directory):
        for after, module in enumerate((ENGINE, FRONT)):
            fleet.wait_for_rounds(after)
            fleet.kill_child(module)
        fleet.wait_for_rounds(2)
        for number in (1, 2):
            fleet.kill_device(number)
        fleet.wait_for_the_end()
    store = Store.open(directory)
    assert [row["status"] for row in store.runs.rounds(RUN)] == ["closed"] * ROUNDS
    assert_no_upload_lost(store)
    assert [row["status"] for row in store.asks.uploads(RUN)] == ["used"] * (ROUNDS * DEVICES)
    assert outcome(store) == undisturbed
    store.close()
