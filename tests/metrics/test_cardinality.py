"""Who names things on a server's ports makes no series of the metrics."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.metrics_core import Metric
from support.live_front import LiveFront, live_front, prepare_store
from support.processes import PATIENCE_SECONDS, wait_until
from support.wire_samples import make_payload

from fleetdistill.wire.v1 import service_pb2, service_pb2_grpc
from fleetdistill_console.metrics.files import FilesCollector

MANY = 1300
MAX_SERIES = 60
"""More than the methods and codes below have, and fewer than 5 % of the callers' names."""


@pytest.fixture
def front(tmp_path: Path) -> Iterator[LiveFront]:
    prepare_store(tmp_path / "store").close()
    with live_front(tmp_path / "store", metrics="127.0.0.1:0") as running:
        yield running


def series(store: Path) -> dict[str, set[tuple[str, ...]]]:
    """Labels of the series of each metric, without a histogram's buckets."""
    result: list[Metric] = list(FilesCollector(store).collect())
    return {
        metric.name: {labels(sample) for sample in metric.samples if "le" not in sample.labels} for metric in result
    }


def labels(sample: Any) -> tuple[str, ...]:
    return tuple(value for _, value in sorted(sample.labels.items()))


@pytest.mark.long
@pytest.mark.slow
def test_strangers_names_make_no_series(front: LiveFront, tmp_path: Path) -> None:
    def call(number: int) -> None:
        name = f"stranger-{number}"
        channel = channels[number % len(channels)]
        stub = service_pb2_grpc.DeviceServiceStub(channel)
        identity = service_pb2.Identity(run=name, device=name, secret=b"s" * 32)
        metadata = [(name, name), ("traceparent", name), (f"{name}-bin", name.encode())]
        header = service_pb2.UploadHeader(identity=identity, payload=make_payload().header())
        header.payload.parts.parts[0].name = name
        given: list[tuple[Any, Any]] = [
            (stub.Heartbeat, service_pb2.HeartbeatRequest(identity=identity)),
            (stub.Upload, iter([service_pb2.UploadRequest(header=header)])),
            (channel.unary_unary(f"/{name}/{name}"), b""),
            (channel.unary_unary(f"/fleetdistill.wire.v1.DeviceService/{name}"), b""),
        ]
        for method, request in given:
            with contextlib.suppress(grpc.RpcError):
                method(request, timeout=PATIENCE_SECONDS, metadata=metadata)

    with contextlib.ExitStack() as opened:
        channels = [
            opened.enter_context(
                grpc.insecure_channel(
                    f"127.0.0.1:{front.port}",
                    [("grpc.primary_user_agent", f"agent-{number}"), ("grpc.use_local_subchannel_pool", 1)],
                )
            )
            for number in range(40)
        ]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            list(pool.map(call, range(MANY)))
    calls = "fleetdistill_calls"
    wait_until(lambda: calls in (found := series(tmp_path / "store")) and found[calls], "the calls to be counted")
    result = series(tmp_path / "store")
    assert {method for _, method in result[calls]} == {"Heartbeat", "Upload"}
    assert sum(map(len, result.values())) < MAX_SERIES
    assert not any(text in str(result) for text in ("stranger", "agent-"))
