"""Rolls a run back to the state after an earlier round: `fleetdistill runs rollback`.

Use it when a round has made the model worse. Later rounds stay in the history with the status `undone`. Devices need no
changes, because each round sends them everything they need. If an engine still works on the run, the rollback revokes
its ownership in the same transaction.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetdistill.errors import ConfigurationError, DamagedError, StoreError
from fleetdistill.state import failpoints
from fleetdistill_server.store.records import Checkpoint
from fleetdistill_server.store.retention import drop_unneeded
from fleetdistill_server.store.store import Store


@dataclass(frozen=True)
class RolledBack:
    """Result of `roll_back`.

    Attributes:
        completed_rounds: Number of completed rounds after the rollback.
        undone: Number of completed rounds that were undone.
    """

    completed_rounds: int
    undone: int


def roll_back(store: Store, run: str, to: int, who: str = "an operator") -> RolledBack:
    """Rolls a run back to the state after a round; it is stopped afterwards.

    Args:
        store: Store that contains the run.
        run: Name of the run.
        to: Round number, as shown by `fleetdistill runs show`; 0 for the state before the first round.
        who: The operator, for the run's events.

    Raises:
        ConfigurationError: The run does not exist, or it has no checkpoint of that round.
        DamagedError: The checkpoint of that round is missing or damaged.
    """
    before = store.runs.existing(run)
    kept = {checkpoint.round: checkpoint for checkpoint in store.runs.checkpoints(run)}
    if to not in kept:
        intact = intact_checkpoints(store, run)
        has = ", ".join(f"{one.round} ({one.completed_rounds} completed)" for one in intact) or "none"
        raise ConfigurationError(
            f"--to is {to}, but run {run!r} has no checkpoint of round {to}; available rounds: {has}. They are "
            "numbered as in `runs show`, where short rounds count too; [server] keep_checkpoints sets how many are kept"
        )
    read_checkpoint(store, run, kept[to].sha256)
    failpoints.hit("rollback.before-commit")
    spent = store.runs.roll_back(run, to, who)
    failpoints.hit("rollback.after-commit")
    drop_unneeded(store, spent)
    completed = kept[to].completed_rounds
    return RolledBack(completed, before.completed_rounds - completed)


def read_checkpoint(store: Store, run: str, sha256: bytes) -> bytes:
    """Returns a checkpoint of a run. Raises DamagedError with the way back if it is missing or damaged."""
    try:
        return store.blobs.get_state(sha256)
    except DamagedError as damage:
        raise DamagedError(sha256, f"{damage}; {way_back(store, run, sha256)}") from damage


def way_back(store: Store, run: str, lost: bytes) -> str:
    """Returns how a run whose newest checkpoint is missing or damaged goes on, for people.

    Args:
        store: Store that contains the run.
        run: Name of the run.
        lost: Digest of the checkpoint.
    """
    left = [checkpoint for checkpoint in intact_checkpoints(store, run) if checkpoint.sha256 != lost]
    if not left:
        file = f"blobs/{lost.hex()[:2]}/{lost.hex()}.safetensors"
        return (
            f"no intact earlier checkpoint is kept. Copy {file} of a backup that has it into the store and run "
            f"`fleetdistill runs start {run}`; or restore a whole backup with `fleetdistill restore`"
        )
    stop, back = f"`fleetdistill runs stop {run}`", f"`fleetdistill runs rollback {run} --to {left[-1].round}`"
    return f"{stop}, then {back} returns to the newest one before it"


def intact_checkpoints(store: Store, run: str) -> list[Checkpoint]:
    """Returns the kept checkpoints of a run that are not missing or damaged, oldest first; reads their files."""
    return [checkpoint for checkpoint in store.runs.checkpoints(run) if _is_intact(store, checkpoint.sha256)]


def _is_intact(store: Store, checkpoint: bytes) -> bool:
    try:
        store.blobs.get_state(checkpoint)
    except StoreError as error:  # of an object store that is away nothing is known
        return not isinstance(error, DamagedError)
    return True
