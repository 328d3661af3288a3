"""gRPC interceptors: reject requests that cannot be decoded, and pass chunks without copying them.

For undecodable bytes gRPC itself would return UNKNOWN and log a stack trace per call, so any caller could fill the log.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.framing import unframe
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.front.errors import abort

_NO_MESSAGE = object()
_SENTENCE = "the request is not a message of this protocol"


class RefuseUndecodable(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends a call with `bad-message` if its request cannot be decoded."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call_details: Any) -> Any:
        """Wraps a handler so that decoding errors end the call with a status."""
        handler = await continuation(call_details)
        return None if handler is None else _guard(handler)


def _guard(handler: Any) -> Any:
    name = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    behaviour = getattr(handler, name)
    # A handler that streams with context.write, such as the health service's, is awaited like a unary one.
    make = _stream_answer if inspect.isasyncgenfunction(behaviour) else _one_answer
    return handler._replace(
        request_deserializer=_lenient(handler.request_deserializer),
        **{name: make(behaviour, _messages if handler.request_streaming else _message)},
    )


def _lenient(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return _NO_MESSAGE

    return read


def _one_answer(behaviour: Callable[..., Awaitable[Any]], checked: Callable[[Any], Any]) -> Callable[..., Any]:
    async def answer(request: Any, context: Any) -> Any:
        try:
            return await behaviour(checked(request), context)
        except _UndecodableError:
            await _refuse(context)

    return answer


def _stream_answer(behaviour: Callable[..., AsyncIterator[Any]], checked: Callable[[Any], Any]) -> Callable[..., Any]:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in behaviour(checked(request), context):
                yield response
        except _UndecodableError:
            await _refuse(context)

    return answer


class _UndecodableError(Exception):
    """Raised inside a handler, which cleans up as for any broken stream."""


def _message(request: Any) -> Any:
    if request is _NO_MESSAGE:
        raise _UndecodableError
    return request


async def _messages(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _message(request)


async def _refuse(context: Any) -> NoReturn:
    await abort(context, RefusedError(Code.BAD_MESSAGE, _SENTENCE))


_DEVICE = "/fleetdistill.wire.v1.DeviceService/"


class RawChunks(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Passes the chunks of `Upload` and `Download` without copying their data through protobuf messages.

    `Upload` receives each chunk as a view of the received bytes; `Download` sends messages that are already serialised.
    """

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call_details: Any) -> Any:
        handler = await continuation(call_details)
        if call_details.method == f"{_DEVICE}Upload":
            return handler._replace(request_deserializer=partial(unframe, kind=service_pb2.UploadRequest))
        return handler._replace(response_serializer=None) if call_details.method == f"{_DEVICE}Download" else handler
