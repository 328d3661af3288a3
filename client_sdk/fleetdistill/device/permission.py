"""Whether a device may work now: the app's eligibility and budgets, and the server's pace.

`MeteredLink` counts the bytes that the budgets limit, and raises interruptions between calls and chunks.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from datetime import datetime, timedelta
from typing import TypeVar

from google.protobuf.message import Message

from fleetdistill.clock import Clock
from fleetdistill.device.budgets import Budgets
from fleetdistill.device.eligibility import Conditions, Eligibility
from fleetdistill.device.events import Events
from fleetdistill.device.probes import resident_bytes
from fleetdistill.device.usage import Pace, Usage
from fleetdistill.errors import FleetDistillError, LinkError, PayloadTooLargeError, WorkInterrupted
from fleetdistill.interruption import Hold, bound_check, check_may_continue, check_with
from fleetdistill.link.base import Link
from fleetdistill.state.files import Files
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.payload import AnyChunk
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2

T = TypeVar("T")

CHECK_SECONDS = 0.25
"""Interval between two probes of the conditions during work, in seconds."""
WAIT_SECONDS = 5.0
"""Interval between two probes of the conditions while one does not hold, in seconds."""
_MAX_WAIT_SECONDS = 60.0
"""Longest wait even if the end is known, because the machine may be suspended or its time changed."""
_SHORTEST_REPORTED_SECONDS = 1.0
_COUNTERS = {"bytes": "bytes_per_day", "compute_seconds": "compute_seconds_per_day"}


class Permission:
    """Decides whether a device may work, and interrupts work that must end.

    Args:
        files: The state directory.
        clock: The device's clock.
        eligibility: The app's conditions, or None.
        budgets: The app's limits, or None.

    Attributes:
        usage: What the device has used today.
        pace: The time before which the device must not call the server.
    """

    def __init__(self, files: Files, clock: Clock, eligibility: Eligibility | None, budgets: Budgets | None) -> None:
        self._clock = clock
        self._budgets = budgets or Budgets()
        self._conditions = Conditions(eligibility or Eligibility(), files.directory)
        self._watches = eligibility is not None or budgets is not None
        limits = {counter: getattr(self._budgets, name) for counter, name in _COUNTERS.items()}
        self.usage = Usage(files, clock, {name: limit for name, limit in limits.items() if limit is not None})
        self.pace = Pace(files, clock)
        self._check_in_bytes = 0

    def note_check_in(self, size: int) -> None:
        """Notes the size of a check-in in bytes, for the reason if it alone exceeds the budget of a day."""
        self._check_in_bytes = size

    def check_answer(self, payload: Payload, compression: knowledge_pb2.Compression.ValueType) -> None:
        """Raises PayloadTooLargeError if an answer, compressed, alone exceeds the budget of a day."""
        limit = self._budgets.bytes_per_day
        if limit is None or payload.data_bytes <= limit:
            return
        size = sum(_bytes_of(chunk) for chunk in wire.chunks(payload.source, payload.slots, compression=compression))
        if size > limit:
            raise PayloadTooLargeError(size, limit, "the answer must fit in a day: raise Budgets(bytes_per_day=...)")

    def hold(self) -> Hold | None:
        """Returns why no work may begin now, or None if it may."""
        conditions = self._conditions.hold(self._local_time())
        return self.budget_hold() or conditions or self._memory_hold(None) or self._pace_hold()

    def _pace_hold(self) -> Hold | None:
        if not (seconds := self.pace.remaining()):
            return None
        return Hold("pace", f"the server requested the next call in {seconds:.0f} seconds", seconds)

    def interruption(self) -> Hold | None:
        """Returns why work in progress must end, or None. Repeating an ask does not reduce the memory that it needs."""
        return self._conditions.hold(self._local_time()) or self._memory_hold(math.inf)

    def budget_hold(self) -> Hold | None:
        """Returns the budget of the day that is used up, or None."""
        counter = self.usage.exceeded()
        if not counter:
            return None
        name = _COUNTERS[counter]
        limit = getattr(self._budgets, name)
        now = self._local_time()
        midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
        text = f"{name} ({limit}) is used up until midnight"
        if counter == "bytes" and self._check_in_bytes > limit:
            text = f"one check-in alone has {self._check_in_bytes} bytes, more than {name} ({limit}); raise the budget"
        return Hold(name, text, (midnight - now).total_seconds())

    def _memory_hold(self, seconds: float | None) -> Hold | None:
        limit = self._budgets.memory_bytes
        used = 0 if limit is None else resident_bytes() or 0
        if limit is None or used <= limit:
            return None
        return Hold("memory_bytes", f"the app uses {used} bytes of memory, more than memory_bytes ({limit})", seconds)

    def _local_time(self) -> datetime:
        return datetime.fromtimestamp(self._clock.time())

    @contextlib.contextmanager
    def working(self, stopped: threading.Event, link: Link) -> Iterator[None]:
        """Interrupts the work in the block when it must end.

        Args:
            stopped: Set when the app stops the device.
            link: Connection whose calls are cancelled.
        """
        work = _Work(self, stopped)
        watched = _watch(work, link) if self._watches and link.remote else contextlib.nullcontext()
        with check_with(work.check), watched:
            yield

    def compute(self, work: Callable[[], T]) -> T:
        """Returns the result of a computation with the niceness of the budgets; counts its time."""

        def counted() -> T:
            with self._computing():
                return work()

        return run_with_niceness(self._budgets.niceness, counted)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Counts the time of the block as computing, and interrupts the block if it exceeds a budget."""
        began = counted = self._clock.now()

        def count() -> None:
            nonlocal counted
            before, counted = counted, self._clock.now()
            self.usage.add("compute_seconds", counted - before)

        def check() -> None:
            count()
            check_limit()

        def check_limit() -> None:
            limit = self._budgets.compute_seconds_per_day
            if limit is not None and counted - began >= limit:
                text = f"the ask takes longer than compute_seconds_per_day ({limit:g}); raise the budget"
                raise Hold("compute_seconds_per_day", text, math.inf).error()

        with check_with(check):
            try:
                yield
            finally:
                count()
        check_limit()  # else an answer that was computed without a check would wait in the outbox until midnight


def seconds_to_wait(hold: Hold) -> float:
    """Returns after how many seconds the device checks again whether it may work."""
    return WAIT_SECONDS if hold.seconds is None else min(hold.seconds, _MAX_WAIT_SECONDS)


class EligibilityGate:
    """Lets a device work only while it may, and reports to app and server when it may not.

    Args:
        permission: Whether the device may work now.
        events: Emits events to the app.
        link: Connection whose calls are cancelled when the work must end.
        stopped: Set when the app stops the device.
        leave: Notifies the server that the device does not take part for now; returns whether it did.
    """

    def __init__(
        self,
        permission: Permission,
        events: Events,
        link: Link,
        stopped: threading.Event,
        leave: Callable[[], bool],
    ) -> None:
        self._permission = permission
        self._events = events
        self._link = link
        self._stopped = stopped
        self._leave = leave
        self._waits_for = ""  # condition of the last event `waiting`; empty after `resumed`
        self._present = False  # whether the server may expect the device to take part

    def seconds_to_wait(self) -> float:
        """Returns how long to wait before the next check if the device must not work now, or 0 if it may."""
        hold = self._permission.hold()
        if hold is None:
            self._emit_resumed()
            return 0.0
        if hold.seconds is None or hold.seconds >= _SHORTEST_REPORTED_SECONDS:
            self._emit_waiting(hold.condition, hold.text, hold.seconds)
        if hold.condition != "pace" and self._present:
            self._present = not self._leave()
        return seconds_to_wait(hold)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Interrupts the work in the block when it must end; emits the reason unless the app stopped the device.

        Stores how long the server requests to wait before the next call.
        """
        self._present = True
        try:
            with self._permission.working(self._stopped, self._link):
                yield
        except WorkInterrupted as reason:
            if reason.condition != "stopped":
                self._emit_waiting(reason.condition, str(reason), reason.seconds)
            raise
        except LinkError as error:
            self._permission.pace.set(error.after_seconds)
            raise

    def _emit_waiting(self, condition: str, text: str, seconds: float | None) -> None:
        if condition == self._waits_for:
            return
        self._waits_for = condition
        known = {} if seconds is None or math.isinf(seconds) else {"seconds": seconds}
        self._events.emit("waiting", 0, f"{text}; the device waits", {"condition": condition, **known})

    def _emit_resumed(self) -> None:
        if self._waits_for:
            condition, self._waits_for = self._waits_for, ""
            text = f"the device no longer waits for {condition}"
            self._events.emit("resumed", 0, text, {"condition": condition})


class _Work:
    """Work in progress, which is checked from any thread."""

    def __init__(self, permission: Permission, stopped: threading.Event) -> None:
        self._permission, self._stopped = permission, stopped
        self._hold: Hold | None = None
        self._probing = threading.Lock()
        self._probed_at = time.monotonic()

    def check(self) -> None:
        """Raises WorkInterrupted if the work must end; probes the conditions every `CHECK_SECONDS`."""
        if self._stopped.is_set():
            raise Hold("stopped", "the app stopped the device").error()
        hold = self._permission.budget_hold() or self._hold or self._probe()
        if hold is not None:
            raise hold.error()

    def _probe(self) -> Hold | None:
        due = time.monotonic() - self._probed_at >= CHECK_SECONDS
        if due and self._probing.acquire(blocking=False):  # a slow probe delays one thread only
            try:
                self._hold = self._permission.interruption()
                self._probed_at = time.monotonic()
            finally:
                self._probing.release()
        return self._hold


@contextlib.contextmanager
def _watch(work: _Work, link: Link) -> Iterator[None]:
    """Cancels the calls of the block, which may wait for the network, when the work must end."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(CHECK_SECONDS):
            try:
                work.check()
            except FleetDistillError:
                link.interrupt()

    thread = threading.Thread(target=watch, name="fleetdistill eligibility", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(CHECK_SECONDS)  # otherwise it could cancel the next call; a probe may take longer


def run_with_niceness(niceness: int | None, work: Callable[[], T]) -> T:
    """Returns the result of `work`, run in a thread of its own with a niceness; in the calling thread with None.

    Linux has a niceness per thread, and a process without privileges cannot lower it again. Threads that `work` starts,
    such as those of OpenMP, inherit it. If the wait for the thread ends with an exception, such as KeyboardInterrupt,
    the work is interrupted first.

    Args:
        niceness: 1 to 19; Linux only.
        work: Function that calls `fleetdistill.interruption.check_may_continue`.
    """
    if niceness is None:
        return work()
    given_up = threading.Event()

    def check() -> None:
        if given_up.is_set():
            raise Hold("stopped", "the wait for the computation was interrupted").error()

    with ThreadPoolExecutor(1, "fleetdistill compute", initializer=_set_niceness, initargs=(niceness,)) as executor:
        with check_with(check):
            future = executor.submit(copy_context().run, work)
        try:
            return future.result()
        except BaseException:
            given_up.set()
            raise


def _set_niceness(niceness: int) -> None:
    current = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(current, niceness))


Reply = TypeVar("Reply", bound=Message)


class MeteredLink:
    """`fleetdistill.link.base.Link` that forwards calls to another link.

    Before a call, after a failed call and before each chunk it raises the errors of `check_may_continue`. Heartbeats,
    declines and `leave` are not interrupted: they keep the server from waiting for the device.

    Args:
        link: Link that receives the calls.
        count: Called from any thread with the number of bytes sent or received, without those of HTTP/2 and TLS.
        note_check_in: Called with the size of a check-in in bytes.
    """

    def __init__(
        self, link: Link, count: Callable[[int], None], note_check_in: Callable[[int], None] = lambda size: None
    ) -> None:
        self._link, self._count, self._note_check_in = link, count, note_check_in
        self.remote = link.remote

    def check_in(
        self, identity: service_pb2.Identity, profile: contract_pb2.DeviceProfile | None
    ) -> service_pb2.CheckInResponse:
        """Forwards the call."""
        sent = identity.ByteSize() + (profile.ByteSize() if profile is not None else 0)
        self._note_check_in(sent)
        self._count(sent)
        reply = self._reply(lambda: self._link.check_in(identity, profile))
        self._note_check_in(sent + reply.ByteSize())
        return reply

    def next_ask(self, identity: service_pb2.Identity, wait_seconds: float) -> service_pb2.NextAskResponse:
        """Forwards the call."""
        self._count(identity.ByteSize())
        return self._reply(lambda: self._link.next_ask(identity, wait_seconds))

    def heartbeat(self, identity: service_pb2.Identity) -> None:
        """Forwards the call."""
        self._count(identity.ByteSize())
        self._link.heartbeat(identity)

    def leave(self, identity: service_pb2.Identity, *, forget: bool = False) -> bool:
        """Forwards the call."""
        self._count(identity.ByteSize())
        return self._link.leave(identity, forget=forget)

    def decline(self, request: service_pb2.DeclineRequest) -> None:
        """Forwards the call."""
        self._count(request.ByteSize())
        self._link.decline(request)

    def upload_status(
        self, identity: service_pb2.Identity, name: service_pb2.UploadName
    ) -> service_pb2.UploadStatusResponse:
        """Forwards the call."""
        self._count(identity.ByteSize() + name.ByteSize())
        return self._reply(lambda: self._link.upload_status(identity, name))

    def upload(self, header: service_pb2.UploadHeader, chunks: Iterator[AnyChunk]) -> service_pb2.Receipt:
        """Forwards the call."""
        self._count(header.ByteSize())
        counted = self._counted(chunks)
        return self._reply(lambda: self._link.upload(header, counted))

    def download(
        self, identity: service_pb2.Identity, sha256: bytes, first_byte: int
    ) -> tuple[knowledge_pb2.PayloadHeader, Iterator[AnyChunk]]:
        """Forwards the call."""
        self._count(identity.ByteSize() + len(sha256))
        with _interruptible():
            header, chunks = self._link.download(identity, sha256, first_byte)
        self._count(header.ByteSize())
        return header, self._counted(chunks)

    def interrupt(self) -> None:
        """Forwards the call."""
        self._link.interrupt()

    def close(self) -> None:
        """Forwards the call."""
        self._link.close()

    def _reply(self, call: Callable[[], Reply]) -> Reply:
        with _interruptible():
            reply = call()
        self._count(reply.ByteSize())
        return reply

    def _counted(self, chunks: Iterator[AnyChunk]) -> Iterator[AnyChunk]:
        check = bound_check()  # gRPC reads an upload's chunks in a thread of its own
        return self._count_chunks(chunks, check)

    def _count_chunks(self, chunks: Iterator[AnyChunk], check: Callable[[], None]) -> Iterator[AnyChunk]:
        while True:
            check()
            with _interruptible(check):
                chunk = next(chunks, None)
            if chunk is None:
                return
            self._count(_bytes_of(chunk))
            yield chunk


@contextlib.contextmanager
def _interruptible(check: Callable[[], None] = check_may_continue) -> Iterator[None]:
    """Raises the errors of a check before the block, and instead of a LinkError from the block."""
    check()
    try:
        yield
    except LinkError:
        check()  # the call was cancelled because the work was interrupted
        raise


def _bytes_of(chunk: AnyChunk) -> int:
    return chunk.ByteSize() if isinstance(chunk, knowledge_pb2.Chunk) else len(chunk.data)
