"""Sums over the rounds and devices of a run, computed by the database.

The tables have a row for each device in each round, which are millions with 1,000 devices in 1,000 rounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from fleetdistill.replacement import REPLACEMENT_METRICS, SPLIT
from fleetdistill_server.event_kinds import GUARD
from fleetdistill_server.store.database import Database, Row
from fleetdistill_server.store.operator_calls import containing
from fleetdistill_server.store.records import (
    ASK_COLUMNS,
    UPLOAD_COLUMNS,
    AnswerCounts,
    Ask,
    Event,
    Participation,
    Replacements,
    ReportedFigure,
    Round,
    Upload,
    ask_and_upload,
)
from fleetdistill_server.store.sums import (
    BYTES_OF_DEVICES,
    BYTES_OF_ROUNDS,
    FIGURES_OF_ROUNDS,
    figures_of_devices,
    rounds_with_answers,
)
from fleetdistill_server.store.traffic import ENVELOPE

_ASKS = f"SELECT a.*, {UPLOAD_COLUMNS} FROM asks a LEFT JOIN uploads u ON u.ask = a.id AND u.quarantined_at IS NULL"
_BYTES = ("up", "down", "envelope_bytes", "up_sent", "down_sent")
_SUMS_OF_BYTES = (
    "coalesce(sum(tensor_bytes + envelope_bytes) FILTER (WHERE direction = 'up'), 0) AS up, "
    "coalesce(sum(tensor_bytes + envelope_bytes) FILTER (WHERE direction = 'down'), 0) AS down, "
    "coalesce(sum(envelope_bytes), 0) AS envelope_bytes, "
    "coalesce(sum(sent_bytes) FILTER (WHERE direction = 'up'), 0) AS up_sent, "
    "coalesce(sum(sent_bytes) FILTER (WHERE direction = 'down'), 0) AS down_sent"
)
"""From and to devices: tensors and headers before compression, headers alone, and bytes on the link."""
_IS_REPLACEMENT = f"split = '{SPLIT}' AND name IN ({', '.join(repr(name) for name in REPLACEMENT_METRICS)})"


class Summaries:
    """Reads sums over the tables `asks`, `uploads`, `events`, `figures` and `traffic`.

    `first` and `last` are the first and the last round of a range, both included.
    """

    def __init__(self, database: Database) -> None:
        self._db = database

    def last_round(self, run: str) -> int:
        """Returns the number of a run's newest round; 0 if it has none."""
        return int(self._db.value("SELECT max(round) FROM rounds WHERE run = ?", run) or 0)

    def last_ended_round(self, run: str) -> int:
        """Returns the number of the newest round that has ended, completed or short; 0 if there is none."""
        ended = "SELECT max(round) FROM rounds WHERE run = ? AND status IN ('closed', 'short')"
        return int(self._db.value(ended, run) or 0)

    def times_of_rounds(self, run: str, after: int) -> dict[int, tuple[float, float | None]]:
        """Returns when the rounds after a round started and ended, in seconds since 1970, by number."""
        rows = self._db.rows(
            "SELECT round, started_at, ended_at FROM rounds WHERE run = ? AND round > ? ORDER BY round", run, after
        )
        return {row["round"]: (row["started_at"], row["ended_at"]) for row in rows}

    def rounds(self, run: str, first: int, last: int) -> list[tuple[Round, AnswerCounts]]:
        """Returns rounds, with the numbers of their answers, ordered by round."""
        return rounds_with_answers(self._db, run, first, last)

    def mean_figures(self, run: str, first: int, last: int) -> list[Row]:
        """Returns the mean over devices of every reported figure: round, name, split, mean, and number of devices."""
        return self._db.rows(
            f"SELECT round, name, split, mean, devices FROM {FIGURES_OF_ROUNDS} WHERE devices > 0 "
            "ORDER BY round, name, split",
            *(run, first, last),
        )

    def replacements(self, run: str, first: int, last: int) -> dict[int, Replacements]:
        """Returns how many app models were replaced and kept, by round."""
        rows = self._db.rows(
            f"SELECT round, sum(positive) AS replaced, sum(others) AS kept FROM {FIGURES_OF_ROUNDS} "
            f"WHERE {_IS_REPLACEMENT} GROUP BY round",
            *(run, first, last),
        )
        return {row["round"]: _replacements(row) for row in rows}

    def replacements_of_devices(self, run: str, device: str | None = None) -> dict[str, Replacements]:
        """Returns how many app models were replaced and kept, by device; only of one device if given."""
        known = figures_of_devices(_IS_REPLACEMENT if device is None else f"{_IS_REPLACEMENT} AND device = ?2")
        rows = self._db.rows(
            f"SELECT device, sum(positive) AS replaced, sum(others) AS kept FROM {known} GROUP BY device",
            *((run,) if device is None else (run, device)),
        )
        return {row["device"]: _replacements(row) for row in rows}

    def guards(self, run: str, first: int, last: int) -> dict[int, int]:
        """Returns how often guards of the method fired, by round."""
        rows = self._db.rows(
            f"SELECT round, count(*) AS fired FROM events WHERE run = ? AND kind LIKE '%{GUARD}' "
            "AND round BETWEEN ? AND ? GROUP BY round",
            *(run, first, last),
        )
        return {row["round"]: int(row["fired"]) for row in rows}

    def bytes(self, run: str, columns: Sequence[str], first: int, last: int) -> list[Row]:
        """Returns byte counts by columns, of `round`, `kind` and `run`, in their order."""
        return self._bytes(columns, BYTES_OF_ROUNDS, run, first, last)

    def bytes_of_devices(self, run: str) -> list[Row]:
        """Returns byte counts by device, in this order."""
        return self._bytes(("device",), BYTES_OF_DEVICES, run)

    def _bytes(self, columns: Sequence[str], counted: str, *values: object) -> list[Row]:
        names = ", ".join(columns)
        rows = self._db.rows(
            f"SELECT {names}, {_SUMS_OF_BYTES} FROM {counted} GROUP BY {names} ORDER BY {names}", *values
        )
        return [{**row, **{name: int(row[name]) for name in _BYTES}} for row in rows]

    def bytes_of_sums(self, run: str, number: int) -> list[tuple[int, int]]:
        """Returns the bytes from and to the devices of each secure sum of a round on the link, in the sums' order.

        These are the sums' messages, and the headers of all payloads of these devices in the round.
        """
        sent = "coalesce(sum(t.sent_bytes) FILTER (WHERE t.direction = '{}'), 0) AS {}"
        rows = self._db.rows(
            f"SELECT {sent.format('up', 'up')}, {sent.format('down', 'down')} FROM asks a LEFT JOIN traffic t "
            "ON t.run = a.run AND t.round = a.round AND t.device = a.device AND t.kind IN ('secure_message', ?3) "
            "WHERE a.run = ?1 AND a.round = ?2 AND a.step = 'secure_keys' "
            "GROUP BY a.step_number ORDER BY a.step_number",
            *(run, number, ENVELOPE),
        )
        return [(int(row["up"]), int(row["down"])) for row in rows]

    def reported_uploads(self, run: str) -> list[Upload]:
        """Returns the accepted answers that are not in a result, oldest first."""
        rows = self._db.rows(
            f"SELECT {ASK_COLUMNS}, {UPLOAD_COLUMNS} FROM uploads u CROSS JOIN asks a "  # in this order
            "WHERE u.ask = a.id AND a.run = ? AND u.status = 'reported' ORDER BY u.received_at",
            run,
        )
        return [Upload.from_row(row) for row in rows]

    def participation(self, run: str, device: str | None = None) -> list[Participation]:
        """Returns the part of each device that a round asked, ordered by device.

        Args:
            run: Name of the run.
            device: Only this device; None for all.
        """
        rows = self._db.rows(
            "SELECT device, count(DISTINCT round) AS rounds, count(*) AS asks, "
            "count(*) FILTER (WHERE status = 'answered') AS answers, count(*) FILTER (WHERE status = 'out') AS out, "
            "max(round) FILTER (WHERE status = 'answered') AS last_answer FROM asks "
            f"WHERE run = ? {'' if device is None else 'AND device = ?'} GROUP BY device ORDER BY device",
            *((run,) if device is None else (run, device)),
        )
        return [Participation(**row) for row in rows]

    def events_of_devices(self, run: str, kinds: Sequence[str]) -> dict[str, dict[str, int]]:
        """Returns the number of events of some kinds, by device and kind, without zeros."""
        marks = ", ".join("?" for _ in kinds)
        rows = self._db.rows(
            f"SELECT kind, device, count(*) AS count FROM events WHERE run = ? AND kind IN ({marks}) "
            "GROUP BY kind, device",
            *(run, *kinds),
        )
        counts: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for row in rows:
            counts[row["device"]][row["kind"]] = int(row["count"])
        return counts

    def events(
        self, run: str, *, before: int | None, kind: str = "", device: str = "", text: str = "", most: int
    ) -> list[Event]:
        """Returns events, newest first.

        Args:
            run: Name of the run.
            before: Only events with a smaller id; None for all.
            kind: Only events of this kind; empty for all.
            device: Only events about this device; empty for all.
            text: Only events whose text, code or device contains this, in any case; empty for all.
            most: Largest number of events.
        """
        wanted = {"kind": kind, "device": device}
        conditions = [f"{name} = ?" for name, value in wanted.items() if value]
        values: list[object] = [value for value in wanted.values() if value]
        if before is not None:
            conditions.append("id < ?")
            values.append(before)
        if text:
            columns = ("text", "code", "device")
            conditions.append("(" + " OR ".join(f"lower({name}) LIKE ? ESCAPE '!'" for name in columns) + ")")
            values += [containing(text)] * len(columns)
        where = " AND ".join(["run = ?", *conditions])
        rows = self._db.rows(f"SELECT * FROM events WHERE {where} ORDER BY id DESC LIMIT ?", run, *values, most)
        return [Event.from_row(row) for row in rows]

    def event_kinds(self, run: str) -> dict[str, int]:
        """Returns the number of events by kind, ordered by kind."""
        rows = self._db.rows(
            "SELECT kind, count(*) AS count FROM events WHERE run = ? GROUP BY kind ORDER BY kind", run
        )
        return {row["kind"]: int(row["count"]) for row in rows}

    def asks_of_round(self, run: str, number: int, *, with_open: bool = True) -> list[tuple[Ask, Upload | None]]:
        """Returns the asks of a round, each with its answer, by step and device.

        Args:
            run: Name of the run.
            number: Number of the round.
            with_open: Whether to include the open asks of other rounds.
        """
        others = f" UNION ALL {_ASKS} WHERE a.run = ?1 AND a.status = 'open' AND a.round <> ?2" if with_open else ""
        rows = self._db.rows(
            f"{_ASKS} WHERE a.run = ?1 AND a.round = ?2{others} ORDER BY round, step_number, device", run, number
        )
        return [ask_and_upload(row) for row in rows]

    def asks_of_device(self, run: str, device: str, most: int) -> list[tuple[Ask, Upload | None]]:
        """Returns a device's newest asks, each with its answer, oldest first."""
        rows = self._db.rows(
            f"{_ASKS} WHERE a.run = ? AND a.device = ? ORDER BY a.round DESC, a.step_number DESC LIMIT ?",
            *(run, device, most),
        )
        return [ask_and_upload(row) for row in reversed(rows)]

    def figures_of(self, run: str, number: int, device: str) -> list[ReportedFigure]:
        """Returns the figures that a device reported in a round."""
        rows = self._db.rows(
            "SELECT * FROM figures WHERE run = ? AND round = ? AND device = ? ORDER BY name, split",
            *(run, number, device),
        )
        return [ReportedFigure.from_row(row) for row in rows]

    def figures_of_device(self, run: str, device: str) -> list[ReportedFigure]:
        """Returns the figures that a device reported in rounds that asked it, ordered by round, name and split."""
        rows = self._db.rows(
            "SELECT * FROM figures WHERE run = ?1 AND device = ?2 AND round IN "
            "(SELECT round FROM asks WHERE run = ?1 AND device = ?2) ORDER BY round, name, split",
            *(run, device),
        )
        return [ReportedFigure.from_row(row) for row in rows]

    def certificate_ends(self) -> dict[str, float]:
        """Returns when the newest certificate of each device expires, in seconds since 1970."""
        rows = self._db.rows("SELECT device, max(expires_at) AS ends FROM certificates GROUP BY device")
        return {row["device"]: float(row["ends"]) for row in rows}


def _replacements(row: Row) -> Replacements:
    return Replacements(int(row["replaced"]), int(row["kept"]))
