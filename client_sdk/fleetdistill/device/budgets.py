"""`Budgets`, an app's limits on what a device uses."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from fleetdistill.device.probes import resident_bytes
from fleetdistill.errors import ConfigurationError

_LEAST_NICE, _MOST_NICE = 1, 19


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Limits on a device's use of network, processor and memory. None means no limit.

    Days are those of the local time. The counters of a day are stored in `state_dir` and survive restarts and crashes.

    Args:
        bytes_per_day: Maximum number of bytes sent and received per day, without the overhead of HTTP/2 and TLS. A
            transfer in progress stops after the chunk that exceeds it, and resumes on the next day.
        compute_seconds_per_day: Maximum seconds per day in which the device computes answers.
        memory_bytes: Maximum resident memory of the app's process. The device does not request work above it, and
            declines an ask that exceeds it. Requires psutil.
        threads: Maximum number of compute threads that a run may require. A run that requires more is refused at
            check-in.
        niceness: Niceness of the thread that computes, 1 to 19, on Linux. Other threads of the app are not affected.

    Raises:
        ConfigurationError: A value is out of range or not supported on this machine.
    """

    bytes_per_day: int | None = None
    compute_seconds_per_day: float | None = None
    memory_bytes: int | None = None
    threads: int | None = None
    niceness: int | None = None

    def __post_init__(self) -> None:
        for name in ("bytes_per_day", "memory_bytes", "threads", "niceness"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigurationError(f"{name} is {value!r}, expected an integer of at least 1")
        seconds = self.compute_seconds_per_day
        if seconds is not None and (not isinstance(seconds, int | float) or not 0 < seconds < math.inf):
            raise ConfigurationError(f"compute_seconds_per_day is {seconds!r}, expected a finite number above 0")
        if self.memory_bytes is not None and resident_bytes() is None:
            raise ConfigurationError("memory_bytes requires psutil; install it or leave the limit out")
        self._check_niceness()

    def _check_niceness(self) -> None:
        if self.niceness is None:
            return
        if self.niceness > _MOST_NICE:
            raise ConfigurationError(f"niceness is {self.niceness}, must be {_LEAST_NICE} to {_MOST_NICE}")
        if not sys.platform.startswith("linux"):
            raise ConfigurationError(
                f"niceness requires Linux; on {sys.platform} it would apply to the whole app. Leave it out"
            )
