"""One device of a run."""

from __future__ import annotations

from nicegui import ui

from fleetdistill_server.dashboard.board import Board
from fleetdistill_server.dashboard.layout import frame, run_link


def show(board: Board, run: str, device: str) -> None:
    """Shows a device.

    Args:
        board: What all pages share.
        run: Name of the run.
        device: Id of the device.
    """
    with frame(board, device, [("Runs", "/"), (run, run_link(run))]):
        ui.label(device)
