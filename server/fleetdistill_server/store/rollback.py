"""Setting a run back to the state after an earlier round: `fleetdistill runs rollback`.

Where a round has spoiled the model, the run goes on from before it. Later rounds stay in the history as undone. Devices
need not know of it, because every round tells them what they need. It is done while no server works on the run: an
engine that still lives, though nobody knows, loses the run with this transaction.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetdistill.errors import ConfigurationError
from fleetdistill.state import failpoints
from fleetdistill_server.store.retention import drop_unneeded
from fleetdistill_server.store.run_names import no_such_run
from fleetdistill_server.store.store import Store


@dataclass(frozen=True)
class RolledBack:
    """What `roll_back` did.

    Attributes:
        completed_rounds: Rounds that count now.
        undone: Rounds that counted until now.
    """

    completed_rounds: int
    undone: int


def roll_back(store: Store, run: str, to: int) -> RolledBack:
    """Sets a run back to the state after a round; while no server works on it.

    Args:
        store: Of the run.
        run: The run.
        to: The round, as `fleetdistill runs show` numbers them; 0 for the state before the first one.

    Raises:
        ConfigurationError: There is no such run, or the state of that round is not kept.
        DamagedError: It is kept, but cannot be read.
    """
    row = store.runs.get(run)
    if row is None:
        raise ConfigurationError(no_such_run(run, store.runs.names()))
    kept = {one["round"]: one for one in store.runs.checkpoints(run)}
    if to not in kept:
        has = ", ".join(map(str, kept)) or "none"
        raise ConfigurationError(
            f"--to is {to}: run {run!r} keeps no checkpoint of round {to}, it has those of {has}; "
            "[server] keep_checkpoints says how many are kept"
        )
    store.blobs.get_state(kept[to]["sha256"])
    failpoints.hit("rollback.before-commit")
    spent = store.runs.roll_back(run, to)
    failpoints.hit("rollback.after-commit")
    drop_unneeded(store, spent)
    completed = kept[to]["completed_rounds"]
    return RolledBack(completed, row["completed_rounds"] - completed)
