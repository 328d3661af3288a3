"""Callers of the dashboard's port that send or read nothing: they cost few connections, and no page of the others."""

from __future__ import annotations

import contextlib
import select
import socket
from pathlib import Path

import httpx
import pytest
from support.dashboards import TOKEN, dashboard
from support.processes import PATIENCE_SECONDS, wait_until
from websockets.sync.client import connect

from fleetdistill_server.store.store import Store

pytestmark = pytest.mark.slow
MANY, MOST = 600, 256
SOCKET = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"


def is_closed(connection: socket.socket) -> bool:
    """Whether the dashboard has closed a connection; reads nothing that it has sent."""
    seen = select.poll()
    seen.register(connection, select.POLLRDHUP)
    return bool(seen.poll(0))


@pytest.mark.long
def test_slow_callers_have_few_connections(tmp_path: Path) -> None:
    Store.open(tmp_path / "store").close()
    with dashboard(tmp_path, "--store", str(tmp_path / "store")) as address, httpx.Client(base_url=address) as client:
        host, _, port = address.removeprefix("http://").partition(":")
        head = f"HTTP/1.1\r\nHost: {host}:{port}\r\n".encode()
        requests = {
            "silent": b"",
            "half": b"GET / " + head,
            "body": b"POST /login " + head + b"Content-Length: 100\r\n\r\nt",
            "reads nothing": b"GET /login " + head + b"\r\n",
        }
        assert client.post("/login", data={"token": TOKEN}).status_code == 303
        cookie = "; ".join(f"{item.name}={item.value}" for item in client.cookies.jar)
        page = {"Cookie": cookie, "Origin": address}
        with connect(address.replace("http", "ws", 1) + SOCKET, additional_headers=page) as opened:
            for kind, request in requests.items():
                with contextlib.ExitStack() as ends:
                    callers = [
                        ends.enter_context(socket.create_connection((host, int(port)), PATIENCE_SECONDS))
                        for _ in range(MANY)
                    ]
                    for caller in callers:
                        with contextlib.suppress(OSError):  # the dashboard has closed it
                            caller.sendall(request)
                    wait_until(
                        lambda callers=callers: sum(map(is_closed, callers)) >= MANY - MOST,  # type: ignore[misc]
                        f"the end of the callers: {kind}",
                    )
                    assert httpx.get(f"{address}/health", timeout=PATIENCE_SECONDS).status_code in (200, 503)
            assert opened.ping().wait(PATIENCE_SECONDS)


def test_a_header_without_end_is_refused(tmp_path: Path) -> None:
    Store.open(tmp_path / "store").close()
    with dashboard(tmp_path, "--store", str(tmp_path / "store")) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), PATIENCE_SECONDS) as caller:
            caller.sendall(b"GET / HTTP/1.1\r\nX: " + b"y" * 60_000)
            assert caller.recv(100).startswith(b"HTTP/1.1 400")
    assert "Invalid" not in (tmp_path / "dashboard.log").read_text()
