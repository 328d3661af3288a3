"""The loop of a device in a thread of the SDK."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

logger = logging.getLogger(__name__)

AT_EXIT_SECONDS = 5.0
"""Maximum time that the end of an app waits for the thread of a device that the app did not close."""


class BackgroundLoop:
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
