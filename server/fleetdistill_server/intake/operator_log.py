"""Stores the calls of operators, here and from elsewhere: changes with their outcome, and failed ones."""

from __future__ import annotations

import contextlib
import getpass
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from fleetdistill.errors import FleetDistillError, NoSpaceError, RefusedError, StoreError, StoreUnavailableError
from fleetdistill.wire.codes import NEED_CERTIFICATE, Code
from fleetdistill_server.intake.device_api import DirectCommit
from fleetdistill_server.intake.limiter import Allowance
from fleetdistill_server.store.group_commit import Commit
from fleetdistill_server.store.operator_calls import FAILED, LOCAL, Call, Outcome
from fleetdistill_server.store.store import Store

__all__ = ["local_call", "local_log"]

T = TypeVar("T")
logger = logging.getLogger("fleetdistill.server.operators")
_REFUSED_PER_HOUR = 60
"""Number of refused calls of one caller that are stored in an hour."""
_OF_ITS_CERTIFICATE = (*NEED_CERTIFICATE, Code.REVOKED)
"""Codes that refuse every call of a caller alike, as those of a page that stays open; one an hour is stored."""


class OperatorLog:
    """Stores calls of operators; thread-safe.

    Args:
        commit: Runs a job in a durable transaction.
    """

    def __init__(self, commit: Commit) -> None:
        self._commit = commit
        self._allowance = Allowance(_REFUSED_PER_HOUR)
        self._of_certificates = Allowance(1)

    def commit(self, call: Call, change: Callable[[Store], T], describe: Callable[[T], Outcome]) -> T:
        """Makes a change and stores its call in the same transaction; a failed call is stored too.

        Args:
            call: The call.
            change: Makes the change.
            describe: Returns the outcome of the change.
        """

        def job(store: Store) -> T:
            with store.operator_calls.with_change(call) as outcome:
                result = change(store)
                done = describe(result)
                outcome.changed, outcome.text = done.changed, done.text
            return result

        return self.unless_failed(call, lambda: self._commit(job))

    def unless_failed(self, call: Call, work: Callable[[], T]) -> T:
        """Does work that stores the call with its change; stores the call if the work fails."""
        try:
            return work()
        except FleetDistillError as error:
            self.add_failed(call, error)
            raise

    def around(self, call: Call, work: Callable[[], T], describe: Callable[[T], Outcome]) -> T:
        """Stores a call as begun, does its work, which is not one transaction, and stores the outcome."""
        number = self._commit(lambda store: store.operator_calls.begin(call))
        try:
            result = work()
        except FleetDistillError as error:
            refused, text = isinstance(error, RefusedError), f"{FAILED}{error}"
            with _log():
                self._commit(lambda store: store.operator_calls.settle(number, text, refused=refused))
            raise
        self._commit(lambda store: store.operator_calls.settle(number, describe(result).words))
        return result

    def add_failed(self, call: Call, error: FleetDistillError) -> None:
        """Stores a failed or refused call if the store can be used, up to a number for each caller and hour."""
        if isinstance(error, (StoreUnavailableError, NoSpaceError)):
            return
        shut_out = isinstance(error, RefusedError) and error.code in _OF_ITS_CERTIFICATE
        allowance = self._of_certificates if shut_out else self._allowance
        if allowance.take((call.role, call.name or call.address.rpartition(":")[0])):
            return
        text = f"refused: {error.code}: {error}" if isinstance(error, RefusedError) else f"{FAILED}{error}"
        with _log():
            self._commit(lambda store: store.operator_calls.add(call, text, refused=True))


@contextlib.contextmanager
def _log() -> Iterator[None]:
    """Logs an error of the store; the error of the call says more."""
    try:
        yield
    except StoreError as error:
        logger.error("a failed call could not be stored: %s", error)


def local_log(store: Store) -> OperatorLog:
    """Returns the log of operators' calls of a store that this process has opened."""
    return OperatorLog(DirectCommit(store))


def local_call(call: str, arguments: Mapping[str, Any]) -> Call:
    """Returns a call that this process makes."""
    return Call(LOCAL, local_user(), call, arguments, LOCAL)


def local_user() -> str:
    """Returns the name of the user who runs this process; `unknown` if the system has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
