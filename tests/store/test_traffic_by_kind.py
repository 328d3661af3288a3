"""Bytes that a version without kinds counted are still there, and count on beside those of today."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path

from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Counted
from fleetdistill_server.views import runs as views

RECORDED = Path(__file__).parent / "golden" / "schema-0.1.0.sql"


def test_rows_of_before_are_read_and_summed_with_new_ones(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "store.sqlite") as before:
        before.executescript(RECORDED.read_text())
        sql = (
            "SELECT run, round, device, direction, payloads, tensor_bytes, envelope_bytes FROM traffic ORDER BY 2, 3, 4"
        )
        rows = before.execute(sql).fetchall()
    before.close()
    assert rows
    store = Store.open(tmp_path)
    (run,) = {row[0] for row in rows}
    found = [
        (run, *(one for name, one in row.items() if name not in ("run", "sent_bytes")))
        for row in store.history.traffic(run)
    ]
    assert found == rows
    assert {row["kind"] for row in store.history.traffic_by_kind(run)} == {""}
    assert all(row["sent_bytes"] == row["tensor_bytes"] + row["envelope_bytes"] for row in store.history.traffic(run))

    _, number, device, direction, payloads, tensor, envelope = rows[0]
    store.history.add_traffic(run, number, device, direction, Counted(Counter(plan=5), Counter(plan=3)), 7)
    first = store.history.traffic(run)[0]
    assert (first["payloads"], first["tensor_bytes"], first["envelope_bytes"]) == (
        payloads + 1,
        tensor + 5,
        envelope + 7,
    )
    assert first["sent_bytes"] == tensor + envelope + 3 + 7
    kinds = {row["kind"]: row[f"{direction}_sent"] for row in views.run(store, run).lists["bytes_by_kind"]}
    assert (kinds["plan"], kinds["envelope"]) == (3, 7)
    assert kinds["not recorded"] == sum(row[5] + row[6] for row in rows if row[3] == direction)
    store.close()
