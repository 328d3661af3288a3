"""The engine of one run: its process, which is started again when it fails or hangs, until it is given up."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from fleetdistill.errors import StoreError
from fleetdistill.link.credentials import write_private
from fleetdistill_server.config.server_config import OF_A_RUN, ServerConfig
from fleetdistill_server.event_kinds import ENGINE_FAILED, ENGINE_RESTARTED, PROCESS_HANGS
from fleetdistill_server.logs import about
from fleetdistill_server.service.child import Child
from fleetdistill_server.service.engine_files import CONFIG_FILE, engine_directory
from fleetdistill_server.service.heartbeat import START_SECONDS, HeartbeatMonitor, clear_heartbeat
from fleetdistill_server.service.process_state import ENGINE, ProcessState
from fleetdistill_server.service.processes import (
    EXIT_CONFIGURATION,
    EXIT_DAMAGED,
    EXIT_NO_SPACE,
    EXIT_STORE_AWAY,
    child_environment,
    ending_in_words,
)
from fleetdistill_server.service.torchrun import Torchrun
from fleetdistill_server.service.wakeups import Ends
from fleetdistill_server.store.blobs import disk_errors
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import shorten, when

FIRST_SECONDS, MAX_SECONDS = 0.2, 300.0
"""Pauses before the first and before a late restart; they double in between."""
MAX_FAILURES = 6
"""How often an engine may fail in the same way at the same point before its run is stopped."""
MAX_KILLS = 12
"""The same for an engine that was killed from outside: the last pauses are then minutes, which outlast a busy machine
or an operator's mistake. The kernel also kills an engine that lacks memory, at the same point each time."""
_DOUBLINGS = 16
"""Upper bound on the exponent; pauses reach `MAX_SECONDS` before it."""
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""What differs between two texts about the same failure, such as addresses and sizes."""
_GPU_DEVICE = re.compile(r"nvidia\d+")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
logger = logging.getLogger("fleetdistill.server.supervisor")
STEADY_SECONDS = 3600.0
"""Seconds without a failure after which earlier failures are forgotten; a run may idle for months."""
WAIT_SECONDS = 10.0
"""Pause before an engine that waits for disk space or for the database is started again."""
_WAITED = {EXIT_NO_SPACE: "disk space", EXIT_STORE_AWAY: "the database"}
"""What an engine waits for, by exit status; this is no failure."""
_WORKS_SECONDS = 60.0
"""Time for which an engine must run before it no longer waits; it may need the space only some time after its start.

After this time, the engine of a run that waits for devices or its next round has got over its failures too.
"""
_TERMINATIONS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that come from outside, also from the kernel when memory is short; others come from a fault of the engine."""
_MAX_START_SECONDS = 300.0
"""Seconds until an engine's first heartbeat is required; importing torch may take minutes."""
_GRACE_SECONDS = 10.0
"""Seconds for which an engine may still exit by itself after its run has finished."""


class Restarts:
    """The failures of one run's engine since its last progress.

    Attributes:
        repeated: How often the last failure has happened.
    """

    def __init__(self) -> None:
        self.repeated = 0
        self._point: object = None
        self._causes = Counter[str]()

    def forget(self) -> None:
        """Forgets all failures."""
        self._causes.clear()

    @property
    def failures(self) -> int:
        """Number of failures since the last progress, of any cause."""
        return self._causes.total()

    def has_progressed(self, point: object) -> bool:
        """Returns whether a run has come further since the last failure; see `pause_after`."""
        return point != self._point

    def pause_after(self, cause: str, point: object, *, killed: bool = False) -> float | None:
        """Records a failure.

        Args:
            cause: Why the engine failed, in words.
            point: How far the run has come; any change since the last failure is progress.
            killed: Whether the engine was killed from outside.

        Returns:
            Seconds until the engine is started again; None to stop the run, because the engine failed in the same way
            at the same point `MAX_FAILURES` times, or `MAX_KILLS` times if it was killed.
        """
        if self.has_progressed(point):
            self._point = point
            self.forget()
        same = _VARYING.sub("#", cause)
        self._causes[same] += 1
        self.repeated = self._causes[same]
        if self.repeated >= (MAX_KILLS if killed else MAX_FAILURES):
            return None
        return float(min(FIRST_SECONDS * 2.0 ** min(self.failures - 1, _DOUBLINGS), MAX_SECONDS))


@dataclass(frozen=True)
class EngineSlot:
    """The place of one engine.

    Attributes:
        ends: The engine's ends of the wake-up pipes.
        gpu: The GPU for an engine of one process, as in CUDA_VISIBLE_DEVICES; empty for the default.
    """

    ends: Ends
    gpu: str = ""

    def environment(self) -> Mapping[str, str]:
        """Returns the variables that select the GPU."""
        return {_VISIBLE: self.gpu} if self.gpu else {}


def make_slots(ends: Sequence[Ends]) -> list[EngineSlot]:
    """Returns one place for each of the ends; the engines share the GPUs equally if there are several of each."""
    gpus = visible_gpus()
    if len(ends) == 1 or len(gpus) < 2:
        return [EngineSlot(end) for end in ends]
    return [EngineSlot(one, gpus[number % len(gpus)]) for number, one in enumerate(ends)]


def engines_at_once(setting: int) -> int:
    """Returns the number of engines that run at once; for 0 one a GPU, else one for two processors, at least 1."""
    return setting or len(visible_gpus()) or max(1, (os.cpu_count() or 1) // 2)


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """Returns the NVIDIA GPUs that a process may use, without loading CUDA: their numbers or names."""
    chosen = os.environ.get(_VISIBLE)
    if chosen is not None:
        return [item.strip() for item in chosen.split(",") if item.strip() not in ("", "-1")]
    result = sorted(int(item.name[6:]) for item in devices.glob("nvidia*") if _GPU_DEVICE.fullmatch(item.name))
    return [str(number) for number in range(len(result))]


class EngineProcess:
    """Runs the engine of one run.

    Args:
        run: Name of the run.
        token: Fencing token that the store has for this engine.
        store: The supervisor's store.
        config: The server's settings, which replace those that the run's configuration has for a server.
        slot: Place of the engine.
        log: File for its standard error; None for the supervisor's.
        options: Further arguments of the process.

    Attributes:
        token: Fencing token of the current process.
        failed: Why the engine is not started again; empty while it is.
        is_damaged: Whether that is because the run's state is damaged.
    """

    def __init__(
        self,
        run: str,
        token: str,
        store: Store,
        config: ServerConfig,
        slot: EngineSlot,
        log: Path | None,
        *options: str,
    ) -> None:
        self.run = run
        self.token = token
        self.failed = ""
        self.is_damaged = False
        self._store = store
        self._config = config
        self.slot = slot
        self._log = log
        self._options = options
        self._directory = engine_directory(Path(config.server.store), run)
        self._due: float | None = None  # when an engine that has exited is started again
        self._restarts = Restarts()
        self._waits_for = ""
        self._pause = ""  # why it does not run, or that it fails again and again
        self._failure = self._failed_at = ""  # why and when it failed the last time
        self._known_failures = self._newest_failure()[0]
        setup = self._write_config()
        self._limit = float(setup["server"].get("engine_timeout_seconds", config.server.engine_timeout_seconds))
        self.reset_heartbeat()
        self.child = self._start(int(setup.get("engine", {}).get("processes", 1)))

    def look(self) -> None:
        """Starts the engine again if it has failed or hangs; call this regularly while the run needs it."""
        code = self.child.process.poll()
        if self.failed:
            return
        if self._due is not None:
            if time.monotonic() >= self._due:
                self._start_again()
        elif code is None:
            self._note_work()
            self._kill_if_hung()
        else:
            self._after_exit(code)

    def end(self, *, at_once: bool = False) -> bool:
        """Ends the process without waiting for it; call repeatedly until this returns True.

        Args:
            at_once: Whether the run was taken from the engine; otherwise it has ended and the engine exits by itself.
        """
        return self._due is not None or self.child.end(0.0 if at_once else _GRACE_SECONDS)

    def state(self) -> ProcessState:
        """Returns what metrics say of the process."""
        state = self.child.state(ENGINE, self.run)
        if state.pid is None:
            return replace(state, waits=self._pause)
        late = f"has not started within {START_SECONDS:g} s" if self._beats.is_late else ""
        return replace(state, waits=late or self._pause, hangs=self._beats.hangs)

    def stop(self, at_once: bool) -> None:
        """Ends the process and waits for it."""
        if self._due is None:
            self.child.stop(at_once)

    def reset_heartbeat(self) -> None:
        """Resets the heartbeat before an engine is started."""
        clear_heartbeat(self._directory)
        self._beats = HeartbeatMonitor(self._directory)

    def _write_config(self) -> dict[str, Any]:
        """Writes the configuration for the engine's process, readable only by its owner."""
        setup = self._store.run_control.setup(self.run) or {}
        settings = self._config.server.model_dump()
        own = setup.get("server", {})
        server = {**settings, **{name: own[name] for name in OF_A_RUN if name in own}}
        merged = {**setup, "server": server, "limits": self._config.limits.model_dump()}
        with disk_errors(f"writing {self._directory}"):
            self._directory.mkdir(parents=True, exist_ok=True)
            write_private(self._directory / CONFIG_FILE, tomli_w.dumps(merged).encode())
        return merged

    def _start(self, processes: int) -> Child:
        module = "fleetdistill_server.engine"
        environment = {**child_environment()}
        if processes == 1:
            return Child(
                module, self._arguments(), self.slot.ends, self._log, {**environment, **self.slot.environment()}
            )
        torchrun = Torchrun(processes, self._directory / "rendezvous")
        environment |= torchrun.environment()
        return Child(module, self._arguments(), self.slot.ends, self._log, environment, torchrun=torchrun)

    def _arguments(self) -> list[str]:
        waits = ["--waits"] if self._waits_for else []
        return [str(self._directory / CONFIG_FILE), "--token", self.token, *waits, *self._options]

    def _start_again(self) -> None:
        """Starts a new process with a token of its own, in case something of the old one is left."""
        pause = ""
        with self._store.transaction():
            token = self._store.run_control.assign(self.run)
            if token is None:  # the run no longer needs an engine
                return
            if not self._waits_for:
                pause = self._repeated_failures()
                self._store.run_control.set_reason(self.run, self._reason(pause))
                self._store.history.add_event(self.run, ENGINE_RESTARTED, "the engine is started again after a failure")
        self._due = None
        self._pause = pause
        self.token = token
        self.reset_heartbeat()
        self.child.arguments = self._arguments()
        self.child.start_again()

    def _after_exit(self, code: int) -> None:
        if code in _WAITED:
            if not self._waits_for:
                self._waits_for = _WAITED[code]
                text = "the engine waits for %s; it is started again every %g s"
                logger.warning(text, self._waits_for, WAIT_SECONDS, extra=about(run=self.run))
            self._wait(WAIT_SECONDS, f"waits for {self._waits_for} and is started again every {WAIT_SECONDS:g} s")
            return
        self._waits_for = ""
        number, cause = self._newest_failure()
        if number > self._known_failures:
            self._known_failures = number
        else:  # the process could not say anything
            cause = ending_in_words("the engine", code)
            self._note_failure(cause)
        if code in (EXIT_CONFIGURATION, EXIT_DAMAGED):
            self.is_damaged = code == EXIT_DAMAGED
            self._give_up(f"the engine cannot run: {cause}")
        else:
            self._after_failure(cause, killed=code == 0 or -code in _TERMINATIONS)

    def _after_failure(self, cause: str, *, killed: bool = False) -> None:
        """Waits before the next start, or gives the engine up."""
        self._failure, self._failed_at = cause, when(time.time())
        if self._is_steady():
            self._restarts.forget()
        pause = self._restarts.pause_after(cause, self._store.run_control.progress(self.run), killed=killed)
        if pause is None:
            self._give_up(f"the engine failed {self._restarts.repeated} times at the same point: {cause}")
            return
        self._wait(pause, f"has failed and is started again at {when(time.time() + pause)}")
        with contextlib.suppress(StoreError):  # the disk may be full too
            self._store.run_control.set_reason(self.run, self._reason(self._pause))

    def _is_steady(self) -> bool:
        """Returns whether the engine has worked for long, or a while for a run that has nothing to do."""
        seconds = time.monotonic() - self.child.started
        if seconds < _WORKS_SECONDS or seconds >= STEADY_SECONDS:
            return seconds >= STEADY_SECONDS
        run = self._store.runs.get(self.run)
        return run is not None and run.waits_since is not None

    def _repeated_failures(self) -> str:
        """Returns what people are told of an engine that is started again; of a single failure nothing."""
        times = self._restarts.failures
        return f"has failed {times} times without progress, the last time at {self._failed_at}" if times > 1 else ""

    def _reason(self, pause: str) -> str:
        return f"the engine {pause}: {self._failure}" if pause else ""

    def _wait(self, seconds: float, why: str) -> None:
        """Plans the next start."""
        self._due = time.monotonic() + seconds
        self._pause = why
        clear_heartbeat(self._directory)  # what does not run does not hang

    def _give_up(self, reason: str) -> None:
        self.failed = reason
        logger.error("run %s is stopped: %s", self.run, reason, extra=about(run=self.run, event=ENGINE_FAILED))

    def _kill_if_hung(self) -> None:
        """Kills an engine without heartbeats, so that it is restarted; only SIGKILL ends a stopped process."""
        silent = self._beats.silent_seconds()
        if hang := self._beats.log_hang("the engine", self.run):
            with contextlib.suppress(StoreError):
                self._store.history.add_event(self.run, PROCESS_HANGS, hang)
        if silent < (self._limit if self._beats.seen else max(self._limit, _MAX_START_SECONDS)):
            return
        self.child.process.kill()
        self.child.process.wait()
        text = f"the engine hangs: it sent no heartbeat for {silent:.0f} s and was killed"
        self._note_failure(text)
        self._after_failure(text)

    def _note_failure(self, text: str) -> None:
        logger.warning("%s", text, extra=about(run=self.run, event=ENGINE_FAILED))
        with contextlib.suppress(StoreError):  # the disk may be full too
            self._known_failures = self._store.history.add_event(self.run, ENGINE_FAILED, text)

    def _note_work(self) -> None:
        """Ends the wait for disk space or the database, or a series of failures, once the engine has done something."""
        if self._pause and (
            self._is_steady() or self._restarts.has_progressed(self._store.run_control.progress(self.run))
        ):
            run = self._store.runs.get(self.run)
            if run is not None and run.reason == shorten(self._reason(self._pause)):
                self._store.run_control.set_reason(self.run, "")
            self._pause = ""
        if self._waits_for and time.monotonic() - self.child.started >= _WORKS_SECONDS:
            logger.warning("the engine no longer waits for %s", self._waits_for, extra=about(run=self.run))
            self._waits_for = ""

    def _newest_failure(self) -> tuple[int, str]:
        """Returns number and text of the newest failure that is recorded; 0 and an empty text without one."""
        failure = self._store.history.newest_event(self.run, ENGINE_FAILED)
        return (0, "") if failure is None else (failure.id, failure.text)
