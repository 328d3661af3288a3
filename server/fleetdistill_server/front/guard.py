"""The interceptor that checks every call against the table in `security/roles.py` before its request is parsed.

The connection determines the caller: the role in its certificate, anonymous on TLS without a certificate (the enrolment
port), or any caller in plain text.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import grpc
from cryptography import x509
from google.protobuf.message import DecodeError

from fleetdistill.errors import FleetDistillError, RefusedError, StoreError
from fleetdistill.link.credentials import AUTHORITIES
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.config.server_config import Tls
from fleetdistill_server.front.errors import abort
from fleetdistill_server.front.receiving import Receiver
from fleetdistill_server.front.strangers import Strangers
from fleetdistill_server.intake.limiter import Limiter
from fleetdistill_server.logs import Interruption
from fleetdistill_server.security.certificates import Holder, Role, holder_of
from fleetdistill_server.security.roles import CALLS, Caller, allowed_callers, refusal
from fleetdistill_server.store.store import Store

logger = logging.getLogger("fleetdistill.server.front")
_REFRESH_SECONDS = 1.0
_RENEWAL = (
    "every call with it is refused until the device is opened again with a new token of the operator's "
    "`fleetdistill enrol`"
)


class Revocations(Protocol):
    """Answers whether somebody is revoked, without waiting, because the event loop asks for each call and message.

    In SQLite, a lookup is one index access, which does not wait for writers in WAL mode. In a database on another
    machine, it is a call over the network. A thread then reads all revocations every second, so that a new one takes
    effect within about a second at every front. While the database is not available, the last known ones apply.
    """

    def is_revoked(self, holder: str, certificate: str) -> bool:
        """Returns whether a holder (`device:ID`) or its certificate (`serial:HEX`) is revoked."""


class _Snapshot:
    """All revocations as of the last `refresh`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._subjects: frozenset[str] = frozenset()
        self.refresh()

    def refresh(self) -> None:
        self._subjects = frozenset(revocation.subject for revocation in self._store.credentials.revocations())

    def is_revoked(self, holder: str, certificate: str) -> bool:
        return holder in self._subjects or certificate in self._subjects


@contextlib.contextmanager
def open_revocations(store: Store) -> Iterator[Revocations]:
    """Yields the revocations in a store that only the event loop uses."""
    if not store.database.is_remote:
        yield store.credentials
        return
    snapshot = _Snapshot(store)
    ended = threading.Event()
    thread = threading.Thread(target=_refresh, args=(snapshot, ended), name="revocations", daemon=True)
    thread.start()
    try:
        yield snapshot
    finally:
        ended.set()


def _refresh(snapshot: _Snapshot, ended: threading.Event) -> None:
    text = "the revocations cannot be read; the last known ones apply: %s"
    away = Interruption(logger, text, "the revocations can be read again")
    while not ended.wait(_REFRESH_SECONDS):
        try:
            snapshot.refresh()
            away.work()
        except StoreError as error:
            if not ended.is_set():
                away.fail(error)


class AcceptedAuthorities:
    """The CAs whose certificates are accepted now: a TLS connection outlives the end of a CA's rotation.

    Args:
        path: File with their certificates, in PEM.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._next_look = 0.0
        self._names: set[str] = set()

    def accept(self, name: str) -> bool:
        """Returns whether a CA of this name is accepted; looks at the file once a second, and for a name that is new.

        Each CA has a name of its own, and TLS has verified its signature. A file that cannot be read changes nothing.
        """
        if name not in self._names or time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _REFRESH_SECONDS
            with contextlib.suppress(OSError, ValueError):
                stat = self._path.stat()
                if (stamp := (stat.st_mtime_ns, stat.st_ino)) != self._stamp:
                    certificates = x509.load_pem_x509_certificates(self._path.read_bytes())
                    names = {certificate.subject.rfc4514_string() for certificate in certificates}
                    if self._names not in (set(), names):
                        logger.info("the server now accepts certificates of: %s", ", ".join(sorted(names)))
                    self._names, self._stamp = names, stamp
        return name in self._names


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no annotations
    """Checks every call against `CALLS`, the certificate's expiry and the revocations.

    Of the server's interceptors only `interceptors.MeasuredCalls` may precede `Guard`. `receiving.Receiver` reads the
    request after these checks, and bytes that are no message of the method end the call with `bad-message`.

    Args:
        revocations: Revocations, asked in the event loop for each call and message, so a lookup must not wait.
        tls: Whether the server uses TLS. In plain text, the request's device id identifies the caller; the device API
            verifies the device's secret.
        limits: Limits on reading requests and on open calls of operators and viewers.
        authorities: The accepted CAs; None to accept every certificate that TLS has.

    Attributes:
        strangers: The connections whose callers are unknown; a call with a valid certificate makes them known.
        on_refusal: Called with the method, the call's context, the error and the request (None if it was not read) when
            a call is refused; must not wait.
    """

    def __init__(
        self,
        revocations: Revocations,
        tls: bool,
        limits: Limits = Limits(),  # noqa: B008  (it is frozen)
        authorities: AcceptedAuthorities | None = None,
    ) -> None:
        self._revocations = revocations
        self._authorities = authorities
        self.tls = tls
        self.on_refusal: Callable[[str, Any, FleetDistillError, Any], None] = lambda *refused: None
        self.receiver = Receiver(limits)
        self.strangers = Strangers(limits)
        self._limiter = Limiter(limits)
        self.stall_seconds = limits.stall_seconds

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Wraps a method's handler in the checks."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is not None:
            return _Guarded(self, method, handler).handler()
        return grpc.stream_stream_rpc_method_handler(partial(self._wrong_port, method)) if method in CALLS else None

    def admit(self, method: str, context: Any) -> Holder | None:
        """Checks a call by its connection; returns the holder of its certificate, or None without a certificate.

        Raises:
            RefusedError: The caller is not allowed to call the method, or its certificate has expired or was revoked.
        """
        holder = holder_in(context) if self.tls else None
        without = Caller.ANONYMOUS if self.tls else Caller.PLAIN
        caller = Caller(holder.role.value) if holder else without
        if holder is not None:
            self.check_valid(holder)
            self.strangers.know(context.peer())
        if caller not in allowed_callers(method):
            raise RefusedError(Code.NOT_ALLOWED, refusal(caller, holder.name if holder else "", method))
        return holder

    async def _wrong_port(self, method: str, requests: AsyncIterator[bytes], context: Any) -> None:
        """Rejects a known method that this port does not serve."""
        try:
            self.admit(method, context)
        except FleetDistillError as error:
            await abort(context, error)
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is served on the other port")

    def stay_open(self, method: str, caller: str) -> contextlib.AbstractContextManager[object]:
        """Counts a call if its method stays open. Raises RefusedError if its caller has too many open calls."""
        stays_open = method in CALLS and CALLS[method].is_long_lived
        return self._limiter.open_call(("", caller)) if stays_open else contextlib.nullcontext()

    def check_valid(self, holder: Holder | None) -> None:
        """Raises RefusedError if a certificate has expired, or if it, its holder or its CA is no longer accepted."""
        if holder is None:
            return
        code, state = Code.EXPIRED, ""
        if self._authorities is not None and not self._authorities.accept(holder.issuer):
            code, state = Code.OLD_CA, "is of a CA that the server no longer accepts"
        elif holder.expires_at < time.time():
            state = "has expired by the server's clock"
        if state:
            remedy = _RENEWAL if holder.role is Role.DEVICE else "ask for a new one of `fleetdistill pki issue`"
            raise RefusedError(code, f"the certificate of {holder.role} {holder.name!r} {state}; {remedy}")
        if self._revocations.is_revoked(*holder.subjects):
            raise RefusedError(Code.REVOKED, f"{holder.role} {holder.name[:64]!r} was revoked; contact the operator")

    def verified_holder(self, request: Any, holder: Holder | None) -> Holder | None:
        """Returns the caller's identity: from the certificate, or, on a plain-text connection, from the request.

        If the request contains no run, its run is set to the run in the certificate.

        Raises:
            RefusedError: The device or run in the request differs from the certificate.
        """
        identity = identity_of(request)
        if identity is None:
            return holder
        if not self.tls:
            holder = Holder(Role.DEVICE, identity.device)
            self.check_valid(holder)
        elif holder is not None:
            _check_identity(identity, holder)
        return holder


class _Guarded:
    """One method with its checks. Requests arrive as bytes and are read and parsed after the checks."""

    def __init__(self, guard: Guard, method: str, handler: Any) -> None:
        self._guard = guard
        self._method = method
        self._handler = handler
        kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        self._work = getattr(handler, kinds[2 * handler.request_streaming + handler.response_streaming])

    def handler(self) -> Any:
        """Returns the wrapped handler. It takes every request as a stream, so that it can defer reading it."""
        make = grpc.stream_stream_rpc_method_handler
        if not self._handler.response_streaming:
            make = grpc.stream_unary_rpc_method_handler
        streams = self._handler.response_streaming and inspect.isasyncgenfunction(self._work)
        return make(self._stream if streams else self._call, None, self._handler.response_serializer)

    async def _call(self, requests: AsyncIterator[bytes], context: Any) -> Any:
        request = None
        try:
            holder = self._guard.admit(self._method, context)
            caller = _caller(context, holder)
            with self._guard.stay_open(self._method, caller):
                request = await self._read(requests, context, caller, holder)
                holder = self._guard.verified_holder(request, holder)
                answer = await self._work(request, _Context(context, self._guard, holder))
                self._guard.check_valid(holder)  # the certificate may have expired during a long poll
        except FleetDistillError as error:
            await self._refuse(requests, context, error, request)
        return answer

    async def _stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        request = None
        try:
            holder = self._guard.admit(self._method, context)
            caller = _caller(context, holder)
            with self._guard.stay_open(self._method, caller):
                request = await self._read(requests, context, caller, holder)
                holder = self._guard.verified_holder(request, holder)
                checked = _Context(context, self._guard, holder)
                async with contextlib.aclosing(self._work(request, checked)) as answers:
                    async for answer in answers:
                        await checked.write(answer)
        except FleetDistillError as error:
            await self._refuse(requests, context, error, request)

    async def _refuse(
        self, requests: AsyncIterator[bytes], context: Any, error: FleetDistillError, request: Any
    ) -> None:
        """Ends a call with an error, and reports the refused call."""
        if request is None and _may_do_less(error, holder_in(context)):
            with contextlib.suppress(FleetDistillError):
                caller = _caller(context, holder_in(context))
                data = await self._guard.receiver.first(requests, self._method, caller)
                request = self._parse(data)
        self._guard.on_refusal(self._method, context, error, request)
        await abort(context, error)

    async def _read(self, requests: AsyncIterator[bytes], context: Any, caller: str, holder: Holder | None) -> Any:
        """Returns the request, or the checked requests of a stream."""
        receiver = self._guard.receiver
        if self._handler.request_streaming:
            return self._requests(receiver.all(requests, self._method, caller), context, holder)
        return self._parse(await receiver.first(requests, self._method, caller))

    async def _requests(
        self, requests: AsyncIterator[bytes], context: Any, holder: Holder | None
    ) -> AsyncIterator[Any]:
        """Raises errors in the method that reads the requests, because a call can end only once; reports them here."""
        async for data in requests:
            request = self._parse(data)
            try:
                holder = self._guard.verified_holder(request, holder)
                self._guard.check_valid(holder)
            except RefusedError as error:
                self._guard.on_refusal(self._method, context, error, request)
                raise
            yield request

    def _parse(self, data: bytes) -> Any:
        """Parses a request. For undecodable bytes gRPC itself would log a stack trace, which could fill the log."""
        try:
            return self._handler.request_deserializer(data)
        except DecodeError:
            raise RefusedError(Code.BAD_MESSAGE, "the request is not a message of this protocol") from None


class _Context:
    """A call's context that checks the certificate before every message, and ends the call of a caller that stalls."""

    def __init__(self, context: Any, guard: Guard, holder: Holder | None) -> None:
        self._context = context
        self._guard = guard
        self._holder = holder

    async def write(self, message: Any) -> None:
        """Sends a message of a stream. Raises RefusedError if the caller's certificate is no longer valid."""
        self._guard.check_valid(self._holder)
        seconds = self._guard.stall_seconds
        try:
            async with asyncio.timeout(seconds):
                await self._context.write(message)
        except TimeoutError:
            text = f"the caller did not accept a message within {seconds:g} s; call again"
            await abort(self._context, RefusedError(Code.INCOMPLETE, text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


@contextlib.contextmanager
def open_guard(directory: Path, tls: Tls | None, limits: Limits) -> Iterator[Guard]:
    """Opens a guard with its own connection to the store in a directory."""
    authorities = None if tls is None else AcceptedAuthorities(tls.directory / AUTHORITIES)
    store = Store.open(directory)
    try:
        with open_revocations(store) as revocations:
            yield Guard(revocations, tls is not None, limits, authorities)
    finally:
        store.close()


def holder_in(context: Any) -> Holder | None:
    """Returns the holder of the connection's certificate; None without a certificate or with an unknown role."""
    pem = context.auth_context().get("x509_pem_cert")
    return holder_of(pem[0]) if pem else None


def _may_do_less(error: FleetDistillError, holder: Holder | None) -> bool:
    """Returns whether a person with a valid identity was refused a call, of which the trail shows the request."""
    not_allowed = isinstance(error, RefusedError) and error.code == Code.NOT_ALLOWED
    return not_allowed and holder is not None and holder.role is not Role.DEVICE


def _caller(context: Any, holder: Holder | None) -> str:
    """Returns the key under which calls are counted: the certificate's holder, or the network address."""
    return f"{holder.role}:{holder.name}" if holder else str(context.peer()).rpartition(":")[0]


def _check_identity(identity: service_pb2.Identity, holder: Holder) -> None:
    if identity.device != holder.name:
        text = f"the certificate is for device {holder.name!r}, but the request is for device {identity.device[:64]!r}"
        raise RefusedError(Code.NOT_ALLOWED, text)
    if holder.run and identity.run not in ("", holder.run):
        text = f"the certificate is for run {holder.run!r}, but the request is for run {identity.run[:64]!r}"
        raise RefusedError(Code.NOT_ALLOWED, text)
    if holder.run:
        identity.run = holder.run


def identity_of(request: Any) -> service_pb2.Identity | None:
    """Returns the device and run for which a request is; None if its kind has none."""
    if isinstance(request, service_pb2.UploadRequest):
        return request.header.identity if request.HasField("header") else None
    identity = getattr(request, "identity", None)
    return identity if isinstance(identity, service_pb2.Identity) else None
