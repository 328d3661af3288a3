"""A stop that a signal handler requests is seen, wherever the signal interrupts the waiting thread."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from fleetdistill.device.interrupts import StopRequest

LINES = 40
"""More than one call of `wait` executes."""


def wait_interrupted(stopped: threading.Event, line: int) -> tuple[bool, int]:
    """What `wait` returns if SIGUSR1 arrives before its `line`-th line, and the lines that it executed."""
    executed = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal executed
        if event == "line":
            executed += 1
            if executed == line:
                signal.raise_signal(signal.SIGUSR1)
        return trace

    tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        result = stopped.wait(0.01)
    finally:
        sys.settrace(tracing)
    return result, executed


@pytest.mark.parametrize("line", range(1, LINES))
def test_signal_at_each_line_of_wait(line: int) -> None:
    stopped = StopRequest()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: stopped.set())
    try:
        result, executed = wait_interrupted(stopped, line)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert result == stopped.is_set() == (executed >= line)
    assert executed < LINES - 1
