"""The turns of a device, and its loops over them: in the foreground, in a background thread, and in the app's own.

A turn settles an unfinished answer, or requests an ask and answers it.

One thread at a time works on a device; `Loop` sees to this, and ends the work when the app stops or closes the device.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from fleetdistill.control_flow import control_flow_as_errors
from fleetdistill.device.ask_handler import AskHandler
from fleetdistill.device.backend import Backend
from fleetdistill.device.check_in import CheckIn
from fleetdistill.device.contact import Contact
from fleetdistill.device.deployer import Deployer
from fleetdistill.device.events import Step
from fleetdistill.device.interrupts import StopRequest, on_ctrl_c
from fleetdistill.device.parts import DeviceParts
from fleetdistill.device.permission import EligibilityGate
from fleetdistill.device.sender import Sender
from fleetdistill.errors import (
    ConfigurationError,
    DeviceBusyError,
    DeviceClosedError,
    FleetDistillError,
    LinkError,
    NoSamplesError,
    StateError,
    WorkInterrupted,
)
from fleetdistill.interruption import check_may_continue, check_with
from fleetdistill.link.base import replies_within
from fleetdistill.link.terms import pause_seconds, plain
from fleetdistill.wire.v1 import service_pb2

POLL_SECONDS = 20.0
"""How long the server may hold a request for work."""


class Turns:
    """Runs turns, which all loops of a device consist of. One thread at a time may use it.

    Args:
        parts: What the parts of the open device share.
        contact: Tracks whether the server can be reached.
        check_in: Checks the device in.
        sender: Sends answers.
        deployer: Keeps and exports the delivered models.
        handler: Handles asks.
        stopped: Set when the app stops the device.
    """

    def __init__(
        self,
        parts: DeviceParts,
        contact: Contact,
        check_in: CheckIn,
        sender: Sender,
        deployer: Deployer,
        handler: AskHandler,
        stopped: threading.Event,
    ) -> None:
        self._parts = parts
        self._events = parts.events
        self._contact = contact
        self._check_in = check_in
        self._sender = sender
        self._deployer = deployer
        self._handler = handler
        self._stopped = stopped
        self._gate = EligibilityGate(parts.permission, parts.events, parts.link, stopped, self.leave)
        self._ask_interrupted = False  # whether the work on the last ask is done again later
        self._ask_declined = False  # whether the server does not wait for an answer to the last ask
        self._over = False  # whether the app knows that the run is over
        self._asks_since: float | None = None  # when the device first asked for work that there was none of
        self._polling = threading.Lock()  # held while the state of a request for work changes
        self._polls = False  # whether a request for work is open
        self._woken = False  # whether `wake` was called since the turn began

    def turn(self, wait_seconds: float) -> tuple[Step, float]:
        """Runs one turn.

        Args:
            wait_seconds: How long the server may hold the request if there is no work.

        Returns:
            The result, PAUSED if the device was stopped before the end of the turn, and the seconds to wait before the
            next turn.

        Raises:
            LinkError: The server is unavailable or temporarily refuses requests, or the disk is full.
            RefusedError: The server refuses this device permanently.
        """
        if self._stopped.is_set():
            return Step.PAUSED, 0.0
        self._woken = False  # this turn sees what the app has changed
        self._events.emit_put_aside(self._parts.storage.put_aside)  # found at the start
        self._deployer.replace_requested()  # also while the device must not work
        if seconds := self._gate.seconds_to_wait():
            return Step.WAITED, seconds
        try:
            with self._gate.working(), self._check_in.as_link_errors():
                result = self._settle_or_answer(wait_seconds)
        except WorkInterrupted:
            return Step.PAUSED if self._stopped.is_set() else Step.WAITED, 0.0
        except NoSamplesError as none:  # without samples the device does not ask for work, which it cannot do
            self._events.emit_no_samples(f"{none}; the device reads the data again")
            return Step.WAITED, wait_seconds
        except LinkError:
            if not self._stopped.is_set():
                raise
            return Step.PAUSED, 0.0  # the stop cancelled a call
        self._contact.reset_pause()
        self._events.emit_put_aside(self._parts.storage.put_aside)  # found during the turn
        return result

    def leave(self) -> bool:
        """Leaves the run, unless the device has not checked in or still owes an answer; returns whether it called."""
        if not self._check_in.accepted or self._ask_interrupted:
            return False
        with contextlib.suppress(FleetDistillError):
            if not self._ask_declined and self._parts.storage.outbox.pending() is not None:
                return False
            self._parts.link.leave(self._parts.identity)
        return True

    def _settle_or_answer(self, wait_seconds: float) -> tuple[Step, float]:
        try:
            with self._parts.lock.held():
                self._check_in.take_replaced_data()
                terms = self._check_in.current_terms(self._contact.restored)
                pending = self._parts.storage.outbox.pending()
                self._events.emit_put_aside(self._parts.storage.put_aside)
        except LinkError:
            self._settle_without_server()
            raise
        if pending is not None:
            acknowledged = self._sender.settle(pending, terms, self._contact.restored)
            return Step.ANSWERED if acknowledged else Step.DECLINED, 0.0
        self._sender.emit_outcome()  # left by an earlier process that ended before it emitted the events
        self._check_in.check_in_changed_data()
        self._deployer.settle()
        if not self._check_in.has_samples():
            raise NoSamplesError()
        asked_at = self._parts.clock.now()
        response = self._next_ask(0.0 if self._contact.is_lost else wait_seconds)  # the app learns of a reply at once
        if response is None:
            return Step.WAITED, 0.0
        self._contact.restored()
        self._note_work(response, asked_at)
        return self._handle(response, terms)

    def _settle_without_server(self) -> None:
        """Emits and exports what an earlier process delivered before it ended."""
        with self._parts.lock.held():
            pending = self._parts.storage.outbox.pending()
        if pending is None:  # the lock is released: the app gets its events before they are marked as reported
            self._sender.emit_outcome()
            self._deployer.settle()

    def _next_ask(self, wait_seconds: float) -> service_pb2.NextAskResponse | None:
        """Requests an ask; returns None if `wake` has ended the turn, also before the request."""
        self._polls = True
        try:
            with check_with(self._check_not_woken):
                check_may_continue()
                return self._parts.link.next_ask(self._parts.identity, wait_seconds)
        except (LinkError, WorkInterrupted):
            if self._woken:
                return None
            raise
        finally:
            with self._polling:
                self._polls = False

    def _check_not_woken(self) -> None:
        if self._woken:
            raise WorkInterrupted("the app has changed what the next turn does", "woken")

    def wake(self) -> None:
        """Ends a wait for work, so that the turn ends. Any thread may call it."""
        with self._polling:
            self._woken = True
            if self._polls:
                self._parts.link.interrupt()

    def _note_work(self, response: service_pb2.NextAskResponse, asked_at: float) -> None:
        """Emits an event once the run has had no work for a while, and one when it has."""
        if response.WhichOneof("next") in ("ask", "finished") or response.come_back.reason:
            self._asks_since = None
            self._events.emit_work(there_is_some=response.HasField("ask"))
            return
        self._asks_since = asked_at if self._asks_since is None else self._asks_since
        if self._parts.clock.now() - self._asks_since >= POLL_SECONDS:
            self._events.emit_no_work()

    def _handle(self, response: service_pb2.NextAskResponse, terms: service_pb2.CheckInResponse) -> tuple[Step, float]:
        self._ask_interrupted = self._ask_declined = False  # the server offers an interrupted ask again, or closed it
        self._over = self._over and response.HasField("finished")  # an operator can continue a finished run
        match response.WhichOneof("next"):
            case "ask":
                self._events.emit_reason("")
                try:
                    result = self._handler.handle(response.ask, terms)
                except (WorkInterrupted, KeyboardInterrupt):
                    self._ask_interrupted = True
                    raise
                self._ask_declined = result[0] is Step.DECLINED
                return result
            case "finished":
                self._finish(response.finished)
                return Step.FINISHED, 0.0
            case _:
                seconds = pause_seconds(response.come_back, self._parts.link.remote)
                self._parts.permission.pace.set(seconds)
                self._events.emit_reason(response.come_back.reason)
                return Step.WAITED, seconds

    def _finish(self, reason: str) -> None:
        self._deployer.finish()
        if self._over:
            return
        self._over = True
        text = plain(reason)
        if not self._deployer.version:
            text += "; the app's own model is in use, because no model was delivered that replaced it, and the run "
            text += "delivers none any more: its operator can continue it with more rounds, or without end (rounds = 0)"
        self._events.emit("finished", 0, text)


AT_EXIT_SECONDS = 5.0
"""Maximum time that the end of an app waits for the thread of a device that the app did not close."""
REPLY_SECONDS = 5.0
"""How long a call waits for the server's reply in a thread of the app, which stands still meanwhile."""
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
        self._resume_at = 0.0  # time before which `tick` and `step` do nothing
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

    def check_process(self, call: str) -> None:
        """Raises StateError, for the method `call`, in a fork of the process that opened the device."""
        self._lock.check_process(call)

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
        """Runs turns until one has work, and waits at most `wait_seconds`. Raises LinkError if one failed."""
        with self.working("step"), replies_within(REPLY_SECONDS):
            until = self._parts.clock.now() + wait_seconds
            while True:
                self._wait(min(self.pause_seconds, self._seconds_to(until)))
                if self.pause_seconds:
                    return self._unless_stopped(Step.WAITED)
                result, pause = self._turns.turn(self._seconds_to(until))
                if result is not Step.WAITED:  # after which the next turn knows by itself that it may not call yet
                    self._resume_at = self._parts.clock.now() + pause
                left = self._seconds_to(until)
                self._wait(min(pause, left))
                if result is not Step.WAITED or not 0 < pause < left:  # else the pause is over before the wait
                    return self._unless_stopped(result)

    def tick(self) -> Step:
        """Runs one turn without any wait; does nothing before the end of the last pause."""
        with self.working("tick"), replies_within(REPLY_SECONDS):
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
        return self._seconds_to(self._resume_at)

    def _seconds_to(self, time: float) -> float:
        return max(0.0, time - self._parts.clock.now())

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
            if _exit.began:
                self._turns.leave()  # so that no round waits for this device
        except BaseException as error:
            if not _exit.began:
                self._events.emit_failed(error)
            raise
        finally:
            self._lock.give_back()
            self._close_if_due()

    def join(self, timeout: float | None) -> bool:
        """Waits for the end of the background thread; returns whether it has ended."""
        self.check_process("join")
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

    def wake(self) -> None:
        """Makes the next turn begin at once, instead of after a wait for work or a pause. Does not wait."""
        self._resume_at = 0.0
        self._stopped.wake()
        self._turns.wake()

    def close(self, *, leave: bool) -> None:
        """Stops the device, waits for the end of its work, leaves the run and releases the state directory."""
        if self._lock.is_mine():
            self._close_due = leave
            self.stop()
            return
        if self._lock.in_fork:
            return  # what is open is that of the other process, which goes on with it
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
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._holder: int | None = None  # identifier of the thread that works on the device
        self._held_by = ""
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the device was closed."""
        return self._closed

    @property
    def in_fork(self) -> bool:
        """Whether this process is a fork of the one that opened the device."""
        return os.getpid() != self._process

    def take(self, call: str, *, for_other_thread: bool = False) -> None:
        """Reserves the device for the calling thread, or for one that calls `hand_over`, until `give_back`.

        Args:
            call: Name of the method that works on the device, for the errors.
            for_other_thread: Whether another thread will work on the device.

        Raises:
            DeviceBusyError: A thread works on the device, also if it is the calling one.
            DeviceClosedError: The device was closed.
            StateError: This process is a fork of the one that opened the device: the lock of the directory is of both.
        """
        self.check_process(call)
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

    def check_process(self, call: str) -> None:
        """Raises StateError in a fork of the process that opened the device."""
        if self.in_fork:
            raise StateError(
                f"Device.{call} was called in process {os.getpid()}, a fork of process {self._process}, which has "
                f"opened {self._state_dir}; call it there, create the Device after the fork, or predict with Predictor"
            )

    def close(self) -> bool:
        """Waits until no thread works on the device and closes it; returns False if it was closed before."""
        with self._changed:
            self._changed.wait_for(lambda: self._holder is None)
            first, self._closed = not self._closed, True
        return first


class BackgroundThread:
    """Runs a device's loop in a daemon thread, and keeps its exception for `join`.

    A thread that is not a daemon would keep an app without a call of `close` alive until the run is over. A daemon that
    still computes while the interpreter shuts down can crash the process. Therefore the thread is a daemon that is
    stopped and joined, for at most `AT_EXIT_SECONDS`, before the shutdown begins.

    Args:
        loop: Runs until the run is over or the device is stopped.
        stop: Stops `loop`; may be called from any thread.
        name: Name of the thread.
    """

    def __init__(self, loop: Callable[[], None], stop: Callable[[], None], name: str) -> None:
        self.stop = stop
        self.ended: Future[None] = Future()
        """Result of the loop: None, or its exception."""
        self.ended.set_running_or_notify_cancel()  # so that nobody can cancel it
        self.thread = threading.Thread(target=self._run, args=(loop,), name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        _exit.add(self)
        self.thread.start()

    def is_this_thread(self) -> bool:
        """Returns whether the calling thread is the one of the loop."""
        return threading.current_thread() is self.thread

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
            _exit.discard(self)


class _Exit:
    """Stops the background threads of all devices when the app ends, before any exit handler of the interpreter.

    Exit handlers run in the reverse order of their registration. PyTorch registers some when a device first computes,
    which remove its operators; an exit handler of the SDK from before would run after them, while the device computes.
    A thread that is not a daemon ends before all exit handlers.
    """

    def __init__(self) -> None:
        self.began = False
        """Whether the app ends, so that errors of the work say nothing about it."""
        self._lock = threading.Lock()
        self._running: set[BackgroundThread] = set()
        self._watcher: threading.Thread | None = None

    def add(self, thread: BackgroundThread) -> None:
        """Watches over a thread until `discard`."""
        with self._lock:
            if self._watcher is None or not self._watcher.is_alive():  # also in a fork, which has no other thread
                self._running = set()
                self._watcher = threading.Thread(target=self._watch, name="fleetdistill exit", daemon=False)
                self._watcher.start()
            self._running.add(thread)

    def discard(self, thread: BackgroundThread) -> None:
        """Forgets a thread that has ended."""
        with self._lock:
            self._running.discard(thread)

    def _watch(self) -> None:
        """Waits for the end of the app, which is that of all its threads but the daemons; then stops the devices."""
        while others := [thread for thread in threading.enumerate() if self._keeps_app_alive(thread)]:
            for thread in others:
                thread.join()
        with self._lock:
            self.began, running = True, list(self._running)
        for background in running:
            background.stop()
        until = time.monotonic() + AT_EXIT_SECONDS
        for background in running:
            background.thread.join(max(0.0, until - time.monotonic()))

    def _keeps_app_alive(self, thread: threading.Thread) -> bool:
        return not thread.daemon and thread is not self._watcher and thread.is_alive()


_exit = _Exit()
