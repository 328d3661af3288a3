"""How operators control runs: complete configuration, start and pause, and the order in which runs get engines.

Every change that takes a run from its engine also deletes the engine's fencing token, so that the engine can commit
nothing afterwards, whether it still runs or not.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from fleetdistill_server.store.database import Database
from fleetdistill_server.store.devices import HAS_ITS_DEVICES, WAITS_NO_MORE
from fleetdistill_server.store.history import History
from fleetdistill_server.store.records import Run
from fleetdistill_server.store.states import ACTIVE, RunStatus, check_run_change, sql_list
from fleetdistill_server.texts import shorten

WAIT_SECONDS = 5.0
"""Seconds for which a run waits before it gives up its engine to another run."""
_IS_ACTIVE = f"status IN ({sql_list(ACTIVE)})"


class FailedRun(NamedTuple):
    """A run that was stopped because its engine failed.

    Attributes:
        name: Name of the run.
        reason: Why the engine failed.
        at: When, in seconds since 1970.
    """

    name: str
    reason: str
    at: float


class RunPoint(NamedTuple):
    """How far a run's engine has come.

    Attributes:
        is_preparing: Whether the run has no contract yet.
        completed_rounds: Number of completed rounds.
        next_round: Number of the round that is opened next.
        step_number: Number of the newest step of the newest round; None before its first step.
    """

    is_preparing: bool
    completed_rounds: int
    next_round: int
    step_number: int | None


class RunControl:
    """Reads and writes the columns of the table `runs` by which operators control runs."""

    def __init__(self, database: Database, history: History) -> None:
        self._db = database
        self._history = history

    def set_setup(self, name: str, setup: Mapping[str, Any]) -> None:
        """Stores the complete configuration from which a run's engine starts the next time."""
        self._db.write("UPDATE runs SET setup = ? WHERE name = ?", json.dumps(setup), name)

    def setup(self, name: str) -> dict[str, Any] | None:
        """Returns a run's complete configuration, or None if the store does not have it."""
        text = self._db.value("SELECT setup FROM runs WHERE name = ?", name)
        return None if text is None else dict(json.loads(text))

    def queue(self) -> list[Run]:
        """Returns the runs that need an engine, in the order in which they get engines.

        Runs that have an engine are first. Those that have waited for `WAIT_SECONDS` are last, of these first those
        that have an engine.
        """
        waits = "waits_since <= ? AND (waits_until IS NULL OR waits_until > ?)"
        now = self._db.now()
        rows = self._db.rows(
            f"SELECT * FROM runs WHERE {_IS_ACTIVE} AND setup IS NOT NULL "
            f"ORDER BY CASE WHEN {waits} THEN 1 ELSE 0 END, engine IS NULL, "
            "coalesce(waits_until, queued_at, created_at), name",
            *(now - WAIT_SECONDS, now),
        )
        return [Run.from_row(row) for row in rows]

    def begin_wait(self, name: str, devices: int) -> None:
        """Records that a run waits until `devices` devices are present, or for 0 until its devices change."""
        self._begin_wait(name, devices, None)

    def begin_wait_until(self, name: str, until: float) -> None:
        """Records that a run waits until a time, in seconds since 1970."""
        self._begin_wait(name, None, until)

    def _begin_wait(self, name: str, devices: int | None, until: float | None) -> None:
        self._db.write(
            "UPDATE runs SET waits_since = coalesce(waits_since, ?), waits_for = ?, waits_until = ? WHERE name = ?",
            *(self._db.now(), devices, until, name),
        )

    def end_wait(self, name: str) -> None:
        """Records that a run no longer waits."""
        self._db.write(f"UPDATE runs SET {WAITS_NO_MORE} WHERE name = ?", name)

    def release(self, name: str, token: str) -> bool:
        """Takes a run that waits from its engine; False if it no longer waits or has another engine."""
        now = self._db.now()
        changed = self._db.write(
            f"UPDATE runs SET engine = NULL WHERE name = ? AND engine = ? AND {_IS_ACTIVE} AND waits_since <= ? "
            f"AND (waits_until > ? OR waits_until IS NULL AND NOT {HAS_ITS_DEVICES})",
            *(name, token, now - WAIT_SECONDS, now),
        )
        return bool(changed)

    def activate(self, name: str, reason: str = "") -> None:
        """Puts a run at the end of the queue of runs that need an engine.

        Raises:
            RunError: The run was cancelled.
        """
        with self._db.transaction():
            is_new = self._db.value("SELECT contract IS NULL FROM runs WHERE name = ?", name)
            status = RunStatus.PREPARING if is_new else RunStatus.RUNNING
            check_run_change(self._db, name, status)
            self._db.write(
                f"UPDATE runs SET status = ?, reason = ?, queued_at = ?, {WAITS_NO_MORE} WHERE name = ?",
                *(status, reason, self._db.now(), name),
            )

    def set_reason(self, name: str, reason: str) -> None:
        """Sets the reason in the status of a run that an engine works on."""
        self._db.write(f"UPDATE runs SET reason = ? WHERE name = ? AND {_IS_ACTIVE}", shorten(reason), name)

    def progress(self, name: str) -> RunPoint | None:
        """Returns how far a run's engine has come, or None for an unknown run."""
        row = self._db.row(
            "SELECT contract IS NULL AS preparing, completed_rounds, next_round, (SELECT max(step_number) FROM asks "
            "WHERE run = name AND round = next_round - 1) AS step FROM runs WHERE name = ?",
            name,
        )
        if row is None:
            return None
        return RunPoint(bool(row["preparing"]), row["completed_rounds"], row["next_round"], row["step"])

    def forget_server(self) -> None:
        """Forgets the engines and present devices of a server that the store no longer has; open asks stay open."""
        with self._db.transaction():
            self._db.write("UPDATE runs SET engine = NULL")
            self._db.write("UPDATE devices SET present = 0")

    def free(self, name: str, token: str) -> None:
        """Records that an engine has ended in order, with its server."""
        self._db.write("UPDATE runs SET engine = NULL WHERE name = ? AND engine = ?", name, token)

    def set_status(self, name: str, status: RunStatus, reason: str) -> None:
        """Sets the status of a run that waits for its operator, and takes it from its engine; its open round stays.

        Raises:
            RunError: This status may not follow the run's; see `states.TRANSITIONS`.
        """
        with self._db.transaction():
            check_run_change(self._db, name, status)
            self._db.write(
                "UPDATE runs SET status = ?, reason = ?, engine = NULL, paused_at = coalesce(paused_at, ?) "
                "WHERE name = ?",
                *(status, shorten(reason), self._db.now(), name),
            )

    def stop_failed(self, name: str, token: str, reason: str) -> bool:
        """Stops a run whose engine failed, without ending its open round; False if it has another engine or none."""
        with self._db.transaction():
            changed = self._db.write(
                f"UPDATE runs SET status = 'stopped', reason = ?, engine = NULL WHERE name = ? AND engine = ? "
                f"AND {_IS_ACTIVE}",
                *(shorten(reason), name, token),
            )
            if changed:
                self._history.add_event(name, "stopped", reason)
        return bool(changed)

    def failed(self) -> list[FailedRun]:
        """Returns the runs that `stop_failed` stopped and nobody has started since, oldest failure first."""
        rows = self._db.rows(
            "SELECT name, reason, at FROM runs JOIN events ON events.id = "
            "(SELECT max(id) FROM events WHERE run = name AND kind = 'stopped') "
            "WHERE status = 'stopped' AND reason = text ORDER BY at, name"  # an operator's event names the operator
        )
        return [FailedRun(row["name"], row["reason"], row["at"]) for row in rows]

    def assign(self, name: str) -> str | None:
        """Makes a new engine the run's only one; returns its fencing token, or None if the run needs no engine.

        The deadlines of asks that were open when the run was paused are extended by the time since then.
        """
        token = secrets.token_hex(8)
        with self._db.transaction():
            row = self._db.row(f"SELECT paused_at FROM runs WHERE name = ? AND {_IS_ACTIVE}", name)
            if row is None:
                return None
            if row["paused_at"] is not None:
                self._db.write(
                    "UPDATE asks SET deadline_at = deadline_at + ? WHERE run = ? AND status = 'open'",
                    *(max(self._db.now() - row["paused_at"], 0.0), name),
                )
            self._db.write("UPDATE runs SET engine = ?, paused_at = NULL WHERE name = ?", token, name)
        return token
