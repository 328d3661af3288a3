"""What people read of a server and do with it, and its implementation for the store on this machine.

`client.open_source` chooses between that store and a server from elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetdistill.errors import ConfigurationError, FleetDistillError
from fleetdistill_server.intake.operator_log import OperatorLog, local_call, local_log, local_user
from fleetdistill_server.security.pki import Authority
from fleetdistill_server.security.revocation import Revoked, check_known_device, revoke_device, revoke_person
from fleetdistill_server.security.tokens import create_tokens, enrol_port_for_tokens
from fleetdistill_server.service.creation import NewRun, create_checked
from fleetdistill_server.service.run_changes import RunState, change, check_checkpoint, delete, roll_back
from fleetdistill_server.service.serve_lock import is_served
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

__all__ = ["UNREADABLE", "LocalStore", "Source", "create_here", "create_logged_tokens", "open_store"]

UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a reply of a server can raise. Its rows have no schema, so that newer servers can add columns."""


@dataclass(frozen=True)
class Exported:
    """An exported model: its size, and the largest difference between outputs of onnxruntime and PyTorch."""

    bytes: int
    max_difference: float


class Source(ABC):
    """Runs, devices and figures of a server, the same for a store on this machine and for a server from elsewhere.

    A `View` has `lists`, rows of plain values by title, and `facts`, values by name. Both sources return equal views.
    Times are in seconds since 1970 by the server's clock where their name ends in `_at`, and else ISO 8601 in UTC.

    Every method can raise, in addition to what it documents:
        ConfigurationError: The run does not exist in the store on this machine.
        RefusedError: The run does not exist on the server, the caller may not make the call, or a change is refused.
        RunError: A change of a run in the store on this machine is not possible in its status.
        LinkError: The server cannot be reached, or does not know the call.
        StoreError: The store could not be read.

    Attributes:
        name: What is read: the store's directory, or host:port of the server.
        is_remote: Whether a server is called, instead of a store read.
    """

    name: str
    is_remote: bool

    @abstractmethod
    def read(self, query: Query) -> View:
        """Reads one view; the methods below name the views."""

    @abstractmethod
    def follow(self, run: str) -> Iterator[list[TableRow]]:
        """Yields the changes in a run until it ends, as dictionaries whose `kind` is run, round, step or event."""

    @abstractmethod
    def revoke(self, device: str, reason: str, *, confirmed: bool = False) -> Revoked:
        """Revokes a device permanently.

        Args:
            device: Id of the device.
            reason: Reason, which is stored.
            confirmed: Whether a device that has never enrolled or checked in is revoked too.

        Raises:
            ConfigurationError: The device is unknown, and `confirmed` is false (of a server: RefusedError).
        """

    @abstractmethod
    def forget(self, run: str, device: str) -> bool:
        """Deletes a device's contributions to a run; returns whether that is done. If not, a server does it soon.

        Raises:
            ConfigurationError: There is no such run or device (of a server: RefusedError).
        """

    @abstractmethod
    def export(self, run: str, out: Path) -> Exported:
        """Writes a run's model to an ONNX file. With a server, for operators only.

        Raises:
            ExportError: The run has no model to export yet (of a server: RefusedError).
        """

    @abstractmethod
    def back_up(self, out: Path) -> BackedUp:
        """Writes a backup of the store to an empty directory on this machine. With a server, for operators only.

        Raises:
            ConfigurationError: `out` is not empty, or the store cannot be backed up by this command.
        """

    @abstractmethod
    def create(self, run: NewRun) -> RunState:
        """Checks and creates a run.

        Relative paths in its settings belong to the current directory, or to that of the server from elsewhere.
        """

    @abstractmethod
    def change(self, run: str, status: str) -> RunState:
        """Makes a run `running`, `paused`, `stopped` or `cancelled`; see `service.run_changes.change`."""

    @abstractmethod
    def delete(self, run: str) -> Pruned | None:
        """Deletes a run with everything that belongs to it; returns None if it was deleted before."""

    @abstractmethod
    def roll_back(self, run: str, to: int) -> RolledBack:
        """Rolls a run that no engine works on back to the state after a round.

        Args:
            run: Name of the run.
            to: Round whose final state is restored; 0 for the state before round 1.
        """

    @abstractmethod
    def tokens(self, count: int, seconds: float, run: str, devices: Sequence[str] = ()) -> list[str]:
        """Creates and returns enrolment tokens, which are valid for `seconds`, for one run or (empty) for all."""

    @abstractmethod
    def revoke_person(self, role: str, name: str, reason: str, *, confirmed: bool = False) -> Revoked:
        """Revokes an operator or viewer permanently.

        Args:
            role: `operator` or `viewer`.
            name: Name in the person's certificate.
            reason: Reason, which is stored.
            confirmed: Whether the caller itself, or a person without an identity in the PKI, may be revoked.
        """

    def operators(self, *, before: int | None = None, call: str = "", text: str = "", most: int = 200) -> View:
        """Returns a page of operators' calls, newest first: list `operators`, fact `more`. For operators only.

        Args:
            before: Id of the last call of the previous page; None for the first page.
            call: Only calls of this method, such as RevokeDevice; empty for all.
            text: Only calls whose caller, arguments or result contain this, in any case.
            most: Largest number of calls, 1 to 1,000.
        """
        return self.read(Query("operators", before=before, kind=call, text=text, most=most))

    def about(self) -> View:
        """Returns facts: version, listen, tls, enrol_port, served_run, and the caller's role and name.

        served_run is the only run that the server serves, empty for all runs, None without a server.

        The role is `operator` or `viewer`; `local` for a store on this machine.
        """
        return self.read(Query("about"))

    def problems(self) -> list[str]:
        """Returns what is wrong with the running server, in sentences: engines that hang, disk limits reached."""
        return list(self.read(Query("health")).facts["problems"])

    def warnings(self) -> list[str]:
        """Returns what `problems` does, and a sentence for each run that stopped after a failure."""
        facts = self.read(Query("health")).facts
        return [*facts["problems"], *facts["failed_runs"]]

    def server(self) -> View:
        """Returns the server as a whole: processes, engines and queue, disk, store, certificates, backups, versions.

        `problems` and `failed_runs` say what is wrong, `warnings` what will be; see `views.server.server` for all
        facts and lists.
        """
        return self.read(Query("server"))

    def runs(self) -> View:
        """Returns the list `runs` of `fleetdistill runs list`, oldest first."""
        return self.read(Query("runs"))

    def run(self, name: str) -> View:
        """Returns the lists and facts of `fleetdistill runs show`; of the events, the newest 1,000."""
        return self.read(Query("run", name))

    def devices(self, run: str | None = None) -> View:
        """Returns the list `devices` of `fleetdistill devices`: of one run, or of all."""
        return self.read(Query("devices", run or ""))

    def overview(self) -> View:
        """Returns the list `runs`: `runs` with present, round_seconds, seconds_left, last accuracies and bytes."""
        return self.read(Query("overview"))

    def rounds(self, run: str, after: int = -1) -> View:
        """Returns the list `rounds` after a round, with `secure_sums`; losses are in nats, accuracies in [0, 1]."""
        return self.read(Query("rounds", run, after=after))

    def traffic(self, run: str, after: int = -1) -> View:
        """Returns the list `bytes` by round and kind of part, after a round, uncompressed and on the link (`_sent`)."""
        return self.read(Query("traffic", run, after=after))

    def events(
        self, run: str, *, before: int | None = None, kind: str = "", device: str = "", text: str = "", most: int = 200
    ) -> View:
        """Returns a page of events, newest first: list `events`, facts `more` and `kinds` (number of events by kind).

        Args:
            run: Name of the run.
            before: Id of the last event of the previous page; None for the first page.
            kind, device: Only events of this kind or about this device; empty for all.
            text: Only events whose text, code or device contains this, in any case.
            most: Largest number of events, 1 to 1,000.
        """
        return self.read(Query("events", run, device, before=before, kind=kind, text=text, most=most))

    def participants(self, run: str) -> View:
        """Returns the list `devices`: as `devices`, with numbers of rounds, answers and refusals, and certificate."""
        return self.read(Query("participants", run))

    def device(self, run: str, device: str) -> View:
        """Returns one device: facts as in `participants`, lists `asks`, `figures`, `events` and `certificates`."""
        return self.read(Query("device", run, device))

    def classes(self, run: str) -> View:
        """Returns the list `devices` with `counts` by class number and their `split`, and the fact `classes`, names.

        Only devices whose apps allow `counts` are listed.
        """
        return self.read(Query("classes", run))

    def round(self, run: str, number: int | None = None) -> View:
        """Returns a round's list `asks`: each device's state and times; facts round, status and times of the round.

        The facts `started_at` and `ended_at` are the round's; `paused_at` is the run's, None unless it is paused.

        States: asked, downloading, training, uploading, acknowledged, late, declined, left, refused, out.

        Args:
            run: Name of the run.
            number: Number of the round; None for the open one, or the newest if none is open.
        """
        return self.read(Query("round", run, round=number))

    def settings(self, run: str) -> View:
        """Returns facts: `settings`, by section, and `contract`.

        The contract has the names of the `classes`, the `input_shape`, and the `columns` that the method needs.
        """
        return self.read(Query("settings", run))


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
        file = _identity(self._directory)
        if file != self._file:  # another thread may still use the old one, so it is not closed here
            self._opened = open_store(self._directory)
            self._file = file
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
        return follow(self._store, self._directory, run)

    def revoke(self, device: str, reason: str, *, confirmed: bool = False) -> Revoked:
        """Revokes a device permanently."""
        call = local_call("RevokeDevice", {"device": device, "reason": reason})
        if not confirmed:
            self._log.unless_failed(call, lambda: check_known_device(self._store, device))
        return self._log.commit(
            call, lambda store: revoke_device(store, device, reason), lambda revoked: Outcome(revoked.changed)
        )

    def forget(self, run: str, device: str) -> bool:
        """Deletes a device's contributions to a run. Returns False if an engine does it, before the next round."""
        from fleetdistill_server.engine.forgetting import ask_to_forget  # imports torch; rarely needed

        call = local_call("ForgetDevice", {"run": run, "device": device})
        return self._log.around(
            call,
            lambda: ask_to_forget(self._store, run, device, served=is_served(self._directory, run)),
            lambda done: Outcome(),
        )

    def revoke_person(self, role: str, name: str, reason: str, *, confirmed: bool = False) -> Revoked:
        """Revokes an operator or viewer permanently; whether the PKI knows the person, a local caller checks itself."""
        call = local_call("RevokePerson", {"role": role, "name": name, "reason": reason})
        changed = self._log.commit(call, lambda store: revoke_person(store, role, name, reason), Outcome)
        return Revoked(changed, known=True)

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
        self._log.unless_failed(call, lambda: check_checkpoint(self._store, run, status))
        state = self._log.commit(
            call, lambda store: change(store, run, status, call.who), lambda state: Outcome(text=state.sentence)
        )
        if status == RunStatus.CANCELLED and (waiting := self._store.devices.to_forget(run)):
            from fleetdistill_server.engine.forgetting import ask_to_forget  # imports torch; rarely needed

            ask_to_forget(self._store, run, waiting[0], served=False)
        return state

    def delete(self, run: str) -> Pruned | None:
        """Deletes a run with everything that belongs to it; returns None if it was deleted before."""
        call = local_call("DeleteRun", {"run": run})
        if not self._store.operator_calls.has_deleted(run):
            self._log.unless_failed(call, lambda: self._store.runs.existing(run))
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
        arguments = (enrol_port_for_tokens(self._directory), count, seconds, run, devices)
        return create_logged_tokens(self._store, Authority(self._pki), *arguments)


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
