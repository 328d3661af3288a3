"""The gRPC front: speaks to devices, writes to the store, and knows neither torch nor any method.

Run by `fleetdistill serve` as `python -m fleetdistill_server.front`. The event loop only moves messages; the work of
the device API (checks, file writes, waiting for commits) happens in a pool of threads, so no call stalls the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fleetdistill.errors import ConfigurationError
from fleetdistill.wire.compression import compression_of
from fleetdistill.wire.v1 import enrolment_pb2, operations_pb2, service_pb2, service_pb2_grpc
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.config.server_config import ServerSection
from fleetdistill_server.front.device_service import DeviceService
from fleetdistill_server.front.grpc_options import channel_options, enrolment_options
from fleetdistill_server.front.guard import Guard, open_guard
from fleetdistill_server.front.interceptors import DownloadsAreBytes, RefuseUndecodable
from fleetdistill_server.front.receiving import ENROLMENT_BYTES, MAX_MESSAGE_BYTES
from fleetdistill_server.front.tls import Ports, add_services, listen_on
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.service.heartbeat import BEAT_SECONDS, SILENT_SECONDS, Beats
from fleetdistill_server.service.processes import EXIT_CANNOT_LISTEN
from fleetdistill_server.service.serve_lock import served_run
from fleetdistill_server.service.wakeups import POLL_SECONDS, Ends, Wakeups
from fleetdistill_server.store.disk_space import Bounds, DiskSpace
from fleetdistill_server.store.group_commit import CommitThread
from fleetdistill_server.store.retention import SWEEP_SECONDS, sweep_directory
from fleetdistill_server.store.states import OVER
from fleetdistill_server.store.store import Store

logger = logging.getLogger("fleetdistill.server.front")

POOL_THREADS = 16
# Uploads write, hash and read what is staged: a pool of their own, so that they never make a heartbeat wait.
UPLOAD_THREADS = 16

_FILES = (service_pb2, enrolment_pb2, operations_pb2)
SERVICES = tuple(one.full_name for file in _FILES for one in file.DESCRIPTOR.services_by_name.values())
"""Names of our own services, as health and reflection know them; the first one is there on plain text too."""

ENGINE = "fleetdistill.engine"
"""The engine's name in the health service."""


OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Without it a second server could silently share the port.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


@contextlib.contextmanager
def open_api(
    config: ServerSection, limits: Limits, wake_engine: Callable[[], None]
) -> Iterator[tuple[DeviceApi, CommitThread]]:
    """A device API over the server's store, reading with one connection and writing with a commit thread."""
    directory = Path(config.store)
    reader, writer = Store.open(directory), Store.open(directory)
    commits = CommitThread(writer)
    try:
        wake = partial(commits.after_commit, wake_engine)
        packed = compression_of(config.compression)
        api = DeviceApi(reader, commits.commit, wake, config.lease_seconds, packed, limits)
        bounds = Bounds(config.disk_budget_bytes, config.keep_free_bytes)
        api.uploads.space = DiskSpace(directory, reader.blobs, bounds, lambda: sweep_directory(directory))
        yield api, commits
    finally:
        commits.close()
        reader.close()
        writer.close()


async def serve(config: ServerSection, limits: Limits, ends: Ends, ready: Callable[[Ports], None]) -> int:
    """Serves until SIGINT or SIGTERM. Calls `ready` with the ports. Returns the exit status."""
    directory, tls = Path(config.store), config.tls()
    wakeups = Wakeups(ends)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def wake_engine() -> None:
        loop.call_soon_threadsafe(wakeups.wake_other)

    opened = open_api(config, limits, wake_engine)
    guarding = open_guard(directory, tls is not None, limits)
    pools = ThreadPoolExecutor(POOL_THREADS), ThreadPoolExecutor(UPLOAD_THREADS)
    with opened as (api, commits), guarding as guard, pools[0] as pool, pools[1] as uploads:
        api.sessions.adopt_present_devices()
        service = DeviceService(api, pool, commits, limits, uploads)
        status = health.aio.HealthServicer()
        server, enrolment = await _make_server(service, guard, limits, status), _bare_enrolment_server(guard, limits)
        try:
            ports = listen_on(server, enrolment, config.listen, tls)
        except RuntimeError:
            where = config.listen if tls is None else f"{config.listen} and {tls.enrol_listen}"
            text = "the address is in use or not ours; choose another with [server] listen or enrol_listen"
            logger.error("cannot listen on %s: %s", where, text)
            return EXIT_CANNOT_LISTEN
        except ConfigurationError as error:
            logger.error("cannot listen on %s: %s", config.listen, error)
            return EXIT_CANNOT_LISTEN
        if tls is not None:
            add_services(server, enrolment, directory, api, pool, tls, ports)
            await enrolment.start()
        await server.start()
        ready(ports)
        tasks = [asyncio.create_task(_pass_wakeups(wakeups, service)), asyncio.create_task(_sweep(api, pool))]
        tasks.append(asyncio.create_task(_sweep_forever(directory, pool)))
        tasks.append(asyncio.create_task(_tell_of_the_engine(status, directory, api, pool)))
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(server.stop(grace=2.0), enrolment.stop(grace=2.0))
    return 0


async def _make_server(service: DeviceService, guard: Guard, limits: Limits, status: health.aio.HealthServicer) -> Any:
    """A server with what it offers on plain text too."""
    options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), *OPTIONS, *channel_options(limits)]
    server = grpc.aio.server(
        interceptors=[guard, RefuseUndecodable(), DownloadsAreBytes()],
        options=options,
        maximum_concurrent_rpcs=2 * limits.open_calls,
    )
    service_pb2_grpc.add_DeviceServiceServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    names = SERVICES if guard.tls else SERVICES[:1]
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    for name in ("", *names):
        await status.set(name, health_pb2.HealthCheckResponse.SERVING)
    await status.set(ENGINE, health_pb2.HealthCheckResponse.NOT_SERVING)
    return server


def _bare_enrolment_server(guard: Guard, limits: Limits) -> Any:
    """A server for the enrolment port, where strangers call: it takes small messages, few at a time, and no more."""
    options = [("grpc.max_receive_message_length", ENROLMENT_BYTES), *OPTIONS, *enrolment_options(limits)]
    return grpc.aio.server(interceptors=[guard, RefuseUndecodable()], options=options)


async def _pass_wakeups(wakeups: Wakeups, service: DeviceService) -> None:
    while True:
        await wakeups.wait()
        await _guarded(service.wake_waiting())


async def _sweep(api: DeviceApi, pool: ThreadPoolExecutor) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(POLL_SECONDS)
        await _guarded(loop.run_in_executor(pool, api.sessions.end_leases))


async def _tell_of_the_engine(status: health.aio.HealthServicer, directory: Path, api: DeviceApi, pool: Any) -> None:
    """Keeps the health of the engine: it gives signs of life, or its run is over, so that none is needed."""
    loop, beats = asyncio.get_running_loop(), Beats(directory)

    def is_well() -> bool:
        if beats.silent_seconds() < SILENT_SECONDS and beats.seen:
            return True
        run = served_run(directory)
        return run is not None and (api.store.runs.get(run) or {}).get("status") in OVER

    async def look() -> None:
        well, answer = await loop.run_in_executor(pool, is_well), health_pb2.HealthCheckResponse
        await status.set(ENGINE, answer.SERVING if well else answer.NOT_SERVING)

    while True:
        await _guarded(look())
        await asyncio.sleep(BEAT_SECONDS)


async def _sweep_forever(directory: Path, pool: ThreadPoolExecutor) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await _guarded(loop.run_in_executor(pool, sweep_directory, directory))
        await asyncio.sleep(SWEEP_SECONDS)


async def _guarded(work: Awaitable[object]) -> None:
    try:
        await work
    except Exception:  # whatever it is: the task that ended here would never be noticed
        logger.exception("background work failed; trying again")
