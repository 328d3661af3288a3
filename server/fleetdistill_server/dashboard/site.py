"""The addresses of the pages, and the web server that serves them. Imported only by the dashboard's process."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from nicegui import app as assets
from nicegui import ui

from fleetdistill_server.dashboard.board import Board
from fleetdistill_server.dashboard.pages import compare, device, run, runs, server
from fleetdistill_server.dashboard.session import Access, protect

_STATIC = Path(__file__).parent / "static"
_CLOSE_SECONDS = 2
"""Seconds for browsers to disconnect when the dashboard is stopped."""


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
        log_level="warning",
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        server_header=False,
        ws_per_message_deflate=True,
    )
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
        compare.show(board, [one for one in runs.split(",") if one])
