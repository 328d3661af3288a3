"""Logs the calls of operators from their table, so that a server's log has them wherever they were made."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from fleetdistill_server.logs import about
from fleetdistill_server.store.operator_calls import BEGUN, LOCAL, caller_in_words
from fleetdistill_server.store.records import OperatorCall
from fleetdistill_server.store.store import Store

logger = logging.getLogger("fleetdistill.server.operators")
LOOK_SECONDS = 1.0
_WHOM = ("role", "name", "device")
"""Arguments that name whom a call revokes or forgets."""


class CallLog:
    """Logs the calls that are stored from now on: creations, starts, stops, deletions, revocations and all others.

    Args:
        store: The supervisor's store.
    """

    def __init__(self, store: Store) -> None:
        self._calls = store.operator_calls
        self._last = self._calls.last()
        self._begun: set[int] = set()
        self._looked = time.monotonic()

    def look(self) -> None:
        """Logs the calls since the last look; call this regularly. Reads the store at most once a second."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        for call in self._calls.after(self._last, sorted(self._begun)):
            known = call.id in self._begun
            self._last = max(self._last, call.id)
            if call.result == BEGUN:
                self._begun.add(call.id)
            else:
                self._begun.discard(call.id)
            if not (known and call.result == BEGUN):
                _log(call)


def _log(call: OperatorCall) -> None:
    where = "" if call.role == LOCAL else f" from {call.address}"
    caller = f"{caller_in_words(call.role, call.name)}{where}"
    given = _arguments(call)
    whom = "".join(f" {given[name]}" for name in _WHOM if given.get(name))
    text = f"{caller}: {call.call}{whom}: {call.result}"
    level = logging.WARNING if call.is_refused else logging.INFO
    logger.log(level, "%s", text, extra=about(run=given.get("run")))


def _arguments(call: OperatorCall) -> dict[str, Any]:
    try:
        return dict(json.loads(call.arguments))
    except ValueError:  # they were too long to be stored
        return {}
