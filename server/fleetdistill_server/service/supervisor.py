"""`fleetdistill serve`: one front and the engines of a store's runs, or of one run.

The supervisor owns the wake-up pipes and passes them to every child that it starts. The front reads a copy of the
configuration, so an edit of the file takes effect at the next start of the server; each engine reads the configuration
that the store has for its run. The supervisor has no state of its own and can be restarted at any time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fleetdistill.device.interrupts import StopRequest
from fleetdistill.errors import NoSpaceError, RunError, StoreError, StoreUnavailableError, in_words
from fleetdistill.link.credentials import write_private
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.config.server_config import ServerConfig, ServerSection
from fleetdistill_server.logs import Interruption, about
from fleetdistill_server.service import serve_lock
from fleetdistill_server.service.engine_process import engines_at_once, make_slots
from fleetdistill_server.service.front_process import FrontProcess
from fleetdistill_server.service.process_state import ENGINE, FRONT, ProcessFile, ProcessState
from fleetdistill_server.service.processes import check_system, child_environment
from fleetdistill_server.service.reconciliation import Reconciliation
from fleetdistill_server.service.registration import serve_run
from fleetdistill_server.service.wakeups import make_ends
from fleetdistill_server.store.blobs import disk_errors
from fleetdistill_server.store.location import Location, has_store, set_location
from fleetdistill_server.store.operator_calls import BEGUN, FAILED, LOCAL, caller_in_words
from fleetdistill_server.store.records import OperatorCall
from fleetdistill_server.store.states import ACTIVE, OVER, RunStatus
from fleetdistill_server.store.store import Store

__all__ = ["Supervisor"]

logger = logging.getLogger("fleetdistill.server.supervisor")
_LOOK_SECONDS = 0.1
_FORGET_LOOK_SECONDS = 1.0
_FORGET_RETRY_SECONDS = 60.0
"""Pause after a process that failed to forget devices, for example because a backup is in progress."""
_START_PATIENCE_SECONDS, _PATIENCE_SECONDS = 60.0, 2.0
"""Time for which the supervisor waits for a database: at its start, and later, when it also looks after the front."""
_away = Interruption(logger, "the store cannot be used; retrying: %s", "the store can be used again")
call_logger = logging.getLogger("fleetdistill.server.operators")
LOOK_SECONDS = 1.0
_WHOM = ("role", "name", "device")
"""Arguments that name whom a call revokes or forgets."""
_ASKED = {
    RunStatus.RUNNING: "start",
    RunStatus.PAUSED: "pause",
    RunStatus.STOPPED: "stop",
    RunStatus.CANCELLED: "cancel",
}
"""What ChangeRun is asked to do, by the status that it gives a run."""


def _write_served(config: RunConfig | ServerConfig) -> Path:
    """Writes the configuration for the front, readable only by its owner. Raises StoreError."""
    path = Path(config.server.store) / serve_lock.SERVED_FILE
    text = as_toml(config.model_copy(update={"server": config.server.absolute()})).encode()
    with disk_errors(f"writing {path}"):
        if not (path.exists() and path.read_bytes() == text):  # a server that starts again needs no room on the disk
            write_private(path, text)
    return path


def _note_served_store(server: ServerSection) -> None:
    tls = server.tls()
    if tls is None:
        return
    try:
        serve_lock.note_served_store(tls.directory, Path(server.store))
    except OSError as error:  # on a disk that only root writes to; then a missing store is not noticed
        logger.info("the PKI cannot record which store it serves: %s", in_words(error))


class Forgetting:
    """Starts a process whenever a run that is over, or stopped, has devices to forget; one at a time.

    It is a process of its own because it loads torch.

    Args:
        store: The supervisor's store.
        directory: The store's directory.
        run: The only run of the server; empty for all.
        log_options: `--log-format` and `--log-level` of the process.
    """

    def __init__(self, store: Store, directory: Path, run: str, log_options: Sequence[str]) -> None:
        self._store = store
        self._directory = directory
        self._run = run
        self._log_options = log_options
        self._process: subprocess.Popen[bytes] | None = None
        self._next_look = 0.0

    def look(self) -> None:
        """Starts a process if one is needed; does not wait for it."""
        if self._process is not None and (status := self._process.poll()) is not None:
            self._process = None
            if status:
                logger.error("forgetting devices failed with exit status %d; trying again later", status)
                self._next_look = time.monotonic() + _FORGET_RETRY_SECONDS
        if self._process is not None or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _FORGET_LOOK_SECONDS
        runs = [run for run in self._store.devices.runs_to_forget_in() if self._run in ("", run)]
        if runs:
            module = "fleetdistill_server.engine.forgetting"
            where = [str(self._directory), str(os.getpid())]
            command = [sys.executable, "-m", module, *self._log_options, *where, *runs]
            self._process = subprocess.Popen(command, env=child_environment())

    def stop(self) -> None:
        """Ends the process; the next server starts it again."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


class Supervisor:
    """Runs the front and the engines of a store's runs and restarts them if they fail.

    Args:
        config: A run's configuration, to serve only this run; or a server's, to serve all runs of the store.
        on_listening: Called with the port whenever a front has started to listen.
        log: File for the standard error of front and engines; None for the supervisor's standard error.
        max_short_rounds: Largest number of consecutive short rounds in a simulation, as in `Engine`.
        stopped: Request that makes `serve` return; `stop` sets it.
        log_options: `--log-format` and `--log-level` of the other processes.
        only: `front` or `engine` to run only these processes, for a server beyond one machine; empty for both.

    Attributes:
        store: The store.
        lock: The store's lock, which `serve` releases.
        engines: The engines' processes.

    Raises:
        ConfigurationError: The system is Windows, or the store is of another kind.
        RunError: Another server uses the store, or the run cannot continue with this configuration.
        StoreError: The store cannot be used.
    """

    def __init__(
        self,
        config: RunConfig | ServerConfig,
        on_listening: Callable[[int], None] = lambda port: None,
        log: Path | None = None,
        max_short_rounds: int | None = None,
        stopped: StopRequest | None = None,
        log_options: Sequence[str] = (),
        only: str = "",
    ) -> None:
        check_system()
        self._only = only
        self._max_short_rounds = max_short_rounds
        self._server = config.server
        self._run = config.run.name if isinstance(config, RunConfig) else ""
        self._on_listening = on_listening
        self._log = log
        self._stopped = stopped or StopRequest()
        self._at_once = False
        self._front: FrontProcess | None = None
        directory, is_new = Path(config.server.store), not has_store(Path(config.server.store))
        set_location(directory, Location.of(config.server))
        self.store = Store.open(directory, patience_seconds=_START_PATIENCE_SECONDS)
        self.store.check()
        self.store.blobs.check()
        if is_new:
            logger.info("the store %s is new", directory.absolute())
        _note_served_store(config.server)
        self.store.database.patience_seconds = _PATIENCE_SECONDS
        count = 1 if self._run else engines_at_once(config.server.engines_at_once)
        self.lock = serve_lock.take(directory, self._run, count)
        # Register before any process starts, so that a changed configuration fails in the foreground.
        if isinstance(config, RunConfig) and only != FRONT:  # the engine's server decides
            serve_run(self.store, config)
        self._calls = CallLog(self.store)
        self._process_file = ProcessFile(directory)
        self._forgetting = Forgetting(self.store, directory, self._run, log_options)
        self._arguments = [str(_write_served(config)), *log_options]
        self._front_ends, ends = make_ends(count)
        self.engines = Reconciliation(
            self.store,
            ServerConfig(server=config.server, limits=config.limits),
            make_slots(ends),
            self._run,
            log,
            [*log_options, *([] if max_short_rounds is None else ["--max-short-rounds", str(max_short_rounds)])],
            self._on_failed,
        )

    @property
    def port(self) -> int | None:
        """Port on which the front listens; None until it is known."""
        return self._front.port if self._front is not None else None

    @property
    def enrol_port(self) -> int | None:
        """Port for enrolment; None until it is known; always None in plain text."""
        return self._front.enrol_port if self._front is not None else None

    def stop(self, *, at_once: bool = False) -> None:
        """Makes `serve` return; may be called from a signal handler.

        Args:
            at_once: Whether to kill front and engines instead of terminating them; no data is lost either way.
        """
        self._at_once = at_once
        self._stopped.set()

    def processes(self) -> list[ProcessState]:
        """Returns the state of each process that this supervisor has started; for any thread."""
        front = self._front
        engines = list(self.engines.engines.values())
        return [*([] if front is None else [front.state()]), *(engine.state() for engine in engines)]

    def serve(self, *, until_finished: bool = False, on_over: Callable[[str], None] = lambda status: None) -> bool:
        """Serves until `stop` is called.

        Args:
            until_finished: Also return once the only run has ended and every device has been notified.
            on_over: Called once with the only run's status, finished or cancelled, when it has ended.

        Returns:
            Whether the only run has ended.

        Raises:
            RunError: The front cannot listen, or the store was moved; or, with only one run, its configuration is
                unusable or its engine fails repeatedly.
        """
        over = notified = False
        try:
            if self._only != ENGINE:
                store = Path(self._server.store)
                self._front = FrontProcess(self._arguments, store, self._front_ends, self._log, self._on_listening)
            while not self._stopped.wait(_LOOK_SECONDS):
                serve_lock.check_place(Path(self._server.store), self.lock)
                if self._front is not None:
                    self._look_after_front(self._front)
                self._process_file.write(self.processes())
                try:
                    self._look()
                    over = (status := self._status()) in OVER
                    if over and not notified:
                        notified = True
                        on_over(status)
                    if until_finished and self._is_over():
                        break
                    _away.work()
                except (StoreUnavailableError, NoSpaceError) as error:
                    _away.fail(error)
            with contextlib.suppress(StoreUnavailableError):
                over = self._status() in OVER
            return over
        finally:
            self._forgetting.stop()
            self.engines.stop(self._at_once)
            if self._front is not None:
                self._front.stop(self._at_once)
            self.store.close()
            self.lock.close()

    def _look(self) -> None:
        # Only after the front listens: a second server of the same run, on another machine, fails to listen before its
        # engine could take over the run.
        if self._only == FRONT or (self.port is None and self._only != ENGINE):
            return
        self.engines.look()
        self._forgetting.look()
        self._calls.look()
        self._check_short_rounds()

    def _look_after_front(self, front: FrontProcess) -> None:
        event = front.look()
        if event is None:
            return
        with contextlib.suppress(StoreError):  # the database may be away too
            for run in self.store.runs.all():
                if run.status in ACTIVE:
                    self.store.history.add_event(run.name, *event)

    def _on_failed(self, run: str, reason: str, is_damaged: bool) -> None:
        """Ends a server of one run; a server of many goes on, and the run's status has the reason."""
        if not self._run:
            return
        if is_damaged:  # the reason has the way back
            raise RunError(reason)
        raise RunError(f"{reason}. The run's state is intact; start the server again to continue it")

    def _check_short_rounds(self) -> None:
        """Raises RunError if the engine of a simulation stopped its run after consecutive short rounds."""
        run = self.store.runs.get(self._run) if self._max_short_rounds is not None else None
        if run is not None and run.status is RunStatus.STOPPED:
            raise RunError(run.reason)

    def _status(self) -> str:
        return (self.store.runs.status(self._run) if self._run else None) or ""

    def _is_over(self) -> bool:
        return self._status() in OVER and not self.store.devices.present(self._run)


class CallLog:
    """Logs the calls of operators that are stored from now on, so that a server's log has them wherever they were made.

    Args:
        store: The supervisor's store.
    """

    def __init__(self, store: Store) -> None:
        self._calls = store.operator_calls
        self._last = self._calls.last()
        self._begun: set[int] = set()
        self._looked = time.monotonic()

    def look(self) -> None:
        """Logs the calls since the last look; call this regularly. Reads the store at most once a second."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        for call in self._calls.after(self._last, sorted(self._begun)):
            known = call.id in self._begun
            self._last = max(self._last, call.id)
            if call.result == BEGUN:
                self._begun.add(call.id)
            else:
                self._begun.discard(call.id)
            if not (known and call.result == BEGUN):
                _log(call)


def _log(call: OperatorCall) -> None:
    where = "" if call.role == LOCAL else f" from {call.address}"
    caller = f"{caller_in_words(call.role, call.name)}{where}"
    arguments = _arguments(call)
    whom = "".join(f" {arguments[name]}" for name in _WHOM if arguments.get(name))
    status = arguments.get("status", "")
    asked = f" {_ASKED.get(status, status)}" if status else ""
    text = f"{caller}: {call.call}{asked}{whom}: {call.result}"
    level = logging.WARNING if call.is_refused or call.result.startswith(FAILED) else logging.INFO
    call_logger.log(level, "%s", text, extra=about(run=arguments.get("run")))


def _arguments(call: OperatorCall) -> dict[str, Any]:
    try:
        return dict(json.loads(call.arguments))
    except ValueError:  # they were too long to be stored
        return {}
