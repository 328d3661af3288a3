"""Waiting for conditions, and looking at processes, for tests that start real ones. Linux only, through /proc."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
COMMAND = [sys.executable, "-c", "from fleetdistill_server.start import main; main()"]
"""The installed command `fleetdistill`; arguments follow."""
REGISTRY = "FLEETDISTILL_TESTS_FORKED"
"""Variable with the path of a file that has a line `parent child start module` per process that the tests forked."""
PATIENCE_SECONDS = 300.0
"""How long a test waits for what is bound to come, before it fails: generous, because a machine may be busy."""


def wait_until(condition: Callable[[], T], what: str, seconds: float = PATIENCE_SECONDS) -> T:
    """Returns the first true value of a condition; fails with what was waited for."""
    until = time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > until:
            raise AssertionError(f"waited {seconds:g} s in vain for: {what}")
        time.sleep(0.02)
    return result


def children(pid: int, module: str = "") -> list[int]:
    """Living children of a process, by default all, else those that run this Python module."""
    result = [
        int(child)
        for parent, child, start, name in _forked()
        if parent == str(pid) and module in ("", name) and is_alive(int(child)) and start == start_of(int(child))
    ]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _parent_of(entry) == pid and module in ("", *_command_of(entry)):
            result.append(int(entry.name))
    return sorted(result)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return _parent_of(Path(f"/proc/{pid}")) is not None


def start_of(pid: int) -> str:
    """When a process began, in ticks since the machine's start: a number that has been used again has another one."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "ended"


def peak_memory(pid: int) -> int:
    """Most bytes that a process ever had in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def own_peak_memory() -> int:
    """Most bytes that this process ever had in memory."""
    return peak_memory(os.getpid())


def kill_in(state: Callable[[], bool], pid: int) -> bool:
    """Kills a process (SIGKILL) in a state of the store: stops it, looks, and lets it go on if the state has passed."""
    os.kill(pid, signal.SIGSTOP)
    if not state():
        os.kill(pid, signal.SIGCONT)
        return False
    os.kill(pid, signal.SIGKILL)
    return True


def python(code: str, environment: Mapping[str, str] | None = None) -> str:
    """Runs code in a fresh interpreter, which finds the modules that this one finds, and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **module_path(), **(environment or {})},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def module_path() -> dict[str, str]:
    """Variable with which a new interpreter finds the tests' modules, however pytest was started."""
    return {"PYTHONPATH": os.pathsep.join(sys.path)}


def _forked() -> list[list[str]]:
    """Parent, child, its start and module of each forked process; in /proc, their parent is the fork server."""
    registry = Path(os.environ.get(REGISTRY, "/dev/null"))
    return [line.split() for line in registry.read_text().splitlines()] if registry.exists() else []


def _parent_of(entry: Path) -> int | None:
    try:
        state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return int(parent) if state not in "ZX" else None


def _command_of(entry: Path) -> list[str]:
    """The arguments, whole: a fork server has the names of modules that it imports within one of its own."""
    try:
        return (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def free_port() -> int:
    """A port of the loopback where nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])
