"""The loops of a device: in the foreground, in a background thread, and in the app's own loop, over one `Engine`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Self

from fleetdistill.checked import check_number
from fleetdistill.control_flow import control_flow_as_errors
from fleetdistill.device.background import BackgroundLoop
from fleetdistill.device.engine import POLL_SECONDS, Engine
from fleetdistill.device.events import Events, Step
from fleetdistill.device.interrupts import on_ctrl_c
from fleetdistill.device.session import Session
from fleetdistill.device.turns import Turns
from fleetdistill.errors import ConfigurationError, DeviceBusyError, FleetDistillError

_MAX_WAIT_SECONDS = 60.0


class Loops:
    """Base class of `Device` with the methods that make it work, stop and close.

    Args:
        session: State of the open device.
        events: Emits events to the app.
        engine: Runs the device's turns.
        stopped: Ends the engine's work when it is set.
    """

    def __init__(self, session: Session, events: Events, engine: Engine, stopped: threading.Event) -> None:
        self._session = session
        self._events = events
        self._engine = engine
        self._stopped = stopped
        self._turns = Turns(session.storage.directory)
        self._background: BackgroundLoop | None = None
        self._closing = threading.Lock()
        self._close_due: bool | None = None  # argument of a `close` that waits for the end of the turn
        self._ctrl_c_reported = False

    def run(self, *, handle_ctrl_c: bool = True) -> None:
        """Takes part in the run until it is finished, or until `stop` is called.

        While the server is unavailable, `run` retries with exponential backoff, 0.5 to 15 seconds. A call of `stop`
        before `run` makes it return immediately.

        Args:
            handle_ctrl_c: Whether Ctrl-C calls `stop`, and a second Ctrl-C makes `run` return without waiting for the
                end of the work in progress. Applies to the main thread, unless the app has its own handler for SIGINT.
                With False, Ctrl-C raises KeyboardInterrupt, as usual in Python.

        Raises:
            DeviceBusyError: Another call works on the device.
            DeviceClosedError: The device was closed.
            RefusedError: The server refuses this device permanently; the message has the reason.
            FleetDistillError: The data, the model or the state directory cannot be used.
        """
        with self._working("run"):
            if handle_ctrl_c:
                self._run_until_ctrl_c()
            else:
                self._engine.run()

    def _run_until_ctrl_c(self) -> None:
        try:
            with on_ctrl_c(self.stop) as pressed:
                self._engine.run()
        except KeyboardInterrupt:  # a second Ctrl-C, or the app raises it in its own handler
            self._session.forget_state()
        else:
            if not pressed:
                return
        self._ctrl_c_reported = True
        self._events.emit("interrupted", 0, "interrupted by Ctrl-C; the device resumes its work after a restart")

    def step(self, wait_seconds: float = POLL_SECONDS) -> Step:
        """Runs one turn: settles an unfinished answer, or requests an ask from the server and answers it.

        Waits for work, and afterwards as long as the server requests, or up to 5 seconds while a condition of
        `eligibility` does not hold. For an app with its own thread for the device;
        `tick` does not wait.

        Args:
            wait_seconds: How long the server may hold the request if there is no work, 0 to 60 seconds.

        Returns:
            `Step.ANSWERED`, `Step.DECLINED` if an ask ended without an answer that counts, `Step.WAITED` if there was
            no work or the device must not work now, `Step.PAUSED` if `stop` was called, or `Step.FINISHED` at the end
            of the run.

        Raises:
            ConfigurationError: `wait_seconds` is outside its range.
            LinkError: The server is unavailable or temporarily refuses requests, or the disk is full. Retry later.
            DeviceBusyError: Another call works on the device.
            DeviceClosedError: The device was closed.
            RefusedError: The server refuses this device permanently.
            FleetDistillError: The data, the model or the state directory cannot be used.
        """
        check_number("wait_seconds", wait_seconds)
        if not 0 <= wait_seconds <= _MAX_WAIT_SECONDS:
            raise ConfigurationError(f"wait_seconds is {wait_seconds}, must be in [0, {_MAX_WAIT_SECONDS:g}]")
        with self._working("step"):
            return self._engine.step(wait_seconds)

    def tick(self) -> Step:
        """Runs one turn without waiting, for an app with its own loop.

        Does not wait for work, for the end of a pause or for a server that is unavailable: it returns `Step.WAITED`
        immediately until the next attempt is due. It blocks only while it computes or sends an answer.

        Returns:
            As `step`; `Step.WAITED` also while the server is unavailable (events `lost-contact`, `contact-returned`).

        Raises:
            DeviceBusyError: Another call works on the device.
            DeviceClosedError: The device was closed.
            RefusedError: The server refuses this device permanently.
            FleetDistillError: The data, the model or the state directory cannot be used.
        """
        with self._working("tick"):
            return self._engine.tick()

    @property
    def pause_seconds(self) -> float:
        """Seconds until the next turn of `tick` is due, at least 0: the server or a lost contact requires a pause.

        Until then `tick` returns `Step.WAITED` without a call. For apps that run several devices in one loop.
        """
        return self._engine.pause_seconds

    @contextlib.contextmanager
    def _working(self, call: str) -> Iterator[None]:
        try:
            with control_flow_as_errors(call), self._turns.taken(call):
                yield
        finally:
            self._close_if_due()

    # --- in the background

    def start(self) -> None:
        """Takes part in the run in a background thread, until the run is finished or `stop` is called.

        Events are emitted in that thread. An exception ends it, is emitted as the event `failed`, and is raised by
        `join`. The thread is a daemon: an app that ends without `close` stops the device, and waits for it at most 5
        seconds; unfinished work is done again after a restart. Withdraws an earlier `stop`.

        Raises:
            DeviceBusyError: Another call works on the device.
            DeviceClosedError: The device was closed.
        """
        self._turns.take("start", for_other_thread=True)
        self._stopped.clear()
        self._background = BackgroundLoop(
            self._run_in_background, self.stop, f"fleetdistill {self._session.identity.device}"
        )
        try:
            self._background.start()
        except BaseException:
            self._turns.give_back()
            raise

    def _run_in_background(self) -> None:
        self._turns.hand_over()
        try:
            with control_flow_as_errors("run"):
                self._engine.run()
        except BaseException as error:
            self._events.emit_failed(error)
            raise
        finally:
            self._turns.give_back()
            self._close_if_due()

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the end of the background thread.

        Args:
            timeout: Maximum time in seconds, at least 0; None for no limit.

        Returns:
            Whether the thread has ended; True if the device was never started.

        Raises:
            DeviceBusyError: `on_event` called `join` in the background thread, which would wait for itself.
            BaseException: The exception that ended the thread, at each call until the next `start`.
        """
        background = self._background
        if background is None:
            return True
        if background.is_this_thread():
            raise DeviceBusyError("join", "start")
        return background.join(timeout)

    def background_result(self) -> Future[None]:
        """Returns the result of the last `start`, as a future that cannot be cancelled; for `AsyncDevice`.

        Raises:
            ConfigurationError: The device was never started.
        """
        if self._background is None:
            raise ConfigurationError("the device has no background thread; call Device.start first")
        return self._background.ended

    def stop(self) -> None:
        """Ends the work in progress; `run`, the background thread, `step` or `tick` then returns.

        Training ends after the current mini-batch, and calls to the server are cancelled. The committed state is
        unchanged. A later turn does the same work again, if the server still requests it. An interrupted ask stays
        open: the round waits for its answer until that turn, or until the ask's deadline or the device's lease ends.

        If no work is in progress, ends the next `run`, `step` or `tick`, but not the next `start`. Does not wait. The
        device can be used again. Thread-safe; may be called from a signal handler.
        """
        self._stopped.set()
        self._session.link.interrupt()

    def close(self, *, leave: bool = True) -> None:
        """Stops the device, waits for the end of its work, leaves the run and releases the state directory.

        The device does not leave while an answer has no receipt or an ask was interrupted, because leaving would close
        the ask; the server then waits until the lease ends. Called from `on_event`, `close` returns immediately, and
        the device closes when the turn ends. Ctrl-C cuts the call to the server short.

        Args:
            leave: Whether to leave the run. With False the server keeps waiting for the answer to an open ask.
        """
        if self._turns.is_mine():
            self._close_due = leave
            self.stop()
            return
        with self._closing, on_ctrl_c(self._session.link.interrupt) as pressed:
            self.stop()
            if self._turns.close():
                self._release(leave)
        if pressed and not self._ctrl_c_reported:
            raise KeyboardInterrupt

    def _close_if_due(self) -> None:
        """Closes the device if `close` was called during the turn, by a callback of the app."""
        if self._close_due is not None and not self._turns.closed:
            self.close(leave=self._close_due)

    def _release(self, leave: bool) -> None:
        try:
            if leave and self._session.terms is not None:
                with contextlib.suppress(FleetDistillError):
                    if self._session.storage.outbox.pending() is None and not self._session.ask_interrupted:
                        self._session.link.leave(self._session.identity)
        finally:
            with self._session.guard.held():  # no thread reads the model from the state directory
                self._session.link.close()
                self._session.permission.usage.settle()
                self._session.storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ctrl_c_reported |= kind is not None and issubclass(kind, KeyboardInterrupt)
        self.close()
