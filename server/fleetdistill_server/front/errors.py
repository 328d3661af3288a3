"""Maps errors to gRPC statuses with google.rpc details, by the table in `fleetdistill.wire.codes`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, ParamSpec, TypeVar

import grpc

from fleetdistill.errors import FleetDistillError, NoSpaceError, RefusedError, StoreUnavailableError
from fleetdistill.wire.codes import DETAILS, MEANINGS, Code, rich_status
from fleetdistill_server.logs import Interruption

T = TypeVar("T")
P = ParamSpec("P")
logger = logging.getLogger("fleetdistill.server.refusals")
_away = Interruption(logger, "calls fail, and devices retry them: %s", "calls no longer fail for want of the store")


async def in_pool(pool: ThreadPoolExecutor, context: Any, work: Callable[[], T]) -> T:
    """Runs a call's work in the pool; any error ends the call with a status from the table."""
    return await ended(context, asyncio.get_running_loop().run_in_executor(pool, work))


async def ended(context: Any, work: Awaitable[T]) -> T:
    """Awaits a call's work; any error ends the call with a status from the table."""
    try:
        result = await work
    except FleetDistillError as error:
        await abort(context, error)
    except Exception:
        await abort(context, _internal())
    _away.work()
    return result


def refusing(work: Callable[P, T]) -> Callable[P, T]:
    """Returns a function like `work` that raises only errors from the table."""

    def checked(*given: P.args, **named: P.kwargs) -> T:
        try:
            return work(*given, **named)
        except FleetDistillError:
            raise
        except Exception:
            raise _internal() from None

    return checked


def _internal() -> RefusedError:
    """Logs the exception that is being handled; returns the error for the caller."""
    logger.exception("a call failed")
    return RefusedError(Code.INTERNAL, "internal error; see the server's log")


async def abort(context: Any, error: FleetDistillError) -> NoReturn:
    """Ends a call with the error's status and google.rpc details."""
    refusal = error if isinstance(error, RefusedError) else _as_refusal(error)
    status = rich_status(refusal)
    try:
        await context.abort(
            getattr(grpc.StatusCode, MEANINGS[Code(refusal.code)].status),
            status.message,
            ((DETAILS, status.SerializeToString()),),
        )
    except grpc.aio.InternalError as gone:  # gRPC has ended the call itself, as for a message that unpacks to too much
        raise asyncio.CancelledError from gone
    raise AssertionError("abort raises")


def _as_refusal(error: FleetDistillError) -> RefusedError:
    if isinstance(error, NoSpaceError):
        return RefusedError(Code.NO_SPACE, "the server's disk is full; no receipt was issued, retry later")
    if isinstance(error, StoreUnavailableError):
        _away.fail(error)
        return RefusedError(Code.NOT_READY, "the server's database or object store is not available; retry later")
    logger.error("a call failed: %s", error)
    return RefusedError(Code.INTERNAL, "the server's store failed; see the server's log")
