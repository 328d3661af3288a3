"""The gRPC front: serves devices, writes to the store, and imports neither torch nor any method.

`fleetdistill serve` runs the front as `python -m fleetdistill_server.front`. The event loop only moves messages. The
device API's work (checks, file writes, waiting for commits) runs in a thread pool, so no call blocks the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fleetdistill.errors import (
    ConfigurationError,
    NoSpaceError,
    RunError,
    StoreError,
    StoreUnavailableError,
    in_words,
)
from fleetdistill.wire.compression import compression_of
from fleetdistill.wire.v1 import enrolment_pb2, operations_pb2, service_pb2, service_pb2_grpc
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.config.server_config import ServerSection
from fleetdistill_server.extras import load_part
from fleetdistill_server.front.device_service import DeviceService
from fleetdistill_server.front.guard import Guard, holder_in, open_guard
from fleetdistill_server.front.interceptors import RawChunks
from fleetdistill_server.front.receiving import ENROLMENT_BYTES, MAX_MESSAGE_BYTES
from fleetdistill_server.front.tls import Ports, add_services, listen_on, log_not_valid
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.logs import Interruption
from fleetdistill_server.security.certificates import Role
from fleetdistill_server.service.heartbeat import BEAT_SECONDS, FRONT_FILE, beat
from fleetdistill_server.service.processes import open_files
from fleetdistill_server.service.serve_lock import serving
from fleetdistill_server.service.wakeups import POLL_SECONDS, Ends, Wakeups
from fleetdistill_server.store.blobs import disk_errors
from fleetdistill_server.store.disk_space import Bounds, DiskSpace
from fleetdistill_server.store.group_commit import CommitThread
from fleetdistill_server.store.meter import Meter
from fleetdistill_server.store.retention import SWEEP_SECONDS, sweep_directory
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import HEALTH_PROBLEM, shorten
from fleetdistill_server.tracing.spans import open_spans
from fleetdistill_server.views.health import EngineHealth

logger = logging.getLogger("fleetdistill.server.front")
POOL_THREADS = 16


# Uploads write, hash and read files. A separate pool prevents them from delaying heartbeats.
UPLOAD_THREADS = 16
_FILES = (service_pb2, enrolment_pb2, operations_pb2)
SERVICES = tuple(item.full_name for file in _FILES for item in file.DESCRIPTOR.services_by_name.values())
"""Names of fleetdistill's services for health and reflection; the first is also served in plain text."""
ENGINE, DATABASE, DISK = "fleetdistill.engine", "fleetdistill.database", "fleetdistill.disk"
"""Names in the health service of the engines, the database and the disk limits."""
_LOOK_SECONDS = 8.0
"""Time after which a database that does not answer is reported as away."""
_DISK_SECONDS = 5.0
_away = Interruption(
    logger, "background tasks fail and are repeated: %s", "background tasks no longer fail for want of the store"
)
OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Otherwise a second server could silently share the port.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


@contextlib.contextmanager
def open_api(
    config: ServerSection, limits: Limits, wake_engine: Callable[[], None], meter: Meter | None = None
) -> Iterator[tuple[DeviceApi, CommitThread]]:
    """Opens a device API on the server's store, with one connection for reading and a commit thread for writing."""
    directory = Path(config.store)
    reader, writer = Store.open(directory), Store.open(directory)
    writer.database.meter = meter or Meter()
    commits = CommitThread(writer)
    try:
        wake = partial(commits.after_commit, wake_engine)
        packed = compression_of(config.compression)
        api = DeviceApi(reader, commits.commit, wake, config.lease_seconds, packed, limits)
        bounds = Bounds(config.disk_budget_bytes, config.keep_free_bytes)
        api.sessions.served_run = partial(_only_run, directory)
        api.note_times()
        api.uploads.space = DiskSpace(directory, reader.blobs, bounds, lambda: sweep_directory(directory))
        yield api, commits
    finally:
        commits.close()
        reader.close()
        writer.close()


async def serve(config: ServerSection, limits: Limits, ends: Ends, ready: Callable[[Ports], None]) -> None:
    """Serves until SIGINT or SIGTERM. Calls `ready` with the bound ports. Raises RunError if it cannot listen."""
    directory = Path(config.store)
    tls = config.tls()
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def wake_engine() -> None:
        loop.call_soon_threadsafe(lambda: wakeups.wake_other())

    meter = _open_meter(config)
    spans = open_spans(config.traces, "front")
    opened = open_api(config, limits, wake_engine, meter)
    guarding = open_guard(directory, tls, limits)
    pools = ThreadPoolExecutor(POOL_THREADS), ThreadPoolExecutor(UPLOAD_THREADS)
    with opened as (api, commits), guarding as guard, pools[0] as pool, pools[1] as uploads:
        wakeups = Wakeups(ends, api.store.database)
        api.sessions.adopt_present_devices()
        service = DeviceService(api, pool, commits, limits, uploads, meter, spans)
        status = _HealthService()
        server = await _make_server(service, guard, limits, status, meter)
        enrolment = _limited_enrolment_server(guard, limits, meter)
        try:
            ports = listen_on(server, enrolment, config.listen, tls, guard.strangers)
        except ConfigurationError as error:
            raise RunError(f"cannot listen on {config.listen}: {error}") from error
        if tls is not None:
            add_services(server, enrolment, config, api, pool, tls, ports, guard)
            await enrolment.start()
        await server.start()
        ready(ports)
        tasks = [asyncio.create_task(_pass_wakeups(wakeups, service)), asyncio.create_task(_sweep(api, pool))]
        if tls is not None:
            tasks.append(asyncio.create_task(log_not_valid(config)))
        tasks.append(asyncio.create_task(_sweep_forever(directory, pool)))
        tasks.append(asyncio.create_task(_update_health(status, directory, api)))
        tasks.append(asyncio.create_task(_beat_forever(directory / FRONT_FILE)))
        if meter is not None:
            tasks.append(asyncio.create_task(meter.watch_loop()))
        await stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(server.stop(grace=2.0), enrolment.stop(grace=2.0))
        wakeups.close()
    if spans is not None:
        spans.close()


def _open_meter(config: ServerSection) -> Meter | None:
    """Returns the front's metrics, or None without `[server] metrics` or without space for them."""
    if not config.metrics:
        return None
    try:
        meter: Meter = load_part("front-metrics")(Path(config.store))
        return meter
    except OSError as error:
        logger.warning("this front measures nothing until it is restarted: %s", in_words(error))
        return None


def _measure(meter: Meter | None) -> list[Any]:
    """Returns the interceptors that measure calls, which must come first; none without metrics."""
    if meter is None:
        return []
    from fleetdistill_server.front.interceptors import MeasuredCalls

    return [MeasuredCalls(meter)]


async def _make_server(
    service: DeviceService, guard: Guard, limits: Limits, status: health.aio.HealthServicer, meter: Meter | None
) -> Any:
    """Returns a server with the services that are also offered in plain text."""
    options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), *OPTIONS, *channel_options(limits)]
    server = grpc.aio.server(
        interceptors=[*_measure(meter), guard, RawChunks()],
        options=options,
        maximum_concurrent_rpcs=2 * limits.open_calls,
    )
    service_pb2_grpc.add_DeviceServiceServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    names = SERVICES if guard.tls else SERVICES[:1]
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    for name in ("", *names, DATABASE, DISK):
        await status.set(name, health_pb2.HealthCheckResponse.SERVING)
    await status.set(ENGINE, health_pb2.HealthCheckResponse.NOT_SERVING)
    return server


def _limited_enrolment_server(guard: Guard, limits: Limits, meter: Meter | None) -> Any:
    """Returns a server for the enrolment port.

    Callers are unauthenticated, so the size and number of messages are limited.
    """
    options = [("grpc.max_receive_message_length", ENROLMENT_BYTES), *OPTIONS, *enrolment_options(limits)]
    return grpc.aio.server(interceptors=[*_measure(meter), guard], options=options)


async def _pass_wakeups(wakeups: Wakeups, service: DeviceService) -> None:
    while True:
        await wakeups.wait()
        await _guard(service.wake_waiting())


async def _beat_forever(path: Path) -> None:
    """Shows the supervisor that the event loop works, which answers every call."""
    while True:
        await asyncio.to_thread(beat, path)  # not in the pools, which calls may occupy
        await asyncio.sleep(BEAT_SECONDS)


async def _sweep(api: DeviceApi, pool: ThreadPoolExecutor) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(POLL_SECONDS)
        await _guard(loop.run_in_executor(pool, api.sessions.end_leases))
        if api.times is not None:
            await _guard(loop.run_in_executor(pool, api.times.write))


class _HealthService(health.aio.HealthServicer):  # type: ignore[misc]
    """The health service; the trailing metadata of a check of the engines has what is wrong.

    With TLS only people are told, because it names runs, and a device acts for its own run only.

    Attributes:
        engines: What is wrong with the engines, in words; empty if nothing is or it is unknown.
    """

    engines = ""

    async def Check(self, request: Any, context: Any) -> Any:
        """Answers a check."""
        holder = holder_in(context)
        is_device = holder is not None and holder.role is Role.DEVICE
        if request.service == ENGINE and self.engines and not is_device:
            context.set_trailing_metadata(((HEALTH_PROBLEM, shorten(self.engines).encode()),))
        return await super().Check(request, context)


class _Health:
    """Looks at the engines, the database and the disk limits, on a thread that calls cannot occupy.

    Attributes:
        engines: What was wrong with the engines when they were last seen, in words.
    """

    def __init__(self, directory: Path, api: DeviceApi) -> None:
        self.engines = ""
        self._engines = EngineHealth(directory, api.store)
        self._space = api.uploads.space
        self._thread = ThreadPoolExecutor(1, "health")
        self._looking: asyncio.Future[dict[str, bool]] | None = None
        self._disk, self._disk_looked = True, -math.inf
        self._away = Interruption(logger, "the store does not answer: %s", "the store answers again")

    async def look(self) -> dict[str, bool]:
        """Returns what works, by name in the health service; the front itself needs the database."""
        self._looking = self._looking or asyncio.get_running_loop().run_in_executor(self._thread, self._look)
        await asyncio.wait({self._looking}, timeout=_LOOK_SECONDS)
        if not self._looking.done():
            self._away.fail(f"no answer for {_LOOK_SECONDS:g} s")
            return {"": False, DATABASE: False, ENGINE: False}
        looking, self._looking = self._looking, None
        try:
            result = looking.result()
        except StoreError as error:
            self._away.fail(error)
            return {"": False, DATABASE: False, ENGINE: False}
        self._away.work()
        return {"": True, DATABASE: True, **result}

    def _look(self) -> dict[str, bool]:
        self.engines = "; ".join(self._engines.problems())
        if self._space is not None and time.monotonic() - self._disk_looked >= _DISK_SECONDS:
            self._disk, self._disk_looked = not self._space.shortfall(), time.monotonic()
        return {ENGINE: not self.engines, DISK: self._disk}


async def _update_health(status: _HealthService, directory: Path, api: DeviceApi) -> None:
    state = health_pb2.HealthCheckResponse
    looked = _Health(directory, api)

    async def update() -> None:
        result = await looked.look()
        status.engines = looked.engines if result[DATABASE] else ""
        for name, works in result.items():
            await status.set(name, state.SERVING if works else state.NOT_SERVING)

    while True:
        await _guard(update())
        await asyncio.sleep(BEAT_SECONDS)


def _only_run(directory: Path) -> str | None:
    served_now = serving(directory)
    return served_now.run or None if served_now is not None else None


async def _sweep_forever(directory: Path, pool: ThreadPoolExecutor) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await _guard(loop.run_in_executor(pool, sweep_directory, directory))
        await asyncio.sleep(SWEEP_SECONDS)


async def _guard(work: Awaitable[object]) -> None:
    try:
        with disk_errors("working in the background"):
            await work
        _away.work()
    except (StoreUnavailableError, NoSpaceError) as error:
        _away.fail(error)
    except Exception:  # otherwise the task would end silently
        logger.exception("a background task failed; retrying")


# --- Limits that gRPC enforces before a call reaches the server's code: connections, streams, handshakes, windows.

_DAY = 24 * 3600.0


# Open files other than connections: the database, uploads in progress, pipes.
_OTHER_FILES = 1024
_ENROLMENT_STREAMS = 4


# Unread bytes of a stream. A device's chunks wait for the network less often than with the enrolment port's 16 KiB.
_WINDOW_BYTES = 64 << 10
_ENROLMENT_WINDOW_BYTES = 16 << 10
Options = list[tuple[str, int]]


def channel_options(limits: Limits) -> Options:
    """Returns the gRPC options of the port for devices.

    gRPC closes connections that do not finish the handshake, make no call, or do not reply to pings. The number of
    connections is limited, so that file descriptors remain for the store.
    """
    return [
        ("grpc.server.max_pending_requests", limits.open_calls),
        ("grpc.server.max_pending_requests_hard_limit", 2 * limits.open_calls),
        ("grpc.max_concurrent_streams", limits.open_calls_per_connection),
        ("grpc.max_allowed_incoming_connections", _connections(limits.connections)),
        ("grpc.max_connection_idle_ms", _milliseconds(limits.idle_seconds)),
        ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
        *_of_both_ports(limits),
    ]


def enrolment_options(limits: Limits) -> Options:
    """Returns the gRPC options of the enrolment port, whose callers are not authenticated."""
    return [
        ("grpc.server.max_pending_requests", limits.enrolments_at_once),
        ("grpc.max_concurrent_streams", _ENROLMENT_STREAMS),
        ("grpc.max_allowed_incoming_connections", _connections(limits.unknown_connections)),
        ("grpc.max_connection_idle_ms", _milliseconds(limits.handshake_seconds)),
        ("grpc.max_connection_age_ms", _milliseconds(limits.request_seconds)),
        ("grpc.max_connection_age_grace_ms", _milliseconds(limits.request_seconds)),
        ("grpc.http2.lookahead_bytes", _ENROLMENT_WINDOW_BYTES),
        *_of_both_ports(limits),
    ]


def _of_both_ports(limits: Limits) -> Options:
    return [
        ("grpc.server_handshake_timeout_ms", _milliseconds(limits.handshake_seconds)),
        ("grpc.keepalive_time_ms", _milliseconds(limits.stall_seconds / 2)),
        ("grpc.keepalive_timeout_ms", _milliseconds(limits.handshake_seconds)),
        # With the BDP probe, the window would grow, and a fast link could buffer megabytes.
        ("grpc.http2.bdp_probe", 0),
    ]


def _connections(wanted: int) -> int:
    return min(wanted, max(open_files() - _OTHER_FILES, _OTHER_FILES))


def _milliseconds(seconds: float) -> int:
    return max(1, math.ceil(min(seconds, _DAY) * 1000))
