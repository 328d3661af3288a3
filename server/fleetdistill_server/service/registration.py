"""Registers a run in the store when a server starts, and decides which settings may change between two starts.

The settings in `OPERATORS`, such as the number of rounds, may change at each start. All other settings
identify the run. If one of them changes after a round was completed, the start fails, even if that
round was rolled back. Before the first completed round, the run is replaced, so that its name can be used again after
a mistake in run.toml.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fleetdistill.errors import RunError
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.config.run_changes import Changes, changes_between, conflict_message, describe_changes
from fleetdistill_server.config.run_config import OPERATORS, RunConfig
from fleetdistill_server.config.server_config import OF_A_RUN
from fleetdistill_server.store.records import Run
from fleetdistill_server.store.states import RoundStatus, RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import counted

_CHANGEABLE = {f"run.{name}" for name in OPERATORS}


def register(store: Store, config: RunConfig, status: RunStatus = RunStatus.PREPARING) -> None:
    """Registers a new run, or resumes a known one with changed settings, in one transaction.

    A finished run continues if `rounds` was raised. Changes are recorded as an event of the run.

    Raises:
        ConfigurationError: The place of the payloads does not exist.
        RunError: The run exists and cannot continue with this configuration.
    """
    store.blobs.check()
    name, settings = config.run.name, json.loads(json.dumps(config.fixed_part()))
    with store.transaction():
        run = store.runs.get(name)
        if run is None:
            store.runs.begin(name, settings, status)
            return
        if run.status is RunStatus.CANCELLED:
            raise RunError(
                f"run {name!r} was cancelled; give the next run another name, or delete this one with "
                f"`fleetdistill runs delete {name}`"
            )
        changes = changes_between(run.config, settings)
        if changes.keys() - _CHANGEABLE:
            _replace(store, run, settings, changes)
            return
        if "run.rounds" in changes:
            _check_rounds(run, config.run.rounds)
        if noted := changed_settings(store, config):
            text = f"{describe_changes(noted)}; an engine of the run reads its settings when it starts"
            store.history.add_event(name, "settings-changed", text)
        if changes:
            store.runs.change(name, settings, _with_settings(run.contract, config))
        if "run.buffer_answers" in changes and not config.run.buffer_answers:
            store.runs.settle_closed(name, "rounds are no longer buffered")
        if run.status is RunStatus.FINISHED and _has_rounds_left(run, config.run.rounds):
            store.runs.set_status(name, RunStatus.RUNNING, "")


def create_run(store: Store, config: RunConfig) -> bool:
    """Creates a run that waits to be started, or gives a known one the settings that may change between starts.

    Returns:
        Whether the run is new. The engine of a known one reads the settings at its next start.

    Raises:
        ConfigurationError: The place of the payloads does not exist.
        RunError: A run of this name has another configuration.
    """
    name = config.run.name
    known = store.runs.get(name)
    if known is not None:
        settings = json.loads(json.dumps(config.fixed_part()))
        changes = changes_between(known.config, settings)
        if changes.keys() - _CHANGEABLE:  # `register` would replace a run without a completed round
            raise RunError(
                conflict_message(name, {key: both for key, both in changes.items() if key not in _CHANGEABLE})
            )
    register(store, config, RunStatus.CREATED)
    store.run_control.set_setup(name, config.setup())
    if known is not None and known.status is RunStatus.FINISHED and store.runs.status(name) is not RunStatus.FINISHED:
        rounds = counted(config.run.rounds, "round") if config.run.rounds else "unlimited rounds"
        store.run_control.set_status(name, RunStatus.STOPPED, f"finished, and now has {rounds}")
    return known is None


def changed_settings(store: Store, config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Returns how a configuration differs from that of the run of its name: old and new values by setting."""
    name = config.run.name
    run, setup = store.runs.get(name), store.run_control.setup(name)
    if run is None:
        return {}
    if setup is None:
        changes = changes_between(run.config, config.fixed_part())
    else:
        changes = changes_between(setup, config.setup())
    return {key: both for key, both in changes.items() if is_of_a_run(key)}


def is_of_a_run(setting: str) -> bool:
    """Returns whether a setting, such as `server.listen`, is one of a run and not of its server."""
    section, _, name = setting.partition(".")
    return section != "limits" and (section != "server" or name in OF_A_RUN)


def check_unchanged(store: Store, config: RunConfig) -> None:
    """Raises RunError if a run of this name exists with other settings, even with ones that may change."""
    name = config.run.name
    if changes := changed_settings(store, config):
        raise RunError(
            f"run {name!r} exists with other settings: {describe_changes(changes)}; choose another name, or change "
            "this run with `fleetdistill runs create run.toml`"
        )


def serve_run(store: Store, config: RunConfig) -> None:
    """Registers a run as `register` does, stores its configuration and queues it for an engine unless it is paused.

    Raises:
        ConfigurationError, RunError: As `register`.
    """
    name = config.run.name
    with store.transaction():
        register(store, config)
        store.run_control.set_setup(name, config.setup())
        status = store.runs.status(name)
        if status in (RunStatus.CREATED, RunStatus.STOPPED):
            store.run_control.activate(name, "started again" if status is RunStatus.STOPPED else "")


def is_prepared(store: Store, config: RunConfig) -> bool:
    """Returns whether the run has been prepared with this configuration, which includes a check of its models."""
    run = store.runs.get(config.run.name)
    if run is None or not run.contract:
        return False
    changes = changes_between(run.config, config.fixed_part())
    return not changes.keys() - _CHANGEABLE


def _replace(store: Store, run: Run, settings: Mapping[str, Any], changes: Changes) -> None:
    name = run.name
    if run.completed_rounds or any(item.status is RoundStatus.UNDONE for item in store.runs.rounds(name)):
        raise RunError(conflict_message(name, {key: both for key, both in changes.items() if key not in _CHANGEABLE}))
    answers = len(store.asks.uploads(name))
    store.runs.delete(name)
    store.runs.begin(name, settings)
    text = f"a run of this name without a completed round was replaced: {describe_changes(changes)}"
    if answers == 1:
        text += "; 1 answer was deleted, so the device that sent it needs a new state_dir"
    elif answers:
        text += f"; {answers} answers were deleted, so the devices that sent them need a new state_dir"
    store.history.add_event(name, "run-replaced", text)


def _check_rounds(run: Run, rounds: int) -> None:
    """Raises RunError if `rounds` is below the completed rounds, or equals them while the last round is still due."""
    completed, over = run.completed_rounds, run.status is RunStatus.FINISHED
    if 0 < rounds < completed + (not over):
        raise RunError(
            f"run {run.name!r} has completed {counted(completed, 'round')}, but [run] rounds is {rounds}; set it to "
            f"at least {completed + (not over)}, or end the run with `fleetdistill runs cancel {run.name}`"
        )


def _has_rounds_left(run: Run, rounds: int) -> bool:
    return rounds == 0 or rounds > run.completed_rounds


def _with_settings(contract: bytes, config: RunConfig) -> bytes | None:
    """Returns the contract with the changed settings, which devices read at their next check-in."""
    if not contract:
        return None
    changed = contract_pb2.Contract.FromString(contract)
    changed.rounds, changed.threads = config.run.rounds, config.run.threads
    return changed.SerializeToString()
