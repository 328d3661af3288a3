"""Helpers for tests of an app with a `Device`: scripted network faults, a manual clock, and an event log.

    clock, events = ManualClock(), EventLog()
    link = FaultyLink(server.link(), lost("upload"), refused("next_ask", "too-many"))
    with Device(server=link, runtime=Runtime(clock=clock), on_event=events.append, ...) as device:
        device.run()

`fleetdistill_server.testing.MemoryServer` is an in-process server for such a link; it requires the extra `server`. The
SDK does not import this package.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from fleetdistill.device.events import Event
from fleetdistill.errors import ConfigurationError, LinkError, RefusedError
from fleetdistill.link.base import Link
from fleetdistill.names import unknown_name
from fleetdistill.wire.codes import Code
from fleetdistill.wire.payload import AnyChunk
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2, tensor_pb2

__all__ = [
    "EventLog",
    "Fault",
    "FaultyLink",
    "ManualClock",
    "cut",
    "late",
    "lost",
    "lost_reply",
    "oversized",
    "refused",
    "revoked",
]

T = TypeVar("T")

CALLS = ("check_in", "next_ask", "heartbeat", "leave", "decline", "upload_status", "upload", "download")
"""Names of the calls that can fail."""
_WITH_CHUNKS = ("upload", "download")
_OVERSIZED_BYTES = 1 << 40


class ManualClock:
    """Clock whose waits return immediately and advance the time: `Device(runtime=Runtime(clock=ManualClock()))`.

    Pass the same clock to `fleetdistill_server.testing.MemoryServer`, so that the device's waits also
    advance the server's deadlines.

    Args:
        now: Initial time in seconds.
        time: Initial time of day, in seconds since 1970-01-01 UTC. Default: 2026-01-01 12:00 in local time.

    Attributes:
        waits: Durations of all waits so far, in seconds.
    """

    def __init__(self, now: float = 0.0, time: float | None = None) -> None:
        self._now = now
        self._offset = (datetime(2026, 1, 1, 12).timestamp() if time is None else time) - now
        self.waits: list[float] = []

    def now(self) -> float:
        """Returns the current time in seconds."""
        return self._now

    def time(self) -> float:
        """Returns the current time of day, in seconds since 1970-01-01 UTC."""
        return self._offset + self._now

    def advance(self, seconds: float) -> None:
        """Advances the time. Raises ValueError if `seconds` is negative."""
        if seconds < 0:
            raise ValueError(f"seconds is {seconds}, must be at least 0")
        self._now += seconds

    def advance_to(self, now: float) -> None:
        """Advances the time to `now` seconds. Raises ValueError if it is later already."""
        if now < self._now:
            raise ValueError(f"now is {now}, must be at least {self._now}")
        self._now = now

    def wait(self, event: threading.Event, seconds: float) -> None:
        """Advances the time by `seconds` unless the event is set; returns immediately."""
        if not event.is_set():
            self.waits.append(seconds)
            self.advance(max(seconds, 0.0))


class EventLog(list[Event]):
    """List of events: `Device(on_event=log.append)`."""

    def kinds(self) -> list[str]:
        """Returns the kinds of all events, in order, without `progress`: its number depends on the machine's speed."""
        return [event.kind for event in self if event.kind != "progress"]

    def of(self, kind: str) -> Event:
        """Returns the only event of a kind. Raises ValueError if there is not exactly one."""
        result = [event for event in self if event.kind == kind]
        if len(result) != 1:
            raise ValueError(
                f"the log has {len(result)} events of kind {kind!r}, expected 1; its kinds are {self.kinds()}"
            )
        return result[0]


@dataclass(frozen=True)
class Fault:
    """A scripted failure of one call. The functions of this module make the common faults.

    Attributes:
        call: Name of the call, one of `CALLS`.
        error: Exception that the call raises; None if the call reaches the server and its reply the device.
        nth: Number of the failing call of that name, from 1.
        reply_only: Whether the server performs the call and only the reply is lost.
        chunks: Number of chunks that pass before an upload or a download fails; None if the call itself fails.
        before: Called before the call.
        change: Changes the header of an upload.

    Raises:
        ConfigurationError: The call is unknown, `nth` or `chunks` is out of range, or `change` is not for an upload.
    """

    call: str
    error: Exception | None
    nth: int = 1
    reply_only: bool = False
    chunks: int | None = None
    before: Callable[[], object] | None = None
    change: Callable[[service_pb2.UploadHeader], service_pb2.UploadHeader] | None = None

    def __post_init__(self) -> None:
        if self.call not in CALLS:
            raise ConfigurationError(unknown_name("call", self.call, CALLS))
        if self.nth < 1:
            raise ConfigurationError(f"nth is {self.nth}, must be at least 1")
        if self.chunks is not None and (self.call not in _WITH_CHUNKS or self.chunks < 0):
            raise ConfigurationError(
                f"Fault({self.call!r}, chunks={self.chunks}): chunks must be at least 0, for upload and download only"
            )
        if self.change is not None and self.call != "upload":
            raise ConfigurationError(f"Fault({self.call!r}): change is for upload only")


def lost(call: str, nth: int = 1) -> Fault:
    """Returns a fault in which the call, one of those of `FaultyLink`, does not reach the server."""
    return Fault(call, LinkError(f"{call}: the server cannot be reached (scripted fault)"), nth)


def lost_reply(call: str, nth: int = 1) -> Fault:
    """Returns a fault in which the server performs the call, but its reply is lost."""
    return Fault(call, LinkError(f"{call}: the connection ended before the reply (scripted fault)"), nth, True)


def cut(call: str, chunks: int, nth: int = 1) -> Fault:
    """Returns a fault in which an upload or a download ends after `chunks` chunks."""
    error = LinkError(f"{call}: the connection ended after {chunks} chunks (scripted fault)")
    return Fault(call, error, nth, chunks=chunks)


def refused(call: str, code: str, nth: int = 1, **details: str) -> Fault:
    """Returns a fault in which the server refuses the call with a code, such as `too-many` or `no-space`.

    Raises:
        ConfigurationError: The code is not in `fleetdistill.wire.codes.Code`.
    """
    if code not in tuple(Code):
        raise ConfigurationError(unknown_name("code", code, tuple(Code)))
    return Fault(call, RefusedError(code, f"{call} was refused with {code!r} (scripted fault)", details), nth)


def late(clock: ManualClock, seconds: float, call: str = "upload_status", nth: int = 1) -> Fault:
    """Returns a fault in which a call arrives later: the clock moves on by `seconds` before it.

    Pass the clock of the `MemoryServer`, and more seconds than the run's `deadline_seconds`: the server then closes the
    ask as `late` before the device can send its answer.
    """
    return Fault(call, None, nth, before=lambda: clock.advance(seconds))


def oversized(nth: int = 1) -> Fault:
    """Returns a fault in which an answer is larger than any limit; the server rejects it as `too-large`."""
    return Fault("upload", None, nth, change=_enlarge)


def revoked(call: str = "next_ask", nth: int = 1, reason: str = "the device was revoked (scripted fault)") -> Fault:
    """Returns a fault in which the operator has revoked the device; `Device.run` raises RefusedError `revoked`."""
    return Fault(call, RefusedError(Code.REVOKED, reason), nth)


class FaultyLink:
    """`fleetdistill.link.base.Link` that forwards calls to another link, except for scripted faults.

    Args:
        link: Link that receives the calls.
        *faults: Faults, in any order. Their calls are `check_in`, `next_ask`, `heartbeat`, `leave`, `decline`,
            `upload_status`, `upload` and `download`; a link in memory has no `heartbeat`.

    Attributes:
        calls: Number of calls by name.
    """

    def __init__(self, link: Link, *faults: Fault) -> None:
        self._link = link
        self._faults = {(fault.call, fault.nth): fault for fault in faults}
        self.remote = link.remote
        self.calls: Counter[str] = Counter()

    @property
    def left(self) -> list[Fault]:
        """Faults that have not occurred yet."""
        return [fault for (call, nth), fault in self._faults.items() if self.calls[call] < nth]

    def check_in(
        self, identity: service_pb2.Identity, profile: contract_pb2.DeviceProfile | None
    ) -> service_pb2.CheckInResponse:
        """Forwards the call, or fails."""
        return self._call("check_in", lambda: self._link.check_in(identity, profile))

    def next_ask(self, identity: service_pb2.Identity, wait_seconds: float) -> service_pb2.NextAskResponse:
        """Forwards the call, or fails."""
        return self._call("next_ask", lambda: self._link.next_ask(identity, wait_seconds))

    def heartbeat(self, identity: service_pb2.Identity) -> None:
        """Forwards the call, or fails."""
        self._call("heartbeat", lambda: self._link.heartbeat(identity))

    def leave(self, identity: service_pb2.Identity, *, forget: bool = False) -> bool:
        """Forwards the call, or fails."""
        return self._call("leave", lambda: self._link.leave(identity, forget=forget))

    def decline(self, request: service_pb2.DeclineRequest) -> None:
        """Forwards the call, or fails."""
        self._call("decline", lambda: self._link.decline(request))

    def upload_status(
        self, identity: service_pb2.Identity, name: service_pb2.UploadName
    ) -> service_pb2.UploadStatusResponse:
        """Forwards the call, or fails."""
        return self._call("upload_status", lambda: self._link.upload_status(identity, name))

    def upload(self, header: service_pb2.UploadHeader, chunks: Iterator[AnyChunk]) -> service_pb2.Receipt:
        """Forwards the call, or fails before, within or after the stream."""
        fault = self._next("upload")
        chunks = _cut_short(fault, chunks)
        if fault is not None and fault.change is not None:
            header = fault.change(header)
        return _perform(fault, lambda: self._link.upload(header, chunks))

    def download(
        self, identity: service_pb2.Identity, sha256: bytes, first_byte: int
    ) -> tuple[knowledge_pb2.PayloadHeader, Iterator[AnyChunk]]:
        """Forwards the call, or fails before or within the stream."""
        fault = self._next("download")
        header, chunks = _perform(fault, lambda: self._link.download(identity, sha256, first_byte))
        return header, _cut_short(fault, chunks)

    def interrupt(self) -> None:
        """Forwards the call."""
        self._link.interrupt()

    def close(self) -> None:
        """Forwards the call."""
        self._link.close()

    def _next(self, call: str) -> Fault | None:
        self.calls[call] += 1
        return self._faults.get((call, self.calls[call]))

    def _call(self, call: str, make: Callable[[], T]) -> T:
        return _perform(self._next(call), make)


def _perform(fault: Fault | None, make: Callable[[], T]) -> T:
    if fault is None:
        return make()
    if fault.before is not None:
        fault.before()
    error = fault.error if fault.chunks is None else None
    if error is not None and not fault.reply_only:
        raise error
    result = make()
    if error is not None:
        raise error
    return result


def _cut_short(fault: Fault | None, chunks: Iterator[AnyChunk]) -> Iterator[AnyChunk]:
    """Returns the chunks that pass before the fault."""
    if fault is None or fault.chunks is None or fault.error is None:
        return chunks
    return _truncate(chunks, fault.chunks, fault.error)


def _truncate(chunks: Iterator[AnyChunk], count: int, error: Exception) -> Iterator[AnyChunk]:
    yield from itertools.islice(chunks, count)
    raise error


def _enlarge(header: service_pb2.UploadHeader) -> service_pb2.UploadHeader:
    """Returns a header with a further tensor of 1 TiB."""
    result = service_pb2.UploadHeader()
    result.CopyFrom(header)
    tensor = result.payload.parts.parts.add(name="oversized").network_file.onnx
    tensor.element_type, tensor.encoding = tensor_pb2.ELEMENT_TYPE_UINT8, tensor_pb2.ENCODING_RAW
    tensor.shape.append(_OVERSIZED_BYTES)
    result.payload.data_bytes += _OVERSIZED_BYTES
    return result
