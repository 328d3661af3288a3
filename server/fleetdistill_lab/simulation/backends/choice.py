"""Chooses the backend of a simulation from its settings."""

from __future__ import annotations

import os
from functools import partial

from fleetdistill.errors import ConfigurationError
from fleetdistill_lab.simulation.backends.backend import MakeBackend
from fleetdistill_lab.simulation.spec.settings import Simulation

MIN_ASK_SECONDS = 0.02
"""Mean seconds of an ask from which `workers = "auto"` uses worker processes; see `benchmarks/workers.py`."""


def check_backend(wanted: Simulation) -> None:
    """Raises ConfigurationError unless the settings `workers`, `backend` and `ray_address` can be used."""
    if isinstance(wanted.workers, str) and wanted.workers != "auto":
        raise ConfigurationError(f"workers is {wanted.workers!r}, must be a number or auto")
    if isinstance(wanted.workers, int) and not 0 <= wanted.workers <= wanted.devices:
        raise ConfigurationError(f"workers is {wanted.workers}, must be auto, or from 0 to devices ({wanted.devices})")
    if wanted.backend not in ("local", "ray", "stacked"):
        raise ConfigurationError(f"backend is {wanted.backend!r}, must be local, ray or stacked")
    if wanted.ray_address and (wanted.backend != "ray" or wanted.workers):
        raise ConfigurationError(
            "ray_address needs backend ray, and workers 0, because the cluster has its own number of workers"
        )
    if wanted.backend != "local" and wanted.link != "memory":
        raise ConfigurationError(f"backend {wanted.backend} needs link memory; leave one of them out")
    if wanted.backend == "stacked" and wanted.workers:
        raise ConfigurationError("backend stacked computes in the simulation's process; leave workers out")
    if wanted.durable and wanted.link != "memory":
        raise ConfigurationError("durable needs link memory; over gRPC all files are written and fsynced anyway")
    if wanted.has_workers and wanted.durable:
        raise ConfigurationError("workers and other backends do not work with durable; leave one of them out")
    if wanted.backend == "ray":
        if wanted.workers == "auto":
            raise ConfigurationError("workers auto works with backend local only; give a number, or leave it out")
        from fleetdistill_lab.simulation.backends.ray_backend import check_ray

        check_ray(wanted.ray_address)


def backend_of(wanted: Simulation) -> MakeBackend | None:
    """Returns the function that makes the backend of a simulation; None to compute in its own process."""
    if wanted.backend == "ray":
        from fleetdistill_lab.simulation.backends.ray_backend import RayBackend

        assert isinstance(wanted.workers, int)  # checked
        return partial(RayBackend, wanted.ray_address, wanted.workers)
    if wanted.backend == "stacked":
        from fleetdistill_lab.simulation.backends.stacked_models import StackedModels

        return StackedModels
    count = wanted.workers if isinstance(wanted.workers, int) else _auto_workers(wanted)
    if count == 0 or (wanted.workers == "auto" and (count == 1 or wanted.durable)):
        return None
    from fleetdistill_lab.simulation.backends.worker_processes import WorkerProcesses

    return partial(WorkerProcesses, count)


def min_ask_seconds(wanted: Simulation) -> float:
    """Returns the mean seconds of an ask from which other processes compute the devices' work; 0 for always."""
    return MIN_ASK_SECONDS if wanted.workers == "auto" else 0.0


def auto_line(wanted: Simulation, ask_seconds: float) -> str:
    """Returns what `workers = "auto"` has chosen, and why.

    Args:
        wanted: Settings of the simulation.
        ask_seconds: Mean seconds of an ask in the first round; any number over gRPC, where it does not matter.
    """
    if wanted.link == "grpc":
        return "workers auto: a process of devices per processor, as always over gRPC"
    measured = f"an ask took {1000 * ask_seconds:.3g} ms on average"
    count = _auto_workers(wanted)
    if count == 1:
        return f"workers auto: none, because there is one processor, or one device; {measured}"
    if ask_seconds < MIN_ASK_SECONDS:
        return f"workers auto: none, because {measured}, below {1000 * MIN_ASK_SECONDS:g} ms"
    return f"workers auto: {count} processes, because {measured}, at least {1000 * MIN_ASK_SECONDS:g} ms"


def _auto_workers(wanted: Simulation) -> int:
    return min(usable_processors(), wanted.devices)


def usable_processors() -> int:
    """Returns the number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1
