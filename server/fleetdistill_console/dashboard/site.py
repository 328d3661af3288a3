"""The addresses of the pages, and the web server that serves them. Imported only by the dashboard's process."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import h11
import uvicorn
from fastapi import FastAPI
from nicegui import app as assets
from nicegui import ui
from uvicorn.protocols.http.h11_impl import H11Protocol

from fleetdistill_console.dashboard.board import Board
from fleetdistill_console.dashboard.layout import frame
from fleetdistill_console.dashboard.pages import compare, device, run, runs, server
from fleetdistill_console.dashboard.session import Access, protect

_STATIC = Path(__file__).parent / "static"
_CLOSE_SECONDS = 2
"""Seconds for browsers to disconnect when the dashboard is stopped."""

_MAX_CONNECTIONS = 256
"""Connections without an open page, of all callers; a browser opens 6, and closes them when it has the page."""
_MAX_HEADER_BYTES = 16 << 10


class BoundedHttp(H11Protocol):
    """HTTP/1.1 with few connections, because uvicorn waits for requests without end.

    A further connection closes the oldest one of the address that has most of them. The websocket of an open page,
    which needs a session, does not count.
    """

    _open: ClassVar[dict[BoundedHttp, str]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Closes another connection if there are too many."""
        super().connection_made(transport)
        self._open[self] = self.client[0] if self.client else ""
        if len(self._open) > _MAX_CONNECTIONS:
            ((crowded, _),) = Counter(self._open.values()).most_common(1)
            oldest = next(one for one, address in self._open.items() if address == crowded)
            del self._open[oldest]
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets the connection."""
        self._open.pop(self, None)
        super().connection_lost(exc)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Forgets the connection, which is that of a page from now on."""
        self._open.pop(self, None)
        super().handle_websocket_upgrade(event)


def serve(board: Board, bound: socket.socket, access: Access, on_listening: Callable[[], object]) -> None:
    """Serves the pages on a bound socket until SIGINT or SIGTERM.

    Args:
        board: What the pages show.
        bound: A bound socket.
        access: Who may open the pages.
        on_listening: Called once the pages can be opened.
    """
    register(board)
    web = FastAPI(title=board.title, docs_url=None, redoc_url=None, openapi_url=None)
    protect(web, access)
    ui.run_with(
        web,
        title=board.title,
        favicon=_STATIC / "favicon.svg",
        dark=None,  # as the browser prefers, until the reader switches
        language="en-US",
        tailwind=False,
        show_welcome_message=False,
    )
    config = uvicorn.Config(
        web,
        log_level="error",  # a stranger can cause warnings
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        server_header=False,
        http=BoundedHttp,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        ws_per_message_deflate=True,
    )
    assets.on_startup(lambda: register_missing(board))
    assets.on_startup(lambda: on_listening())
    uvicorn.Server(config).run(sockets=[bound])


def register(board: Board) -> None:
    """Registers the pages with NiceGUI."""
    assets.add_static_files("/static", _STATIC)

    @ui.page("/")
    def runs_page() -> None:
        runs.show(board)

    @ui.page("/runs/{name}")
    def run_page(name: str, tab: str = "") -> None:
        run.show(board, name, tab)

    @ui.page("/runs/{name}/devices/{device_id}")
    def device_page(name: str, device_id: str) -> None:
        device.show(board, name, device_id)

    @ui.page("/server")
    def server_page() -> None:
        server.show(board)

    @ui.page("/compare")
    def compare_page(runs: str = "") -> None:
        compare.show(board, [item for item in runs.split(",") if item])


def register_missing(board: Board) -> None:
    """Registers the page of every other address; it must be the last route, and NiceGUI adds some when it starts."""

    @ui.page("/{path:path}")
    def missing_page(path: str) -> None:
        ui.status_code(404)
        with frame(board, "Page not found", [("Runs", "/")]):
            ui.label(f"There is no page /{path}. Runs, Compare and Server are above.").classes("fd-empty")
