"""Forgetting a device: its part goes out of the method's state, and its payloads out of the store.

What stays is the history of the rounds: the device's id and profile, its figures but for those by class, bytes and
events; and its share in what methods have averaged or learned of many devices.

Somebody asks (`fleetdistill devices forget`), and from then on the run does not ask the device any more. It is done
between two rounds, by the engine or, where no server works on the run, at once, after the round that was left open is
closed as a short one: first the state without the device becomes the run's, then all that nothing needs any more is
deleted, and only then the device counts as forgotten. Whatever goes wrong before that, it is all done again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fleetdistill.errors import ConfigurationError
from fleetdistill.seeds import derive_seed
from fleetdistill.state import failpoints
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill_server.event_kinds import GUARD
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.retention import WAIT_SECONDS, drop_unneeded, sweep_all
from fleetdistill_server.store.states import AT_REST
from fleetdistill_server.store.store import Store


class BetweenRounds:
    """Takes the notes of a method that works outside a round, as `Cohort` does within one.

    They are kept until `write`, for the transaction that makes true what they tell of.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._events: list[tuple[str, str, str]] = []

    def write(self, store: Store, run: str) -> None:
        """Writes the events into a run's history."""
        for kind, text, device in self._events:
            store.history.add_event(run, kind, text, device=device)

    def event(self, kind: str, text: str, device: str = "", *, once: bool = False) -> None:
        """Notes something out of the ordinary."""
        self._events.append((kind, text, device))

    def guard(self, name: str, text: str, device: str = "") -> None:
        """Notes that a guard fired."""
        self.event(f"{name}{GUARD}", text, device)

    def report(self, name: str, value: Any) -> None:
        """There is no round that a figure would belong to."""

    def generator(self, name: str) -> torch.Generator:
        """Random numbers for one named purpose."""
        return torch.Generator().manual_seed(derive_seed(self._seed, "between rounds", name, "server"))


def forget_asked(
    store: Store, run: str, method: ServerMethod, check: Callable[[], None] = lambda: None, wait_seconds: float = 0.0
) -> bool:
    """Forgets every device of a run that somebody has asked for; between rounds only.

    Args:
        store: Of the run.
        run: The run.
        method: Where there is a device to forget, it gets the run's state and forgets the device.
        check: Called within the transaction; raises where this process may not change the run.
        wait_seconds: For whoever else deletes payloads or makes a backup.

    Returns:
        False where it has to be done again: nothing may be deleted yet, or somebody else has changed the run meanwhile.
    """
    devices = store.devices.to_forget(run)
    if not devices:
        return True
    if not _leave_out(store, run, devices, method, check):
        return False
    failpoints.hit("forget.after-state")
    if not sweep_all(store, store.devices.payloads_about(run, devices), wait_seconds):
        return False
    failpoints.hit("forget.before-note")
    with store.transaction():
        for device in devices:
            if store.devices.note_forgotten(run, device):
                text = "its part in the method's state and its payloads are deleted"
                store.history.add_event(run, "forgotten", text, device=device)
    return True


def _leave_out(store: Store, run: str, devices: Sequence[str], method: ServerMethod, check: Callable[[], None]) -> bool:
    """Makes the state without these devices the run's; False if it has another one by now than this was made of."""
    row = store.runs.get(run)
    assert row is not None
    method.load_state_dict(unpack_state(store.blobs.get_state(row["checkpoint"])))
    notes = BetweenRounds(method.context.seed)
    for device in devices:
        method.forget(device, notes)
    state = pack_state(method.state_dict())
    checkpoint = store.blobs.put_state(state)
    with store.transaction():
        check()
        unchanged = _is_unchanged(store, row)
        if unchanged:
            store.secure_state(checkpoint, state)
            store.runs.leave_out(run, devices, checkpoint)
            notes.write(store, run)
    if not unchanged:  # another device may have been forgotten meanwhile, whose part is in this state
        drop_unneeded(store, [checkpoint])
    return unchanged


def _is_unchanged(store: Store, row: Row) -> bool:
    """Whether a run still has the state and the engine of this row, and no round is open."""
    now = store.runs.get(row["name"]) or {}
    same = all(now.get(name) == row[name] for name in ("checkpoint", "engine"))
    return same and store.runs.open_round(row["name"]) is None


def ask_to_forget(store: Store, run: str, device: str, *, served: str | None) -> bool:
    """Takes a device out of a run for good, and forgets it at once where nobody works on the run.

    Args:
        store: Of the run.
        run: The run.
        device: Its id.
        served: The run that a server works on at this moment, if one does.

    Returns:
        Whether it is done. Else the engine does it before the next round, or, where the run is over, this when it is
        called again.

    Raises:
        ConfigurationError: There is no such run or device.
    """
    if not store.devices.ask_to_forget(run, device):
        raise ConfigurationError(f"run {run!r} has no device {device!r}; `fleetdistill devices` lists them")
    if device not in store.devices.to_forget(run):
        return True
    row = store.runs.get(run)  # only now: an engine ends a run only while nobody is to be forgotten
    assert row is not None
    over = row["status"] in AT_REST
    if (served == run and not over) or row["checkpoint"] is None:
        return False
    end_open_round(store, row)
    done = forget_asked(store, run, _method_of(row), wait_seconds=WAIT_SECONDS)
    return done or device not in store.devices.to_forget(run)  # another one may have done it meanwhile


def end_open_round(store: Store, row: Row) -> None:
    """Closes a round that nobody works on as a short one, unless an engine has started since this row was read.

    One that still lives, though it is not known, loses the run: it cannot go on with a round that is closed.
    """
    with store.transaction():
        left = store.runs.open_round(row["name"])
        if left is not None and (store.runs.get(row["name"]) or {}).get("engine") == row["engine"]:
            store.runs.own(row["name"])
            store.runs.close_short_round(
                row["name"], left["round"], "a device was forgotten while no server worked on it"
            )


def _method_of(row: Row) -> ServerMethod:
    from fleetdistill_server.config.run_config import run_config
    from fleetdistill_server.engine.contract import build_method

    return build_method(run_config({**json.loads(row["config"]), "server": {"torch_device": "cpu"}, "proxy": {}}))
