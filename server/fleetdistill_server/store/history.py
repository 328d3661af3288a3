"""What happened in a run: events, what devices report about themselves, and bytes."""

from __future__ import annotations

import json
import time

from fleetdistill.knowledge import Metrics
from fleetdistill_server.store.database import Database, Row
from fleetdistill_server.store.traffic import ENVELOPE, REFUSED, Counted
from fleetdistill_server.texts import shortened


class History:
    """Rows of `events`, `figures` and `traffic`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def add_event(self, run: str, kind: str, text: str, *, number: int = 0, device: str = "", code: str = "") -> None:
        """Notes something that a person may want to know later; of a long text its beginning."""
        row = {"run": run, "round": number, "device": device, "kind": kind, "code": code, "text": shortened(text)}
        with self._db.transaction():
            self._db.insert("events", {**row, "at": time.time()})
            self._db.log(row)

    def note_refusals_left_out(self, run: str, device: str, text: str, known: int | None) -> int | None:
        """Says how many refusals of a device are not noted one by one; returns the event, to be `known` next time."""
        same = "id = ? AND run = ? AND device = ? AND kind = 'refusals-left-out'"  # ids of pruned events come again
        if known is not None and self._db.write(
            f"UPDATE events SET text = ?, at = ? WHERE {same}", *(text, time.time(), known, run, device)
        ):
            return known
        self.add_event(run, "refusals-left-out", text, device=device)
        return int(self._db.value("SELECT max(id) FROM events"))

    def events(self, run: str, kind: str | None = None) -> list[Row]:
        """Events of a run, oldest first."""
        sql = "SELECT * FROM events WHERE run = ? AND (? IS NULL OR kind = ?) ORDER BY id"
        return self._db.rows(sql, run, kind, kind)

    def has_event(self, run: str, kind: str, device: str, number: int | None = None, text: str | None = None) -> bool:
        """Whether there is such an event of a device; in any round and with any text unless they are given."""
        found = self._db.value(
            "SELECT 1 FROM events WHERE run = ?1 AND kind = ?2 AND device = ?3 "
            "AND (?4 IS NULL OR round = ?4) AND (?5 IS NULL OR text = ?5) LIMIT 1",
            *(run, kind, device, number, None if text is None else shortened(text)),
        )
        return found is not None

    def newest_events(self, run: str, most: int) -> list[Row]:
        """The newest events of a run, oldest first."""
        return self._db.rows("SELECT * FROM events WHERE run = ? ORDER BY id DESC LIMIT ?", run, most)[::-1]

    def count_events(self, run: str) -> int:
        """How many events a run has."""
        return int(self._db.value("SELECT count(*) FROM events WHERE run = ?", run))

    def last_event(self, run: str) -> Row | None:
        """The newest event of a run."""
        return self._db.row("SELECT * FROM events WHERE run = ? ORDER BY id DESC LIMIT 1", run)

    def add_figures(self, run: str, number: int, device: str, metrics: Metrics) -> None:
        """Stores what a device reports about itself."""
        for metric in metrics.metrics:
            by_class = {one.label: [one.sum, one.count] for one in metric.by_class}
            row = {"run": run, "round": number, "device": device, "name": metric.name, "split": metric.split}
            row |= {"sum": metric.sum, "count": metric.count, "by_class": json.dumps(by_class)}
            self._db.insert(
                "figures",
                row,
                "ON CONFLICT DO UPDATE SET sum=excluded.sum, count=excluded.count, by_class=excluded.by_class",
            )

    def figures(self, run: str, name: str, split: str) -> list[Row]:
        """One figure over rounds and devices."""
        return self._db.rows(
            "SELECT * FROM figures WHERE run = ? AND name = ? AND split = ? ORDER BY round, device", run, name, split
        )

    def newest_figures(self, run: str, name: str, split: str) -> list[Row]:
        """Of each device the newest of a figure, and of those named like `ANSWER/NAME`, by name and device."""
        return self._db.rows(  # beside max(), SQLite takes the other columns from the row that has it
            "SELECT device, name, sum, count, max(round) AS round FROM figures WHERE run = ? AND split = ? "
            "AND (name = ? OR name GLOB ?) GROUP BY name, device ORDER BY name, device",
            *(run, split, name, f"?*/{name}"),
        )

    def add_traffic(
        self, run: str, number: int, device: str, direction: str, counted: Counted, envelope_bytes: int
    ) -> None:
        """Adds one payload, or the part of it that was sent, to the count of what went over the link."""
        name = {"run": run, "round": number, "device": device, "direction": direction}
        with self._db.transaction():
            self._count_bytes({**name, "kind": ENVELOPE}, 1, 0, envelope_bytes, envelope_bytes)
            for kind in sorted(counted.tensor.keys() | counted.sent.keys()):
                self._count_bytes({**name, "kind": kind}, 0, counted.tensor[kind], 0, counted.sent[kind])

    def add_refused_traffic(self, ask: int, sent_bytes: int) -> None:
        """Counts what travelled for an answer to an ask and was not taken; no tensor bytes, as no answer was made."""
        with self._db.transaction():
            name = self._db.row("SELECT run, round, device FROM asks WHERE id = ?", ask)
            if name is not None and sent_bytes:
                self._count_bytes({**name, "direction": "up", "kind": REFUSED}, 0, 0, 0, sent_bytes)

    def _count_bytes(self, name: Row, payloads: int, tensor: int, envelope: int, sent: int) -> None:
        columns = {"payloads": payloads, "tensor_bytes": tensor, "envelope_bytes": envelope, "sent_bytes": sent}
        added = ", ".join(f"{column} = {column} + excluded.{column}" for column in columns)
        self._db.insert("traffic", {**name, **columns}, f"ON CONFLICT DO UPDATE SET {added}")

    def traffic(self, run: str) -> list[Row]:
        """Bytes by round, device and direction: tensors and headers as they are, `sent_bytes` all as it travelled."""
        return self._db.rows(
            "SELECT run, round, device, direction, sum(payloads) AS payloads, sum(tensor_bytes) AS tensor_bytes, "
            "sum(envelope_bytes) AS envelope_bytes, sum(sent_bytes) AS sent_bytes FROM traffic WHERE run = ? "
            "GROUP BY round, device, direction ORDER BY round, device, direction",
            run,
        )

    def traffic_by_kind(self, run: str) -> list[Row]:
        """The same by kind of part too; the headers' kind is "envelope", that of rows of an older version is empty."""
        return self._db.rows("SELECT * FROM traffic WHERE run = ? ORDER BY round, device, direction, kind", run)
