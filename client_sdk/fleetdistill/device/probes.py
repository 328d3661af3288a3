"""Probes of the machine's state, with psutil where it is installed and supports the platform."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

IDLE_LOAD = 0.25
"""Largest share of the machine's CPU time that other processes use on an idle machine."""
WINDOW_SECONDS = 1.0
_PLAUSIBLE_CELSIUS = (-50.0, 200.0)

Probe = Callable[[], bool | float | None]
"""Function that returns the current value of a condition, or None if it is unknown."""


def psutil_module() -> ModuleType | None:
    """Returns psutil, or None if it is not installed."""
    try:
        import psutil
    except ImportError:
        return None
    result: ModuleType = psutil
    return result


def system_probe(name: str, directory: Path) -> Probe | None:
    """Returns the SDK's probe of a condition on this platform, or None if there is none.

    Args:
        name: Name of the condition, as in `Eligibility.probes`.
        directory: A directory on the disk that `free_disk` measures.
    """
    if name == "free_disk":
        return lambda: shutil.disk_usage(directory).free
    psutil = psutil_module()
    if psutil is None:
        return None
    if name == "idle":
        return OtherLoad(psutil).is_low
    if name == "free_memory":
        return lambda: int(psutil.virtual_memory().available)
    makers = {"charging": _charging, "temperature": _temperature}
    probe = makers[name](psutil) if name in makers else None
    return probe if probe is not None and probe() is not None else None  # a machine without a battery or a sensor


def resident_bytes() -> int | None:
    """Returns the resident memory of this process, or None without psutil."""
    psutil = psutil_module()
    return None if psutil is None else int(psutil.Process().memory_info().rss)


def _charging(psutil: Any) -> Probe | None:
    if not hasattr(psutil, "sensors_battery"):  # some platforms
        return None

    def charging() -> bool | None:
        battery = psutil.sensors_battery()
        return None if battery is None else battery.power_plugged

    return charging


def _temperature(psutil: Any) -> Probe | None:
    if not hasattr(psutil, "sensors_temperatures"):  # Windows and macOS
        return None

    def hottest() -> float | None:
        low, high = _PLAUSIBLE_CELSIUS
        values = [item.current for group in psutil.sensors_temperatures().values() for item in group]
        return max((value for value in values if value is not None and low < value < high), default=None)

    return hottest


class OtherLoad:
    """CPU load by other processes than this one, averaged over at least one second.

    Args:
        psutil: The module psutil.
    """

    def __init__(self, psutil: Any) -> None:
        self._psutil = psutil
        self._process = psutil.Process()
        self._lock = threading.Lock()
        self._sample = self._now()
        self._share: float | None = None

    def is_low(self) -> bool | None:
        """Returns whether the load is at most `IDLE_LOAD`; None until it is known, after one second."""
        with self._lock:
            if time.monotonic() - self._sample[0] >= WINDOW_SECONDS:
                before, self._sample = self._sample, self._now()
                total, others = (now - then for now, then in zip(self._sample[1:], before[1:], strict=True))
                self._share = others / total if total > 0 else self._share
            return None if self._share is None else self._share <= IDLE_LOAD

    def _now(self) -> tuple[float, float, float]:
        """Returns the time, and the CPU seconds of the machine and of other processes since an arbitrary start."""
        times = self._psutil.cpu_times()
        total = sum(times)
        with contextlib.suppress(AttributeError):
            total -= times.guest + times.guest_nice  # Linux counts them twice
        waiting = times.idle + getattr(times, "iowait", 0.0)
        own = self._process.cpu_times()
        return time.monotonic(), total, total - waiting - own.user - own.system
