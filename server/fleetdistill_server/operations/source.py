"""Reads and changes the store on this machine, and chooses between it and a server from elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetdistill.errors import ConfigurationError, FleetDistillError
from fleetdistill_server.engine.cancelling import cancel
from fleetdistill_server.operations.client import connect
from fleetdistill_server.operations.interface import Exported, Source
from fleetdistill_server.operations.local_calls import local_call, local_user, note_failure, noted, noted_around
from fleetdistill_server.security.pki import Authority
from fleetdistill_server.security.revocation import revoke_device, revoke_person
from fleetdistill_server.security.tokens import create_tokens
from fleetdistill_server.service import run_changes
from fleetdistill_server.service.creation import NewRun, create_checked
from fleetdistill_server.service.enrol_port import enrol_port_for_tokens
from fleetdistill_server.service.run_endings import delete, roll_back
from fleetdistill_server.store.backup import BackedUp, backup
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.location import SQLITE, has_store
from fleetdistill_server.store.operator_calls import LOCAL
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import counted
from fleetdistill_server.views.reading import Query, read
from fleetdistill_server.views.results import backed_up, deleted
from fleetdistill_server.views.runs import View
from fleetdistill_server.views.watch import follow


def open_store(directory: Path) -> Store:
    """Opens the store in a directory. Raises ConfigurationError if there is none."""
    if not has_store(directory):
        raise ConfigurationError(
            f"there is no store in {directory}; set --store to the [server] store of your run.toml"
        )
    return Store.open(directory)


def _identity(directory: Path) -> tuple[int, int] | None:
    """Returns what tells the database's file from another of the same name; None if there is none."""
    try:
        found = (directory / SQLITE).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


class LocalStore(Source):
    """Reads and changes the store in a directory.

    Args:
        directory: The store's directory.
        pki: Directory of the PKI, only needed for `tokens`.
    """

    is_remote = False

    def __init__(self, directory: Path, pki: Path | None = None) -> None:
        self.name = str(directory)
        self._directory, self._pki = directory, pki
        self._opened = open_store(directory)
        self._file = _identity(directory)

    @property
    def _store(self) -> Store:
        """The store, opened again if another one has been restored into its directory."""
        found = _identity(self._directory)
        if found != self._file:  # another thread may still use the old one, so it is not closed here
            self._opened = open_store(self._directory)
            self._file = found
        return self._opened

    def read(self, query: Query) -> View:
        """Reads one view."""
        found = read(self._store, self._directory, query)
        return (
            View(found.lists, {**found.facts, "role": LOCAL, "name": local_user()}) if query.view == "about" else found
        )

    def follow(self, run: str) -> Iterator[list[Row]]:
        """Yields the changes in a run until it ends."""
        return follow(self._store, run)

    def revoke(self, device: str, reason: str) -> bool:
        """Revokes a device permanently; returns False if it was already revoked."""
        arguments = {"device": device, "reason": reason}
        with noted(self._store, "RevokeDevice", arguments) as result:
            result.changed = revoke_device(self._store, device, reason)
        return result.changed

    def revoke_person(self, role: str, name: str, reason: str, *, own: bool = False) -> bool:
        """Revokes an operator or viewer; returns False if that role and name was already revoked."""
        with noted(self._store, "RevokePerson", {"role": role, "name": name, "reason": reason}) as result:
            result.changed = revoke_person(self._store, role, name, reason)
        return result.changed

    def cancel(self, run: str) -> bool:
        """Cancels a run permanently; returns False if it had already ended."""
        with noted_around(self._store, "CancelRun", {"run": run}) as result:
            result.changed = cancel(self._store, run)
        return result.changed

    def export(self, run: str, out: Path) -> Exported:
        """Writes a run's model to an ONNX file."""
        from fleetdistill_server.engine.export import export_server_model  # imports torch

        report = export_server_model(self._store, run, out)
        return Exported(report.bytes, report.max_difference)

    def back_up(self, out: Path) -> BackedUp:
        """Writes a backup of the store to an empty directory."""
        with noted_around(self._store, "BackUp", {"out": str(out)}) as result:
            made = backup(self._directory, out)
            result.text = backed_up(made.payloads, made.bytes, made.missing)
        return made

    def create(self, run: NewRun) -> str:
        """Checks and creates a run; returns a sentence on it. Relative paths belong to the current directory."""
        return create_here(self._directory, run)

    def start(self, run: str) -> str:
        """Starts a run that was created or stopped; returns a sentence on it."""
        return self._lead("StartRun", run_changes.start, run)

    def pause(self, run: str) -> str:
        """Pauses a run; returns a sentence on it."""
        return self._lead("PauseRun", run_changes.pause, run)

    def resume(self, run: str) -> str:
        """Resumes a paused run; returns a sentence on it."""
        return self._lead("ResumeRun", run_changes.resume, run)

    def stop(self, run: str) -> str:
        """Stops a run until it is started again; returns a sentence on it."""
        return self._lead("StopRun", run_changes.stop, run)

    def delete(self, run: str) -> str:
        """Deletes a run with everything that belongs to it; returns a sentence on what was deleted."""
        with noted_around(self._store, "DeleteRun", {"run": run}) as result:
            result.text = deleted(run, delete(self._directory, self._store, run))
        return result.text

    def roll_back(self, run: str, to: int) -> str:
        """Rolls a run back to the state after a round; returns a sentence on it."""
        with noted_around(self._store, "RollBackRun", {"run": run, "to": to}) as result:
            result.text = roll_back(self._directory, self._store, run, to, local_call("", {}).who)
        return result.text

    def _lead(self, call: str, change: Callable[[Store, str, str], str], run: str) -> str:
        with noted(self._store, call, {"run": run}) as result:
            result.text = change(self._store, run, local_call(call, {}).who)
        return result.text

    def tokens(self, count: int, seconds: float, run: str, devices: Sequence[str] = ()) -> list[str]:
        """Creates and returns enrolment tokens. Raises ConfigurationError without a PKI."""
        if self._pki is None:
            raise ConfigurationError("tokens need a PKI; create one with `fleetdistill pki init` and set --pki")
        given = (enrol_port_for_tokens(self._directory), count, seconds, run, devices)
        return create_noted_tokens(self._store, Authority(self._pki), *given)


def create_here(directory: Path, run: NewRun) -> str:
    """Checks and creates a run in a store on this machine, and the store if there is none; see `Source.create`."""
    call = local_call(*_creation(run))
    try:
        return create_checked(directory, run, call)
    except FleetDistillError as error:
        if has_store(directory):
            note_failure(open_store(directory), call, error)
        raise


def _creation(run: NewRun) -> tuple[str, Mapping[str, Any]]:
    """Returns the call that creates a run, and its arguments except the settings, which the store has elsewhere."""
    section = run.settings.get("run")
    name = str(section.get("name", "")) if isinstance(section, Mapping) else ""
    if run.clone_of:
        return "CloneRun", {"run": run.clone_of, "new_run": name, "changes": list(run.changes), "start": run.start}
    return "CreateRun", {"run": name, "start": run.start}


def create_noted_tokens(
    store: Store, authority: Authority, port: int, count: int, seconds: float, run: str, devices: Sequence[str]
) -> list[str]:
    """Creates enrolment tokens like `create_tokens`, and stores who did."""
    arguments = {"count": count, "expires_seconds": seconds, "run": run, "devices": list(devices)}
    with noted(store, "CreateTokens", arguments) as result:
        made = create_tokens(store, authority, port, count, seconds, run, devices)
        result.text = counted(len(made), "token")
    return made


@contextlib.contextmanager
def open_source(store: Path, server: str | None, identity: Path | None) -> Iterator[Source]:
    """Yields a source of runs: a server if one is given, else the store in a directory."""
    if server is None:
        yield LocalStore(store)
        return
    with connect(server, identity) as remote:
        yield remote
