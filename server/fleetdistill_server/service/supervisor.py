"""`fleetdistill serve`: starts, restarts and stops the front and the engine of one run.

The supervisor owns the wake-up pipes and passes them to every child that it starts. Both children read one copy of the
configuration, so an edit of run.toml takes effect at the next start of the server. The supervisor has no state of its
own and can be restarted at any time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fleetdistill.errors import RunError, StoreError
from fleetdistill.link.credentials import write_private
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.event_kinds import ENGINE_FAILED
from fleetdistill_server.logs import about
from fleetdistill_server.service import serve_lock
from fleetdistill_server.service.heartbeat import HeartbeatMonitor, clear_heartbeat
from fleetdistill_server.service.process_state import ENGINE, FRONT, ProcessState
from fleetdistill_server.service.processes import (
    EXIT_CANNOT_LISTEN,
    EXIT_CONFIGURATION,
    EXIT_NO_SPACE,
    check_system,
    child_environment,
    front_environment,
)
from fleetdistill_server.service.registration import register
from fleetdistill_server.service.torchrun import Torchrun
from fleetdistill_server.service.wakeups import Ends, make_pair
from fleetdistill_server.store.blobs import disk_errors
from fleetdistill_server.store.location import Location, set_location
from fleetdistill_server.store.states import OVER
from fleetdistill_server.store.store import Store

logger = logging.getLogger("fleetdistill.server.supervisor")
MAX_RESTARTS = 5
"""Restarts of a failing engine, without a completed round or `STEADY_SECONDS` in between, before the run is stopped."""
STEADY_SECONDS = 3600.0
"""Seconds without a failure after which an engine's failure count is reset; a run may idle for months."""
_LOOK_SECONDS = 0.1
_STOP_SECONDS = 10.0
_START_SECONDS = 600.0
"""Seconds until an engine's first heartbeat is required; importing torch may take minutes."""
NO_SPACE_SECONDS = 10.0
_SERVED_FILE = "served.toml"
_RENDEZVOUS = "rendezvous"


class Child:
    """A child process that can be restarted."""

    def __init__(
        self,
        module: str,
        arguments: list[str],
        ends: Ends,
        log: Path | None,
        environment: Mapping[str, str],
        *,
        keep_output: bool = False,
        torchrun: Torchrun | None = None,
    ) -> None:
        self.arguments = arguments
        self._module = module
        self._ends = ends
        self._log = log
        self._environment = environment
        self._keep_output = keep_output
        self._torchrun = torchrun
        self.failures = 0
        self.restarts = 0
        self.started = time.monotonic()
        self.process = self._start()

    def restart(self) -> None:
        """Restarts a failed process after a delay."""
        self.failures += 1
        time.sleep(min(0.2 * self.failures, 2.0))
        self.start_again()

    def start_again(self) -> None:
        """Restarts a process that has exited, without a delay."""
        self.restarts += 1
        self.started = time.monotonic()
        self.process = self._start()

    def state(self, name: str, run: str = "") -> ProcessState:
        """Returns what metrics say of the process."""
        return ProcessState(name, run, self.process.pid if self.process.poll() is None else None, self.restarts)

    def stop(self, at_once: bool = False) -> None:
        """Terminates the process, and kills it after `_STOP_SECONDS` or if `at_once`."""
        if at_once:
            self.process.kill()
            self.process.wait()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _start(self) -> subprocess.Popen[str]:
        errors = self._log.open("ab") if self._log else None
        # In a new session, so that Ctrl-C in the terminal reaches only the supervisor, which then stops the children.
        return subprocess.Popen(
            self._command(),
            pass_fds=(self._ends.read, self._ends.write),
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


def _write_served(config: RunConfig) -> Path:
    """Writes the configuration for front and engine, readable only by its owner. Raises StoreError."""
    path = Path(config.server.store) / _SERVED_FILE
    with disk_errors(f"writing {path}"):
        write_private(path, as_toml(config).encode())
    return path


class Supervisor:
    """Runs the front and the engine of one run and restarts them if they fail.

    Args:
        config: The configuration; front and engine read a copy, `served.toml` in the store's directory.
        on_listening: Called with the port whenever a front has started to listen.
        log: File for the standard error of front and engine; None for the supervisor's standard error.
        most_short_rounds: Largest number of consecutive short rounds in a simulation, as in `Engine`.
        stopped: Event that makes `serve` return; `stop` sets it.
        log_options: `--log-format` and `--log-level` of front and engine.
        only: `front` or `engine` to run only that process, for a server beyond one machine; empty for both.

    Attributes:
        port: Port on which the front listens; None until it is known.
        enrol_port: Port for enrolment; None until it is known; always None in plain text.
    """

    def __init__(
        self,
        config: RunConfig,
        on_listening: Callable[[int], None] = lambda port: None,
        log: Path | None = None,
        most_short_rounds: int | None = None,
        stopped: threading.Event | None = None,
        log_options: Sequence[str] = (),
        only: str = "",
    ) -> None:
        check_system()
        self._only = only
        self._most_short_rounds = most_short_rounds
        self._config = config
        self._on_listening = on_listening
        self._log = log
        self._stopped = stopped or threading.Event()
        self._at_once = False
        self.port: int | None = None
        self.enrol_port: int | None = None
        self._front: Child | None = None
        self.engine: Child | None = None
        self._beats = HeartbeatMonitor(Path(config.server.store))
        self._engine_due: float | None = None  # when an engine that lacked disk space is restarted
        set_location(Path(config.server.store), Location.of(config.server))
        self.store = Store.open(Path(config.server.store))
        self.store.check()
        self.lock = serve_lock.take(Path(config.server.store), config.run.name)
        # Register before any process starts, so that a changed configuration fails in the foreground.
        if only != FRONT:  # the engine's server decides
            register(self.store, config)
        self._arguments = [str(_write_served(config)), *log_options]

    def stop(self, *, at_once: bool = False) -> None:
        """Makes `serve` return; may be called from a signal handler.

        Args:
            at_once: Whether to kill front and engine instead of terminating them; no data is lost either way.
        """
        self._at_once = at_once
        self._stopped.set()

    def processes(self) -> list[ProcessState]:
        """Returns the state of each process that this supervisor has started; for any thread."""
        front, engine = self._front, self.engine
        return [
            *([] if front is None else [front.state(FRONT)]),
            *([] if engine is None else [engine.state(ENGINE, self._config.run.name)]),
        ]

    def serve(self, *, until_finished: bool = False, on_over: Callable[[str], None] = lambda status: None) -> bool:
        """Serves until `stop` is called.

        Args:
            until_finished: Also return once the run has ended and every device has been notified.
            on_over: Called once with the run's status, finished or cancelled, when the run has ended.

        Returns:
            Whether the run has ended.

        Raises:
            RunError: The front cannot listen, the configuration is unusable, or the engine fails repeatedly.
        """
        front_ends, self._engine_ends = make_pair()
        module, environment = "fleetdistill_server.front", front_environment()
        if self._only != ENGINE:
            self._front = Child(module, self._arguments, front_ends, self._log, environment, keep_output=True)
            self._read_port(self._front)
        notified = False
        try:
            while not self._stopped.wait(_LOOK_SECONDS):
                self._check_front()
                if self._only != FRONT:
                    self.look_after_engine()
                if not notified and (status := self._status()) in OVER:
                    notified = True
                    on_over(status)
                if until_finished and self._is_over():
                    break
            return self._run_is_over()
        finally:
            for child in (self._front, self.engine):
                if child is not None:
                    child.stop(self._at_once)
            self.store.close()
            self.lock.close()

    def _read_port(self, front: Child) -> None:
        """Reads the ports that the front prints: `enrolling PORT` (with TLS only), then `listening PORT`."""
        stdout = front.process.stdout
        assert stdout is not None

        def read() -> None:
            for line in stdout:
                if line.startswith("enrolling "):
                    self.enrol_port = int(line.split()[1])
                if line.startswith("listening "):
                    self.port = int(line.split()[1])
                    self._on_listening(self.port)

        threading.Thread(target=read, daemon=True).start()

    def _check_front(self) -> None:
        code = self._front.process.poll() if self._front is not None else None
        if self._front is None or code is None:
            return
        if code == EXIT_CANNOT_LISTEN and self.port is None:
            where = self._log or "the log above"
            raise RunError(f"the front cannot listen on {self._config.server.listen}; see {where}")
        logger.warning("the front exited with status %s; restarting it", code)
        # Devices use these ports, even if the system assigned them at the first start.
        known = {"--port": self.port, "--enrol-port": self.enrol_port}
        ports = [f"{option}={port}" for option, port in known.items() if port is not None]
        self._front.arguments = [*self._arguments, *ports]
        self._front.restart()
        self._read_port(self._front)

    def _start_engine(self, arguments: list[str]) -> Child:
        count, module, environment = self._config.engine.processes, "fleetdistill_server.engine", child_environment()
        if count == 1:
            return Child(module, arguments, self._engine_ends, self._log, environment)
        torchrun = Torchrun(count, Path(self._config.server.store) / _RENDEZVOUS)
        environment |= torchrun.environment()
        return Child(module, arguments, self._engine_ends, self._log, environment, torchrun=torchrun)

    def look_after_engine(self) -> None:
        if self.engine is None:
            # Only after the front listens: a second server of the same run fails to listen, before its engine
            # could take over the run.
            if (self.port is not None or self._only == ENGINE) and self._status() != "cancelled":
                given = [*self._arguments]
                if self._most_short_rounds is not None:
                    given += ["--most-short-rounds", str(self._most_short_rounds)]
                self.reset_heartbeat()
                self.engine = self._start_engine(given)
            return
        if self._status() == "cancelled":
            self.engine.stop()
            return
        code = self.engine.process.poll()
        if code is None and not self._run_is_over():
            self._kill_if_hung(self.engine)
        if code is None or self._run_is_over():
            return
        self.reset_heartbeat()
        if code == EXIT_CONFIGURATION:
            row = self.store.runs.get(self._config.run.name)
            if self._most_short_rounds is not None and row is not None and row["status"] == "stopped":
                raise RunError(row["reason"])
            why = self._last_failure() or f"see {self._log or 'the log above'}"
            raise RunError(f"the engine cannot run this configuration: {why}")
        if code == EXIT_NO_SPACE:
            self._restart_after_no_space(self.engine)
            return
        self._note_progress(self.engine)
        if self.engine.failures >= MAX_RESTARTS:
            reason = f"the engine failed {self.engine.failures + 1} times at the same point, {self._why(code)}"
            with contextlib.suppress(StoreError):  # the disk may be full too; the error is reported anyway
                self.store.runs.end(self._config.run.name, "stopped", reason)
            raise RunError(f"{reason}; see the engine's log for the cause. The run's state is intact")
        logger.warning("the engine exited with status %s; restarting it", code)
        self.engine.restart()

    def reset_heartbeat(self) -> None:
        """Resets the heartbeat before an engine is started."""
        directory = Path(self._config.server.store)
        clear_heartbeat(directory)
        self._beats = HeartbeatMonitor(directory)

    def _kill_if_hung(self, engine: Child) -> None:
        """Kills an engine without heartbeats, so that it is restarted; only SIGKILL ends a stopped process."""
        silent, limit = self._beats.silent_seconds(), self._config.server.engine_timeout_seconds
        if silent < (limit if self._beats.seen else max(limit, _START_SECONDS)):
            return
        text = f"the engine hangs: it sent no heartbeat for {silent:.0f} s and was killed"
        logger.warning("%s", text, extra=about(run=self._config.run.name, event=ENGINE_FAILED))
        engine.process.kill()
        engine.process.wait()
        with contextlib.suppress(StoreError):
            self.store.history.add_event(self._config.run.name, ENGINE_FAILED, text)

    def _restart_after_no_space(self, engine: Child) -> None:
        """Restarts an engine that lacked disk space after `NO_SPACE_SECONDS`; this does not count as a failure."""
        now = time.monotonic()
        if self._engine_due is None:
            self._engine_due = now + NO_SPACE_SECONDS
            logger.warning("the engine waits for disk space; retrying in %g s", NO_SPACE_SECONDS)
        elif now >= self._engine_due:
            self._engine_due = None
            engine.start_again()

    def _why(self, code: int) -> str:
        """Returns the engine's exit status and last recorded failure."""
        last = self._last_failure()
        return f"last with {code}" + (f": {last}" if last else "")

    def _last_failure(self) -> str:
        """Returns the engine's last recorded failure, or an empty string."""
        failures = self.store.history.events(self._config.run.name, ENGINE_FAILED)
        return str(failures[-1]["text"]) if failures else ""

    _completed = 0

    def _note_progress(self, engine: Child) -> None:
        row = self.store.runs.get(self._config.run.name)
        completed = int(row["completed_rounds"]) if row else 0
        if completed > self._completed:
            self._completed, engine.failures = completed, 0
        if time.monotonic() - engine.started >= STEADY_SECONDS:
            engine.failures = 0

    def _run_is_over(self) -> bool:
        return self._status() in OVER

    def _status(self) -> str:
        row = self.store.runs.get(self._config.run.name)
        return row["status"] if row is not None else ""

    def _is_over(self) -> bool:
        return self._run_is_over() and not self.store.devices.present(self._config.run.name)
