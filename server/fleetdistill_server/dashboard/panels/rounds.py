"""All figures of a run's rounds as a table."""

from __future__ import annotations

from fleetdistill_server.dashboard import table
from fleetdistill_server.dashboard.board import Board
from fleetdistill_server.dashboard.layout import panel
from fleetdistill_server.dashboard.readers import rounds
from fleetdistill_server.dashboard.table import LiveTable

_COLUMNS = [
    table.number("round", "Round", width=85, sort="desc", flex=0, pinned="left"),
    table.text("status", "Status", flex=2, minWidth=110),
    table.number("cohort", "Devices asked", minWidth=85),
    table.number("used", "Answers used", minWidth=95),
    table.number("reported", "Answers not used", minWidth=95),
    table.number("guards", "Guards fired", minWidth=80),
    table.number("seconds", "Duration (s)", minWidth=90),
    table.number("train_loss", "Training loss (nats)", minWidth=90),
    table.rate("test_accuracy", "Fleet accuracy", minWidth=95),
    table.rate("server_accuracy", "Server's model", minWidth=85),
    table.rate("global_accuracy", "Global model", minWidth=80),
    table.size("bytes_up", "Received", minWidth=100),
    table.size("bytes_down", "Sent", minWidth=90),
]


class RoundsPanel:
    """A table of all rounds, newest first."""

    def __init__(self, board: Board, run: str) -> None:
        self._board, self._run = board, run
        with panel("Rounds"):
            self._table = LiveTable("Rounds of the run", _COLUMNS, "No round has begun.", "34rem")

    def update(self) -> None:
        """Shows the newest rounds."""
        rows = self._board.feed.look(rounds(self._run)).value
        if rows is not None:
            self._table.show([{**row, "id": row["round"]} for row in rows])
