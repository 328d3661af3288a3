"""What people read of a server and do with it, through its store on this machine or the server from elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetdistill_server.service.creation import NewRun
from fleetdistill_server.service.run_changes import RunState
from fleetdistill_server.store.backup import BackedUp
from fleetdistill_server.store.retention import Pruned
from fleetdistill_server.store.rollback import RolledBack
from fleetdistill_server.views.reading import Query
from fleetdistill_server.views.runs import TableRow, View

__all__ = ["UNREADABLE", "Source"]

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
    def revoke(self, device: str, reason: str) -> bool:
        """Revokes a device permanently; returns False if it was already revoked."""

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
        """Deletes a run with everything that belongs to it; returns None if there was none of this name."""

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
    def revoke_person(self, role: str, name: str, reason: str, *, own: bool = False) -> bool:
        """Revokes an operator or viewer permanently; returns False if that role and name was already revoked.

        Args:
            role: `operator` or `viewer`.
            name: Name in the person's certificate.
            reason: Reason, which is stored.
            own: Whether the caller may be revoked itself.
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
        """Returns the list `rounds` after a round: figures, losses in nats, accuracies in [0, 1], bytes, times."""
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
