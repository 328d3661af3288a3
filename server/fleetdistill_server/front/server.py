"""The gRPC front: speaks to devices, writes to the store, and knows neither torch nor any method.

Run by `fleetdistill serve` as `python -m fleetdistill_server.front`. The event loop only moves messages; the work of
the device API (checks, file writes, waiting for commits) happens in a pool of threads, so no call stalls the others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import random
import signal
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fleetdistill.errors import ConfigurationError, RefusedError
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.codes import Code
from fleetdistill.wire.compression import RAW, compression_of
from fleetdistill.wire.framing import framed
from fleetdistill.wire.payload import CHUNK_BYTES, Chunk
from fleetdistill.wire.v1 import enrolment_pb2, knowledge_pb2, operations_pb2, service_pb2, service_pb2_grpc
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.config.tls import Tls
from fleetdistill_server.front.errors import abort, ended, in_pool
from fleetdistill_server.front.grpc_options import channel_options, enrolment_options
from fleetdistill_server.front.guard import Guard, open_guard
from fleetdistill_server.front.interceptors import RefuseUndecodable
from fleetdistill_server.front.receiving import ENROLMENT_BYTES, MAX_MESSAGE_BYTES
from fleetdistill_server.front.streams import BATCH, in_batches, with_progress_deadline
from fleetdistill_server.front.tls import Ports, add_services, listen_on
from fleetdistill_server.intake.device_api import DeviceApi, UploadSession
from fleetdistill_server.intake.limiter import Who
from fleetdistill_server.logs import LogFormat, LogLevel, configure
from fleetdistill_server.service.heartbeat import BEAT_SECONDS, SILENT_SECONDS, Beats
from fleetdistill_server.service.processes import (
    EXIT_CANNOT_LISTEN,
    allow_open_files,
    end_with_parent,
    keep_freed_memory,
)
from fleetdistill_server.service.serve_lock import served_run
from fleetdistill_server.service.wakeups import POLL_SECONDS, Ends, Wakeups
from fleetdistill_server.store.disk_space import Bounds, DiskSpace
from fleetdistill_server.store.group_commit import CommitThread
from fleetdistill_server.store.retention import SWEEP_SECONDS, sweep_directory
from fleetdistill_server.store.states import AT_REST, OVER
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Sending

T = TypeVar("T")
logger = logging.getLogger("fleetdistill.server.front")

POOL_THREADS = 16
# Uploads write, hash and read what is staged: a pool of their own, so that they never make a heartbeat wait.
UPLOAD_THREADS = 16
LONGEST_WAIT_SECONDS = 60.0
# After a wake-up the devices spread over [0, waiting / this] seconds.
WAKES_PER_SECOND = 1000

_FILES = (service_pb2, enrolment_pb2, operations_pb2)
SERVICES = tuple(one.full_name for file in _FILES for one in file.DESCRIPTOR.services_by_name.values())
"""Names of our own services, as health and reflection know them; the first one is there on plain text too."""

ENGINE = "fleetdistill.engine"
"""The engine's name in the health service."""

_DOWNLOAD = "/fleetdistill.wire.v1.DeviceService/Download"

OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Without it a second server could silently share the port.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class DeviceService(service_pb2_grpc.DeviceServiceServicer):
    """The device calls over gRPC; each hands its work to the device API.

    Args:
        api: Answers them.
        pool: Where the work is done.
        commits: Where calls that only check and commit are done, by default in the pool too.
        limits: How slow a stream may be.
        uploads: Where uploads are worked on, by default in the pool too.
    """

    def __init__(
        self,
        api: DeviceApi,
        pool: ThreadPoolExecutor,
        commits: CommitThread | None = None,
        limits: Limits | None = None,
        uploads: ThreadPoolExecutor | None = None,
    ) -> None:
        self._api = api
        self._pool = pool
        self._uploads = uploads or pool
        self._commits = commits
        self._limits = limits or Limits()
        # By call and not by device: a device may call again before its broken call is noticed.
        self._waiting: dict[asyncio.Event, Who] = {}

    async def CheckIn(self, request: service_pb2.CheckInRequest, context: Any) -> service_pb2.CheckInResponse:
        address = str(context.peer()).rpartition(":")[0]
        return await self._durable_call(context, lambda: self._api.check_in(request, address))

    async def Heartbeat(self, request: service_pb2.HeartbeatRequest, context: Any) -> service_pb2.HeartbeatResponse:
        return await self._call(context, lambda: self._api.heartbeat(request))

    async def Leave(self, request: service_pb2.LeaveRequest, context: Any) -> service_pb2.LeaveResponse:
        return await self._call(context, lambda: self._api.leave(request))

    async def Decline(self, request: service_pb2.DeclineRequest, context: Any) -> service_pb2.DeclineResponse:
        return await self._call(context, lambda: self._api.decline(request))

    async def UploadStatus(
        self, request: service_pb2.UploadStatusRequest, context: Any
    ) -> service_pb2.UploadStatusResponse:
        return await self._call(context, lambda: self._api.upload_status(request))

    async def NextAsk(self, request: service_pb2.NextAskRequest, context: Any) -> service_pb2.NextAskResponse:
        found, who = await self._call(context, lambda: self._look(request.identity))
        if found is None:
            async with self._open_call(context, who):
                await self._wait_for_work(who, request.wait_seconds)
            found = await self._call(context, lambda: self._api.next_ask(request.identity))
        if found is None:
            come_back = service_pb2.ComeBack(after_seconds=0.0, before_seconds=self._spread())
            found = service_pb2.NextAskResponse(come_back=come_back)
        return found

    def _look(self, identity: service_pb2.Identity) -> tuple[service_pb2.NextAskResponse | None, Who]:
        """What there is to do, and for whom: the run by its name, also for a device that does not name it."""
        return self._api.next_ask(identity), (self._api.run_name(identity.run), identity.device)

    async def _wait_for_work(self, who: Who, wait_seconds: float) -> None:
        """Waits for a wake-up; who calls has shown that it is this device."""
        event = asyncio.Event()
        self._waiting[event] = who
        # A device that waits here is not silent, so its lease must not end meanwhile. In this order NaN is the longest.
        longest = min(LONGEST_WAIT_SECONDS, self._api.lease_seconds / 2)
        try:
            await asyncio.wait_for(event.wait(), max(0.0, min(longest, wait_seconds)))
            await asyncio.sleep(random.uniform(0, self._spread()))
        except TimeoutError:
            pass
        finally:
            del self._waiting[event]

    def _spread(self) -> float:
        return len(self._waiting) / WAKES_PER_SECOND

    async def wake_waiting(self) -> None:
        """Ends the long poll of every device that has work, or whose run is over."""
        runs = {run for run, _ in self._waiting.values()}
        for run in runs:
            row, ready = await self._work_of(run)
            over = row is not None and row["status"] in AT_REST
            for event, (its_run, device) in list(self._waiting.items()):
                if its_run == run and (over or device in ready):
                    event.set()

    async def _work_of(self, run: str) -> tuple[dict[str, Any] | None, set[str]]:
        store = self._api.store
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: (store.runs.get(run), store.asks.devices_with_open(run)))

    async def Upload(
        self, request_iterator: AsyncIterator[service_pb2.UploadRequest], context: Any
    ) -> service_pb2.UploadResponse:
        upload = _Upload(self._api)
        try:
            timely = with_progress_deadline(request_iterator, self._limits.stall_seconds, upload.held, CHUNK_BYTES)
            async with contextlib.aclosing(in_batches(timely)) as batches:
                async for batch in batches:
                    await in_pool(self._uploads, context, partial(upload.take, batch))
            return service_pb2.UploadResponse(receipt=await in_pool(self._uploads, context, upload.finish))
        except RefusedError as refusal:  # the stream's own; one of the device API's has ended the call already
            await abort(context, refusal)
        finally:
            # Not here: it may have to wait for an fsync. At shutdown the pool is gone, and with it the session.
            with contextlib.suppress(RuntimeError):
                self._uploads.submit(upload.abandon)

    async def Download(  # type: ignore[override]  # of messages as bytes, see `DownloadsAreBytes`
        self, request: service_pb2.DownloadRequest, context: Any
    ) -> AsyncIterator[bytes]:
        async with contextlib.aclosing(self._responses(request, context)) as responses:
            async for response in responses:
                await self._write(context, response)
        nothing: bytes
        for nothing in ():  # written above, where a device that does not take it is noticed
            yield nothing

    async def _write(self, context: Any, response: bytes) -> None:
        """Sends a message of a stream, to a device that takes it in good time."""
        seconds = self._limits.stall_seconds
        try:
            async with asyncio.timeout(seconds):
                await context.write(response)
        except TimeoutError:
            text = f"the device did not take a chunk within {seconds:g} s; go on from what has come"
            await abort(context, RefusedError(Code.INCOMPLETE, text))

    async def _responses(self, request: service_pb2.DownloadRequest, context: Any) -> AsyncGenerator[bytes, None]:
        (payload, chunks), who = await self._call(context, lambda: self._open_download(request))
        async with self._open_call(context, who):
            try:
                yield service_pb2.DownloadResponse(header=payload.header()).SerializeToString()
                async with contextlib.aclosing(self._ahead(context, chunks)) as responses:
                    async for response in responses:
                        yield response
            finally:
                with contextlib.suppress(RuntimeError):  # at shutdown the pool is gone
                    self._pool.submit(chunks.end)

    def _open_download(self, request: service_pb2.DownloadRequest) -> tuple[tuple[Payload, Sending], Who]:
        identity = request.identity
        return self._api.download(request), (self._api.run_name(identity.run), identity.device)

    async def _ahead(self, context: Any, chunks: Sending) -> AsyncGenerator[bytes, None]:
        """The chunks as messages; the next ones are made while these are sent."""
        make = partial(_next_responses, chunks)
        making = asyncio.ensure_future(self._call(context, make))
        try:
            while batch := await making:
                making = asyncio.ensure_future(self._call(context, make))
                for response in batch:
                    yield response
        finally:
            making.cancel()

    async def _call(self, context: Any, work: Callable[[], T]) -> T:
        return await in_pool(self._pool, context, work)

    async def _durable_call(self, context: Any, work: Callable[[], T]) -> T:
        """As `_call`, for work that mostly waits for its commit: no thread of the pool waits with it."""
        if self._commits is None:
            return await self._call(context, work)
        future = asyncio.wrap_future(self._commits.call(work))

        async def outcome() -> T:
            return (await future)()

        return await ended(context, outcome())

    @contextlib.asynccontextmanager
    async def _open_call(self, context: Any, who: Who) -> AsyncIterator[None]:
        """Counts a call that stays open, of a device that has shown who it is, or ends it as one too many."""
        try:
            place = self._api.limiter.open_call(who)
        except RefusedError as refusal:
            await abort(context, refusal)
        with place:
            yield


class _Upload:
    """What one stream brings: a header and then chunks."""

    def __init__(self, api: DeviceApi) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._session: UploadSession | None = None

    def take(self, requests: list[service_pb2.UploadRequest]) -> None:
        """Takes the next messages. Raises RefusedError, as `UploadSession` does too."""
        with self._lock:
            for request in requests:
                self._take(request)

    def _take(self, request: service_pb2.UploadRequest) -> None:
        message = request.WhichOneof("message")
        if message == "header" and self._session is None:
            self._session = self._api.begin_upload(request.header)
        elif message == "chunk" and self._session is not None:
            self._session.feed(request.chunk)
        else:
            raise RefusedError(Code.BAD_MESSAGE, "an upload is one header and then chunks")

    def held(self) -> int:
        """Bytes that the server has of the upload by now."""
        return self._session.held if self._session is not None else 0

    def finish(self) -> service_pb2.Receipt:
        """Ends the upload with its receipt."""
        if self._session is None:
            raise RefusedError(Code.BAD_MESSAGE, "an upload must begin with its header")
        return self._session.finish()

    def abandon(self) -> None:
        """Ends the stream, once nothing of it is worked on any more."""
        with self._lock:
            if self._session is not None:
                self._session.abandon()


def _next_responses(chunks: Iterator[Chunk]) -> list[bytes]:
    return [framed(chunk) for chunk in itertools.islice(chunks, BATCH)]


class DownloadsAreBytes(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Sends what `Download` gives as it is: it has its messages serialised already."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call_details: Any) -> Any:
        handler = await continuation(call_details)
        return handler._replace(response_serializer=None) if call_details.method == _DOWNLOAD else handler


@contextlib.contextmanager
def open_api(
    directory: Path,
    wake_engine: Callable[[], None],
    lease_seconds: float,
    compression: knowledge_pb2.Compression.ValueType = RAW,
    bounds: Bounds = Bounds(),  # noqa: B008  (it is frozen)
    limits: Limits | None = None,
) -> Iterator[tuple[DeviceApi, CommitThread]]:
    """A device API over the store in a directory, reading with one connection and writing with a commit thread."""
    reader, writer = Store.open(directory), Store.open(directory)
    commits = CommitThread(writer)
    try:
        wake = partial(commits.afterwards, wake_engine)
        api = DeviceApi(reader, commits.commit, wake, lease_seconds, compression, limits)
        api.space = DiskSpace(directory, reader.blobs, bounds, lambda: sweep_directory(directory))
        yield api, commits
    finally:
        commits.close()
        reader.close()
        writer.close()


async def serve(
    directory: Path,
    listen: str,
    ends: Ends,
    lease_seconds: float,
    ready: Callable[[Ports], None],
    compression: knowledge_pb2.Compression.ValueType = RAW,
    bounds: Bounds = Bounds(),  # noqa: B008  (it is frozen)
    limits: Limits = Limits(),  # noqa: B008  (it is frozen)
    tls: Tls | None = None,
) -> int:
    """Serves until SIGINT or SIGTERM. Calls `ready` with the ports. Returns the exit status."""
    wakeups = Wakeups(ends)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def wake_engine() -> None:
        loop.call_soon_threadsafe(wakeups.wake_other)

    opened = open_api(directory, wake_engine, lease_seconds, compression, bounds, limits)
    guarding = open_guard(directory, tls is not None, limits)
    pools = ThreadPoolExecutor(POOL_THREADS), ThreadPoolExecutor(UPLOAD_THREADS)
    with opened as (api, commits), guarding as guard, pools[0] as pool, pools[1] as uploads:
        api.adopt_present_devices()
        service = DeviceService(api, pool, commits, limits, uploads)
        status = health.aio.HealthServicer()
        server, enrolment = await _make_server(service, guard, limits, status), _bare_enrolment_server(guard, limits)
        try:
            ports = listen_on(server, enrolment, listen, tls)
        except RuntimeError:
            where = listen if tls is None else f"{listen} and {tls.enrol_listen}"
            text = "the address is in use or not ours; choose another with [server] listen or enrol_listen"
            logger.error("cannot listen on %s: %s", where, text)
            return EXIT_CANNOT_LISTEN
        except ConfigurationError as error:
            logger.error("cannot listen on %s: %s", listen, error)
            return EXIT_CANNOT_LISTEN
        if tls is not None:
            add_services(server, enrolment, directory, api, pool, tls, ports)
            await enrolment.start()
        await server.start()
        ready(ports)
        tasks = [asyncio.create_task(_pass_wakeups(wakeups, service)), asyncio.create_task(_sweep(api, pool))]
        tasks.append(asyncio.create_task(_delete_what_nobody_needs(directory, pool)))
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
        await _guarded(loop.run_in_executor(pool, api.end_leases))


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


async def _delete_what_nobody_needs(directory: Path, pool: ThreadPoolExecutor) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await _guarded(loop.run_in_executor(pool, sweep_directory, directory))
        await asyncio.sleep(SWEEP_SECONDS)


async def _guarded(work: Awaitable[object]) -> None:
    try:
        await work
    except Exception:  # whatever it is: the task that ended here would never be noticed
        logger.exception("background work failed; trying again")


def main() -> int:
    """Entry point of the front's process."""
    parser = argparse.ArgumentParser(prog="fleetdistill-front", description="The gRPC front of a store.")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--wakeups", type=Ends.parse, default=Ends())
    parser.add_argument("--parent", type=int)
    parser.add_argument("--lease-seconds", type=float, default=60.0)
    parser.add_argument("--limits", type=Limits.parse, default=Limits())
    parser.add_argument("--compression", type=compression_of, default=RAW)
    parser.add_argument("--disk-budget-bytes", type=int, default=0)
    parser.add_argument("--keep-free-bytes", type=int, default=0)
    parser.add_argument("--pki", type=Path)
    parser.add_argument("--enrol-listen", default="")
    parser.add_argument("--certificate-days", type=float, default=0.0)
    parser.add_argument("--log-format", choices=list(LogFormat), default=LogFormat.TEXT)
    parser.add_argument("--log-level", choices=list(LogLevel), default=LogLevel.INFO)
    given = parser.parse_args()
    tls = Tls(given.pki, given.enrol_listen, given.certificate_days) if given.pki else None
    bounds = Bounds(given.disk_budget_bytes, given.keep_free_bytes)
    configure("front", given.log_format, given.log_level)
    keep_freed_memory()
    allow_open_files()
    end_with_parent(given.parent)
    settings = (given.lease_seconds, _say_ports, given.compression, bounds, given.limits, tls)
    return asyncio.run(serve(given.store, given.listen, given.wakeups, *settings))


def _say_ports(ports: Ports) -> None:
    if ports.enrol is not None:
        print(f"enrolling {ports.enrol}", flush=True)
    print(f"listening {ports.devices}", flush=True)
