"""Writes the calls of operators to the store: changes with their result, and refused calls."""

from __future__ import annotations

import asyncio
import json
import logging
import tomllib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from fleetdistill.errors import FleetDistillError, RefusedError, StoreError
from fleetdistill_server.front.guard import holder_in
from fleetdistill_server.intake.commit import Commit
from fleetdistill_server.intake.limiter import Allowance
from fleetdistill_server.store.operator_calls import Call, Outcome
from fleetdistill_server.store.store import Store

T = TypeVar("T")
logger = logging.getLogger("fleetdistill.server.operators")
_REFUSED_PER_HOUR = 60
"""Number of refused calls of one caller that are stored in an hour."""
_LONG = ("run_toml",)
"""Fields of requests that are not stored: they are long, and the store has their content elsewhere."""
_OPERATIONS = "/fleetdistill.wire.v1.OperationsService/"


def call_of(context: Any, name: str, request: Any = None) -> Call:
    """Returns who makes a call of a method, from where, and with which request."""
    holder = holder_in(context)
    known = isinstance(request, Message)  # an undecodable request has no arguments
    given = json.loads(MessageToJson(request, preserving_proto_field_name=True)) if known else {}
    arguments = _created_run(given) | {field: value for field, value in given.items() if field not in _LONG}
    role, who = ("unknown", "") if holder is None else (str(holder.role), holder.name)
    return Call(role, who, name, arguments, str(context.peer()))


def _created_run(given: Mapping[str, Any]) -> dict[str, str]:
    """Returns the name of the run that a request creates; nothing for other requests, or if it cannot be read."""
    try:
        return {"run": str(tomllib.loads(given["run_toml"])["run"]["name"])}
    except (KeyError, TypeError, ValueError, RecursionError):  # TOMLDecodeError, or a number of too many digits
        return {}


class OperatorLog:
    """Stores calls of operators; thread-safe.

    Args:
        commit: Runs a job in a durable transaction.
    """

    def __init__(self, commit: Commit) -> None:
        self._commit = commit
        self._allowance = Allowance(_REFUSED_PER_HOUR)

    def commit(self, call: Call, change: Callable[[Store], T], describe: Callable[[T], Outcome]) -> T:
        """Makes a change and stores its call in the same transaction.

        Args:
            call: The call.
            change: Makes the change.
            describe: Returns the outcome of the change.

        Raises:
            RefusedError: The change was refused; the refused call is stored.
        """

        def job(store: Store) -> T:
            with store.operator_calls.with_change(call) as outcome:
                result = change(store)
                found = describe(result)
                outcome.changed, outcome.text = found.changed, found.text
            return result

        return self.unless_refused(call, lambda: self._commit(job))

    def unless_refused(self, call: Call, work: Callable[[], T]) -> T:
        """Does work that stores the call with its change; stores the call if it is refused."""
        try:
            return work()
        except RefusedError as refusal:
            self.refuse(call, refusal)
            raise

    def around(self, call: Call, work: Callable[[], T], describe: Callable[[T], Outcome]) -> T:
        """Stores a call as begun, does its work, which is not one transaction, and stores the result."""
        number = self._commit(lambda store: store.operator_calls.begin(call))
        try:
            result = work()
        except FleetDistillError as error:
            refused = isinstance(error, RefusedError)
            text = f"failed: {error}"
            self._commit(lambda store: store.operator_calls.settle(number, text, refused=refused))
            raise
        self._commit(lambda store: store.operator_calls.settle(number, describe(result).words))
        return result

    def refuse(self, call: Call, refusal: FleetDistillError) -> None:
        """Stores a refused call, up to a number for each caller and hour."""
        if self._allowance.take((call.role, call.name or call.address.rpartition(":")[0])):
            return
        code = f"{refusal.code}: " if isinstance(refusal, RefusedError) else ""
        try:
            self._commit(lambda store: store.operator_calls.add(call, f"refused: {code}{refusal}", refused=True))
        except StoreError as error:
            logger.error("a refused call could not be stored: %s", error)

    def refusals(self, pool: ThreadPoolExecutor) -> Callable[[str, Any, FleetDistillError, Any], None]:
        """Returns a function for the guard that stores refused calls of operations without waiting."""

        def note(method: str, context: Any, refusal: FleetDistillError, request: Any) -> None:
            if method.startswith(_OPERATIONS):
                call = call_of(context, method.removeprefix(_OPERATIONS), request)
                asyncio.get_running_loop().run_in_executor(pool, partial(self.refuse, call, refusal))

        return note
