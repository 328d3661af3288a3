"""Ray workers on two nodes compute what the simulation's process would, to the bit, also if one of them dies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from simulation.backends.dying_models import DYING, deaths
from support.fleets import SMALL, device_files, prepare, record, run_in_memory
from support.processes import module_path, wait_until

from fleetdistill.errors import ConfigurationError
from fleetdistill_lab import simulate
from fleetdistill_lab.simulation.backends.backend import RunData
from fleetdistill_lab.simulation.links.links import run_over_memory

LOOPBACK = "127.0.0.1"


@pytest.fixture
def due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in module_path().items():
        monkeypatch.setenv(name, value)
    return deaths(tmp_path, monkeypatch, 1)


@pytest.fixture
def address(due: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a cluster of two nodes, whose processes have the test's environment."""
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # otherwise Ray replaces 127.0.0.1 in addresses
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    from ray.cluster_utils import Cluster

    head = {"node_ip_address": LOOPBACK, "num_cpus": 1, "include_dashboard": False}
    head |= {"no_monitor": True, "include_log_monitor": False}  # of the autoscaler, and of the logs: not needed here
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(node_ip_address=LOOPBACK, num_cpus=1)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def listening() -> set[str]:
    """Addresses on which the processes of this one listen."""
    result = set()
    for process in psutil.Process().children(recursive=True):
        connections = process.net_connections("inet") if process.is_running() else []
        result |= {
            connection.laddr.ip.removeprefix("::ffff:")
            for connection in connections
            if connection.status == psutil.CONN_LISTEN
        }
    return result


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.cold_start  # Ray's processes
def test_two_nodes_and_a_dying_worker_give_identical_bits(tmp_path: Path, due: Path, address: str) -> None:
    from fleetdistill_lab.simulation.backends.ray_backend import RayBackend

    alone, on_ray = (prepare(DYING, tmp_path / kind) for kind in ("alone", "ray"))
    seen: list[set[str]] = []
    backend = partial(RayBackend, address, 0)
    with (
        closing(run_in_memory(alone)) as one,
        closing(run_over_memory(*on_ray, lambda store: seen.append(listening()), make_backend=backend)) as other,
    ):
        assert record(one) == record(other)
    assert device_files(alone) == device_files(on_ray)
    assert not list(due.iterdir()), "a worker died in the middle of a training"
    assert set().union(*seen) == {LOOPBACK}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.cold_start
def test_local_cluster_uses_only_loopback_and_ends_with_backend() -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    from fleetdistill_lab.simulation.backends.ray_backend import RayBackend

    with closing(RayBackend("", 1, RunData(b"", {}))):
        assert listening() == {LOOPBACK}
    wait_until(lambda: not listening(), "Ray's processes to end")


@pytest.mark.slow
@pytest.mark.cold_start
def test_address_without_cluster_is_refused_before_any_writing(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    out = tmp_path / "out"
    with pytest.raises(ConfigurationError, match="no Ray cluster at nowhere"):
        simulate(replace(SMALL, backend="ray", ray_address="nowhere", out=out))
    assert not out.exists()
