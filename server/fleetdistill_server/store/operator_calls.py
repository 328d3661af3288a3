"""The calls of operators: who changed what, when, from where, with which result; and calls that were refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleetdistill.state import failpoints
from fleetdistill_server.store.database import Database, Row
from fleetdistill_server.store.records import OperatorCall
from fleetdistill_server.texts import shorten

__all__ = ["BEGUN", "FAILED", "LOCAL", "Outcome", "caller_in_words"]

KEPT = 10_000
"""Number of the newest calls that are kept, of those that were carried out and of those that were refused, each."""
_MAX_LIST = 20
LOCAL = "local"
"""Role and address of a caller on the store's machine."""
BEGUN = "begun"
"""Result of a call that is being carried out, or that was interrupted by the end of its process."""
FAILED = "failed: "
"""Begin of the result of a call that could not be carried out."""


@dataclass(frozen=True)
class Call:
    """A call that changes something.

    Attributes:
        role: Role in the caller's certificate; `local` for a command on the store's machine.
        name: Name in the caller's certificate; the name of the local user for a command.
        call: Name of the method, such as RevokeDevice.
        arguments: Arguments without secrets.
        address: Network address of the caller; `local` for a command.
    """

    role: str
    name: str
    call: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    address: str = "local"

    @property
    def who(self) -> str:
        """The caller in words, such as `operator olga`."""
        return caller_in_words(self.role, self.name)


def caller_in_words(role: str, name: str) -> str:
    """Returns a caller in words, such as `operator olga`."""
    return f"{name} on the store's machine" if role == LOCAL else f"{role} {name}"


@dataclass
class Outcome:
    """Result of a change.

    Attributes:
        changed: Whether anything changed.
        text: What changed; empty if the arguments say it.
    """

    changed: bool = True
    text: str = ""

    @property
    def words(self) -> str:
        """The result in words."""
        done = "done" if self.changed else "nothing to change"
        return f"{done}: {self.text}" if self.text else done


class OperatorCalls:
    """Reads and writes the table `operator_calls`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add(self, call: Call, result: str, *, refused: bool = False) -> int:
        """Stores a call with its result, in the open transaction or its own; returns its id.

        Deletes the oldest calls above `KEPT`. Refused calls are counted separately, and so never displace changes.
        """
        row: Row = {"role": call.role, "name": call.name[:64], "call": call.call, "address": call.address}
        row |= {"arguments": _text_of(call.arguments), "result": shorten(result), "refused": int(refused)}
        with self._db.transaction():
            number = int(self._db.value("SELECT coalesce(max(id), 0) + 1 FROM operator_calls"))
            self._db.insert("operator_calls", {"id": number, "at": self._db.now(), **row})
            self._db.write(
                "DELETE FROM operator_calls WHERE refused = ?1 AND id <= coalesce((SELECT id FROM operator_calls "
                "WHERE refused = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2), 0)",
                *(int(refused), KEPT),
            )
        return number

    @contextlib.contextmanager
    def with_change(self, call: Call) -> Iterator[Outcome]:
        """Makes the block, a change, one transaction with its entry; stores nothing if the block fails."""
        failpoints.hit("operators.before-entry")
        outcome = Outcome()
        with self._db.transaction():
            yield outcome
            self.add(call, outcome.words)
            failpoints.hit("operators.before-commit")
            self._db.after_commit(_hit_after_result)

    def begin(self, call: Call) -> int:
        """Stores a call as begun, before work that is not one transaction; returns its id for `settle`."""
        failpoints.hit("operators.before-entry")
        with self._db.transaction():
            self._db.after_commit(lambda: failpoints.hit("operators.after-begun"))
            return self.add(call, BEGUN)

    def settle(self, number: int, result: str, *, refused: bool = False) -> None:
        """Stores the result of a call that was stored as begun."""
        failpoints.hit("operators.before-result")
        sql = "UPDATE operator_calls SET result = ?, refused = ? WHERE id = ?"
        with self._db.transaction():
            self._db.write(sql, shorten(result), int(refused), number)
            self._db.after_commit(_hit_after_result)

    def has_deleted(self, run: str) -> bool:
        """Returns whether a deletion of a run was begun, of which a repetition deletes the rest."""
        sql = "SELECT count(*) FROM operator_calls WHERE call = 'DeleteRun' AND arguments = ? AND refused = 0"
        return bool(self._db.value(sql, _text_of({"run": run})))

    def last(self) -> int:
        """Returns the id of the newest call; 0 without one."""
        return int(self._db.value("SELECT coalesce(max(id), 0) FROM operator_calls"))

    def after(self, number: int, also: Sequence[int] = ()) -> list[OperatorCall]:
        """Returns the calls after an id, and those with the given ids, oldest first."""
        marks = ", ".join("?" for _ in also)
        rows = self._db.rows(
            f"SELECT * FROM operator_calls WHERE id > ?{f' OR id IN ({marks})' if also else ''} ORDER BY id",
            *(number, *also),
        )
        return list(map(OperatorCall.from_row, rows))

    def last_backup(self) -> float | None:
        """Returns when the newest complete backup was made, in seconds since 1970; None if none was."""
        complete = "result LIKE 'done%' AND result NOT LIKE '%, with % missing'"  # as `views.results` writes it
        at = self._db.value(f"SELECT max(at) FROM operator_calls WHERE call = 'BackUp' AND {complete}")
        return None if at is None else float(at)

    def newest(self, *, before: int | None, call: str, text: str, most: int) -> list[OperatorCall]:
        """Returns calls, newest first.

        Args:
            before: Only calls with a smaller id; None for all.
            call: Only calls of this method; empty for all.
            text: Only calls whose caller, arguments or result contain this, in any case; empty for all.
            most: Largest number of calls.
        """
        conditions, values = ["1 = 1"], list[Any]()
        if before is not None:
            conditions.append("id < ?")
            values.append(before)
        if call:
            conditions.append("call = ?")
            values.append(call)
        if text:
            columns = ("name", "arguments", "result", "address")
            conditions.append("(" + " OR ".join(f"lower({column}) LIKE ? ESCAPE '!'" for column in columns) + ")")
            values += [containing(text)] * len(columns)
        where = " AND ".join(conditions)
        rows = self._db.rows(f"SELECT * FROM operator_calls WHERE {where} ORDER BY id DESC LIMIT ?", *values, most)
        return list(map(OperatorCall.from_row, rows))


def _hit_after_result() -> None:
    failpoints.hit("operators.after-result")


def containing(text: str) -> str:
    """Returns a LIKE pattern with the escape character `!` for lower-case texts that contain `text`."""
    for special in "!%_":
        text = text.replace(special, f"!{special}")
    return f"%{text.lower()}%"


def _text_of(arguments: Mapping[str, Any]) -> str:
    """Returns the arguments as JSON; long lists are cut, with their length."""
    shown = {
        name: [*value[:_MAX_LIST], f"and {len(value) - _MAX_LIST} more"]
        if isinstance(value, list) and len(value) > _MAX_LIST
        else value
        for name, value in arguments.items()
    }
    return shorten(json.dumps(shown))
