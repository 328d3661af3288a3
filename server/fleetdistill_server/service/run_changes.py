"""Creates, starts, pauses, resumes, stops and clones runs, on the operator's behalf.

Each function changes the store in one transaction, which also takes the run from its engine where it should end, and
returns what is then true of the run. Repeating a call, for example after a crash, returns the same and changes nothing.
The supervisor of a server on the store starts and ends engines accordingly (`service/reconciliation.py`).
"""

from __future__ import annotations

import contextlib
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

from fleetdistill.errors import ConfigurationError, RunError
from fleetdistill.state import failpoints
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.service.registration import check_unchanged, create_run
from fleetdistill_server.store.states import ACTIVE, OVER, RunStatus
from fleetdistill_server.store.store import Store

_BY_OPERATOR = "by the operator"
"""The run's reason, which devices get too; they need not know who it was."""
_SOMEBODY = "an operator"


def create(
    store: Store, config: RunConfig, *, start_it: bool = False, who: str = _SOMEBODY, may_change: bool = True
) -> str:
    """Creates a run; gives a known one the settings that may change; see `registration.create_run`.

    Args:
        store: Store for the run.
        config: The run's configuration, which must have been checked.
        start_it: Whether to start the run too.
        who: The operator, for the run's events.
        may_change: Whether a known run may get other settings.

    Returns:
        A sentence on the run.

    Raises:
        ConfigurationError: The place of the payloads does not exist.
        RunError: A run of this name has another configuration, or cannot be started.
    """
    with _durably(store):
        if not may_change:
            check_unchanged(store, config)
        create_run(store, config)
        if start_it and store.runs.existing(config.run.name).status not in OVER:
            _start(store, config.run.name, who)
    return f"run {config.run.name!r} is {'created and started' if start_it else 'created'}"


def start(store: Store, run: str, who: str = _SOMEBODY) -> str:
    """Starts a run that was created, was stopped or failed; it gets an engine as soon as one is free.

    Raises:
        ConfigurationError: There is no such run.
        RunError: The run is paused or has ended, or the store does not have its configuration.
    """
    with _durably(store):
        _start(store, run, who)
    return f"run {run!r} is started"


def pause(store: Store, run: str, who: str = _SOMEBODY) -> str:
    """Pauses a run: its engine ends, its open round and everything that devices have sent stay.

    Raises:
        ConfigurationError: There is no such run.
        RunError: The run is not started, or has ended.
    """
    with _durably(store):
        status = store.runs.existing(run).status
        if status in ACTIVE:
            store.run_control.set_status(run, RunStatus.PAUSED, _BY_OPERATOR)
            store.history.add_event(run, "paused", f"by {who}")
        elif status is not RunStatus.PAUSED:
            raise RunError(f"run {run!r} is {status}, so it cannot be paused")
    return f"run {run!r} is paused"


def resume(store: Store, run: str, who: str = _SOMEBODY) -> str:
    """Resumes a paused run; it continues its open round as soon as an engine is free.

    Raises:
        ConfigurationError: There is no such run.
        RunError: The run is not paused.
    """
    with _durably(store):
        status = store.runs.existing(run).status
        if status is RunStatus.PAUSED:
            store.run_control.activate(run)
            store.history.add_event(run, "resumed", f"by {who}")
        elif status in (RunStatus.CREATED, RunStatus.STOPPED):
            raise RunError(f"run {run!r} is {status}, not paused; start it with `fleetdistill runs start {run}`")
        elif status in OVER:
            raise RunError(f"run {run!r} is {status}, so it cannot be resumed")
    return f"run {run!r} is resumed"


def stop(store: Store, run: str, who: str = _SOMEBODY) -> str:
    """Stops a run until it is started again: its engine ends, and an open round is closed as short.

    Raises:
        ConfigurationError: There is no such run.
    """
    with _durably(store):
        status = store.runs.existing(run).status
        if status in OVER:
            return f"run {run!r} had already ended"
        if status is not RunStatus.STOPPED:
            store.runs.stop(run, _BY_OPERATOR)
            store.history.add_event(run, "stopped", f"by {who}")
    return f"run {run!r} is stopped"


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


def _start(store: Store, run: str, who: str) -> None:
    status = store.runs.existing(run).status
    if status is RunStatus.PAUSED:
        raise RunError(f"run {run!r} is paused; continue it with `fleetdistill runs resume {run}`")
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
        store.history.add_event(run, "started", f"by {who}")


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
        failpoints.hit("runs.lead.before-commit")
        store.database.after_commit(lambda: failpoints.hit("runs.lead.after-commit"))
