"""Runs and their rounds: settings, contract, checkpoints and retention settings.

`retention.py` deletes the payloads that are no longer kept.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from fleetdistill.errors import ConfigurationError, RunError
from fleetdistill_server.config.run_changes import changes_between, conflict_message
from fleetdistill_server.figures import Figure
from fleetdistill_server.store.asks import Asks
from fleetdistill_server.store.back_off import update_back_off
from fleetdistill_server.store.database import Database
from fleetdistill_server.store.history import History
from fleetdistill_server.store.records import Checkpoint, Round, Run
from fleetdistill_server.store.run_figures import RoundFigures, round_figures
from fleetdistill_server.store.run_names import no_such_run
from fleetdistill_server.store.states import (
    ACTIVE,
    MAX_STALENESS,
    OVER,
    STALENESS,
    RoundStatus,
    RunStatus,
    check_run_change,
    check_transition,
    sql_list,
)
from fleetdistill_server.store.sums import EVERY, Sums
from fleetdistill_server.texts import shorten

_OF_A_SUM = """expects LIKE '%"secure_message"%'"""
"""Condition on asks of secure sums, by the kind of their answers, which all their steps have."""


@dataclass(frozen=True)
class Progress:
    """Snapshot of a run's progress.

    Attributes:
        run: run, method, status, reason, completed_rounds, wanted_rounds (None to run until stopped), and the number of
            present devices.
        rounds: Figures of all rounds.
        steps: Steps of the newest round: how many devices were asked, have answered, and are out.
        events: Events that are newer than the event given by the caller.
    """

    run: dict[str, Any]
    rounds: list[RoundFigures]
    steps: list[dict[str, Any]]
    events: list[dict[str, Any]]


class Runs:
    """Reads and writes the tables `runs`, `rounds` and `checkpoints`."""

    def __init__(self, database: Database, history: History, asks: Asks) -> None:
        self._db = database
        self._history = history
        self._asks = asks
        self._sums = Sums(database)

    def begin(self, name: str, config: Mapping[str, Any], status: RunStatus = RunStatus.PREPARING) -> None:
        """Registers a run; does nothing if it exists with the same configuration.

        `service/registration.py` applies the changes that are allowed between two starts.

        Raises:
            RunError: The run exists with another configuration; the message lists the changes.
        """
        with self._db.transaction():
            known = self.get(name)
            if known is not None:
                changes = changes_between(known.config, json.loads(json.dumps(config)))
                if changes:
                    raise RunError(conflict_message(name, changes))
                return
            row = {
                "name": name,
                "config": json.dumps(config),
                "status": status,
                "created_at": self._db.now(),
            }
            self._db.insert("runs", {**row, "completed_rounds": 0, "next_round": 1})

    def change(self, name: str, config: Mapping[str, Any], contract: bytes | None) -> None:
        """Replaces a run's settings and its contract, which contains some of them."""
        self._db.write("UPDATE runs SET config = ?, contract = ? WHERE name = ?", json.dumps(config), contract, name)

    def get(self, name: str) -> Run | None:
        """Returns a run, or None."""
        row = self._db.row("SELECT * FROM runs WHERE name = ?", name)
        return None if row is None else Run.from_row(row)

    def existing(self, name: str) -> Run:
        """Returns a run. Raises ConfigurationError, which lists the store's runs, if there is none of this name."""
        run = self.get(name)
        if run is None:
            raise ConfigurationError(no_such_run(name, self.names()))
        return run

    def status(self, name: str) -> RunStatus | None:
        """Returns the status of a run, or None if there is none of this name."""
        status = self._db.value("SELECT status FROM runs WHERE name = ?", name)
        return None if status is None else RunStatus(status)

    def completed_rounds(self, name: str) -> int:
        """Returns the number of completed rounds of a run; 0 for an unknown run."""
        return int(self._db.value("SELECT completed_rounds FROM runs WHERE name = ?", name) or 0)

    def all(self) -> list[Run]:
        """Returns all runs, oldest first."""
        return [Run.from_row(row) for row in self._db.rows("SELECT * FROM runs ORDER BY created_at, name")]

    def active(self) -> list[Run]:
        """Returns the runs that an engine works on or will as soon as one is free."""
        rows = self._db.rows(f"SELECT * FROM runs WHERE status IN ({sql_list(ACTIVE)})")
        return [Run.from_row(row) for row in rows]

    def names(self, *, without: Collection[RunStatus] = ()) -> list[str]:
        """Returns the names of the runs, oldest first, except those with one of these statuses."""
        rows = self._db.rows("SELECT name, status FROM runs ORDER BY created_at, name")
        return [row["name"] for row in rows if row["status"] not in without]

    def own(self, name: str) -> str:
        """Makes the caller the run's only engine; returns the fencing token for its later writes.

        Raises:
            RunError: The run was cancelled.
        """
        token = secrets.token_hex(8)
        if not self._db.write("UPDATE runs SET engine = ? WHERE name = ? AND status != 'cancelled'", token, name):
            raise RunError(f"run {name!r} was cancelled")
        return token

    def assert_owner(self, name: str, token: str) -> None:
        """Raises RunError if another engine has taken over the run since `own`, or if the run was cancelled."""
        if self._db.value("SELECT engine FROM runs WHERE name = ?", name) != token:
            self.assert_not_cancelled(name)
            raise RunError(f"run {name!r} was taken over by another engine")

    def assert_not_cancelled(self, name: str) -> None:
        """Raises RunError if the run was cancelled, so that no device may be asked."""
        if self.status(name) is RunStatus.CANCELLED:
            raise RunError(f"run {name!r} was cancelled")

    def publish_contract(
        self, name: str, contract: bytes, figures: Mapping[str, Figure] = MappingProxyType({})
    ) -> None:
        """Stores the run's contract and sets its status to `running`, so that devices can check in.

        Args:
            name: Name of the run.
            contract: Serialized `Contract`.
            figures: Figures that the method declares, by name.
        """
        declared = json.dumps({figure: asdict(declared) for figure, declared in figures.items()})
        with self._db.transaction():
            check_run_change(self._db, name, RunStatus.RUNNING)
            self._db.write(
                "UPDATE runs SET contract = ?, figures = ?, status = ? WHERE name = ?",
                *(contract, declared, RunStatus.RUNNING, name),
            )

    def set_checkpoint(self, name: str, checkpoint: bytes) -> None:
        """Sets the run's checkpoint outside the close of a round: initially, and after forgetting a device."""
        with self._db.transaction():
            self._db.write("UPDATE runs SET checkpoint = ? WHERE name = ?", checkpoint, name)
            self._db.write(_NOTE_CHECKPOINT, self._db.now(), name)

    def checkpoints(self, run: str) -> list[Checkpoint]:
        """Returns the kept checkpoints of a run, oldest first."""
        rows = self._db.rows(
            "SELECT round, completed_rounds, sha256, at FROM checkpoints WHERE run = ? ORDER BY round", run
        )
        return [Checkpoint(**row) for row in rows]

    def set_keep_checkpoints(self, name: str, keep_checkpoints: int) -> None:
        """Sets how many of a run's newest checkpoints are kept; at least 1."""
        self._db.write("UPDATE runs SET keep_checkpoints = ? WHERE name = ?", keep_checkpoints, name)

    def _drop_old_checkpoints(self, run: str) -> set[bytes]:
        """Deletes the rows of checkpoints beyond the kept number; returns their digests."""
        beyond = (
            "FROM checkpoints WHERE run = ?1 AND round NOT IN (SELECT round FROM checkpoints WHERE run = ?1 "
            "ORDER BY round DESC LIMIT (SELECT keep_checkpoints FROM runs WHERE name = ?1))"
        )
        spent = {row["sha256"] for row in self._db.rows(f"SELECT sha256 {beyond}", run)}
        self._db.write(f"DELETE {beyond}", run)
        return spent

    def roll_back(self, run: str, number: int, who: str = "an operator") -> set[bytes]:
        """Restores the checkpoint of a round in one transaction; the run's current engine loses ownership.

        Later rounds become `undone`, and their uploads `reported`. `who` is the operator, for the run's events.

        Returns:
            Digests of the checkpoints that the run no longer keeps.

        Raises:
            RunError: The run has no checkpoint of that round, or was cancelled.
        """
        why = f"the run was rolled back to the state after round {number}"
        with self._db.transaction():
            kept = {checkpoint.round: checkpoint for checkpoint in self.checkpoints(run)}
            if number not in kept:
                raise RunError(f"run {run!r} has no checkpoint of round {number}")
            check_run_change(self._db, run, RunStatus.STOPPED)
            self._close_open_round(run, why)
            self._sums.drop_rounds(run, number - MAX_STALENESS, EVERY)
            report_late_answers(self._db, run, number, why)
            later = "run = ? AND round > ?"
            asked = f"(SELECT id FROM asks WHERE {later})"
            self._db.write(
                f"UPDATE uploads SET status = 'reported', reason = ? WHERE status = 'used' AND ask IN {asked}",
                *(why, run, number),
            )
            closed = f"{later} AND status = 'closed'"
            self._db.write(f"UPDATE rounds SET status = 'undone', reason = ? WHERE {closed}", why, run, number)
            self._db.write(f"DELETE FROM checkpoints WHERE {later}", run, number)
            self._db.write(
                "UPDATE runs SET checkpoint = ?, completed_rounds = ?, status = 'stopped', reason = ?, engine = NULL "
                "WHERE name = ?",
                *(kept[number].sha256, kept[number].completed_rounds, why, run),
            )
            self._sums.add_settled(run, EVERY, number - MAX_STALENESS)
            self._history.add_event(run, "rolled-back", f"{why} by {who}", number=number)
        return {checkpoint.sha256 for after, checkpoint in kept.items() if after > number}

    def set_status(self, name: str, status: RunStatus, reason: str) -> None:
        """Sets the status of a run that keeps its engine and its open round; see `stop` and `cancel`.

        Raises:
            RunError: This status may not follow the run's; see `states.TRANSITIONS`.
        """
        with self._db.transaction():
            check_run_change(self._db, name, status)
            self._db.write("UPDATE runs SET status = ?, reason = ? WHERE name = ?", status, shorten(reason), name)

    def stop(self, name: str, reason: str) -> bool:
        """Stops a run until it is started again, and closes its open round as short; its engine loses ownership.

        Returns False if the run had already ended.
        """
        return self._take_from_engine(name, RunStatus.STOPPED, reason)

    def cancel(self, name: str, reason: str) -> bool:
        """Cancels a run permanently, and closes its open round as short; its engine loses ownership.

        Returns False if the run had already ended.
        """
        return self._take_from_engine(name, RunStatus.CANCELLED, reason)

    def _take_from_engine(self, name: str, status: RunStatus, reason: str) -> bool:
        with self._db.transaction():
            run = self.get(name)
            if run is None or run.status in OVER:
                return False
            check_transition(f"run {name!r}", run.status, status)
            self._db.write("UPDATE runs SET status = ?, reason = ?, engine = NULL WHERE name = ?", status, reason, name)
            self._close_open_round(name, f"run {status}")
        return True

    def open_number(self, run: str) -> int | None:
        """Returns the number of the open round, or None."""
        value = self._db.value("SELECT round FROM rounds WHERE run = ? AND status = 'open'", run)
        return None if value is None else int(value)

    def open_round(self, run: str) -> Round | None:
        """Returns the open round, or None."""
        row = self._db.row("SELECT * FROM rounds WHERE run = ? AND status = 'open'", run)
        return None if row is None else Round.from_row(row)

    def start_round(self, run: str, cohort: Sequence[str], data_versions: Mapping[str, str] | None = None) -> int:
        """Opens the next round and returns its number, counted from 1 over all rounds, including short ones.

        Args:
            run: Name of the run.
            cohort: Ids of the round's devices.
            data_versions: Data versions by device id, which `open_round` returns until the round has ended.
        """
        with self._db.transaction():
            number = int(self._db.value("SELECT next_round FROM runs WHERE name = ?", run))
            self._db.write("UPDATE runs SET next_round = ? WHERE name = ?", number + 1, run)
            row = {"run": run, "round": number, "status": RoundStatus.OPEN, "cohort": json.dumps(list(cohort))}
            versions = json.dumps(dict(data_versions)) if data_versions else None
            self._db.insert("rounds", {**row, "data_versions": versions, "started_at": self._db.now()})
        return number

    def close_round(
        self,
        run: str,
        number: int,
        checkpoint: bytes,
        used: Sequence[int],
        figures: Mapping[str, Any],
        settles: tuple[int, int] | None = None,
    ) -> set[bytes]:
        """Closes a completed round and stores its checkpoint, in one transaction.

        Args:
            run: Name of the run.
            number: Round number.
            checkpoint: SHA-256 of the state after the round.
            used: Ids of the asks whose answers were used; the round's other acknowledged answers become `reported`.
            figures: JSON-serializable figures that the method reports for the round.
            settles: First and last round whose open asks are closed and whose other answers become `reported`; None
                for this round.

        Returns:
            Digests of the checkpoints that the run no longer keeps.
        """
        with self._db.transaction():
            self._db.write(
                "UPDATE runs SET completed_rounds = completed_rounds + 1, checkpoint = ? WHERE name = ?",
                checkpoint,
                run,
            )
            self._db.write_many(
                "UPDATE uploads SET status = 'used' WHERE ask = ? AND status = 'acknowledged'", [(a,) for a in used]
            )
            self._end_round(run, number, RoundStatus.CLOSED, None, figures)
            settle(self._db, run, *(settles or (number, number)), "the round ended without using the answer")
            self._sums.add_settled(run, number)
            self._db.write(_NOTE_CHECKPOINT, self._db.now(), run)
            return self._drop_old_checkpoints(run)

    def close_short_round(
        self, run: str, number: int, reason: str, figures: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Closes a short round: all unused uploads become `reported`, and it does not count as a completed round.

        Args:
            run: Name of the run.
            number: Round number.
            reason: Why it is short.
            figures: JSON-serializable figures that say more of the reason; the round has no result to report on.
        """
        with self._db.transaction():
            why = shorten(reason)
            self._end_round(run, number, RoundStatus.SHORT, why, dict(figures))
            settle_until(self._db, run, number, shorten(f"round short: {why}"))

    def _end_round(
        self, run: str, number: int, status: RoundStatus, reason: str | None, figures: Mapping[str, Any]
    ) -> None:
        now = self._db.value("SELECT status FROM rounds WHERE run = ? AND round = ?", run, number)
        check_transition(f"round {number} of run {run!r}", RoundStatus(now), status)
        self._sums.add_round(run, number)
        self._db.write(
            "UPDATE rounds SET status = ?, reason = ?, figures = ?, ended_at = ?, data_versions = NULL "
            "WHERE run = ? AND round = ?",
            *(status, reason, json.dumps(figures), self._db.now(), run, number),
        )
        self._db.write(f"UPDATE asks SET given_up = 2 WHERE run = ? AND round = ? AND {_OF_A_SUM}", run, number)
        update_back_off(self._db, self._history, run, number)

    def _close_open_round(self, run: str, why: str) -> None:
        """Closes the open round as short, and settles the asks of earlier rounds."""
        number = self.open_number(run)
        if number is not None:
            self.close_short_round(run, number, why)
        self.settle_closed(run, why)

    def settle_closed(self, run: str, why: str) -> None:
        """Settles the asks of all rounds before the open one."""
        number = self.open_number(run)
        started = int(self._db.value("SELECT next_round FROM runs WHERE name = ?", run)) - 1
        settle_until(self._db, run, started if number is None else number - 1, why)

    def short_rounds_in_a_row(self, run: str) -> int:
        """Returns the number of short rounds since the last completed round."""
        return int(
            self._db.value(
                "SELECT count(*) FROM rounds WHERE run = ?1 AND status = 'short' AND round > "
                "(SELECT coalesce(max(round), 0) FROM rounds WHERE run = ?1 AND status = 'closed')",
                run,
            )
        )

    def rounds(self, run: str) -> list[Round]:
        """Returns all rounds of a run, ordered by number."""
        return [Round.from_row(row) for row in self._db.rows("SELECT * FROM rounds WHERE run = ? ORDER BY round", run)]

    def undone_rounds(self, run: str) -> set[int]:
        """Returns the numbers of the rounds that rollbacks have undone."""
        return set(self._db.column("SELECT round FROM rounds WHERE run = ? AND status = 'undone'", run))

    def remove_contributions(self, run: str, devices: Sequence[str], checkpoint: bytes) -> None:
        """Removes devices' contributions: sets a checkpoint without them and releases payloads that can contain them.

        Must run in a transaction, between two rounds. Rows are kept, except the devices' per-class figures, which
        reveal the classes in their data.
        """
        self._db.write("DELETE FROM checkpoints WHERE run = ?", run)  # they contain the devices' contributions
        self.set_checkpoint(run, checkpoint)
        self._db.write("UPDATE asks SET given_up = 1 WHERE run = ? AND given_up = 0", run)
        for device in devices:
            self._db.write(
                "UPDATE uploads SET quarantined_at = coalesce(quarantined_at, ?) "
                "WHERE ask IN (SELECT id FROM asks WHERE run = ? AND device = ?)",
                *(self._db.now(), run, device),
            )
            self._db.write("UPDATE figures SET by_class = '{}' WHERE run = ? AND device = ?", run, device)

    def set_keep_rounds(self, run: str, keep_rounds: int) -> None:
        """Sets how many of the newest closed rounds keep their payloads; at least 0."""
        self._db.write("UPDATE runs SET keep_rounds = ? WHERE name = ?", keep_rounds, run)

    def first_kept_round(self, run: str, keep_rounds: int | None = None) -> int:
        """Returns the first round whose payloads are kept.

        The kept rounds are the newest closed rounds, the short rounds between and after them, and the open round.
        Rounds that were undone count, because the payloads of the rounds before them were deleted when they closed.

        Args:
            run: Name of the run.
            keep_rounds: Number of closed rounds to keep; None for the run's setting.
        """
        kept = self.existing(run)
        wanted = kept.keep_rounds if keep_rounds is None else keep_rounds
        closed = self._db.rows(
            "SELECT round FROM rounds WHERE run = ? AND status IN ('closed', 'undone') ORDER BY round DESC LIMIT ?",
            *(run, max(wanted, 1)),
        )
        if wanted == 0:
            first = closed[0]["round"] + 1 if closed else 0
        else:
            first = closed[-1]["round"] if len(closed) == wanted else 0
        return first_needed_round(self._asks, kept, max(first, kept.kept_from))

    def prune_rounds(self, run: str, first_kept: int) -> tuple[int, int]:
        """Releases the payloads of all rounds before `first_kept` and deletes their events and figures.

        Receipts and traffic are kept.

        Returns:
            Numbers of deleted events and figures.
        """
        old = "WHERE run = ? AND round > 0 AND round < ?"
        with self._db.transaction():
            kept_from = "UPDATE runs SET kept_from = ? WHERE name = ? AND kept_from < ?"
            self._db.write(kept_from, first_kept, run, first_kept)
            events = self._db.write(f"DELETE FROM events {old}", run, first_kept)
            figures = self._db.write(f"DELETE FROM figures {old}", run, first_kept)
            self._sums.prune(run, first_kept)
        return events, figures

    def delete(self, run: str) -> tuple[int, int]:
        """Deletes a run and all rows about it, except enrolled devices' credentials.

        Returns:
            Numbers of deleted events and figures.
        """
        with self._db.transaction():
            self._db.write("DELETE FROM uploads WHERE ask IN (SELECT id FROM asks WHERE run = ?)", run)
            for table in ("asks", "rounds", "traffic", "devices", "checkpoints"):
                self._db.write(f"DELETE FROM {table} WHERE run = ?", run)
            self._sums.delete(run)
            self._db.write("DELETE FROM runs WHERE name = ?", run)
            events = self._db.write("DELETE FROM events WHERE run = ?", run)
            return events, self._db.write("DELETE FROM figures WHERE run = ?", run)

    def payloads_between(self, run: str, first: int, stop: int) -> set[bytes]:
        """Returns the digests of the payloads that rounds `first` to `stop` - 1 of a run refer to."""
        rows = self._db.rows(
            "SELECT DISTINCT sha256 FROM spoken WHERE run = ? AND round >= ? AND round < ?", run, first, stop
        )
        return {row["sha256"] for row in rows}

    def payloads_of_sums(self, run: str, number: int) -> set[bytes]:
        """Returns the digests of the payloads of a round's secure sums, which nobody needs once the round has ended."""
        of_round = f"a.run = ?1 AND a.round = ?2 AND a.{_OF_A_SUM}"
        rows = self._db.rows(
            f"SELECT a.payload AS sha256 FROM asks a WHERE a.payload IS NOT NULL AND {of_round} UNION "
            f"SELECT u.sha256 FROM uploads u JOIN asks a ON u.ask = a.id WHERE {of_round}",
            *(run, number),
        )
        return {row["sha256"] for row in rows}

    def progress(self, run: str, after_event: int = 0) -> Progress | None:
        """Returns the progress of a run, or None if the run does not exist.

        If the returned status is final, the rest of the result is complete.

        Args:
            run: Name of the run.
            after_event: Id of the last event that the caller has received.
        """
        row = self._db.row(_RUN_PROGRESS, run)  # read first: data read after a final status is complete
        if row is None:
            return None
        config = json.loads(row.pop("config")).get("run", {})
        shown = {**row, "method": config.get("method", ""), "wanted_rounds": config.get("rounds") or None}
        return Progress(
            run={**shown, "reason": row["reason"] or ""},
            rounds=round_figures(self._db, run),
            steps=self._db.rows(_STEP_PROGRESS, run),
            events=self._db.rows("SELECT * FROM events WHERE run = ? AND id > ? ORDER BY id", run, after_event),
        )


_RUN_PROGRESS = (
    "SELECT name AS run, status, reason, completed_rounds, config, "
    "(SELECT count(*) FROM devices WHERE run = name AND present = 1) AS present FROM runs WHERE name = ?"
)
_STEP_PROGRESS = (
    "SELECT round, step_number, step, count(*) AS asked, count(*) FILTER (WHERE status = 'answered') AS answered, "
    "count(*) FILTER (WHERE status = 'out') AS out FROM asks "
    "WHERE run = ?1 AND round = (SELECT max(round) FROM rounds WHERE run = ?1) "
    "GROUP BY round, step_number, step ORDER BY step_number"
)
_NOTE_CHECKPOINT = """
INSERT INTO checkpoints (run, round, completed_rounds, sha256, at)
SELECT name, (SELECT coalesce(max(round), 0) FROM rounds WHERE run = name AND status = 'closed'), completed_rounds,
checkpoint, ? FROM runs WHERE name = ?
ON CONFLICT (run, round) DO UPDATE SET
completed_rounds = excluded.completed_rounds, sha256 = excluded.sha256, at = excluded.at
"""


# --- Asks that outlive their round in a run with buffered rounds: open ones, and answers that no round has used yet.


def settle(db: Database, run: str, first: int, last: int, unused: str) -> None:
    """Closes the open asks of rounds and reports their unused answers with a reason."""
    rounds = (run, first, last)
    db.write(
        "UPDATE uploads SET status = 'reported', reason = ? WHERE status = 'acknowledged' "
        "AND ask IN (SELECT id FROM asks WHERE run = ? AND round >= ? AND round <= ?)",
        *(unused, *rounds),
    )
    db.write(
        "UPDATE asks SET status = 'out', reason = 'round closed' "
        "WHERE run = ? AND round >= ? AND round <= ? AND status = 'open'",
        *rounds,
    )


def settle_until(db: Database, run: str, last: int, unused: str) -> None:
    """Settles all asks up to a round, and adds the rounds that are settled now to the sums."""
    with db.transaction():
        settle(db, run, last - MAX_STALENESS, last, unused)
        Sums(db).add_settled(run, last)


def report_late_answers(db: Database, run: str, number: int, why: str) -> None:
    """Reports the answers to asks of earlier rounds that the rounds after `number` used."""
    for row in db.rows("SELECT round, figures FROM rounds WHERE run = ? AND round > ?", run, number):
        for device, age in json.loads(row["figures"] or "{}").get(STALENESS, {}).items():
            db.write(
                "UPDATE uploads SET status = 'reported', reason = ? WHERE status = 'used' "
                "AND ask IN (SELECT id FROM asks WHERE run = ? AND round = ? AND device = ?)",
                *(why, run, row["round"] - age, device),
            )


def first_needed_round(asks: Asks, run: Run, first: int) -> int:
    """Returns the first round with an unsettled ask of a run, or `first` if that is earlier."""
    if not run.config.get("run", {}).get("buffer_answers"):
        return first
    result = asks.first_unsettled(run.name, first - MAX_STALENESS, first)
    return first if result is None else min(first, result)
