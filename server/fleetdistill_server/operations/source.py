"""Reads and changes the store on this machine, and chooses between it and a server from elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fleetdistill.errors import ConfigurationError, FleetDistillError
from fleetdistill_server.intake.operator_log import OperatorLog
from fleetdistill_server.operations.client import connect
from fleetdistill_server.operations.interface import Exported, Source
from fleetdistill_server.operations.local_calls import local_call, local_log, local_user
from fleetdistill_server.security.pki import Authority
from fleetdistill_server.security.revocation import revoke_device, revoke_person
from fleetdistill_server.security.tokens import create_tokens
from fleetdistill_server.service.creation import NewRun, create_checked
from fleetdistill_server.service.enrol_port import enrol_port_for_tokens
from fleetdistill_server.service.run_changes import RunState, change
from fleetdistill_server.service.run_endings import delete, roll_back
from fleetdistill_server.store.backup import BackedUp, backup
from fleetdistill_server.store.location import SQLITE, has_store
from fleetdistill_server.store.operator_calls import LOCAL, Outcome
from fleetdistill_server.store.retention import Pruned
from fleetdistill_server.store.rollback import RolledBack
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import counted
from fleetdistill_server.views.reading import Query, read
from fleetdistill_server.views.results import backed_up, deleted, rolled_back
from fleetdistill_server.views.runs import TableRow, View
from fleetdistill_server.views.watch import follow

__all__ = ["LocalStore", "create_here", "create_logged_tokens", "open_source", "open_store"]


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
        result = (directory / SQLITE).stat()
    except OSError:
        return None
    return result.st_dev, result.st_ino


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
    def _log(self) -> OperatorLog:
        return local_log(self._store)

    @property
    def _store(self) -> Store:
        """The store, opened again if another one has been restored into its directory."""
        result = _identity(self._directory)
        if result != self._file:  # another thread may still use the old one, so it is not closed here
            self._opened = open_store(self._directory)
            self._file = result
        return self._opened

    def read(self, query: Query) -> View:
        """Reads one view."""
        result = read(self._store, self._directory, query)
        return (
            View(result.lists, {**result.facts, "role": LOCAL, "name": local_user()})
            if query.view == "about"
            else result
        )

    def follow(self, run: str) -> Iterator[list[TableRow]]:
        """Yields the changes in a run until it ends."""
        return follow(self._store, run)

    def revoke(self, device: str, reason: str) -> bool:
        """Revokes a device permanently; returns False if it was already revoked."""
        call = local_call("RevokeDevice", {"device": device, "reason": reason})
        return self._log.commit(call, lambda store: revoke_device(store, device, reason), Outcome)

    def revoke_person(self, role: str, name: str, reason: str, *, own: bool = False) -> bool:
        """Revokes an operator or viewer; returns False if that role and name was already revoked."""
        call = local_call("RevokePerson", {"role": role, "name": name, "reason": reason})
        return self._log.commit(call, lambda store: revoke_person(store, role, name, reason), Outcome)

    def export(self, run: str, out: Path) -> Exported:
        """Writes a run's model to an ONNX file."""
        from fleetdistill_server.engine.export import export_server_model  # imports torch

        report = export_server_model(self._store, run, out)
        return Exported(report.bytes, report.max_difference)

    def back_up(self, out: Path) -> BackedUp:
        """Writes a backup of the store to an empty directory."""
        call = local_call("BackUp", {"out": str(out)})
        return self._log.around(
            call,
            lambda: backup(self._directory, out),
            lambda made: Outcome(text=backed_up(made.payloads, made.bytes, made.missing)),
        )

    def create(self, run: NewRun) -> RunState:
        """Checks and creates a run. Relative paths belong to the current directory."""
        return create_here(self._directory, run)

    def change(self, run: str, status: str) -> RunState:
        """Starts, pauses, stops or cancels a run. Devices that a cancelled run should forget are forgotten here."""
        call = local_call("ChangeRun", {"run": run, "status": status})
        state = self._log.commit(
            call, lambda store: change(store, run, status, call.who), lambda state: Outcome(text=state.sentence)
        )
        if status == RunStatus.CANCELLED and (waiting := self._store.devices.to_forget(run)):
            from fleetdistill_server.engine.forgetting import ask_to_forget  # imports torch; rarely needed

            ask_to_forget(self._store, run, waiting[0], served=False)
        return state

    def delete(self, run: str) -> Pruned | None:
        """Deletes a run with everything that belongs to it; returns None if there was none of this name."""
        call = local_call("DeleteRun", {"run": run})
        return self._log.around(
            call, lambda: delete(self._directory, self._store, run), lambda gone: Outcome(text=deleted(run, gone))
        )

    def roll_back(self, run: str, to: int) -> RolledBack:
        """Rolls a run back to the state after a round."""
        call = local_call("RollBackRun", {"run": run, "to": to})
        return self._log.around(
            call,
            lambda: roll_back(self._directory, self._store, run, to, call.who),
            lambda done: Outcome(text=rolled_back(run, to, done)),
        )

    def tokens(self, count: int, seconds: float, run: str, devices: Sequence[str] = ()) -> list[str]:
        """Creates and returns enrolment tokens. Raises ConfigurationError without a PKI."""
        if self._pki is None:
            raise ConfigurationError("tokens need a PKI; create one with `fleetdistill pki init` and set --pki")
        given = (enrol_port_for_tokens(self._directory), count, seconds, run, devices)
        return create_logged_tokens(self._store, Authority(self._pki), *given)


def create_here(directory: Path, run: NewRun) -> RunState:
    """Checks and creates a run in a store on this machine, and the store if there is none; see `Source.create`."""
    section = run.settings.get("run")
    name = str(section.get("name", "")) if isinstance(section, Mapping) else ""
    cloned = {"clone_of": run.clone_of, "changes": list(run.changes)} if run.clone_of else {}
    call = local_call("CreateRun", {"run": name, **cloned, "start": run.start})
    try:
        return create_checked(directory, run, call)
    except FleetDistillError as error:
        if has_store(directory):
            local_log(open_store(directory)).add_failed(call, error)
        raise


def create_logged_tokens(
    store: Store, authority: Authority, port: int, count: int, seconds: float, run: str, devices: Sequence[str]
) -> list[str]:
    """Creates enrolment tokens like `create_tokens`, and stores who did."""
    arguments = {"count": count, "expires_seconds": seconds, "run": run, "devices": list(devices)}
    return local_log(store).commit(
        local_call("CreateTokens", arguments),
        lambda store: create_tokens(store, authority, port, count, seconds, run, devices),
        lambda tokens: Outcome(text=counted(len(tokens), "token")),
    )


@contextlib.contextmanager
def open_source(store: Path, server: str | None, identity: Path | None) -> Iterator[Source]:
    """Yields a source of runs: a server if one is given, else the store in a directory."""
    if server is None:
        yield LocalStore(store)
        return
    with connect(server, identity) as remote:
        yield remote
