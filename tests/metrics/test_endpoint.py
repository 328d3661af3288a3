"""The endpoint of the metrics and callers that do not behave: silent ones, slow readers, garbage."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from support.processes import PATIENCE_SECONDS, wait_until

from fleetdistill_console.metrics.endpoint import Endpoint
from fleetdistill_server.config.server_config import ServerSection
from fleetdistill_server.store.store import Store

HOSTILE = {
    "silent": b"",
    "half a request": b"GET /metrics HTTP/1.1\r\nHost: x\r\n",
    "never reads": b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
    "garbage": b"\x16\x03\x01" + bytes(range(256)) * 100,
    "endless header": b"GET /metrics HTTP/1.1\r\n" + b"X: " + b"y" * 60_000,
}


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    Store.open(tmp_path / "store").close()
    served = Endpoint(ServerSection(store=str(tmp_path / "store"), metrics="127.0.0.1:0"), list)
    yield served
    served.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", HOSTILE)
def test_callers_that_stall_cost_few_threads_and_no_scrape(
    kind: str, endpoint: Endpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    before = threading.active_count()
    with contextlib.ExitStack() as opened:
        for _ in range(200):
            one = opened.enter_context(socket.create_connection(("127.0.0.1", endpoint.port), PATIENCE_SECONDS))
            with contextlib.suppress(OSError):  # the endpoint has closed it
                one.sendall(HOSTILE[kind])
        with urlopen(f"http://127.0.0.1:{endpoint.port}/metrics") as answer:
            assert b"fleetdistill_" in answer.read()
        wait_until(lambda: threading.active_count() - before <= 40, "the surplus connections to end")
    assert "Traceback" not in capfd.readouterr().err


def test_a_strangers_path_query_or_header_makes_no_metric(endpoint: Endpoint) -> None:
    def names() -> set[bytes]:
        with urlopen(f"http://127.0.0.1:{endpoint.port}/metrics") as answer:
            return {line.partition(b" ")[0] for line in answer.read().splitlines() if not line.startswith(b"#")}

    before = names()
    for number in range(100):
        with contextlib.suppress(OSError):
            urlopen(f"http://127.0.0.1:{endpoint.port}/stranger-{number}?name[]=stranger-{number}").close()
    assert not any(b"stranger" in name for name in names() | before)
    assert names() == before
