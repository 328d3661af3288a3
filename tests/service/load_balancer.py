"""HAProxy with the configuration of docs/reference/several-machines.md, if it is installed."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.processes import PATIENCE_SECONDS

_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "several-machines.md"
MISSING = "" if shutil.which("haproxy") else "not installed: haproxy"
"""Why there is no load balancer here; empty if there is one."""


@contextlib.contextmanager
def load_balancer(directory: Path, ports: Sequence[int]) -> Iterator[int]:
    """Runs HAProxy before fronts of this machine; yields its port."""
    port = _free_port()
    path = directory / "haproxy.cfg"
    path.write_text(_configuration(port, ports))
    process = subprocess.Popen(["haproxy", "-db", "-f", str(path)])
    try:
        yield port
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def _configuration(port: int, ports: Sequence[int]) -> str:
    """The page's file, with other addresses."""
    result = re.search(r'^```haproxy title="haproxy.cfg"\n(.*?)^```', _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert result is not None
    text = result[1].replace("bind :50051", f"bind 127.0.0.1:{port}")
    for number, one in enumerate(ports, 1):
        text = text.replace(f"10.0.0.1{number}:50051", f"127.0.0.1:{one}")
    assert "50051" not in text
    return text


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
