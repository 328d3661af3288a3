"""`WorkerProcesses`, the backend that computes tasks in processes on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue

from fleetdistill.errors import RunError
from fleetdistill_lab.simulation.backends.backend import PackedPayload, Result, RunData, Task
from fleetdistill_lab.simulation.backends.worker import receive, send
from fleetdistill_server.service.processes import child_environment

logger = logging.getLogger("fleetdistill.server.simulation")
_MODULE = "fleetdistill_lab.simulation.backends.worker"


class WorkerProcesses:
    """Implements `Backend` with worker processes, each with a thread that hands it one task at a time.

    Args:
        workers: Number of processes, at least 1.
        run: The run's data.
    """

    def __init__(self, workers: int, run: RunData) -> None:
        self._run = run
        self._tasks: SimpleQueue[tuple[Task, Future[Result]] | None] = SimpleQueue()
        self._closing = False
        self._lock = threading.Lock()  # no process starts after `close` has killed the others
        self._processes: dict[int, _Process] = {}
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"worker {number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> Future[Result]:
        """See `Backend.submit`."""
        future: Future[Result] = Future()
        self._tasks.put((task, future))
        return future

    def close(self) -> None:
        """See `Backend.close`."""
        with self._lock:
            self._closing = True
            for process in self._processes.values():
                process.kill()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        try:
            while (given := self._tasks.get()) is not None and not self._closing:
                task, future = given
                try:
                    future.set_result(self._compute(number, task))
                except BaseException as error:  # raised again in the thread that waits for the result
                    future.set_exception(error)
        finally:
            self._end(number)

    def _compute(self, number: int, task: Task) -> Result:
        """Returns a task's result; a worker that dies is replaced once."""
        try:
            return self._process(number).run(task)
        except (OSError, EOFError):
            died = self._end(number)
        if not self._closing:
            logger.warning("%s while computing for %s; another worker computes it again", died, task.spec.name)
        try:
            return self._process(number).run(task)
        except (OSError, EOFError) as error:
            raise RunError(
                f"two workers died while computing for {task.spec.name}: {self._end(number)}; check the system log, "
                "use fewer --workers if memory ran out, and continue with --resume"
            ) from error

    def _process(self, number: int) -> _Process:
        with self._lock:
            if self._closing:
                raise RunError("the simulation has ended")
            if number not in self._processes:
                self._processes[number] = _Process(self._run)
            return self._processes[number]

    def _end(self, number: int) -> str:
        """Ends a process that is dead or not needed; returns how it ended."""
        with self._lock:
            process = self._processes.pop(number, None)
        return "" if process is None else process.end()


class _Process:
    """One worker process."""

    def __init__(self, run: RunData) -> None:
        command = [sys.executable, "-m", _MODULE, str(os.getpid())]
        pipe = subprocess.PIPE
        self._popen = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, start_new_session=True, env=child_environment()
        )
        assert self._popen.stdin is not None  # both are pipes
        assert self._popen.stdout is not None
        self._tasks, self._results = self._popen.stdin, self._popen.stdout
        self._sent: PackedPayload | None = None  # payload that the process has
        send(self._tasks, run)

    def run(self, task: Task) -> Result:
        """Returns a task's result. Raises OSError or EOFError if the process is dead."""
        repeats = task.payload == self._sent
        send(self._tasks, (replace(task, payload=None) if repeats else task, repeats))
        self._sent = task.payload
        result: Result = receive(self._results)
        return result

    def kill(self) -> None:
        """Kills the process, so that `run` ends."""
        self._popen.kill()

    def end(self) -> str:
        """Ends the process and returns how it ended."""
        self._popen.kill()
        status = self._popen.wait()
        for pipe in (self._tasks, self._results):
            with contextlib.suppress(OSError):
                pipe.close()
        return f"worker process {self._popen.pid} died with {f'signal {-status}' if status < 0 else f'status {status}'}"
