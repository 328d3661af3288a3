"""Runs a simulated fleet over gRPC: front, engine and devices are processes on the loopback interface."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from fleetdistill.errors import RunError
from fleetdistill_lab.simulation.backends.choice import usable_processors
from fleetdistill_lab.simulation.links.links import MAX_SHORT_ROUNDS, Watch
from fleetdistill_lab.simulation.spec.device import DeviceSpec
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.service.processes import child_environment
from fleetdistill_server.service.supervisor import Supervisor
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store

_POLL_SECONDS = 0.1


def run_over_grpc(config: RunConfig, specs: list[DeviceSpec], work: Path, watch: Watch, *, workers: int = 0) -> Store:
    """Runs a fleet; see `run_over_memory`.

    Args:
        config: Configuration of the run.
        specs: The devices.
        work: Folder for the log of front and engine.
        watch: Called with the store several times a second.
        workers: Number of processes that the devices share; 0 for one per processor.

    Raises:
        RunError: A device failed, a process was killed too often, or the run was stopped.
    """
    supervisor = Supervisor(config, log=work / "server.log", max_short_rounds=MAX_SHORT_ROUNDS)
    failure: list[Exception] = []
    serving = threading.Thread(target=_serve, args=(supervisor, failure), name="supervisor")
    finished = False
    try:
        serving.start()  # Ctrl-C may arrive here too, with the thread running
        with (
            device_host(specs, _port(supervisor, failure), workers or usable_processors()) as host,
            closing(Store.open(Path(config.server.store))) as store,  # the supervisor closes its own when it fails
        ):
            log = _specs_of(specs).with_suffix(".log")
            _watch_until_over(config.run.name, store, host, watch, failure, log)
        finished = True
    finally:
        supervisor.stop(at_once=not finished)
        if serving.is_alive():
            serving.join()
    return Store.open(Path(config.server.store))


def _serve(supervisor: Supervisor, failure: list[Exception]) -> None:
    try:
        supervisor.serve()
    except Exception as error:  # raised again in the thread that waits for the run
        failure.append(error)


def _port(supervisor: Supervisor, failure: list[Exception]) -> int:
    while supervisor.port is None:
        if failure:
            raise failure[0]
        time.sleep(_POLL_SECONDS)
    return supervisor.port


@contextlib.contextmanager
def device_host(specs: Sequence[DeviceSpec], port: int, processes: int) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the devices in some processes, with a host that watches them, and terminates them at the end."""
    command = [sys.executable, "-m", "fleetdistill_lab.simulation.links.device_host", str(save_specs(specs))]
    command += ["--server", f"127.0.0.1:{port}", "--processes", str(processes), "--parent", str(os.getpid())]
    host = subprocess.Popen(command, start_new_session=True, env=child_environment())
    try:
        yield host
    finally:
        host.terminate()
        host.wait()


def _specs_of(specs: Sequence[DeviceSpec]) -> Path:
    return Path(f"{specs[0].state_dir}.json")


def save_specs(specs: Sequence[DeviceSpec]) -> Path:
    """Writes specs next to the first device's state directory, in the format that `device_host` reads."""
    path = _specs_of(specs)
    path.write_text(json.dumps([asdict(spec) for spec in specs]))
    return path


def _watch_until_over(
    run: str, store: Store, host: subprocess.Popen[bytes], watch: Watch, failure: list[Exception], log: Path
) -> None:
    while host.poll() is None:
        if failure:
            raise failure[0]
        _check_not_stopped(store, run, log)
        watch(store)
        time.sleep(_POLL_SECONDS)
    _check_not_stopped(store, run, log)  # raised first, because its error states the run's reason
    if host.returncode:
        raise RunError("a device process failed; its error is printed above")
    watch(store)


def _check_not_stopped(store: Store, run: str, log: Path) -> None:
    known_run = store.runs.get(run)
    if known_run is not None and known_run.status is RunStatus.STOPPED:
        raise RunError(f"{known_run.reason}; the devices' log is {log}" if log.exists() else known_run.reason)
