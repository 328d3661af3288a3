"""A child process of the supervisor that can be started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleetdistill_server.service.process_state import ProcessState
from fleetdistill_server.service.torchrun import Torchrun
from fleetdistill_server.service.wakeups import Ends

STOP_SECONDS = 10.0
"""Seconds after SIGTERM until a child is killed."""


class Child:
    """A child process that can be restarted.

    Args:
        module: Python module that the process runs.
        arguments: Its arguments, except those that tie it to the supervisor.
        ends: Its ends of the wake-up pipes.
        log: File for its standard error; None for the supervisor's.
        environment: Its environment.
        keep_output: Whether the supervisor reads its standard output.
        torchrun: Starts several processes of the module; None for one.

    Attributes:
        restarts: How often it was started again.
        started: Monotonic seconds of the last start.
        process: The current process.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        ends: Ends,
        log: Path | None,
        environment: Mapping[str, str],
        *,
        keep_output: bool = False,
        torchrun: Torchrun | None = None,
    ) -> None:
        self.arguments = list(arguments)
        self._module = module
        self._ends = ends
        self._log = log
        self._environment = environment
        self._keep_output = keep_output
        self._torchrun = torchrun
        self._killed_at: float | None = None
        self._terminated = False
        self.restarts = 0
        self.started = time.monotonic()
        self.process = self._start()

    def start_again(self) -> None:
        """Restarts a process that has exited."""
        self._killed_at, self._terminated = None, False
        self.restarts += 1
        self.started = time.monotonic()
        self.process = self._start()

    def state(self, name: str, run: str = "") -> ProcessState:
        """Returns what metrics say of the process."""
        return ProcessState(name, run, self.process.pid if self.process.poll() is None else None, self.restarts)

    def stop(self, at_once: bool = False) -> None:
        """Terminates the process, and kills it after `STOP_SECONDS` or if `at_once`."""
        if at_once:
            self.process.kill()
        self.end()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def end(self, grace_seconds: float = 0.0) -> bool:
        """Ends the process without waiting for it; call repeatedly until this returns True.

        Args:
            grace_seconds: Time for which the process may still exit by itself, from the first call.
        """
        if self.process.poll() is not None:
            return True
        now = time.monotonic()
        if self._killed_at is None:
            self._killed_at = now + grace_seconds + STOP_SECONDS
        if now >= self._killed_at:
            self.process.kill()
        elif now >= self._killed_at - STOP_SECONDS and not self._terminated:
            self._terminated = True  # a second signal could come while the process ends, and be reported as an error
            self.process.send_signal(signal.SIGTERM)
        return False

    def _start(self) -> subprocess.Popen[str]:
        errors = self._log.open("ab") if self._log else None
        # In a new session, so that Ctrl-C in the terminal reaches only the supervisor, which then stops the children.
        return subprocess.Popen(
            self._command(),
            pass_fds=self._ends.all(),
            stdout=subprocess.PIPE if self._keep_output else None,
            stderr=errors,
            # gRPC would print its own lines on standard error before the error message.
            env={"GRPC_VERBOSITY": "NONE", **self._environment},
            text=True,
            start_new_session=True,
        )

    def _command(self) -> list[str]:
        """Returns the command; several processes are started by torchrun, which passes no pipes to them."""
        if self._torchrun is None:
            tied = ["--wakeups", str(self._ends), "--parent", str(os.getpid())]
            return [sys.executable, "-m", self._module, *self.arguments, *tied]
        return [*self._torchrun.command(), self._module, *self.arguments, "--supervisor", str(os.getpid())]
