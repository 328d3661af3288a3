"""Calls of operators that commands make on the store's machine."""

from __future__ import annotations

import getpass
from collections.abc import Mapping
from typing import Any

from fleetdistill_server.intake.device_api import DirectCommit
from fleetdistill_server.intake.operator_log import OperatorLog
from fleetdistill_server.store.operator_calls import LOCAL, Call
from fleetdistill_server.store.store import Store

__all__ = ["local_call", "local_log"]


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
