"""Records the front's spans of devices' calls, after the calls and in a thread, and passes asks' places to devices.

A device's `traceparent` only chooses a parent within the trace of the device's own ask, whose id the server derives. A
header with any other trace is ignored, so no device can write into another trace.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fleetdistill.errors import RefusedError
from fleetdistill.spans import KEY, Place, place_in
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.store.traced import created_at
from fleetdistill_server.tracing.spans import RoundIds, Spans, fail, place_of


@dataclass
class Call:
    """A device's call, as far as it is known; the call's handler adds to it.

    Attributes:
        identity: The device, once it is authenticated.
        sha256: Digest of the payload that a download sends.
        name: Ask that an upload answers.
        committing: When all of an upload was received, in nanoseconds since 1970; 0 until then.
    """

    identity: service_pb2.Identity | None = None
    sha256: bytes = b""
    name: service_pb2.UploadName | None = None
    committing: int = 0


class CallSpans:
    """Records the spans of calls.

    Args:
        spans: Records spans; None records nothing.
        api: Device API, whose store has the runs.
        pool: Threads that read the store.
    """

    def __init__(self, spans: Spans | None, api: DeviceApi, pool: ThreadPoolExecutor) -> None:
        self._spans = spans
        self._api = api
        self._pool = pool

    @property
    def on(self) -> bool:
        """Whether spans are recorded."""
        return self._spans is not None

    def headers(
        self, identity: service_pb2.Identity, ask: service_pb2.Ask | service_pb2.UploadName
    ) -> tuple[tuple[str, str], ...]:
        """Returns the metadata with the place of an authenticated device's ask. Reads the store."""
        ids = self._ids(identity, ask.round)
        if self._spans is None or ids is None:
            return ()
        return ((KEY, self._spans.place(ids, ids.ask(ask.step_number, identity.device)).header()),)

    @contextlib.contextmanager
    def of_call(self, name: str, call: Call, context: Any) -> Iterator[None]:
        """Records the block as a span, and the commit of an upload as its child."""
        if self._spans is None:
            yield
            return
        began = time.time_ns()
        error = ""
        try:
            yield
        except BaseException as raised:
            error = str(raised.code) if isinstance(raised, RefusedError) else type(raised).__name__
            raise
        finally:
            place = place_in(context.invocation_metadata())
            with contextlib.suppress(RuntimeError):  # at shutdown the pool no longer exists
                self._pool.submit(self._record, name, call, place, began, time.time_ns(), error)

    def _record(self, name: str, call: Call, place: Place | None, began: int, ended: int, error: str) -> None:
        ask = self._ask_of(call)
        if self._spans is None or call.identity is None or ask is None:
            return  # not authenticated, or a payload of the contract, which belongs to no round
        ids, step_number = ask
        device = call.identity.device
        of = {"run": ids.run, "round": ids.number, "device": device, "step_number": step_number}
        below = place.span if place is not None and place.trace == ids.trace else ids.ask(step_number, device)
        span = self._spans.start(name, self._spans.place(ids, below), began, server=True, fields=of)
        if error:
            fail(span, error)
        if call.committing:
            self._spans.start("commit", place_of(span), call.committing, fields=of).end(ended)
        span.end(ended)

    def _ask_of(self, call: Call) -> tuple[RoundIds, int] | None:
        """Returns the ids of the round of a call's ask, and the ask's step number."""
        if call.identity is None:
            return None
        number, step_number = 0, 0
        if call.name is not None:
            number, step_number = call.name.round, call.name.step_number
        else:
            ask = self._api.store.asks.with_payload(
                self._api.sessions.run_name(call.identity.run), call.identity.device, call.sha256
            )
            if ask is not None:
                number, step_number = ask.round, ask.step_number
        ids = self._ids(call.identity, number) if number else None
        return None if ids is None else (ids, step_number)

    def _ids(self, identity: service_pb2.Identity, number: int) -> RoundIds | None:
        run = self._api.sessions.run_name(identity.run)
        created = created_at(self._api.store.database, run)
        return None if self._spans is None or created is None else self._spans.ids(run, created, number)
