"""A device that speaks plain text, before a server that speaks TLS and before one that is away."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from support.hostile_server import DATA, model
from support.open_device import open_device
from support.processes import free_port
from support.secured import make_pki, secured_front

from fleetdistill import COLUMNS, Device
from fleetdistill.errors import ConfigurationError, LinkError
from fleetdistill.link.tls_probe import accepts_tls


def plain_device(port: int, state_dir: Path) -> Device:
    return open_device(server=f"127.0.0.1:{port}", model=model, data=DATA, state_dir=state_dir, allow=COLUMNS)


def test_unenrolled_device_is_told_that_server_requires_tls(tmp_path: Path) -> None:
    make_pki(tmp_path / "pki")
    with secured_front(tmp_path / "store", tmp_path / "pki") as front:
        for port in (front.port, front.enrol_port):
            with (
                plain_device(port, tmp_path / str(port)) as device,
                pytest.raises(ConfigurationError, match=r"requires TLS: pass .* as Server\(enrolment="),
            ):
                device.run()


def test_absent_or_plain_server_is_not_taken_for_tls_server(tmp_path: Path) -> None:
    port = free_port()
    assert not accepts_tls(f"127.0.0.1:{port}")
    assert not accepts_tls("no port at all")
    with plain_device(port, tmp_path) as device, pytest.raises(LinkError, match="cannot be reached"):
        device.step(0)
    with socket.create_server(("127.0.0.1", port)) as server:
        answering = threading.Thread(target=lambda: server.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
        answering.start()
        assert not accepts_tls(f"127.0.0.1:{port}")
        answering.join()
