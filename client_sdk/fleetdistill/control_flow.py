"""Python's own control-flow exceptions, raised by code of the app, as errors of the SDK."""

from __future__ import annotations

import contextlib
from asyncio import CancelledError
from collections.abc import Iterator

from fleetdistill.errors import FleetDistillError

CONTROL_FLOW = (StopIteration, StopAsyncIteration, GeneratorExit, CancelledError)
"""Exceptions that Python uses for generators and tasks; they mean nothing to the caller of a `Device`."""


@contextlib.contextmanager
def control_flow_as_errors(call: str) -> Iterator[None]:
    """Turns a control-flow exception in the block into a FleetDistillError; all others pass.

    An asyncio future cannot store a StopIteration, so an `await` would never return, and a CancelledError would look
    like a cancellation of the app's task.

    Args:
        call: Name of the call, for the message.
    """
    try:
        yield
    except CONTROL_FLOW as error:
        detail = f": {error}" if str(error) else ""
        raise FleetDistillError(
            f"{call}: code of the app raised {type(error).__name__}{detail}, which Python uses for control flow; "
            "catch it in the app's function or model, whose line is in the traceback"
        ) from error
