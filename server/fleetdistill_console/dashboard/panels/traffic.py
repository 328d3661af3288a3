"""The bytes of a run by kind of part and direction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fleetdistill_console.dashboard import table
from fleetdistill_console.dashboard.board import Board
from fleetdistill_console.dashboard.layout import Tiles, panel
from fleetdistill_console.dashboard.readers import traffic
from fleetdistill_console.dashboard.table import LiveTable
from fleetdistill_console.dashboard.units import size
from fleetdistill_server.views.runs import TableRow

_COUNTS = ("up_sent", "down_sent", "up", "down")
_UP, _DOWN, _SAVED = "Received from devices", "Sent to devices", "Saved by compression"
_COLUMNS = [
    table.text("kind", "Kind of part", minWidth=130),
    table.size("up_sent", "Received", minWidth=130),
    table.size("down_sent", "Sent", minWidth=130),
    table.size("up", "Received, uncompressed", minWidth=130),
    table.size("down", "Sent, uncompressed", minWidth=130),
    table.rate("share", "Share of all bytes", minWidth=130, sort="desc"),
]


class TrafficPanel:
    """Totals, and a table with a row for each kind of part."""

    def __init__(self, board: Board, run: str) -> None:
        self._board, self._run = board, run
        with panel("Bytes by kind"):
            self._tiles = Tiles((_UP, _DOWN, _SAVED))
            self._table = LiveTable("Bytes by kind of part", _COLUMNS, "Nothing has been sent yet.", "20rem")

    def update(self) -> None:
        """Shows the newest counts."""
        rows = self._board.feed.look(traffic(self._run)).value
        if rows is None:
            return
        kinds = by_kind(rows)
        total = {name: sum(row[name] for row in kinds) for name in _COUNTS}
        saved = total["up"] + total["down"] - total["up_sent"] - total["down_sent"]
        shown = {_UP: size(total["up_sent"]), _DOWN: size(total["down_sent"]), _SAVED: size(max(saved, 0))}
        self._tiles.show(shown)
        self._table.show(kinds)


def by_kind(rows: Sequence[TableRow]) -> list[dict[str, Any]]:
    """Returns the sums over rounds by kind of part, with the kind's share of all bytes on the link."""
    sums: defaultdict[str, dict[str, Any]] = defaultdict(lambda: dict.fromkeys(_COUNTS, 0))
    for row in rows:
        for name in _COUNTS:
            sums[row["kind"]][name] += row[name]
    sent = sum(item["up_sent"] + item["down_sent"] for item in sums.values())
    return [
        {"id": kind, "kind": kind, **one, "share": (one["up_sent"] + one["down_sent"]) / sent if sent else None}
        for kind, one in sums.items()
    ]
