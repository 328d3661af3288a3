"""Clocks of a process that are set while it runs: the time of day, and the seconds since the machine was started.

A process reads a file with two offsets in seconds. The clocks of Python are replaced in this process alone; those of
the kernel and of gRPC go on, as do waits that have begun. gRPC keeps its own in both languages, because its Python part
gives its core times of day.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import grpc

from fleetdistill_server.store import clock

_LOOK_SECONDS = 0.2


@dataclass
class Offsets:
    """Seconds by which the clocks of a process are off.

    Attributes:
        wall: Of the time of day; a user or NTP may set it in both directions.
        boot: Of the monotonic clock, which only jumps forward, as when a suspended machine goes on.
    """

    wall: float = 0.0
    boot: float = 0.0

    def write(self, path: Path) -> None:
        """Writes the offsets, whole or not at all."""
        fresh = path.with_suffix(".new")
        fresh.write_text(f"{self.wall} {self.boot}")
        fresh.replace(path)

    @classmethod
    def read(cls, path: Path) -> Offsets:
        """Reads what `write` wrote; no offsets without a file."""
        if not path.exists():
            return cls()
        wall, boot = path.read_text().split()
        return cls(float(wall), float(boot))


def follow(path: Path, since_boot: float) -> None:
    """Replaces the clocks of this process, and sets them whenever the file says so.

    Args:
        path: File of `Offsets`.
        since_boot: Seconds that the monotonic clock of this life is ahead, because the machine was started at another
            time; at least 0.
    """
    now, wall, monotonic = Offsets.read(path), time.time, time.monotonic
    _leave_grpc_alone()

    def look() -> None:
        nonlocal now
        while True:
            time.sleep(_LOOK_SECONDS)
            now = Offsets.read(path)

    replaced: dict[str, Callable[[], float]] = {
        "time": lambda: wall() + now.wall,
        "monotonic": lambda: monotonic() + now.boot + since_boot,
    }
    for name, function in replaced.items():
        setattr(time, name, function)
    clock.PROCESS.__init__(system=replaced["time"], steady=replaced["monotonic"])  # type: ignore[misc]
    threading.Thread(target=look, name="chaos clocks", daemon=True).start()


def _leave_grpc_alone() -> None:
    """Gives gRPC's modules a copy of the module `time` with the real clocks."""
    real = ModuleType("time")
    vars(real).update(vars(time))
    grpc.insecure_channel("127.0.0.1:1").close()  # loads the modules that gRPC imports at its first use
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "grpc" and getattr(module, "time", None) is time:
            module.time = real  # type: ignore[attr-defined]
