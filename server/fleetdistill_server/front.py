"""The gRPC front: speaks to devices, writes to the store, and knows neither torch nor any method.

Run by `fleetdistill serve` as `python -m fleetdistill_server.front`. The event loop only moves messages; the desk's
work (checks, file writes, waiting for commits) happens in a pool of threads, so no call stalls the others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fleetdistill.errors import FleetDistillError, RefusedError, StoreError
from fleetdistill.wire.codes import DOMAIN, MEANINGS, Code
from fleetdistill.wire.v1 import service_pb2, service_pb2_grpc
from fleetdistill_server.commits import CommitThread
from fleetdistill_server.desk import Desk, UploadSession
from fleetdistill_server.processes import EXIT_CANNOT_LISTEN, end_with_parent
from fleetdistill_server.store import Store
from fleetdistill_server.wakeups import POLL_SECONDS, Ends, Wakeups

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 << 20
PENDING_CALLS = 20_000
POOL_THREADS = 16
LONGEST_WAIT_SECONDS = 60.0
# After a wake-up the devices spread over [0, waiting / this] seconds.
WAKES_PER_SECOND = 1000
# What a refusal says travels in trailers, of which gRPC takes 8 KiB.
LONGEST_SENTENCE = 1000

OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Without it a second server could silently share the port.
    ("grpc.so_reuseport", 0),
    ("grpc.server_max_pending_requests", PENDING_CALLS),
    ("grpc.server_max_pending_requests_hard_limit", 2 * PENDING_CALLS),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class DeviceService(service_pb2_grpc.DeviceServiceServicer):
    """The device calls over gRPC; each hands its work to the desk."""

    def __init__(self, desk: Desk, pool: ThreadPoolExecutor) -> None:
        self._desk = desk
        self._pool = pool
        # By call and not by device: a device may call again before its broken call is noticed.
        self._waiting: dict[asyncio.Event, tuple[str, str]] = {}

    async def CheckIn(self, request: service_pb2.CheckInRequest, context: Any) -> service_pb2.CheckInResponse:
        return await self._call(context, lambda: self._desk.check_in(request))

    async def Heartbeat(self, request: service_pb2.HeartbeatRequest, context: Any) -> service_pb2.HeartbeatResponse:
        return await self._call(context, lambda: self._desk.heartbeat(request))

    async def Leave(self, request: service_pb2.LeaveRequest, context: Any) -> service_pb2.LeaveResponse:
        return await self._call(context, lambda: self._desk.leave(request))

    async def Decline(self, request: service_pb2.DeclineRequest, context: Any) -> service_pb2.DeclineResponse:
        return await self._call(context, lambda: self._desk.decline(request))

    async def UploadStatus(
        self, request: service_pb2.UploadStatusRequest, context: Any
    ) -> service_pb2.UploadStatusResponse:
        return await self._call(context, lambda: self._desk.upload_status(request))

    async def NextAsk(self, request: service_pb2.NextAskRequest, context: Any) -> service_pb2.NextAskResponse:
        found = await self._call(context, lambda: self._desk.next_ask(request.identity))
        if found is None:
            await self._wait_for_work(request)
            found = await self._call(context, lambda: self._desk.next_ask(request.identity))
        if found is None:
            come_back = service_pb2.ComeBack(after_seconds=0.0, before_seconds=self._spread())
            found = service_pb2.NextAskResponse(come_back=come_back)
        return found

    async def _wait_for_work(self, request: service_pb2.NextAskRequest) -> None:
        event = asyncio.Event()
        self._waiting[event] = (request.identity.run, request.identity.device)
        # A device that waits here is not silent, so its lease must not end meanwhile. In this order NaN is the longest.
        longest = min(LONGEST_WAIT_SECONDS, self._desk.lease_seconds / 2)
        try:
            await asyncio.wait_for(event.wait(), max(0.0, min(longest, request.wait_seconds)))
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
            over = row is not None and row["status"] in ("finished", "stopped")
            for event, (its_run, device) in list(self._waiting.items()):
                if its_run == run and (over or device in ready):
                    event.set()

    async def _work_of(self, run: str) -> tuple[dict[str, Any] | None, set[str]]:
        store = self._desk.store
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: (store.run(run), store.devices_with_open_asks(run)))

    async def Upload(
        self, request_iterator: AsyncIterator[service_pb2.UploadRequest], context: Any
    ) -> service_pb2.UploadResponse:
        session: UploadSession | None = None
        try:
            async for request in request_iterator:
                session = await self._call(context, partial(self._take, request, session))
            if session is None:
                await self._abort(context, RefusedError(Code.BAD_MESSAGE, "an upload must begin with its header"))
                raise AssertionError("abort raises")
            done = session
            return service_pb2.UploadResponse(receipt=await self._call(context, done.finish))
        finally:
            if session is not None:
                # Not here: it may have to wait for an fsync. At shutdown the pool is gone, and with it the session.
                with contextlib.suppress(RuntimeError):
                    self._pool.submit(session.abandon)

    def _take(self, request: service_pb2.UploadRequest, session: UploadSession | None) -> UploadSession:
        if request.WhichOneof("message") == "header" and session is None:
            return self._desk.begin_upload(request.header)
        if request.WhichOneof("message") != "chunk" or session is None:
            raise RefusedError(Code.BAD_MESSAGE, "an upload is one header and then chunks")
        session.feed(request.chunk)
        return session

    async def Download(
        self, request: service_pb2.DownloadRequest, context: Any
    ) -> AsyncIterator[service_pb2.DownloadResponse]:
        payload, chunks = await self._call(context, lambda: self._desk.download(request))
        yield service_pb2.DownloadResponse(header=payload.header())
        while (chunk := await self._call(context, lambda: next(chunks, None))) is not None:
            yield service_pb2.DownloadResponse(chunk=chunk)

    async def _call(self, context: Any, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except FleetDistillError as error:
            await self._abort(context, error)
        except Exception:
            logger.exception("a call failed")
            await self._abort(context, RefusedError(Code.INTERNAL, "a fault of the server; see its log"))
        raise AssertionError("abort raises")

    async def _abort(self, context: Any, error: FleetDistillError) -> None:
        refusal = error if isinstance(error, RefusedError) else _as_refusal(error)
        status = rich_status(refusal)
        await context.abort(
            getattr(grpc.StatusCode, MEANINGS[Code(refusal.code)].status),
            status.message,
            (("grpc-status-details-bin", status.SerializeToString()),),
        )


def _as_refusal(error: FleetDistillError) -> RefusedError:
    if isinstance(error, StoreError) and "full" in str(error):
        return RefusedError(Code.NO_SPACE, f"{error}; no receipt is given, try again later")
    logger.error("a call failed: %s", error)
    return RefusedError(Code.INTERNAL, "the server's store failed; see its log")


def rich_status(refusal: RefusedError) -> status_pb2.Status:
    """The google.rpc.Status with one ErrorInfo that carries the reason and its details."""
    details = {name: value[:LONGEST_SENTENCE] for name, value in refusal.details.items()}
    info = error_details_pb2.ErrorInfo(reason=refusal.code, domain=DOMAIN, metadata=details)
    packed = any_pb2.Any()
    packed.Pack(info)
    number = getattr(grpc.StatusCode, MEANINGS[Code(refusal.code)].status).value[0]
    return status_pb2.Status(code=number, message=str(refusal)[:LONGEST_SENTENCE], details=[packed])


@contextlib.contextmanager
def open_desk(directory: Path, wake_engine: Callable[[], None], lease_seconds: float) -> Iterator[Desk]:
    """A desk over the store in a directory, reading with one connection and writing with a commit thread."""
    reader, writer = Store.open(directory), Store.open(directory)
    commits = CommitThread(writer)
    try:
        yield Desk(reader, commits.commit, wake_engine, lease_seconds)
    finally:
        commits.close()
        reader.close()
        writer.close()


async def serve(directory: Path, listen: str, ends: Ends, lease_seconds: float, ready: Callable[[int], None]) -> int:
    """Serves until SIGINT or SIGTERM. Calls `ready` with the port. Returns the exit status."""
    wakeups = Wakeups(ends)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def wake_engine() -> None:
        loop.call_soon_threadsafe(wakeups.wake_other)

    with open_desk(directory, wake_engine, lease_seconds) as desk, ThreadPoolExecutor(POOL_THREADS) as pool:
        desk.adopt_present_devices()
        service = DeviceService(desk, pool)
        server = await _start(service, listen)
        if server is None:
            text = "the address is in use or not ours; choose another with [server] listen"
            print(f"cannot listen on {listen}: {text}", file=sys.stderr)
            return EXIT_CANNOT_LISTEN
        grpc_server, port = server
        ready(port)
        tasks = [asyncio.create_task(_pass_wakeups(wakeups, service)), asyncio.create_task(_sweep(desk, pool))]
        await stop.wait()
        for task in tasks:
            task.cancel()
        await grpc_server.stop(grace=2.0)
    return 0


async def _start(service: DeviceService, listen: str) -> tuple[Any, int] | None:
    server = grpc.aio.server(options=OPTIONS)
    service_pb2_grpc.add_DeviceServiceServicer_to_server(service, server)
    status = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(status, server)
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError:
        return None
    await server.start()
    for name in ("", "fleetdistill.wire.v1.DeviceService"):
        await status.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server, port


async def _pass_wakeups(wakeups: Wakeups, service: DeviceService) -> None:
    while True:
        await wakeups.wait()
        await _guarded(service.wake_waiting())


async def _sweep(desk: Desk, pool: ThreadPoolExecutor) -> None:
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(POLL_SECONDS)
        await _guarded(loop.run_in_executor(pool, desk.end_leases))


async def _guarded(work: Awaitable[None]) -> None:
    try:
        await work
    except FleetDistillError:
        logger.exception("background work failed; trying again")


def main() -> int:
    """Entry point of the front's process."""
    parser = argparse.ArgumentParser(prog="fleetdistill-front", description="The gRPC front of a store.")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--wakeups", type=Ends.parse, default=Ends())
    parser.add_argument("--parent", type=int)
    parser.add_argument("--lease-seconds", type=float, default=60.0)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="front: %(message)s")
    end_with_parent(given.parent)
    return asyncio.run(serve(given.store, given.listen, given.wakeups, given.lease_seconds, _say_port))


def _say_port(port: int) -> None:
    print(f"listening {port}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
