"""Creates, starts, pauses, stops, cancels, clones, rolls back and deletes runs, on the operator's behalf.

Each function but `roll_back` and `delete` changes the store in one transaction, which also takes the run from its
engine where it should end, and returns the run. Repeating a call, for example after a crash, returns the same and
changes nothing. The supervisor of a server on the store starts and ends engines accordingly
(`service/reconciliation.py`).
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetdistill.errors import ConfigurationError, RunError
from fleetdistill.names import did_you_mean
from fleetdistill.state import failpoints
from fleetdistill_server.config.run_changes import describe_changes
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.service.engine_files import delete_engine_files
from fleetdistill_server.service.registration import changed_settings, check_unchanged, create_run
from fleetdistill_server.service.serve_lock import without_server
from fleetdistill_server.store import rollback
from fleetdistill_server.store.retention import Pruned, prune, sweep_all
from fleetdistill_server.store.rollback import RolledBack
from fleetdistill_server.store.states import ACTIVE, OVER, RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import counted

_BY_OPERATOR = "by the operator"
"""The run's reason, which devices get too; they need not know who it was."""
_SOMEBODY = "an operator"


@dataclass(frozen=True)
class RunState:
    """A run after a change.

    Attributes:
        run: Name of the run.
        status: A value of `RunStatus`; another text from a server of another version.
        reason: Why it has this status; may be empty.
        completed_rounds: Number of completed rounds.
        changes: Settings of a known run that `create` has changed, in words; else empty.
    """

    run: str
    status: str
    reason: str
    completed_rounds: int
    changes: str = ""

    @classmethod
    def of(cls, store: Store, run: str, changes: str = "") -> RunState:
        """Returns the state of a run in a store. Raises ConfigurationError if there is no such run."""
        row = store.runs.existing(run)
        return cls(row.name, row.status, row.reason, row.completed_rounds, changes)

    @property
    def sentence(self) -> str:
        """The state in words."""
        state = f"is {'started' if self.status in ACTIVE else self.status}"
        if not self.changes:
            why = self.status in ACTIVE and self.reason  # such as when an engine that failed is started again
            return f"run {self.run!r} {state}{f': {why}' if why else ''}"
        text = f"run {self.run!r} has new settings ({self.changes}), and {state}"
        if self.status in ACTIVE:
            text += f". Its engine reads them at its next start: `fleetdistill runs pause {self.run}`, then "
            return f"{text}`fleetdistill runs start {self.run}`"
        return f"{text}{self.reason and ': '}{self.reason}"


def create(
    store: Store, config: RunConfig, *, start_it: bool = False, who: str = _SOMEBODY, may_change: bool = True
) -> RunState:
    """Creates a run; gives a known one the settings that may change; see `registration.create_run`.

    Args:
        store: Store for the run.
        config: The run's configuration, which must have been checked.
        start_it: Whether to start the run too.
        who: The operator, for the run's events.
        may_change: Whether a known run may get other settings.

    Raises:
        ConfigurationError: The place of the payloads does not exist.
        RunError: A run of this name has another configuration, or cannot be started.
    """
    run = config.run.name
    with _durably(store):
        if not may_change:
            check_unchanged(store, config)
        changes = describe_changes(changed_settings(store, config))
        create_run(store, config)
        status = store.runs.existing(run).status
        if start_it and status not in OVER:
            _start(store, run, status, who)
        return RunState.of(store, run, changes)


def change(store: Store, run: str, wanted: str, who: str = _SOMEBODY) -> RunState:
    """Starts, pauses, stops or cancels a run. A run that has ended cannot be stopped or cancelled, and stays as it is.

    Args:
        store: Store that contains the run.
        run: Name of the run.
        wanted: `running`: it gets an engine as soon as one is free, and continues an open round. `paused`: its engine
            ends, its open round and everything that devices have sent stay. `stopped`: its engine ends, and an open
            round is closed as short. `cancelled`: as stopped, permanently; devices learn it at their next call.
        who: The operator, for the run's events.

    Raises:
        ConfigurationError: There is no such run, or no such status.
        RunError: The run cannot be started or paused, or the store does not have its configuration.
    """
    if wanted not in _CHANGES:
        raise ConfigurationError(f"status is {wanted!r}, must be {', '.join(_CHANGES)}")
    with _durably(store):
        _CHANGES[wanted](store, run, store.runs.existing(run).status, who)
        return RunState.of(store, run)


def check_checkpoint(store: Store, run: str, wanted: str) -> None:
    """Checks that a run that is to be started can go on; reads its checkpoint, so call it before the transaction.

    Raises:
        ConfigurationError: There is no such run.
        DamagedError: The run's checkpoint is missing or damaged; the message has the way back.
    """
    row = store.runs.existing(run)
    if wanted == RunStatus.RUNNING and row.checkpoint and row.status not in (*ACTIVE, *OVER):
        rollback.read_checkpoint(store, run, row.checkpoint)


def request_forgetting(store: Store, run: str, device: str) -> bool:
    """Excludes a device from a run permanently, and requests that its contributions be deleted.

    An engine does it before the next round of its run, and the supervisor's process in a run without an engine.

    Returns:
        Whether they had been deleted before.

    Raises:
        ConfigurationError: The store has no such run, or the run has no such device.
    """
    store.runs.existing(run)
    if not store.devices.ask_to_forget(run, device):
        meant = did_you_mean(device, store.devices.ids(run))
        raise ConfigurationError(
            f"run {run!r} has no device {device!r}{meant or ';'} `fleetdistill devices` lists them"
        )
    return device not in store.devices.to_forget(run)


def clone_settings(store: Store, run: str, new: str, changes: Sequence[str]) -> dict[str, Any]:
    """Returns a run's settings, not checked again, under another name and with changed settings.

    Args:
        store: Store that contains the run.
        run: Name of the run.
        new: Name of the clone.
        changes: Settings as `section.key=value`, with values as in run.toml; text may stand without quotes.

    Raises:
        ConfigurationError: There is no such run, the clone has its name, or a change has another form.
        RunError: The store does not have the run's configuration.
    """
    store.runs.existing(run)
    if new == run:
        raise ConfigurationError(f"the clone of run {run!r} has the name of the run; choose another one")
    setup = store.run_control.setup(run)
    if setup is None:
        raise RunError(_without_setup(run))
    setup["run"]["name"] = new
    for change in changes:
        section, key, value = _parse_change(change)
        setup.setdefault(section, {})[key] = value
    return setup


def _parse_change(change: str) -> tuple[str, str, Any]:
    name, equals, text = change.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigurationError(f"--set is {change!r}, expected section.key=value, such as run.rounds=20")
    if (section, key) == ("run", "name"):
        raise ConfigurationError(f"--set is {change!r}, but the clone's name is the second argument")
    try:
        return section, key, tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return section, key, text.strip()


def _start(store: Store, run: str, status: RunStatus, who: str) -> None:
    if status is RunStatus.FINISHED:
        raise RunError(
            f"run {run!r} is finished; raise [run] rounds in its run.toml and use `fleetdistill runs create` to "
            "continue it"
        )
    if status in OVER:
        raise RunError(f"run {run!r} is {status}, so it cannot be started")
    if store.run_control.setup(run) is None:
        raise RunError(_without_setup(run))
    if status not in ACTIVE:
        store.run_control.activate(run)
        store.history.add_event(run, "resumed" if status is RunStatus.PAUSED else "started", f"by {who}")


def _pause(store: Store, run: str, status: RunStatus, who: str) -> None:
    if status in ACTIVE:
        store.run_control.set_status(run, RunStatus.PAUSED, _BY_OPERATOR)
        store.history.add_event(run, "paused", f"by {who}")
    elif status is not RunStatus.PAUSED:
        raise RunError(f"run {run!r} is {status}, so it cannot be paused")


def _stop(store: Store, run: str, status: RunStatus, who: str) -> None:
    if status not in OVER and status is not RunStatus.STOPPED:
        store.runs.stop(run, _BY_OPERATOR)
        store.history.add_event(run, "stopped", f"by {who}")


def _cancel(store: Store, run: str, status: RunStatus, who: str) -> None:
    if status not in OVER:
        completed = store.runs.existing(run).completed_rounds
        store.runs.cancel(run, f"{_BY_OPERATOR}, after {counted(completed, 'round')}")


_CHANGES: dict[str, Callable[[Store, str, RunStatus, str], None]] = {
    RunStatus.RUNNING: _start,
    RunStatus.PAUSED: _pause,
    RunStatus.STOPPED: _stop,
    RunStatus.CANCELLED: _cancel,
}
"""What makes a run have a status."""


def _without_setup(run: str) -> str:
    return (
        f"the store does not have the complete configuration of run {run!r}; "
        "add it with `fleetdistill runs create run.toml`"
    )


@contextlib.contextmanager
def _durably(store: Store) -> Iterator[None]:
    """Runs the block in one transaction, durable afterwards unless the caller has opened a larger one."""
    with store.transaction():
        yield
        failpoints.hit("runs.change.before-commit")
        store.database.after_commit(lambda: failpoints.hit("runs.change.after-commit"))


def roll_back(directory: Path, store: Store, run: str, to: int, who: str) -> RolledBack:
    """Rolls a run back to the state after a round, also while a server works on others.

    Args:
        directory: The store's directory.
        store: The store.
        run: Name of the run.
        to: Round number; 0 for the state before the first round.
        who: The operator, for the run's events.

    Raises:
        ConfigurationError: The run does not exist, or it has no checkpoint of that round.
        RunError: A server works on the run.
        DamagedError: The checkpoint of that round is missing or damaged.
    """
    with without_server(directory) as served:
        if served is not None and served.includes(run):
            status = store.runs.status(run)
            if served.run:
                raise RunError(f"run {run!r} is being served; stop its server first")
            if status in ACTIVE:
                raise RunError(f"run {run!r} is {status}; stop it first with `fleetdistill runs stop {run}`")
        return rollback.roll_back(store, run, to, who)


def delete(directory: Path, store: Store, run: str) -> Pruned | None:
    """Deletes a run in any state with its rows, payloads and checkpoints, except files that other runs need.

    Deletes the rows in one transaction, which takes the run from its engine too, then the files. If interrupted, the
    next call deletes the rest.

    Args:
        directory: The store's directory.
        store: The store.
        run: Name of the run.

    Returns:
        What was deleted; None for an unknown run.

    Raises:
        RunError: A server serves only this run.
        StoreError: Another process holds the deletion lock, for example during a backup.
    """
    with without_server(directory) as served:
        if served is not None and served.run == run:
            raise RunError(
                f"run {run!r} is being served; stop its server first, or only end the run with "
                f"`fleetdistill runs cancel {run}`"
            )
        known = store.runs.get(run) is not None
        gone = prune(store, run, whole=True, served=served is not None) if known else None
        if served is None:
            delete_engine_files(directory, run)
            sweep_all(store, ())
        return gone
