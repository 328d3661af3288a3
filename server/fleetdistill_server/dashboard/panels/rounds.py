"""All figures of a run's rounds as a table."""

from __future__ import annotations

from fleetdistill_server.dashboard import table
from fleetdistill_server.dashboard.board import Board
from fleetdistill_server.dashboard.layout import panel
from fleetdistill_server.dashboard.readers import rounds
from fleetdistill_server.dashboard.table import LiveTable

_COLUMNS = [
    table.number("round", "Round", width=125, sort="desc", pinned="left"),
    table.text("status", "Status", flex=1, minWidth=120),
    table.number("cohort", "Devices asked", width=135),
    table.number("used", "Answers used", width=130),
    table.number("reported", "Answers not used", width=150),
    table.number("guards", "Guards fired", width=130),
    table.number("seconds", "Duration (s)", width=125),
    table.number("train_loss", "Training loss (nats)", width=170),
    table.rate("test_accuracy", "Fleet accuracy", width=140),
    table.rate("server_accuracy", "Server's model", width=140),
    table.rate("global_accuracy", "Global model", width=135),
    table.size("bytes_up", "Received", width=115),
    table.size("bytes_down", "Sent", width=115),
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
