"""`RayBackend`, the backend that computes tasks on a Ray cluster, on one machine or several."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from fleetdistill.errors import ConfigurationError, RunError
from fleetdistill_lab.simulation.backends.backend import PackedPayload, Result, RunData, Task
from fleetdistill_lab.simulation.backends.worker import TaskRunner, run_task

_RETRIES = 1
_runner: tuple[str, TaskRunner] | None = None  # of a Ray worker process, with the id of its run


def load_ray() -> Any:
    """Imports Ray. Raises ConfigurationError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError("the backend ray needs Ray: pip install 'fleetdistill[ray]'") from error
    return ray


def compute(key: str, run: list[Any], payload: PackedPayload | None, task: Task) -> Result:
    """Computes a task in a Ray worker process, which keeps the models of its last run.

    Args:
        key: Id of the run's data.
        run: Reference to the run's data; in a list, so that Ray does not read them for every task.
        payload: Payload of the task's ask.
        task: The task, without its payload.
    """
    global _runner
    if _runner is None or _runner[0] != key:
        _runner = key, TaskRunner(load_ray().get(run[0]))
    return run_task(_runner[1], replace(task, payload=payload))


class RayBackend:
    """Implements `Backend` with Ray tasks. Ray starts the worker processes, and replaces those that die.

    Args:
        address: Address of a Ray cluster, as in `ray.init`; empty for a cluster on this machine that ends with the
            backend.
        workers: Number of tasks at a time on this machine; 0 for all processors. Not with an address.
        run: The run's data.

    Raises:
        ConfigurationError: Ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, address: str, workers: int, run: RunData) -> None:
        self._ray = load_ray()
        self._started = not self._ray.is_initialized()
        if self._started:
            _connect(self._ray, address, workers)
        self._run = self._ray.put(run)
        self._compute = self._ray.remote(num_cpus=1, max_retries=_RETRIES)(compute)
        self._payload: tuple[PackedPayload, Any] | None = None

    def submit(self, task: Task) -> Future[Result]:
        """See `Backend.submit`."""
        given = replace(task, payload=None)
        reference = self._compute.remote(self._run.hex(), [self._run], self._shared(task.payload), given)
        result: Future[Result] = Future()
        reference.future().add_done_callback(lambda done: _settle(result, done, task))
        return result

    def _shared(self, payload: PackedPayload | None) -> Any:
        """Returns the reference to a payload in Ray's object store, where many tasks find it."""
        if payload is None:
            return None
        if self._payload is None or self._payload[0] is not payload:
            self._payload = payload, self._ray.put(payload)
        return self._payload[1]

    def close(self) -> None:
        """See `Backend.close`; a cluster that was there before goes on."""
        if self._started:
            self._ray.shutdown()


def check_ray(address: str) -> None:
    """Raises ConfigurationError unless Ray is installed and has a cluster at the address, if there is one."""
    ray = load_ray()
    if address and not ray.is_initialized():
        _connect(ray, address, 0)
        ray.shutdown()


def _connect(ray: Any, address: str, workers: int) -> None:
    given: dict[str, Any] = {"address": address}
    if not address:
        given = {"address": "local", "num_cpus": workers or None, "_node_ip_address": "127.0.0.1"}
        given["include_dashboard"] = False
    try:
        ray.init(logging_level=logging.WARNING, **given)
    except (ConnectionError, ValueError, RuntimeError) as error:
        text = str(error).strip().split("\n")[0].rstrip(".")
        raise ConfigurationError(f"no Ray cluster at {address or 'this machine'}: {text}; check ray_address") from error


def _settle(result: Future[Result], done: Future[Any], task: Task) -> None:
    error = done.exception()
    if error is None:
        result.set_result(done.result())
        return
    reason = str(error).strip().split("\n")[0]
    text = f"Ray could not compute for {task.spec.name} ({type(error).__name__}: {reason}); continue with --resume"
    result.set_exception(RunError(text))
