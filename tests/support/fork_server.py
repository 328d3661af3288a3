"""Processes that start in milliseconds: forked from one that has imported torch, one such server per test process."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from typing import Any

import pytest

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["support.preloaded"])
_started: weakref.WeakSet[ForkServerProcess] = weakref.WeakSet()


def forked(target: Callable[..., object], *args: Any) -> ForkServerProcess:
    """Starts a process that calls a function. It may start others, and it is killed when this process ends."""
    process = _context.Process(target=_call, args=(target, *args))
    if "support.preloaded" in sys.modules:  # forked itself: use the same server instead of a second one
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
        process.start()
    else:  # a server may start here, which finds only what PYTHONPATH has and ignores a module that it cannot import
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
            process.start()
    _started.add(process)
    return process


def _call(target: Callable[..., object], *args: Any) -> None:
    assert "support.preloaded" in sys.modules, "the fork server could not import support.preloaded"
    target(*args)


@atexit.register
def _kill_all() -> None:
    """Before multiprocessing waits for them: it does so because none is a daemon, which could start no others."""
    for process in list(_started):
        if process.is_alive():
            process.kill()
