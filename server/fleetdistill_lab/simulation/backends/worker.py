"""A worker process: reads tasks from its standard input and writes their results to its standard output.

python -m fleetdistill_lab.simulation.backends.worker PARENT
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import time
import traceback
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import IO, Any, NoReturn

import torch

from fleetdistill import COLUMNS
from fleetdistill.compute.base import Compute, Computed
from fleetdistill.device.budgets import MAX_SECONDS_PER_ASK
from fleetdistill.errors import FleetDistillError
from fleetdistill.interruption import time_limit
from fleetdistill.methods.outside import import_modules
from fleetdistill.training.randomness import without_app
from fleetdistill.wire.codec import decode
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_lab.simulation.backends.backend import Description, PackedPayload, Result, RunData, Task
from fleetdistill_lab.simulation.spec.compute import Shared
from fleetdistill_lab.simulation.spec.device import make_compute
from fleetdistill_server.service.processes import end_with_parent

_SIZE_BYTES = 8


def send(stream: IO[bytes], message: Any) -> None:
    """Writes one message."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    stream.write(len(data).to_bytes(_SIZE_BYTES, "little"))
    stream.write(data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Returns the next message. Raises EOFError if the other process has ended."""
    return pickle.loads(_read(stream, int.from_bytes(_read(stream, _SIZE_BYTES), "little")))


def _read(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def main() -> int:
    """Computes tasks until the simulation closes the pipe; returns the process's exit status."""
    end_with_parent(int(sys.argv[1]))
    logging.getLogger("fleetdistill").addHandler(logging.NullHandler())
    tasks, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a model prints must not mix with the results
    try:
        _work(tasks, results)
    except (EOFError, BrokenPipeError):  # the simulation has ended
        return 0


def _work(tasks: IO[bytes], results: IO[bytes]) -> NoReturn:
    from fleetdistill_lab.simulation.backends.worker import TaskRunner

    runner = TaskRunner(receive(tasks))
    payload: PackedPayload | None = None
    while True:
        task, repeats = receive(tasks)
        payload = payload if repeats else task.payload
        send(results, run_task(runner, replace(task, payload=payload)))


def run_task(runner: Any, task: Task) -> Result:
    """Returns a task's result; prints the traceback of an exception that ends the simulation."""
    try:
        result: Result = runner.run(task)
        return result
    except Exception as error:  # of the app's model
        traceback.print_exc()
        return Result(fault=f"{task.spec.name}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())


MAX_PREPARED = 64
"""Largest number of devices whose model a worker keeps; preparing one again takes milliseconds."""


@dataclass
class _Prepared:
    """A device's compute backend, and the state and delivered model that it holds."""

    compute: Compute
    description: Description
    held: tuple[bytes, bytes | None] | None = None


class TaskRunner:
    """Computes tasks one after another.

    Args:
        run: The run's data.

    Attributes:
        threads: Torch's number of threads.
    """

    def __init__(self, run: RunData) -> None:
        self._contract = contract_pb2.Contract.FromString(run.contract)
        self.threads = self._contract.threads
        self._payloads = run.payloads
        self._shared = Shared()
        self._prepared: OrderedDict[str, _Prepared] = OrderedDict()
        torch.set_num_threads(self.threads)

    def run(self, task: Task) -> Result:
        """Returns a task's result, including an error that a device declines with."""
        description, first = None, None
        try:
            with without_app():
                prepared = self._prepare(task)
                description = prepared.description
                if task.prepare_only:
                    return Result(description)
                first = self._load(prepared, task)
                computed = _answer(prepared, task) if task.ask else None
        except FleetDistillError as error:
            self._prepared.pop(task.spec.name, None)
            return Result(description, first, error=error)
        return Result(description, first, computed)

    def _prepare(self, task: Task) -> _Prepared:
        name = task.spec.name
        known = self._prepared.get(name)
        if known is None or (known.held is not None and task.state is None):  # the weights may have changed
            self._prepared[name] = self._new(task)
        self._prepared.move_to_end(name)
        if len(self._prepared) > MAX_PREPARED:
            self._prepared.popitem(last=False)
        return self._prepared[name]

    def _new(self, task: Task) -> _Prepared:
        import_modules(task.spec.modules, "modules")
        compute = make_compute(task.spec, self._contract, self._shared)
        wanted = tuple(compute.wanted_payloads())
        for sha256 in wanted:
            if sha256 != self._contract.initial_weights:
                compute.take_payload(sha256, decode(self._payloads[sha256].unpacked()))
        digest = compute.data_digest()
        return _Prepared(compute, Description(compute.profile(COLUMNS).SerializeToString(), digest, wanted))

    def _load(self, prepared: _Prepared, task: Task) -> tuple[bytes, bytes] | None:
        """Loads the device's state; returns it if it is the first one."""
        compute, initial = prepared.compute, self._contract.initial_weights
        if task.state is not None:
            if prepared.held != (task.state, task.delivered):
                compute.restore(task.state, task.delivered)
                prepared.held = task.state, task.delivered
            return None
        if initial and initial in prepared.description.wanted_payloads:
            compute.load_initial(decode(self._payloads[initial].unpacked()))
        prepared.held = first = compute.state(), compute.delivered_state()
        return first


def _answer(prepared: _Prepared, task: Task) -> Computed:
    """Answers the ask, and keeps the state as if the server had accepted the answer."""
    assert prepared.held is not None  # loaded before
    ask = service_pb2.Ask.FromString(task.ask)
    parts = {} if task.payload is None else decode(task.payload.unpacked())
    with time_limit(MAX_SECONDS_PER_ASK, time.monotonic):
        computed = prepared.compute.answer(ask, parts, task.allow)
    if computed.replacement is not None:
        prepared.compute.deliver(computed.replacement)
    prepared.held = computed.state, prepared.held[1] if computed.delivered is None else computed.delivered
    return computed
