"""Forgetting a device: its part goes out of the method's state, and its payloads out of the store.

What stays is the history of the rounds: the device's id and profile, its figures, bytes and events.
Somebody asks (`fleetdistill devices forget`), and from then on the run does not ask the device any more. It is done
between two rounds, by the engine or, where no server works on the run and no round is open, at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from fleetdistill.errors import ConfigurationError
from fleetdistill.seeds import derive_seed
from fleetdistill.state_file import pack_state, unpack_state
from fleetdistill_server.joining import GUARD
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.retention import drop_unneeded
from fleetdistill_server.store import Store


class BetweenRounds:
    """Takes the notes of a method that works outside a round, as `Cohort` does within one."""

    def __init__(self, store: Store, run: str, seed: int) -> None:
        self._store, self._run, self._seed = store, run, seed

    def event(self, kind: str, text: str, device: str = "") -> None:
        """Notes something out of the ordinary."""
        self._store.add_event(self._run, kind, text, device=device)

    def guard(self, name: str, text: str, device: str = "") -> None:
        """Notes that a guard fired."""
        self.event(f"{name}{GUARD}", text, device)

    def report(self, name: str, value: Any) -> None:
        """There is no round that a figure would belong to."""

    def generator(self, name: str) -> torch.Generator:
        """Random numbers for one named purpose."""
        return torch.Generator().manual_seed(derive_seed(self._seed, "between rounds", name, "server"))


def forget_asked(store: Store, run: str, method: ServerMethod, check: Callable[[], None] = lambda: None) -> None:
    """Forgets every device of a run that somebody has asked for; between rounds only. After a crash it is done again.

    Args:
        store: Of the run.
        run: The run.
        method: Holds the state of the run's checkpoint, and afterwards that of the new one.
        check: Called within the transaction; raises where this process may not change the run.
    """
    devices = store.to_forget(run)
    if not devices:
        return
    row = store.run(run)
    assert row is not None
    for device in devices:
        method.forget(device, BetweenRounds(store, run, method.setting.seed))
    checkpoint = store.blobs.put_state(pack_state(method.state_dict()))
    spent = set().union(*(store.payloads_of(run, device) for device in devices)) | {row["checkpoint"]}
    with store.transaction():
        check()
        store.note_forgotten(run, devices, checkpoint)
        for device in devices:
            text = "its part in the method's state and its payloads are deleted"
            store.add_event(run, "forgotten", text, device=device)
    drop_unneeded(store, spent)


def ask_to_forget(store: Store, run: str, device: str, *, served: str | None) -> bool:
    """Takes a device out of a run for good, and forgets it at once where nobody works on the run.

    Returns:
        Whether it is done; else the engine does it before the next round.

    Raises:
        ConfigurationError: There is no such run or device.
    """
    from fleetdistill_server.contract import build_method
    from fleetdistill_server.run_config import run_config

    row = store.run(run)
    if row is None or not store.ask_to_forget(run, device):
        raise ConfigurationError(f"run {run!r} has no device {device!r}; `fleetdistill devices` lists them")
    if device not in store.to_forget(run):
        return True
    if served == run or store.open_round(run) is not None or row["checkpoint"] is None:
        return False
    config = run_config({**json.loads(row["config"]), "server": {"torch_device": "cpu"}, "proxy": {}})
    method = build_method(config)
    method.load_state_dict(unpack_state(store.blobs.get_state(row["checkpoint"])))
    forget_asked(store, run, method)
    return True
