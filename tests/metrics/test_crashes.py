"""What metrics say after processes were killed, and without space for them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.answering import AnsweringFleet
from support.live_front import client_of, live_front, prepare_store, refused, upload_name
from support.processes import children, free_port, python
from support.scraping import Scraped, scraped_until
from support.served import RUN, supervised
from support.wire_samples import make_payload

from fleetdistill.errors import RunError
from fleetdistill.wire.v1 import service_pb2, service_pb2_grpc
from fleetdistill_console.metrics.endpoint import Endpoint
from fleetdistill_server.config.server_config import ServerSection
from fleetdistill_server.store.store import Store

FRONT, ENGINE = "fleetdistill_server.front", "fleetdistill_server.engine"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "run": {"method": "feddkc", "rounds": 2},
    "contract": {"classes": 10, "input_shape": [1, 8, 8]},
    "method": {"server_epochs": 1},
}


@dataclass
class Server:
    """A server with metrics: port of the devices, port of the metrics, the supervisor, the folder of its store."""

    port: int
    metrics: int
    supervisor: int
    work: Path

    def kill(self, module: str, scrape: Scraped, process: str) -> Scraped:
        """Kills a child of the supervisor (SIGKILL); the scrape after it was restarted."""
        before = scrape.value("process_restarts_total", process=process)
        for pid in children(self.supervisor, module):
            os.kill(pid, signal.SIGKILL)
        return scraped_until(
            self.metrics,
            lambda now: (
                now.value("process_restarts_total", process=process) == before + 1
                and now.value("process_up", process=process)
            ),
            f"the restart of the {process}",
        )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    metrics = free_port()
    settings = {**SETTINGS, "server": {"metrics": f"127.0.0.1:{metrics}"}}
    with supervised(tmp_path, settings) as (address, pid):
        yield Server(int(address.rpartition(":")[2]), metrics, pid, tmp_path)


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_front_continues_its_counters(server: Server) -> None:
    with AnsweringFleet(server.port, RUN, 2):
        before = scraped_until(server.metrics, lambda now: now.value("run_completed_rounds") == 2, "two rounds")
    for time in range(2):
        after = server.kill(FRONT, before, "front")
        for name in ("uploads_begun_total", "uploads_acknowledged_total", "receipt_duration_seconds_count"):
            assert after.value(name) == before.value(name) == 4, (name, time)
        assert after.by("link_bytes_total") == before.by("link_bytes_total")
        before = after
    store = Store.open(server.work / "store")
    assert len(store.asks.uploads(RUN)) == before.value("uploads_acknowledged_total")
    store.close()
    assert len(list((server.work / "store/metrics").iterdir())) == 3, "no file for each process"


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_engine_is_counted_and_its_run_goes_on(server: Server) -> None:
    before = scraped_until(server.metrics, lambda now: now.value("process_up", process="engine"), "the engine")
    after = server.kill(ENGINE, before, "engine")
    assert after.by("process_restarts_total") == {("front", ""): 0.0, ("engine", RUN): 1.0}
    with AnsweringFleet(server.port, RUN, 2):
        scraped_until(server.metrics, lambda now: now.value("run_completed_rounds") == 2, "two rounds")


@pytest.mark.slow
@pytest.mark.long
def test_a_refused_upload_is_counted_with_its_code(server: Server) -> None:
    scraped_until(server.metrics, lambda now: now.value("run_info", status="waiting for devices"), "the contract")
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel, refused() as result:
        identity = service_pb2.Identity(run=RUN, device="stranger", secret=b"x")
        header = service_pb2.UploadHeader(identity=identity, name=upload_name(1), payload=make_payload().header())
        service_pb2_grpc.DeviceServiceStub(channel).Upload(iter([service_pb2.UploadRequest(header=header)]))
    now = scraped_until(server.metrics, lambda now: now.by("uploads_refused_total"), "the refusal")
    assert now.by("uploads_refused_total") == {(result[0].reason,): 1.0}
    assert now.value("calls_total", method="Upload", code=result[0].reason) == 1
    assert now.value("uploads_begun_total") == 1


@pytest.mark.slow
def test_a_front_without_space_for_its_metrics_serves_devices(tmp_path: Path) -> None:
    store = prepare_store(tmp_path)
    (tmp_path / "metrics").write_text("no directory, as if there were no space for one")
    with live_front(tmp_path, metrics="127.0.0.1:1") as front, client_of(front) as client:
        assert client.check_in().run
    store.close()


def test_an_address_in_use_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerSection(store=str(tmp_path), metrics=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(RunError, match=r"cannot listen on 127.0.0.1:\d+: .* \[server\] metrics"):
            Endpoint(config, list)


def test_a_front_without_metrics_loads_no_library_for_them() -> None:
    code = "import sys, fleetdistill_server.front.process; print('prometheus_client' in sys.modules)"
    assert python(code).strip() == "False"
