"""The lines that an app needs to take part in a run."""

from __future__ import annotations

import json
import socket
from typing import Any

from nicegui import ui

from fleetdistill_console.dashboard.actions import EnrolButton
from fleetdistill_console.dashboard.board import Board
from fleetdistill_console.dashboard.layout import panel
from fleetdistill_console.dashboard.readers import ABOUT, settings

_ANY = ("", "0.0.0.0", "[::]", "::")
"""Addresses on which a server listens on all of a machine's interfaces."""


class EmbedPanel:
    """Python code with this server's address and this run, and a button that copies it."""

    def __init__(self, board: Board, run: str) -> None:
        self._board = board
        self._run = run
        self._shown = ""
        with panel("Add a device"):
            ui.label("An app takes part in this run with these lines. Replace the model and the data by its own.")
            ui.code(_INSTALL, language="sh").classes("fd-code").props('aria-label="Command to install the SDK"')
            self._code = ui.code("", language="python").classes("fd-code").props('aria-label="Lines for an app"')
            with ui.element("div").classes("fd-row"):
                copy = ui.button("Copy the lines", icon="content_copy").props("no-caps outline")
                self._enrol = EnrolButton(board, run)
                self._said = ui.label().props("role=status aria-live=polite")
            copy.on_click(self._copy)
            ui.label(_NOTE).classes("fd-muted")

    def update(self) -> None:
        """Shows the lines if they have changed."""
        self._enrol.update()
        about, known = self._board.feed.look(ABOUT).value, self._board.feed.look(settings(self._run)).value
        if about is None or known is None:
            return
        lines = embedding(address(self._board.server, about.facts["listen"]), self._run, about.facts, known.facts)
        if lines != self._shown:
            self._shown = self._code.content = lines

    def _copy(self) -> None:
        ui.clipboard.write(self._shown)
        self._said.text = "Copied."


_INSTALL = 'pip install "fleetdistill[train,onnx,tls]"'
_NOTE = (
    "The state directory belongs to one device. allow lists what may leave it: what the method needs, and counts and "
    "metrics, from which this page shows classes and accuracies."
)


_SHOWN = ("counts", "metrics")
"""Columns that no method needs, but without which this dashboard shows neither accuracies nor classes."""


def address(server: str, listen: str) -> str:
    """Returns where devices reach the server.

    Args:
        server: host:port by which the dashboard reaches it; empty for a store.
        listen: The server's own setting, with a port; its host may stand for all interfaces.
    """
    host, _, port = (server or listen).rpartition(":")
    return f"{socket.getfqdn() if host in _ANY else host}:{port or 50051}"


def embedding(server: str, run: str, about: dict[str, Any], needs: dict[str, Any]) -> str:
    """Returns Python code that embeds a device.

    Args:
        server: host:port.
        run: Name of the run.
        about: Facts about the server: `tls` and `enrol_port`.
        needs: The run's `contract`: `classes`, `input_shape` and the `columns` that its method needs.
    """
    contract = needs["contract"]
    shape = contract["input_shape"]
    size, classes = "×".join(map(str, shape)), len(contract["classes"])
    columns = dict.fromkeys([*contract["columns"], *_SHOWN])
    where = [json.dumps(server), f"run={json.dumps(run)}"]
    where += ["enrolment=token"] if about["tls"] else []
    token = "  # one-time token: fleetdistill enrol" if about["tls"] else ""
    lines = [
        "from fleetdistill import Device, Server",
        "",
        f"# make_model: a function that returns a PyTorch module for inputs {size} and {classes} classes",
        f"# images: float32 array [N, {', '.join(map(str, shape))}]",
        f"# labels: integers [N] from 0 to {max(classes - 1, 0)}",
        "with Device(",
        f"    server=Server({', '.join(where)}),{token}",
        "    model=make_model,",
        "    data=(images, labels),",
        '    state_dir="fleet-state",',
        f"    allow={json.dumps(list(columns))},",
    ]
    return "\n".join([*lines, ") as device:", "    device.run()"])
