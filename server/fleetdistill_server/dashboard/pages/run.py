"""One run: its progress, curves, devices and events."""

from __future__ import annotations

from nicegui import ui

from fleetdistill_server.dashboard.board import Board
from fleetdistill_server.dashboard.layout import Notice, frame


def show(board: Board, run: str) -> None:
    """Shows a run and keeps it up to date.

    Args:
        board: What all pages share.
        run: Name of the run.
    """
    with frame(board, run, [("Runs", "/")]):
        notice = Notice()
        status = ui.label()

        def update() -> None:
            snapshot = board.feed.look(("run", run), lambda: lambda source: source.run(run))
            notice.show(snapshot)
            if snapshot.value is not None:
                status.text = snapshot.value.facts["status"]

        ui.timer(0.5, update)
