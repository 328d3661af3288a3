"""The interceptor that checks every call against the table of `security/roles.py`, before a request is even parsed.

A caller is what its connection proves: the role in its certificate, nobody on TLS without one (the enrolment port), or
anybody on plain text.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc

from fleetdistill.errors import FleetDistillError, RefusedError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.front.errors import abort
from fleetdistill_server.front.receiving import Receiver
from fleetdistill_server.intake.limiter import Limiter
from fleetdistill_server.security.certificates import Holder, Role, holder_of
from fleetdistill_server.security.roles import ALLOWED_CALLERS, LONG_LIVED, Caller
from fleetdistill_server.store.store import Store

T = TypeVar("T")


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no annotations
    """Checks every call against `ALLOWED_CALLERS`, the certificate and the revocations; a server's first interceptor.

    Only then is a request read, by `receiving.Receiver`.

    Args:
        revocations: A store for reading them, used in the event loop and by nobody else. It is one look into an index,
            which in WAL mode waits for no writer.
        tls: Whether the server speaks TLS. On plain text the device that a request names stands for its caller; that
            it is this device is the business of the device API, which knows the secrets.
        limits: How requests are read, and how many calls of people may stay open.
    """

    def __init__(self, revocations: Store, tls: bool, limits: Limits = Limits()) -> None:  # noqa: B008  (it is frozen)
        self._revocations = revocations
        self.tls = tls
        self.receiver = Receiver(limits)
        self._limiter = Limiter(limits)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Puts the checks around a method's handler."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is not None:
            return _Guarded(self, method, handler).handler()
        return (
            grpc.stream_stream_rpc_method_handler(partial(self._elsewhere, method))
            if method in ALLOWED_CALLERS
            else None
        )

    def admit(self, method: str, context: Any) -> Holder | None:
        """Checks a call by its connection alone; returns whom its certificate names.

        Raises:
            RefusedError: This caller may not call the method, or its certificate is no longer good.
        """
        holder = holder_in(context) if self.tls else None
        without = Caller.ANONYMOUS if self.tls else Caller.PLAIN
        caller = Caller(holder.role.value) if holder else without
        if holder is not None:
            self.still_good(holder)
        if caller not in ALLOWED_CALLERS.get(method, ()):
            name = f" {holder.name!r}" if holder else ""
            may = ", ".join(sorted(ALLOWED_CALLERS.get(method, ()))) or "nobody"
            raise RefusedError(Code.NOT_ALLOWED, f"{caller}{name} may not call {method}; it is for: {may}")
        return holder

    async def _elsewhere(self, method: str, requests: AsyncIterator[bytes], context: Any) -> None:
        """Refuses a method that is ours, and that this port does not have."""
        await _or_abort(context, self.admit, method, context)
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is served on the other port")

    def stay_open(self, method: str, caller: str) -> contextlib.AbstractContextManager[object]:
        """A place for a call, where it is one that stays open. Raises RefusedError if its caller has too many."""
        return self._limiter.open_call(("", caller)) if method in LONG_LIVED else contextlib.nullcontext()

    def still_good(self, holder: Holder | None) -> None:
        """Raises RefusedError if a certificate has expired or was revoked, it or its holder."""
        if holder is None:
            return
        if holder.expires_at < time.time():
            text = f"the certificate of {holder.role} {holder.name!r} has expired; renew it, or enrol anew"
            raise RefusedError(Code.EXPIRED, text)
        if self._revocations.credentials.is_revoked(*holder.subjects):
            raise RefusedError(Code.REVOKED, f"{holder.role} {holder.name[:64]!r} was revoked; ask the operator")

    def vouched(self, request: Any, holder: Holder | None) -> Holder | None:
        """Whom a request speaks for: whom the certificate names, on plain text whom the request does.

        A request that names no run gets the one of the certificate.

        Raises:
            RefusedError: It speaks for another device than the certificate, or of a run that this is not for.
        """
        identity = _identity_of(request)
        if identity is None:
            return holder
        if not self.tls:
            holder = Holder(Role.DEVICE, identity.device)
            self.still_good(holder)
        elif holder is not None:
            _check_speaks_for(identity, holder)
        return holder


class _Guarded:
    """One method behind its checks. Requests come in as bytes, and none is read or parsed before them."""

    def __init__(self, guard: Guard, method: str, handler: Any) -> None:
        self._guard = guard
        self._method = method
        self._handler = handler
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        self._work = getattr(handler, kinds[2 * handler.request_streaming + handler.response_streaming])

    def handler(self) -> Any:
        """The handler to serve instead. On the wire one request is a stream of one, which is read when we want it."""
        make = grpc.stream_stream_rpc_method_handler
        if not self._handler.response_streaming:
            make = grpc.stream_unary_rpc_method_handler
        streams = self._handler.response_streaming and inspect.isasyncgenfunction(self._work)
        return make(self._stream if streams else self._call, None, self._handler.response_serializer)

    async def _call(self, requests: AsyncIterator[bytes], context: Any) -> Any:
        try:
            holder = self._guard.admit(self._method, context)
            caller = _caller(context, holder)
            with self._guard.stay_open(self._method, caller):
                holder, request = await self._begin(requests, caller, holder)
                answer = await self._work(request, _Context(context, self._guard, holder))
                self._guard.still_good(holder)  # a long poll may have outlasted the certificate
        except FleetDistillError as error:
            await abort(context, error)
        return answer

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        try:
            holder = self._guard.admit(self._method, context)
            caller = _caller(context, holder)
            with self._guard.stay_open(self._method, caller):
                holder, request = await self._begin(requests, caller, holder)
                async for answer in self._work(request, _Context(context, self._guard, holder)):
                    self._guard.still_good(holder)
                    yield answer
        except FleetDistillError as error:
            await abort(context, error)

    async def _begin(
        self, requests: AsyncIterator[bytes], caller: str, holder: Holder | None
    ) -> tuple[Holder | None, Any]:
        receiver = self._guard.receiver
        if self._handler.request_streaming:
            return holder, self._requests(receiver.all(requests, self._method, caller), holder)
        request = self._handler.request_deserializer(await receiver.first(requests, self._method, caller))
        return self._guard.vouched(request, holder), request

    async def _requests(self, requests: AsyncIterator[bytes], holder: Holder | None) -> AsyncIterator[Any]:
        """Raises to the method that reads them: it may be refusing something else, and a call can end only once."""
        async for data in requests:
            request = self._handler.request_deserializer(data)
            holder = self._guard.vouched(request, holder)
            self._guard.still_good(holder)
            yield request


class _Context:
    """A call's context that looks at the certificate again before every message that is written to it."""

    def __init__(self, context: Any, guard: Guard, holder: Holder | None) -> None:
        self._context = context
        self._guard = guard
        self._holder = holder

    async def write(self, message: Any) -> None:
        """Sends a message of a stream."""
        await _or_abort(self._context, self._guard.still_good, self._holder)
        await self._context.write(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


async def _or_abort(context: Any, check: Callable[..., T], *given: Any) -> T:
    try:
        return check(*given)
    except FleetDistillError as error:
        await abort(context, error)


@contextlib.contextmanager
def open_guard(directory: Path, tls: bool, limits: Limits) -> Iterator[Guard]:
    """A guard with a connection of its own to the store in a directory."""
    store = Store.open(directory)
    try:
        yield Guard(store, tls, limits)
    finally:
        store.close()


def holder_in(context: Any) -> Holder | None:
    """Whom the certificate of a call's connection names; None without one, or if it names no role of ours."""
    pem = context.auth_context().get("x509_pem_cert")
    return holder_of(pem[0]) if pem else None


def _caller(context: Any, holder: Holder | None) -> str:
    """Who shares what one caller may have: the holder of a certificate, else everybody behind one address."""
    return f"{holder.role}:{holder.name}" if holder else str(context.peer()).rpartition(":")[0]


def _check_speaks_for(identity: service_pb2.Identity, holder: Holder) -> None:
    if identity.device != holder.name:
        text = f"the certificate is for device {holder.name!r}, the request speaks for {identity.device[:64]!r}"
        raise RefusedError(Code.NOT_ALLOWED, text)
    if holder.run and identity.run not in ("", holder.run):
        text = f"the certificate is for run {holder.run!r}, the request is about {identity.run[:64]!r}"
        raise RefusedError(Code.NOT_ALLOWED, text)
    if holder.run:
        identity.run = holder.run


def _identity_of(request: Any) -> service_pb2.Identity | None:
    if isinstance(request, service_pb2.UploadRequest):
        return request.header.identity if request.HasField("header") else None
    found = getattr(request, "identity", None)
    return found if isinstance(found, service_pb2.Identity) else None
