"""Chooses the backend of a simulation from its settings."""

from __future__ import annotations

from functools import partial

from fleetdistill.errors import ConfigurationError
from fleetdistill_lab.simulation.backends.backend import MakeBackend
from fleetdistill_lab.simulation.spec.settings import Simulation


def check_backend(wanted: Simulation) -> None:
    """Raises ConfigurationError unless the settings `workers`, `backend` and `ray_address` can be used."""
    if not 0 <= wanted.workers <= wanted.devices:
        raise ConfigurationError(f"workers is {wanted.workers}, must be from 0 to devices ({wanted.devices})")
    if wanted.backend not in ("local", "ray"):
        raise ConfigurationError(f"backend is {wanted.backend!r}, must be local or ray")
    if wanted.ray_address and (wanted.backend != "ray" or wanted.workers):
        raise ConfigurationError(
            "ray_address needs backend ray, and workers 0, because the cluster has its own number of workers"
        )
    if wanted.backend == "ray" and wanted.link != "memory":
        raise ConfigurationError("backend ray needs link memory; leave one of them out")
    if wanted.durable and wanted.link != "memory":
        raise ConfigurationError("durable needs link memory; over gRPC all files are written and fsynced anyway")
    if wanted.has_workers and wanted.durable:
        raise ConfigurationError("workers and backend ray do not work with durable; leave one of them out")
    if wanted.backend == "ray":
        from fleetdistill_lab.simulation.backends.ray_backend import check_ray

        check_ray(wanted.ray_address)


def backend_of(wanted: Simulation) -> MakeBackend | None:
    """Returns the function that makes the backend of a simulation; None to compute in its own process."""
    if wanted.backend == "ray":
        from fleetdistill_lab.simulation.backends.ray_backend import RayBackend

        return partial(RayBackend, wanted.ray_address, wanted.workers)
    if not wanted.workers:
        return None
    from fleetdistill_lab.simulation.backends.worker_processes import WorkerProcesses

    return partial(WorkerProcesses, wanted.workers)
