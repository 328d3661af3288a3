"""Events of a run, figures reported by devices, and byte counts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from fleetdistill.knowledge import Metrics
from fleetdistill_server.store.database import Database, Row
from fleetdistill_server.store.records import Ask, Event, ReportedFigure, Traffic
from fleetdistill_server.store.sums import Sums, figures_of_devices
from fleetdistill_server.store.traffic import ENVELOPE, REFUSED, Counted
from fleetdistill_server.texts import shorten


class History:
    """Reads and writes the tables `events`, `figures` and `traffic`."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._sums = Sums(database)

    def add_event(
        self, run: str, kind: str, text: str, *, number: int = 0, device: str = "", code: str = "", ask: int = 0
    ) -> int:
        """Stores an event for the operator, truncating text over the limit, and logs it.

        Args:
            run: Name of the run.
            kind: Kind of the event.
            text: What happened.
            number: Round that it is about; 0 for none.
            device: Device that it is about; empty for none.
            code: Code of a refusal.
            ask: Id of the ask that it is about, for the log only; 0 for none.

        Returns:
            The event's id.
        """
        row = {"run": run, "round": number, "device": device, "kind": kind, "code": code, "text": shorten(text)}
        with self._db.transaction():
            self._db.log({**row, "ask": ask})
            return int(self._db.insert("events", {**row, "at": self._db.now()}, "RETURNING id")["id"])

    def add_declined(self, run: str, ask: Ask, reason: str) -> None:
        """Stores the event for an ask that its device declines."""
        self.add_event(run, "declined", f"{_of_step(ask.step)}{reason}", **about_ask(ask))

    def declined(self, run: str, number: int, step: str) -> dict[str, str]:
        """Returns the reasons of the devices that declined a step of a round, by device."""
        events = self._events(
            "SELECT * FROM events WHERE run = ? AND kind = 'declined' AND round = ? ORDER BY id", run, number
        )
        prefix = _of_step(step)
        return {one.device: one.text.removeprefix(prefix) for one in events if one.text.startswith(prefix)}

    def note_refusals_left_out(self, run: str, device: str, text: str, known: int | None) -> int | None:
        """Stores how many of a device's refusals are not recorded one by one.

        Args:
            run: Name of the run.
            device: Id of the device.
            text: Text of the event.
            known: Id of the event to update, as returned by the previous call; None for a new event.

        Returns:
            Id of the event, to be passed as `known` next time.
        """
        same = "id = ? AND run = ? AND device = ? AND kind = 'refusals-left-out'"  # SQLite reuses ids of pruned events
        if known is not None and self._db.write(
            f"UPDATE events SET text = ?, at = ? WHERE {same}", *(text, self._db.now(), known, run, device)
        ):
            return known
        return self.add_event(run, "refusals-left-out", text, device=device)

    def events(self, run: str, kind: str | None = None) -> list[Event]:
        """Returns the events of a run, oldest first; if `kind` is given, only events of that kind."""
        if kind is None:
            return self._events("SELECT * FROM events WHERE run = ? ORDER BY id", run)
        return self._events("SELECT * FROM events WHERE run = ? AND kind = ? ORDER BY id", run, kind)

    def _events(self, sql: str, *values: object) -> list[Event]:
        return [Event.from_row(row) for row in self._db.rows(sql, *values)]

    def newest_event(self, run: str, kind: str) -> Event | None:
        """Returns the newest event of a kind, or None."""
        events = self._events("SELECT * FROM events WHERE run = ? AND kind = ? ORDER BY id DESC LIMIT 1", run, kind)
        return events[0] if events else None

    def has_event(self, run: str, kind: str, device: str, number: int | None = None, text: str | None = None) -> bool:
        """Returns whether a device has an event of this kind; without `number` or `text`, any round or text matches."""
        wanted: Row = {"run": run, "kind": kind, "device": device}
        if number is not None:
            wanted["round"] = number
        if text is not None:
            wanted["text"] = shorten(text)
        condition = " AND ".join(f"{column} = ?" for column in wanted)
        return self._db.exists(f"SELECT 1 FROM events WHERE {condition} LIMIT 1", *wanted.values())

    def newest_events(self, run: str, most: int) -> list[Event]:
        """Returns the newest `most` events of a run, oldest first."""
        return self._events("SELECT * FROM events WHERE run = ? ORDER BY id DESC LIMIT ?", run, most)[::-1]

    def count_events(self, run: str) -> int:
        """Returns the number of a run's events."""
        return int(self._db.value("SELECT count(*) FROM events WHERE run = ?", run))

    def last_event(self, run: str) -> Event | None:
        """Returns the newest event of a run, or None."""
        events = self.newest_events(run, 1)
        return events[0] if events else None

    def add_answer(
        self,
        run: str,
        number: int,
        device: str,
        counted: Counted,
        envelope_bytes: int,
        metrics: Sequence[Metrics],
    ) -> None:
        """Adds an answer's bytes to the byte counts, and stores the metrics in it; see the next methods."""
        with self._db.together():
            summed = self._sums.contain(run, number)
            self._add_payload(run, number, device, "up", counted, envelope_bytes, summed)
            for item in metrics:
                self._add_figures(run, number, device, item, summed)

    def add_figures(self, run: str, number: int, device: str, metrics: Metrics) -> None:
        """Stores the metrics that a device reported for a round; newer values replace older ones."""
        with self._db.transaction():
            self._add_figures(run, number, device, metrics, self._sums.contain(run, number))

    def _add_figures(self, run: str, number: int, device: str, metrics: Metrics, summed: bool) -> None:
        rows = []
        for metric in metrics.metrics:
            by_class = {item.label: [item.sum, item.count] for item in metric.by_class}
            row = {"run": run, "round": number, "device": device, "name": metric.name, "split": metric.split}
            rows.append({**row, "sum": metric.sum, "count": metric.count, "by_class": json.dumps(by_class)})
        if summed:
            self._sums.change_figures(run, number, device, -1)
        self._db.insert_many("figures", rows, _REPLACE_FIGURES)
        if summed:
            self._sums.change_figures(run, number, device, 1)

    def figures(self, run: str, name: str, split: str) -> list[ReportedFigure]:
        """Returns all reported values of one figure of a run, ordered by round and device."""
        return self._figures(
            "SELECT * FROM figures WHERE run = ? AND name = ? AND split = ? ORDER BY round, device", run, name, split
        )

    def _figures(self, sql: str, *values: object) -> list[ReportedFigure]:
        return [ReportedFigure.from_row(row) for row in self._db.rows(sql, *values)]

    def figures_of_last_round(self, run: str, name: str, split: str) -> list[ReportedFigure]:
        """Returns the values of one figure that devices reported in the last completed round, ordered by device."""
        return self._figures(
            "SELECT * FROM figures WHERE run = ?1 AND name = ?2 AND split = ?3 AND round = "
            "(SELECT max(round) FROM rounds WHERE run = ?1 AND status = 'closed') ORDER BY device",
            *(run, name, split),
        )

    def newest_figures(self, run: str, name: str, split: str, device: str | None = None) -> list[ReportedFigure]:
        """Returns each device's newest value of a figure and of its `VARIANT/NAME` forms, ordered by name and device.

        Their `by_class` is empty.

        Args:
            run: Name of the run.
            name: Name of the figure.
            split: Data that the figure is about.
            device: Only this device; None for all.
        """
        named = "split = ?2 AND (name = ?3 OR (length(name) > ?4 AND substr(name, length(name) + 1 - ?4) = ?5))"
        known = figures_of_devices(named if device is None else f"{named} AND device = ?6")
        form = f"/{name}"
        return self._figures(
            f"WITH newest AS (SELECT device, name, max(newest) AS round FROM {known} GROUP BY device, name) "
            "SELECT f.run, f.round, f.device, f.name, f.split, f.sum, f.count, '' AS by_class "
            "FROM newest n CROSS JOIN figures f WHERE f.run = ?1 "
            "AND f.split = ?2 AND f.round = n.round AND f.device = n.device AND f.name = n.name "
            "ORDER BY f.name, f.device",
            *(run, split, name, len(form), form, *(() if device is None else (device,))),
        )

    def add_traffic(
        self, run: str, number: int, device: str, direction: str, counted: Counted, envelope_bytes: int
    ) -> None:
        """Adds a payload, or the part of it that was sent, to the byte counts."""
        with self._db.together():
            self._add_payload(run, number, device, direction, counted, envelope_bytes, self._sums.contain(run, number))

    def _add_payload(
        self,
        run: str,
        number: int,
        device: str,
        direction: str,
        counted: Counted,
        envelope_bytes: int,
        summed: bool,
    ) -> None:
        name = {"run": run, "round": number, "device": device, "direction": direction}
        rows = [_bytes_row({**name, "kind": ENVELOPE}, 1, 0, envelope_bytes, envelope_bytes)]
        for kind in sorted(counted.tensor.keys() | counted.sent.keys()):
            rows.append(_bytes_row({**name, "kind": kind}, 0, counted.tensor[kind], 0, counted.sent[kind]))
        self._add_bytes(rows, summed)
        kinds = {row["kind"]: row["sent_bytes"] for row in rows}
        self._db.after_commit(partial(self._db.meter.sent, direction, kinds))

    def add_refused_traffic(self, ask: int, sent_bytes: int) -> None:
        """Adds the bytes received for an answer that was not accepted; its tensor bytes are not counted."""
        with self._db.transaction():
            name = self._db.row("SELECT run, round, device FROM asks WHERE id = ?", ask)
            if name is not None and sent_bytes:
                row = _bytes_row({**name, "direction": "up", "kind": REFUSED}, 0, 0, 0, sent_bytes)
                self._add_bytes([row], self._sums.contain(name["run"], name["round"]))
                self._db.after_commit(partial(self._db.meter.sent, "up", {REFUSED: sent_bytes}))

    def _add_bytes(self, rows: Sequence[Row], summed: bool) -> None:
        """Adds to the byte counts of one round, and to the sums if they contain it."""
        self._db.insert_many("traffic", rows, _ADD_BYTES)
        if summed:
            self._sums.add_bytes(rows)

    def traffic(self, run: str) -> list[Traffic]:
        """Returns the byte counts over all kinds of parts, ordered by round, device and direction."""
        rows = self._db.rows(
            "SELECT round, device, direction, '' AS kind, sum(payloads) AS payloads, "
            "sum(tensor_bytes) AS tensor_bytes, sum(envelope_bytes) AS envelope_bytes, "
            "sum(sent_bytes) AS sent_bytes FROM traffic WHERE run = ? "
            "GROUP BY round, device, direction ORDER BY round, device, direction",
            run,
        )
        return [Traffic.from_row(row) for row in rows]

    def traffic_by_kind(self, run: str) -> list[Traffic]:
        """Returns the byte counts, ordered by round, device, direction and kind of part."""
        rows = self._db.rows("SELECT * FROM traffic WHERE run = ? ORDER BY round, device, direction, kind", run)
        return [Traffic.from_row(row) for row in rows]

    def total_traffic(self, run: str) -> list[Traffic]:
        """Returns the byte counts over all devices, ordered by round, direction and kind of part."""
        sums = ", ".join(f"sum({column}) AS {column}" for column in _COUNTS)
        rows = self._db.rows(
            f"SELECT round, '' AS device, direction, kind, {sums} FROM traffic WHERE run = ? "
            "GROUP BY round, direction, kind ORDER BY round, direction, kind",
            run,
        )
        return [Traffic.from_row(row) for row in rows]


def _of_step(step: str) -> str:
    return f"step {step!r}: "


def about_ask(ask: Ask) -> dict[str, Any]:
    """Returns the arguments of `History.add_event` for an event about an ask."""
    return {"number": ask.round, "device": ask.device, "ask": ask.id}


_REPLACE_FIGURES = (
    "ON CONFLICT (run, round, device, name, split) "
    "DO UPDATE SET sum=excluded.sum, count=excluded.count, by_class=excluded.by_class"
)
_COUNTS = ("payloads", "tensor_bytes", "envelope_bytes", "sent_bytes")
_ADD_BYTES = "ON CONFLICT (run, round, device, direction, kind) DO UPDATE SET " + ", ".join(
    f"{column} = traffic.{column} + excluded.{column}" for column in _COUNTS
)


def _bytes_row(name: Row, *counts: int) -> Row:
    """Returns a row of `traffic` with counts in the order of `_COUNTS`."""
    return {**name, **dict(zip(_COUNTS, counts, strict=True))}
