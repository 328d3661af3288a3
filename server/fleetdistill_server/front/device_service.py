"""The gRPC service for devices. Each call runs the device API in a thread pool."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from fleetdistill.errors import FleetDistillError, RefusedError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.framing import frame
from fleetdistill.wire.payload import CHUNK_BYTES, Chunk
from fleetdistill.wire.v1 import service_pb2, service_pb2_grpc
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.front.call_spans import Call, CallSpans
from fleetdistill_server.front.errors import abort, ended, in_pool, refusing
from fleetdistill_server.front.streams import AHEAD, Lane, with_progress_deadline
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.limiter import DeviceKey
from fleetdistill_server.intake.uploads import RepeatedUpload, UploadSession
from fleetdistill_server.store.group_commit import CommitThread
from fleetdistill_server.store.meter import Meter
from fleetdistill_server.store.states import AT_REST, RunStatus
from fleetdistill_server.store.traffic import Sending
from fleetdistill_server.tracing.spans import Spans

T = TypeVar("T")

MAX_WAIT_SECONDS = 60.0
# After a wake-up, devices return at random times within [0, devices / WAKES_PER_SECOND] seconds.
WAKES_PER_SECOND = 1000


class DeviceService(service_pb2_grpc.DeviceServiceServicer):
    """Implements the device calls over gRPC with the device API.

    Args:
        api: Implements the calls.
        pool: Threads for the device API's blocking work.
        commits: Thread for calls that only check and commit; None uses `pool`.
        limits: Limits, such as the longest stall of a stream.
        uploads: Threads for uploads; None uses `pool`.
        meter: Takes the time to each receipt.
        spans: Records the spans of calls; None records nothing.
    """

    def __init__(
        self,
        api: DeviceApi,
        pool: ThreadPoolExecutor,
        commits: CommitThread | None = None,
        limits: Limits | None = None,
        uploads: ThreadPoolExecutor | None = None,
        meter: Meter | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._api = api
        self._meter = meter or Meter()
        self._pool = pool
        self._uploads = uploads or pool
        self._spans = CallSpans(spans, api, pool)
        self._commits = commits
        self._limits = limits or Limits()
        # Keyed by call, not by device: a device may call again before its broken call is detected.
        # The result is the number of devices that are woken together.
        self._waiting: dict[asyncio.Future[int], DeviceKey] = {}

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
        status = await self._call(context, lambda: self._api.uploads.status(request))
        if self._spans.on:
            await self._set_place(context, request.identity, request.name)
        return status

    async def NextAsk(self, request: service_pb2.NextAskRequest, context: Any) -> service_pb2.NextAskResponse:
        result, who = await self._call(context, lambda: self._next_ask(request.identity))
        if result is None:
            async with self._open_call(context, who):
                woken = await self._wait_for_work(who, request.wait_seconds)
            if woken:
                result = await self._call(context, lambda: self._api.next_ask(request.identity))
        if result is None:
            # With the wait before it, less than the lease.
            spread = min(len(self._waiting) / WAKES_PER_SECOND, self._api.sessions.lease_seconds / 4)
            come_back = service_pb2.ComeBack(after_seconds=0.0, before_seconds=spread)
            result = service_pb2.NextAskResponse(come_back=come_back)
        elif self._spans.on and result.HasField("ask"):
            await self._set_place(context, request.identity, result.ask)
        return result

    async def _set_place(
        self, context: Any, identity: service_pb2.Identity, ask: service_pb2.Ask | service_pb2.UploadName
    ) -> None:
        """Tells a device the place of its ask in the round's trace."""
        context.set_trailing_metadata(await self._call(context, lambda: self._spans.headers(identity, ask)))

    def _next_ask(self, identity: service_pb2.Identity) -> tuple[service_pb2.NextAskResponse | None, DeviceKey]:
        """Returns the next ask or None, and the device's key, with the run's name even if the request omits it."""
        return self._api.next_ask(identity), (self._api.sessions.run_name(identity.run), identity.device)

    async def _wait_for_work(self, who: DeviceKey, wait_seconds: float) -> bool:
        """Waits for a wake-up of an authenticated device, at most `wait_seconds`; returns whether it came."""
        wake_up: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[wake_up] = who
        # A waiting device is alive, so its lease must not expire. This order of arguments maps NaN to the longest wait.
        longest = min(MAX_WAIT_SECONDS, self._api.sessions.lease_seconds / 2)
        try:
            async with asyncio.timeout(max(0.0, min(longest, wait_seconds))):
                woken = await wake_up
            await asyncio.sleep(random.uniform(0, woken / WAKES_PER_SECOND))
            return True
        except TimeoutError:
            return False
        finally:
            del self._waiting[wake_up]

    async def wake_waiting(self) -> None:
        """Ends the long polls of devices that have an open ask or whose run has ended."""
        runs = {run for run, _ in self._waiting.values()}
        for run in runs:
            status, ready = await self._work_of(run)
            if status is RunStatus.PAUSED:
                continue  # its open asks wait too
            over = status in AT_REST
            woken = [
                wake_up
                for wake_up, (its_run, device) in self._waiting.items()
                if its_run == run and (over or device in ready) and not wake_up.done()
            ]
            for wake_up in woken:
                wake_up.set_result(len(woken))

    async def _work_of(self, run: str) -> tuple[RunStatus | None, set[str]]:
        store = self._api.store
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._pool, lambda: (store.runs.status(run), store.asks.devices_with_open(run))
        )

    async def Upload(
        self, request_iterator: AsyncIterator[Chunk | service_pb2.UploadRequest], context: Any
    ) -> service_pb2.UploadResponse:
        upload = _Upload(self._api, self._meter)
        receipt = None
        try:
            with self._spans.of_call("receive upload", upload.call, context):
                timely = with_progress_deadline(request_iterator, self._limits.stall_seconds, upload.held, CHUNK_BYTES)
                receipt = await Lane(self._uploads, refusing(upload.take), refusing(upload.finish)).process(timely)
                return service_pb2.UploadResponse(receipt=receipt)
        except FleetDistillError as error:
            await abort(context, error)
        finally:
            if receipt is None:
                # In the pool, because it may wait for an fsync. At shutdown neither the pool nor the session exists.
                with contextlib.suppress(RuntimeError):
                    self._uploads.submit(upload.abandon)

    async def Download(self, request: service_pb2.DownloadRequest, context: Any) -> None:  # type: ignore[override]
        """Sends serialised messages, see `RawChunks`, and prepares the next ones while these are sent."""
        chunks, made, who = await self._call(context, lambda: self._open_download(request))
        async with self._open_call(context, who):
            try:
                with self._spans.of_call("send payload", Call(request.identity, request.sha256), context):
                    while made:
                        work = partial(_next_responses, chunks) if chunks.left > 0 else chunks.end
                        making = asyncio.ensure_future(self._call(context, work))
                        try:
                            for response in made:
                                await context.write(response)
                            made = await making
                        finally:
                            making.cancel()
            finally:
                if made is not None:  # the stream is broken
                    with contextlib.suppress(RuntimeError):  # at shutdown the pool no longer exists
                        self._pool.submit(chunks.end)

    def _open_download(self, request: service_pb2.DownloadRequest) -> tuple[Sending, list[bytes] | None, DeviceKey]:
        """Returns the chunks, the header and the first of them as messages, and the device's key."""
        identity = request.identity
        chunks = self._api.downloads.open(request)
        header = service_pb2.DownloadResponse(header=chunks.payload.header()).SerializeToString()
        made = [header, *_next_responses(chunks)]
        return chunks, made, (self._api.sessions.run_name(identity.run), identity.device)

    async def _call(self, context: Any, work: Callable[[], T]) -> T:
        return await in_pool(self._pool, context, work)

    async def _durable_call(self, context: Any, work: Callable[[], T]) -> T:
        """Like `_call`, for work that mostly waits for its commit; does not block a thread of the pool."""
        if self._commits is None:
            return await self._call(context, work)
        future = asyncio.wrap_future(self._commits.call(work))

        async def outcome() -> T:
            return (await future)()

        return await ended(context, outcome())

    @contextlib.asynccontextmanager
    async def _open_call(self, context: Any, who: DeviceKey) -> AsyncIterator[None]:
        """Counts an open call of an authenticated device; ends the call if it exceeds a limit."""
        try:
            place = self._api.limiter.open_call(who)
        except RefusedError as refusal:
            await abort(context, refusal)
        with place:
            yield


class _Upload:
    """One upload stream: a header, then chunks."""

    def __init__(self, api: DeviceApi, meter: Meter) -> None:
        self.call = Call()
        self._api = api
        self._meter = meter
        self._lock = threading.Lock()
        self._session: UploadSession | RepeatedUpload | None = None

    def take(self, request: Chunk | service_pb2.UploadRequest) -> None:
        """Processes the next message. Raises RefusedError."""
        with self._lock:
            self._take(request)

    def _take(self, request: Chunk | service_pb2.UploadRequest) -> None:
        if isinstance(request, Chunk) and self._session is not None:
            self._session.feed(request)
        elif isinstance(request, service_pb2.UploadRequest) and request.HasField("header") and self._session is None:
            self._session = self._api.uploads.begin(request.header)
            self.call.identity, self.call.name = request.header.identity, request.header.name
        else:
            raise RefusedError(Code.BAD_MESSAGE, "an upload stream must contain one header, then chunks")

    def held(self) -> int:
        """Returns the number of bytes received so far."""
        return self._session.held if self._session is not None else 0

    def finish(self) -> service_pb2.Receipt:
        """Completes the upload and returns its receipt."""
        if self._session is None:
            raise RefusedError(Code.BAD_MESSAGE, "an upload stream must begin with its header")
        self.call.committing, arrived = time.time_ns(), time.monotonic()
        receipt = self._session.finish()
        self._meter.receipt_took(time.monotonic() - arrived)
        return receipt

    def abandon(self) -> None:
        """Ends the stream after the message in progress."""
        with self._lock:
            if self._session is not None:
                self._session.abandon()


def _next_responses(chunks: Sending) -> list[bytes]:
    """Returns the next chunks as messages: `AHEAD` large ones, or as many small ones as have the same size."""
    stop = max(chunks.left - AHEAD * CHUNK_BYTES, 0)
    responses = []
    for chunk in chunks:
        responses.append(frame(chunk))
        if chunks.left <= stop:
            break
    return responses
