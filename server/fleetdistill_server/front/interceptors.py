"""gRPC interceptors: pass chunks without copying them, and count calls."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from fleetdistill.wire.codes import DETAILS
from fleetdistill.wire.framing import unframe
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.store.meter import Meter

_OK, _BROKEN = "ok", "broken"
_DEVICE = "/fleetdistill.wire.v1.DeviceService/"
_UPLOAD, _DOWNLOAD = f"{_DEVICE}Upload", f"{_DEVICE}Download"


class RawChunks(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Passes the chunks of `Upload` and `Download` without copying their data through protobuf messages.

    `Upload` receives each chunk as a view of the received bytes; `Download` sends messages that are already serialised.
    """

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call_details: Any) -> Any:
        handler = await continuation(call_details)
        if call_details.method == _UPLOAD:
            return handler._replace(request_deserializer=partial(unframe, kind=service_pb2.UploadRequest))
        return handler._replace(response_serializer=None) if call_details.method == _DOWNLOAD else handler


class MeasuredCalls(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no annotations
    """Counts the calls of every method that the server has, for metrics, if `[server] metrics` is set.

    It must be the first interceptor.

    Args:
        meter: Counts calls and uploads.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._forms: dict[str, tuple[str, bool]] = {}  # of each method: attribute with its function, a generator or not

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call_details: Any) -> Any:
        """Wraps a method's handler; methods that do not exist are not counted, because callers name them."""
        handler = await continuation(call_details)
        return None if handler is None else self._wrap(handler, call_details.method)

    def _wrap(self, handler: Any, method: str) -> Any:
        form = self._forms.get(method)
        if form is None:
            name = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
            form = self._forms[method] = name, inspect.isasyncgenfunction(getattr(handler, name))
        name, generates = form
        make = self._stream if generates else self._call
        return handler._replace(**{name: make(getattr(handler, name), method)})

    def _call(self, work: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Any]:
        async def call(requests: Any, context: Any) -> Any:
            measured = self._begin(context, method)
            try:
                answer = await work(requests, measured)
                measured.code = measured.code or _OK
                return answer
            finally:
                self._end(method, measured.code or _BROKEN)

        return call

    def _stream(self, work: Callable[..., AsyncIterator[Any]], method: str) -> Callable[..., Any]:
        async def call(requests: Any, context: Any) -> AsyncIterator[Any]:
            measured = self._begin(context, method)
            try:
                async for answer in work(requests, measured):
                    yield answer
                measured.code = measured.code or _OK
            finally:
                self._end(method, measured.code or _BROKEN)

        return call

    def _begin(self, context: Any, method: str) -> _Context:
        if method == _UPLOAD:
            self._meter.upload_begun()
        return _Context(context)

    def _end(self, method: str, code: str) -> None:
        self._meter.call_ended(method.rpartition("/")[2], code)
        if method == _UPLOAD and code not in (_OK, _BROKEN):
            self._meter.upload_refused(code)


class _Context:
    """A call's context that keeps the code with which the call was refused; empty for none."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.code = ""

    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> None:
        self.code = _reason(trailing_metadata) or code.name.lower()
        await self._context.abort(code, details, trailing_metadata)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _reason(metadata: Any) -> str:
    """Returns the server's error code in the metadata of a refusal; empty for gRPC's own statuses."""
    packed = dict(metadata).get(DETAILS)
    info = error_details_pb2.ErrorInfo()
    if packed is None or not status_pb2.Status.FromString(packed).details[0].Unpack(info):
        return ""
    return str(info.reason)


def _arity(streaming: bool) -> str:
    return "stream" if streaming else "unary"
