"""Up to five runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from nicegui import ui

from fleetdistill_server.dashboard.board import Board
from fleetdistill_server.dashboard.layout import frame


def show(board: Board, names: Sequence[str]) -> None:
    """Shows runs side by side.

    Args:
        board: What all pages share.
        names: Names of the runs, from the address.
    """
    with frame(board, "Compare", [("Runs", "/")]):
        ui.label(", ".join(names))
