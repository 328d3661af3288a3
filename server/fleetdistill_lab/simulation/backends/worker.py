"""A worker process: reads tasks from its standard input and writes their results to its standard output.

python -m fleetdistill_lab.simulation.backends.worker PARENT
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import traceback
from dataclasses import replace
from typing import IO, Any, NoReturn

from fleetdistill_lab.simulation.backends.backend import PackedPayload, Result, Task
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
    from fleetdistill_lab.simulation.backends.task_runner import TaskRunner

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
