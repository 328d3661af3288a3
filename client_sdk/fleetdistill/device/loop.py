"""The loops of a device: in the foreground, in a background thread, and in the app's own loop.

One thread at a time works on a device; `Loop` sees to this, and ends the work when the app stops or closes the device.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from fleetdistill.control_flow import control_flow_as_errors
from fleetdistill.device.backend import Backend
from fleetdistill.device.contact import Contact
from fleetdistill.device.events import Step
from fleetdistill.device.interrupts import StopRequest, on_ctrl_c
from fleetdistill.device.parts import DeviceParts
from fleetdistill.device.turn import POLL_SECONDS, Turns
from fleetdistill.errors import ConfigurationError, DeviceBusyError, DeviceClosedError, LinkError

AT_EXIT_SECONDS = 5.0
"""Maximum time that the end of an app waits for the thread of a device that the app did not close."""
_NO_THREAD = -1
"""Identifier of a thread that has not started yet."""


class Loop:
    """Runs the turns of a device, in any of the ways that `Device` offers, until the device is closed.

    The methods of the same names in `Device` say what they do and raise.

    Args:
        parts: What the parts of the open device share.
        contact: Tracks whether the server can be reached.
        turns: Runs one turn.
        backend: Keeps the compute backend, whose unfinished training a second Ctrl-C discards.
        stopped: Ends the work in progress when it is set.
    """

    def __init__(
        self, parts: DeviceParts, contact: Contact, turns: Turns, backend: Backend, stopped: StopRequest
    ) -> None:
        self._parts = parts
        self._events = parts.events
        self._contact = contact
        self._turns = turns
        self._backend = backend
        self._stopped = stopped
        self._lock = WorkLock(parts.storage.directory)
        self._thread: BackgroundThread | None = None
        self._resume_at = 0.0  # time before which `tick` does nothing
        self._closing = threading.Lock()
        self._close_due: bool | None = None  # argument of a `close` that waits for the end of the turn
        self._ctrl_c_reported = False

    @property
    def closed(self) -> bool:
        """Whether the device was closed."""
        return self._lock.closed

    def check_open(self, call: str) -> None:
        """Raises DeviceClosedError, for the method `call`, if the device was closed."""
        self._lock.check_open(call)

    @contextlib.contextmanager
    def working(self, call: str) -> Iterator[None]:
        """Reserves the device for the method `call` within the block; then closes it, if a callback has asked for it.

        Raises:
            DeviceBusyError: A thread works on the device.
            DeviceClosedError: The device was closed.
        """
        try:
            with control_flow_as_errors(call), self._lock.taken(call):
                yield
        finally:
            self._close_if_due()

    # --- in the foreground

    def run(self, *, handle_ctrl_c: bool) -> None:
        """Runs turns until the run is finished, or until `stop` is called."""
        with self.working("run"):
            if handle_ctrl_c:
                self._run_until_ctrl_c()
            else:
                self._run()

    def _run(self) -> None:
        """Runs turns; retries while the server is unavailable."""
        try:
            while not self._stopped.is_set():
                try:
                    result, pause = self._turns.turn(POLL_SECONDS)
                    if result is Step.FINISHED:
                        return
                except LinkError as error:
                    pause = self._contact.lost(error)
                self._wait(pause)
        finally:
            self._stopped.clear()

    def _run_until_ctrl_c(self) -> None:
        try:
            with on_ctrl_c(self.stop) as pressed:
                self._run()
        except KeyboardInterrupt:  # a second Ctrl-C, or the app raises it in its own handler
            self._backend.forget_state()
        else:
            if not pressed:
                return
        self.note_ctrl_c()
        self._events.emit("interrupted", 0, "interrupted by Ctrl-C; the device resumes its work after a restart")

    def note_ctrl_c(self) -> None:
        """Records that the app knows of the Ctrl-C, so that `close` does not raise KeyboardInterrupt for it."""
        self._ctrl_c_reported = True

    def step(self, wait_seconds: float) -> Step:
        """Runs one turn, and waits afterwards if the server requires it. Raises LinkError if the turn failed."""
        with self.working("step"):
            result, pause = self._turns.turn(wait_seconds)
            self._wait(pause)
            return self._unless_stopped(result)

    def tick(self) -> Step:
        """Runs one turn without any wait; does nothing before the end of the last pause."""
        with self.working("tick"):
            if self.pause_seconds:
                return self._unless_stopped(Step.WAITED)
            try:
                result, pause = self._turns.turn(0.0)
            except LinkError as error:
                result, pause = Step.WAITED, self._contact.lost(error)
            self._resume_at = self._parts.clock.now() + pause
            return self._unless_stopped(result)

    @property
    def pause_seconds(self) -> float:
        """Seconds until `tick` runs a turn again; 0 if it does so now."""
        return max(0.0, self._resume_at - self._parts.clock.now())

    def _wait(self, seconds: float) -> None:
        if seconds:
            self._parts.clock.wait(self._stopped, seconds)

    def _unless_stopped(self, result: Step) -> Step:
        """Returns the result of a turn; one that a stop has cut short ends the request to stop."""
        if result is Step.PAUSED or (result is Step.WAITED and self._stopped.is_set()):
            self._stopped.clear()
            return Step.PAUSED
        return result

    # --- in the background

    def start(self) -> None:
        """Runs turns in a background thread, until the run is finished or `stop` is called."""
        self._lock.take("start", for_other_thread=True)
        self._stopped.clear()
        name = f"fleetdistill {self._parts.identity.device}"
        self._thread = BackgroundThread(self._run_in_background, self.stop, name)
        try:
            self._thread.start()
        except BaseException:
            self._lock.give_back()
            raise

    def _run_in_background(self) -> None:
        self._lock.hand_over()
        try:
            with control_flow_as_errors("run"):
                self._run()
        except BaseException as error:
            self._events.emit_failed(error)
            raise
        finally:
            self._lock.give_back()
            self._close_if_due()

    def join(self, timeout: float | None) -> bool:
        """Waits for the end of the background thread; returns whether it has ended."""
        thread = self._thread
        if thread is None:
            return True
        if thread.is_this_thread():
            raise DeviceBusyError("join", "start")
        return thread.join(timeout)

    def background_result(self) -> Future[None]:
        """Returns the result of the last `start`."""
        if self._thread is None:
            raise ConfigurationError("the device has no background thread; call Device.start first")
        return self._thread.ended

    # --- the end

    def stop(self) -> None:
        """Ends the work in progress. Does not wait; may be called from a signal handler."""
        self._stopped.set()
        self._parts.link.interrupt()

    def close(self, *, leave: bool) -> None:
        """Stops the device, waits for the end of its work, leaves the run and releases the state directory."""
        if self._lock.is_mine():
            self._close_due = leave
            self.stop()
            return
        with self._closing, on_ctrl_c(self._parts.link.interrupt) as pressed:
            self.stop()
            if self._lock.close():
                self._release(leave)
        if pressed and not self._ctrl_c_reported:
            raise KeyboardInterrupt

    def _close_if_due(self) -> None:
        """Closes the device if `close` was called during the turn, by a callback of the app."""
        if self._close_due is not None and not self.closed:
            self.close(leave=self._close_due)

    def _release(self, leave: bool) -> None:
        try:
            if leave:
                self._turns.leave()
        finally:
            with self._parts.lock.held():  # no thread reads the model from the state directory
                self._parts.link.close()
                self._parts.permission.usage.settle()
                self._parts.storage.close()


class WorkLock:
    """Ensures that one thread at a time works on a device, and none after the device was closed.

    Args:
        state_dir: State directory of the device, for the errors.
    """

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._changed = threading.Condition()
        self._holder: int | None = None  # identifier of the thread that works on the device
        self._held_by = ""
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the device was closed."""
        return self._closed

    def take(self, call: str, *, for_other_thread: bool = False) -> None:
        """Reserves the device for the calling thread, or for one that calls `hand_over`, until `give_back`.

        Args:
            call: Name of the method that works on the device, for the errors.
            for_other_thread: Whether another thread will work on the device.

        Raises:
            DeviceBusyError: A thread works on the device, also if it is the calling one.
            DeviceClosedError: The device was closed.
        """
        with self._changed:
            self.check_open(call)
            if self._holder is not None:
                raise DeviceBusyError(call, self._held_by)
            self._holder = _NO_THREAD if for_other_thread else threading.get_ident()
            self._held_by = call

    def hand_over(self) -> None:
        """Makes the calling thread the one that works on the device."""
        self._holder = threading.get_ident()

    def give_back(self) -> None:
        """Ends the reservation."""
        with self._changed:
            self._holder = None
            self._changed.notify_all()

    @contextlib.contextmanager
    def taken(self, call: str) -> Iterator[None]:
        """Reserves the device within the block; raises the errors of `take`."""
        self.take(call)
        try:
            yield
        finally:
            self.give_back()

    def is_mine(self) -> bool:
        """Returns whether the calling thread works on the device."""
        return self._holder == threading.get_ident()

    def check_open(self, call: str) -> None:
        """Raises DeviceClosedError if the device was closed."""
        if self._closed:
            raise DeviceClosedError(call, self._state_dir)

    def close(self) -> bool:
        """Waits until no thread works on the device and closes it; returns False if it was closed before."""
        with self._changed:
            self._changed.wait_for(lambda: self._holder is None)
            first, self._closed = not self._closed, True
        return first


class BackgroundThread:
    """Runs a device's loop in a daemon thread, and keeps its exception for `join`.

    A thread that is not a daemon would keep an app without a call of `close` alive until the run is over. A daemon that
    still computes while the interpreter shuts down can crash the process. Therefore the thread is a daemon that
    an exit handler of the interpreter stops and joins, for at most `AT_EXIT_SECONDS`.

    Args:
        loop: Runs until the run is over or the device is stopped.
        stop: Stops `loop`; may be called from any thread.
        name: Name of the thread.
    """

    def __init__(self, loop: Callable[[], None], stop: Callable[[], None], name: str) -> None:
        self._stop = stop
        self.ended: Future[None] = Future()
        """Result of the loop: None, or its exception."""
        self.ended.set_running_or_notify_cancel()  # so that nobody can cancel it
        self._thread = threading.Thread(target=self._run, args=(loop,), name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        atexit.register(self._end_at_exit)
        self._thread.start()

    def is_this_thread(self) -> bool:
        """Returns whether the calling thread is the one of the loop."""
        return threading.current_thread() is self._thread

    def join(self, timeout: float | None) -> bool:
        """Waits for the end of the loop, at most `timeout` seconds; raises its exception. Returns whether it ended."""
        try:
            self.ended.exception(timeout)
        except TimeoutError:
            return False
        self.ended.result()
        return True

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)
        finally:
            atexit.unregister(self._end_at_exit)

    def _end_at_exit(self) -> None:
        self._stop()
        self._thread.join(AT_EXIT_SECONDS)
