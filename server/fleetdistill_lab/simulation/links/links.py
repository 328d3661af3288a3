"""Runs a simulated fleet in memory, or over gRPC with front, engine and devices as processes on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path

from fleetdistill.errors import RunError
from fleetdistill.link.base import Link
from fleetdistill.training.randomness import without_app
from fleetdistill.wire.compression import compression_of
from fleetdistill_lab.simulation.backends.backend import MakeBackend
from fleetdistill_lab.simulation.backends.choice import usable_processors
from fleetdistill_lab.simulation.backends.remote_work import RemoteWork
from fleetdistill_lab.simulation.links.simulated_devices import MAX_OPEN, DriveFleet, Recipients, SimulatedDevices
from fleetdistill_lab.simulation.spec.device import DeviceSpec
from fleetdistill_lab.simulation.timing.behaviour import FleetBehaviour
from fleetdistill_lab.simulation.timing.timing import Timing
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import SharedLink
from fleetdistill_server.service.processes import child_environment
from fleetdistill_server.service.supervisor import Supervisor
from fleetdistill_server.store.round_store import RoundStore
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store

Watch = Callable[[Store], None]
MakeLink = Callable[[DeviceApi, str], Link]
"""Makes the link of one device, from the server's side of the device API and the device's id."""
MAX_SHORT_ROUNDS = 10
"""Number of consecutive short rounds after which a simulation fails, since no further devices will join."""
_MAX_SHORT_ROUNDS_OF_TRACES = 100
"""The same with a simulated time, in which devices come and go."""


def memory_link(api: DeviceApi, device: str) -> Link:
    """Returns the usual link of a device in this process."""
    return SharedLink(api)


def run_over_memory(
    config: RunConfig,
    specs: list[DeviceSpec],
    work: Path,
    watch: Watch,
    make_link: MakeLink = memory_link,
    *,
    durable: bool = False,
    max_open: int = MAX_OPEN,
    behaviour: FleetBehaviour | None = None,
    make_backend: MakeBackend | None = None,
    recipients: Recipients = Recipients.PARTICIPANTS,
    min_ask_seconds: float = 0.0,
    on_measured: Callable[[float], None] = lambda seconds: None,
) -> Store:
    """Runs engine and devices in this process, one step at a time.

    The store is on disk, so that another process can resume an interrupted run: from the last completed round, or with
    `durable` from the last step.

    Args:
        config: Configuration of the run.
        specs: The devices.
        work: Not used; the store's path is in `config`.
        watch: Called with the store after every device step.
        make_link: Makes each device's link.
        durable: Whether devices and server write and fsync their files as over gRPC.
        max_open: Largest number of devices in memory, unless `durable`.
        behaviour: Behaviour of the fleet in simulated time, with its own links; None if all devices are always
            available and answer immediately.
        make_backend: Makes what computes the devices' work; None for this process. Not with `durable`.
        recipients: Which devices take the run's final model; all of them with `durable`.
        min_ask_seconds: Mean seconds of an ask in the first round from which the backend computes the later ones.
        on_measured: Called once with the mean seconds of an ask in the first round, unless `min_ask_seconds` is 0.

    Returns:
        The open store.
    """
    from fleetdistill_server.engine.engine import Engine

    directory = Path(config.server.store)
    store = Store.open(directory) if durable else RoundStore(directory)
    timing = None if behaviour is None else Timing(behaviour, config, specs)
    api = _api(store, config, timing)
    link_of = partial(make_link if timing is None else timing.link, api)
    with _closed_on_failure(store), without_app(), _rare_collections(), _remote(api, config, make_backend) as remote:
        rounds = store if isinstance(store, RoundStore) else None
        clock = None if timing is None else timing.clock
        with SimulatedDevices(
            specs,
            link_of,
            api,
            config.run.name,
            rounds,
            max_open,
            clock,
            remote,
            recipients=recipients,
            min_ask_seconds=min_ask_seconds,
            on_measured=on_measured,
        ) as devices:
            after = partial(watch, store)
            if timing is None:
                waker = DriveFleet(store, config.run.name, devices, after)
            else:
                waker = timing.drive(api, devices, after)
            most = MAX_SHORT_ROUNDS if timing is None else _MAX_SHORT_ROUNDS_OF_TRACES
            engine = Engine(store, config, waker, most)
            engine.pauses = timing is not None
            # asyncio.run would turn Ctrl-C into a task cancellation, which this code never awaits.
            with contextlib.closing(asyncio.new_event_loop()) as loop:
                loop.run_until_complete(engine.run())
            waker.end()
            devices.finish()
            waker.save()
        watch(store)
    return store


def _api(store: Store, config: RunConfig, timing: Timing | None) -> DeviceApi:
    compression = compression_of(config.server.compression)
    if timing is None:
        api = DeviceApi(store, compression=compression)
    else:
        store.use_clock(timing.clock.for_store())
        api = DeviceApi(
            store, lease_seconds=config.server.lease_seconds, compression=compression, clock=timing.clock.now
        )
    api.uploads.compression = api.compression
    return api


@contextlib.contextmanager
def _remote(api: DeviceApi, config: RunConfig, make_backend: MakeBackend | None) -> Iterator[RemoteWork | None]:
    if make_backend is None:
        yield None
        return
    with contextlib.closing(RemoteWork(api, config.run.name, make_backend)) as remote:
        yield remote


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Makes garbage collections rarer: open devices are many long-lived objects, which each full collection visits."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextlib.contextmanager
def _closed_on_failure(store: Store) -> Iterator[None]:
    try:
        yield
    except BaseException:
        store.close()
        raise


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
