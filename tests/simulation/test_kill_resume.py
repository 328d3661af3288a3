"""kill -9 of engine, front or devices in mid-round: the run ends as if nothing had happened, to the bit."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fleets import Prepared, assert_no_upload_lost, outcome, prepare, run_in_memory
from support.processes import PATIENCE_SECONDS, children, kill_in, wait_until

from fleetdistill_lab.simulation.links.links import device_host
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.service.supervisor import Supervisor
from fleetdistill_server.store.store import Store

pytestmark = pytest.mark.slow

ENGINE, FRONT = "fleetdistill_server.engine", "fleetdistill_server.front"
ROUNDS, DEVICES, PROCESSES = 8, 3, 2
# So many local epochs that a round lasts long enough to be met in its middle, and rounds to spare if one is missed.
FLEET = Simulation(
    method="feddkc",
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
    result = outcome(store)
    assert len(result[1]) == ROUNDS * DEVICES
    store.close()
    return result


class Fleet:
    """Supervisor of a run and its devices in two processes, to be killed by the test."""

    def __init__(self, prepared: Prepared) -> None:
        self._config, self._specs, work = prepared
        self.supervisor = Supervisor(self._config, log=work / "server.log")
        self.store = self.supervisor.store
        self._stack = contextlib.ExitStack()
        self._serving = threading.Thread(target=self.supervisor.serve)

    def __enter__(self) -> Fleet:
        self._serving.start()
        try:
            port = wait_until(lambda: self.supervisor.port or 0, "the front to listen")
            self.host = self._stack.enter_context(device_host(self._specs, port, PROCESSES))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self.supervisor.stop()
        self._serving.join()

    def kill_devices(self, group: int) -> None:
        """Kills a process of devices, the oldest, while one of them owes an answer; the host starts it again."""
        names = {spec.name for spec in self._specs[group::PROCESSES]}
        before = wait_until(self._device_processes, "all processes of devices")
        self._kill(before[0], lambda: not names.isdisjoint(self.store.asks.devices_with_open(RUN)))
        wait_until(lambda: self._device_processes() not in ([], before), "another process of devices")

    def _device_processes(self) -> list[int]:
        result = children(self.host.pid)
        return result if len(result) == PROCESSES else []

    def kill_child(self, module: str) -> None:
        """Kills front or engine while asks are open; the supervisor starts it again."""
        (pid,) = wait_until(lambda: children(os.getpid(), module), f"a process of {module}")
        self._kill(pid, lambda: bool(self.store.asks.devices_with_open(RUN)))

    def _kill(self, pid: int, owing: Callable[[], bool]) -> None:
        wait_until(lambda: kill_in(lambda: self.store.runs.open_round(RUN) is not None and owing(), pid), "mid-round")

    def wait_for_rounds(self, count: int) -> None:
        def there() -> bool:
            row = self.store.runs.get(RUN)
            return row is not None and row.completed_rounds >= count

        wait_until(there, f"{count} rounds")

    def wait_for_the_end(self) -> None:
        self.wait_for_rounds(ROUNDS)
        assert self.host.wait(PATIENCE_SECONDS) == 0


@contextlib.contextmanager
def running(directory: Path) -> Iterator[tuple[Fleet, Path]]:
    prepared = prepare(FLEET, directory / "work")
    with Fleet(prepared) as fleet:
        yield fleet, Path(prepared[0].server.store)


@pytest.mark.long
def test_killed_processes_change_nothing(tmp_path: Path, undisturbed: object) -> None:
    """Engine, front and both processes of devices in one run; every kill hits an open round."""
    with running(tmp_path) as (fleet, directory):
        for after, module in enumerate((ENGINE, FRONT)):
            fleet.wait_for_rounds(after)
            fleet.kill_child(module)
        fleet.wait_for_rounds(2)
        for group in range(PROCESSES):
            fleet.kill_devices(group)
        fleet.wait_for_the_end()
    store = Store.open(directory)
    assert [row.status for row in store.runs.rounds(RUN)] == ["closed"] * ROUNDS
    assert_no_upload_lost(store)
    assert [row.status for row in store.asks.uploads(RUN)] == ["used"] * (ROUNDS * DEVICES)
    assert outcome(store) == undisturbed
    store.close()
