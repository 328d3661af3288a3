"""The supervisor's front: one process for all runs of a store, started again on the same ports if it exits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fleetdistill.errors import RunError
from fleetdistill_server.event_kinds import FRONT_RESTARTED, PROCESS_HANGS
from fleetdistill_server.service.child import Child
from fleetdistill_server.service.heartbeat import FRONT_FILE, HeartbeatMonitor, clear_heartbeat
from fleetdistill_server.service.process_state import FRONT, ProcessState
from fleetdistill_server.service.processes import EXIT_CANNOT_LISTEN, ending_in_words, front_environment
from fleetdistill_server.service.wakeups import Ends

logger = logging.getLogger("fleetdistill.server.supervisor")
FRONT_TIMEOUT_SECONDS = 60.0
"""Seconds without a heartbeat after which a front that has sent one is killed and started again."""
STEADY_SECONDS = 10.0
"""Seconds for which a front must have listened until its earlier failures no longer count."""
_MAX_PAUSE_SECONDS = 5.0
"""Longest pause before a front is started again that fails repeatedly."""
_READ_SECONDS = 1.0
"""Time limit for reading what a front that has ended printed."""


class FrontProcess:
    """Runs the front.

    Args:
        arguments: Path of its configuration, and options.
        store: The store's directory.
        ends: Its ends of the wake-up pipes.
        log: File for its standard error; None for the supervisor's.
        on_listening: Called with the port whenever a front has started to listen.

    Attributes:
        port: Port on which the front listens; None until it is known.
        enrol_port: Port for enrolment; None until it is known; always None in plain text.
    """

    def __init__(
        self, arguments: Sequence[str], store: Path, ends: Ends, log: Path | None, on_listening: Callable[[int], None]
    ) -> None:
        self._arguments = list(arguments)
        self._store = store
        self._log = log
        self._on_listening = on_listening
        self.port: int | None = None
        self.enrol_port: int | None = None
        self._failures = 0  # ends in a row of fronts that did not listen for `STEADY_SECONDS`
        self._ending = self._logged = ""  # how the last one ended, and what was last logged of that
        self._start_at: float | None = None  # when the next one is started
        self._failure = ""  # what the process said of its end
        self._listens_since: float | None = None
        self._reset_heartbeat()
        self._child = Child(
            "fleetdistill_server.front", self._arguments, ends, log, front_environment(), keep_output=True
        )
        self._reader = self._read_lines()

    def look(self) -> tuple[str, str] | None:
        """Starts the front again if it has exited, or hangs for a minute, and logs that; call this regularly.

        Returns:
            Kind and text of the event, if it was started again, or begins or ceases to hang.

        Raises:
            RunError: It never listened and cannot.
        """
        if self._start_at is not None:
            return self._start_again() if time.monotonic() >= self._start_at else None
        code = self._child.process.poll()
        if code is None:
            if self._is_steady:
                self._note_works()
            silent = self._beats.silent_seconds()
            hang = self._beats.log_hang("the front")
            if not self._beats.seen or silent < FRONT_TIMEOUT_SECONDS:
                return (PROCESS_HANGS, hang) if hang else None
            self._child.process.kill()  # only SIGKILL ends a stopped process
            self._child.process.wait()
            self._ending = f"the front sent no heartbeat for {silent:.0f} s and was killed"
        elif code == EXIT_CANNOT_LISTEN and self.port is None:
            self._reader.join(_READ_SECONDS)
            raise RunError(f"the front {self._failure}")
        else:
            self._reader.join(_READ_SECONDS)
            self._ending = f"the front {self._failure}" if self._failure else ending_in_words("the front", code)
        self._failures += 1
        pause = min(0.2 * 2**self._failures, _MAX_PAUSE_SECONDS) if self._failures > 1 else 0.0
        self._log_ending(pause, killed=code is not None and code < 0)
        if self._failures == 1:
            return self._start_again()
        self._start_at = time.monotonic() + pause
        return None

    def _log_ending(self, pause: float, *, killed: bool) -> None:
        """Logs how the front ended: a kill each time, what lasts once, such as a port that stays taken."""
        if killed and self._failures > 1:
            text = "%s; failure %d without working for %g s, the next start in %.1f s"
            logger.warning(text, self._ending, self._failures, STEADY_SECONDS, pause)
        elif killed or self._ending != self._logged:  # not one line every few seconds
            logger.warning("%s; restarting it", self._ending)
        self._logged = self._ending

    def _start_again(self) -> tuple[str, str]:
        # Devices use these ports, even if the system assigned them at the first start.
        known = {"--port": self.port, "--enrol-port": self.enrol_port}
        self._child.arguments = [
            *self._arguments,
            *(f"{option}={port}" for option, port in known.items() if port is not None),
        ]
        self._start_at = None
        self._reset_heartbeat()
        self._child.start_again()
        self._reader = self._read_lines()
        return FRONT_RESTARTED, f"{self._ending}; it was started again"

    @property
    def _is_steady(self) -> bool:
        """Whether the front has listened for a while."""
        return self._listens_since is not None and time.monotonic() - self._listens_since >= STEADY_SECONDS

    def _note_works(self) -> None:
        if self._failures > 1:
            logger.warning("the front works again, after %d failures", self._failures)
        self._failures, self._logged = 0, ""

    def state(self) -> ProcessState:
        """Returns what metrics say of the process."""
        state = self._child.state(FRONT)
        waits = ""
        if self._failures > 1 and not (state.pid is not None and self._is_steady):
            last = self._ending.removeprefix("the front ")
            waits = f"has failed {self._failures} times without working for {STEADY_SECONDS:g} s; last time, it {last}"
        return replace(state, waits=waits, hangs=self._beats.hangs if state.pid is not None else "")

    def stop(self, at_once: bool) -> None:
        """Ends the process."""
        self._child.stop(at_once)

    def _reset_heartbeat(self) -> None:
        clear_heartbeat(self._store, FRONT_FILE)
        self._beats = HeartbeatMonitor(self._store, file=FRONT_FILE)

    def _read_lines(self) -> threading.Thread:
        """Reads what the front prints: `enrolling PORT` (with TLS only), then `listening PORT`; or `failed TEXT`."""
        stdout = self._child.process.stdout
        assert stdout is not None
        self._failure, self._listens_since = "", None

        def read() -> None:
            for line in stdout:
                what, _, value = line.strip().partition(" ")
                match what:
                    case "enrolling":
                        self.enrol_port = int(value)
                    case "listening":
                        self.port, self._listens_since = int(value), time.monotonic()
                        self._on_listening(self.port)
                    case "failed":
                        self._failure = value

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread
