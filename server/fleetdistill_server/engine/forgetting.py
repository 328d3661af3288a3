"""Forgets a device: removes its part from the method's state and deletes its payloads from the store.

The history of the rounds is kept: the device's id and profile, its figures except those per class, its byte counts and
events. The device's share in values that methods averaged or learned over many devices is kept too.

After `fleetdistill devices forget` the run no longer asks the device. Forgetting happens between two rounds: in the
engine, or immediately in the command if no server serves the run, after closing an open round as short. For a run at
rest the supervisor starts this module as a process (`service/supervisor.py`). Forgetting proceeds in three steps:
commit a state without the device, delete everything that is no longer needed, mark the device as forgotten. After a
failure before the last step, all steps are repeated.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fleetdistill.errors import FleetDistillError
from fleetdistill.seeds import derive_seed
from fleetdistill.state import failpoints
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill_server.event_kinds import GUARD
from fleetdistill_server.logs import LogFormat, LogLevel, configure
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.service.processes import end_with_parent
from fleetdistill_server.service.run_changes import request_forgetting
from fleetdistill_server.store.records import Run
from fleetdistill_server.store.retention import WAIT_SECONDS, drop_unneeded, sweep_all
from fleetdistill_server.store.states import ACTIVE
from fleetdistill_server.store.store import Store

__all__ = ["ask_to_forget"]


class BetweenRounds:
    """Implements `Notes` for a method that works between rounds.

    Buffers the events until `write`, so that they commit in the same transaction as the change they describe.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._events: list[tuple[str, str, str]] = []

    def write(self, store: Store, run: str) -> None:
        """Writes the buffered events to a run's history."""
        for kind, text, device in self._events:
            store.history.add_event(run, kind, text, device=device)

    def event(self, kind: str, text: str, device: str = "", *, once: bool = False) -> None:
        """Buffers an event; `once` is ignored."""
        self._events.append((kind, text, device))

    def guard(self, name: str, text: str, device: str = "") -> None:
        """Buffers the event `<name>-guard`."""
        self.event(f"{name}{GUARD}", text, device)

    def report(self, name: str, value: Any) -> None:
        """Ignores the figure, since figures belong to a round."""

    def generator(self, name: str) -> torch.Generator:
        """Returns a random generator for one named purpose."""
        return torch.Generator().manual_seed(derive_seed(self._seed, "between rounds", name, "server"))


def forget_requested(
    store: Store, run: str, method: ServerMethod, check: Callable[[], None] = lambda: None, wait_seconds: float = 0.0
) -> bool:
    """Forgets every device of a run whose deletion was requested; call only between rounds.

    Args:
        store: Store that contains the run.
        run: Name of the run.
        method: The run's server half; changed in place: if a device is to be forgotten, the run's state is loaded into
            it.
        check: Called within the transaction; raises if this process must not change the run.
        wait_seconds: Longest wait, in seconds, for another process that sweeps the store or makes a backup.

    Returns:
        True if no request is left. False if the caller must try again, because another process is using the store or
        has changed the run.
    """
    devices = store.devices.to_forget(run)
    if not devices:
        return True
    if not _commit_state_without(store, run, devices, method, check):
        return False
    failpoints.hit("forget.after-state")
    if not sweep_all(store, store.devices.payloads_with_data_of(run, devices), wait_seconds):
        return False
    failpoints.hit("forget.before-note")
    with store.transaction():
        for device in devices:
            if store.devices.mark_forgotten(run, device):
                text = "the device's part in the method's state and its payloads were deleted"
                store.history.add_event(run, "forgotten", text, device=device)
    return True


def _commit_state_without(
    store: Store, run: str, devices: Sequence[str], method: ServerMethod, check: Callable[[], None]
) -> bool:
    """Commits a state without these devices; returns False if the run's state has changed in the meantime."""
    before = store.runs.existing(run)
    method.load_state_dict(unpack_state(store.blobs.get_state(before.checkpoint)))
    notes = BetweenRounds(method.context.seed)
    for device in devices:
        method.forget(device, notes)
    state = pack_state(method.state_dict())
    checkpoint = store.blobs.put_state(state)
    with store.transaction():
        check()
        unchanged = _is_unchanged(store, before)
        if unchanged:
            store.secure_state(checkpoint, state)
            store.runs.remove_contributions(run, devices, checkpoint)
            notes.write(store, run)
    if not unchanged:  # this state may contain a device that another process has forgotten in the meantime
        drop_unneeded(store, [checkpoint])
    return unchanged


def _is_unchanged(store: Store, before: Run) -> bool:
    """Returns whether a run still has the checkpoint and engine that it had before, and has no open round."""
    run = store.runs.get(before.name)
    same = run is not None and (run.checkpoint, run.engine) == (before.checkpoint, before.engine)
    return same and store.runs.open_number(before.name) is None


def ask_to_forget(store: Store, run: str, device: str, *, served: bool) -> bool:
    """Excludes a device from a run permanently, and forgets it immediately if no engine runs.

    Args:
        store: Store that contains the run.
        run: Name of the run.
        device: Id of the device.
        served: Whether a server serves the run, so that an engine forgets the device if the run is active.

    Returns:
        True if the device is forgotten. Otherwise the engine forgets it before the next round; if the run is over,
        call this function again.

    Raises:
        ConfigurationError: The store has no such run, or the run has no such device.
    """
    if request_forgetting(store, run, device):
        return True
    # Read after the request: an engine does not end a run while requests are pending.
    known_run = store.runs.existing(run)
    if (served and known_run.status in ACTIVE) or not known_run.checkpoint:
        return False
    end_open_round(store, known_run)
    done = forget_requested(store, run, _method_of(known_run), wait_seconds=WAIT_SECONDS)
    return done or device not in store.devices.to_forget(run)  # another process may have forgotten it meanwhile


def end_open_round(store: Store, run: Run) -> None:
    """Closes an open round as short, unless an engine has started since `run` was read.

    Takes over the run first, so that an engine that is still running undetected fails at its next commit.
    """
    with store.transaction():
        number = store.runs.open_number(run.name)
        if number is not None and store.runs.existing(run.name).engine == run.engine:
            store.runs.own(run.name)
            store.runs.close_short_round(run.name, number, "a device was forgotten while no server served the run")


def _method_of(run: Run) -> ServerMethod:
    from fleetdistill_server.config.run_config import run_config
    from fleetdistill_server.engine.contract import build_method

    return build_method(run_config({**run.config, "server": {"torch_device": "cpu"}, "proxy": {}}))


def main() -> int:
    """Forgets the devices of runs at rest; the arguments are the store, the parent's process id, and the runs."""
    parser = argparse.ArgumentParser(prog="fleetdistill-forgetting", description="Forgets devices of runs at rest.")
    parser.add_argument("store", type=Path)
    parser.add_argument("parent", type=int)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--log-format", choices=list(LogFormat), default=LogFormat.TEXT)
    parser.add_argument("--log-level", choices=list(LogLevel), default=LogLevel.INFO)
    options = parser.parse_args()
    configure("engine", options.log_format, options.log_level)
    end_with_parent(options.parent)
    store = Store.open(options.store)
    left = False
    try:
        for run in options.runs:
            for device in store.devices.to_forget(run)[:1]:
                left |= not ask_to_forget(store, run, device, served=True)
    except FleetDistillError:
        logging.exception("the devices of a run at rest could not be forgotten")
        return 1
    finally:
        store.close()
    return int(left)


if __name__ == "__main__":
    sys.exit(main())
