"""Bytes that are no message of ours end a call with a status of our table, like anything else that breaks the protocol.

gRPC itself would answer UNKNOWN and write a stack trace for every such call, so that anybody could fill the log.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codes import Code
from fleetdistill_server.front.errors import abort

_NO_MESSAGE = object()
_SENTENCE = "the request's bytes are no message of this protocol"


class RefuseUndecodable(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Goes first in a server's list of interceptors, so that all others see messages."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call_details: Any) -> Any:
        """Reads requests leniently, and refuses those that could not be read."""
        handler = await continuation(call_details)
        return None if handler is None else _guarded(handler)


def _guarded(handler: Any) -> Any:
    name = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    behaviour = getattr(handler, name)
    # A handler that streams by context.write, as the health service's does, is awaited like one that gives one answer.
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
    """Passes through a call's own code, which does what it does for every broken stream."""


def _message(request: Any) -> Any:
    if request is _NO_MESSAGE:
        raise _UndecodableError
    return request


async def _messages(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _message(request)


async def _refuse(context: Any) -> NoReturn:
    await abort(context, RefusedError(Code.BAD_MESSAGE, _SENTENCE))


_DOWNLOAD = "/fleetdistill.wire.v1.DeviceService/Download"


class DownloadsAreBytes(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Sends what `Download` gives as it is: it has its messages serialised already."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call_details: Any) -> Any:
        handler = await continuation(call_details)
        return handler._replace(response_serializer=None) if call_details.method == _DOWNLOAD else handler
