"""`Budgets`, an app's limits on what a device uses."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from fleetdistill.checked import check_number
from fleetdistill.device.probes import resident_bytes
from fleetdistill.errors import ConfigurationError
from fleetdistill.state.directory import MAX_SPOOL_BYTES
from fleetdistill.state.privacy_ledger import PrivacyBudget

__all__ = ["MAX_SECONDS_PER_ASK"]

MAX_THREADS = 64
"""Default of `Budgets(threads=...)`."""
MAX_SECONDS_PER_ASK = 3600.0
"""Default of `Budgets(seconds_per_ask=...)`, in seconds."""

_MIN_NICE, _MAX_NICE = 1, 19


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Limits on what a device uses: network, processor, memory, disk, and privacy. None means no limit.

    Days are those of the local time. The counters of a day are stored in `state_dir` and survive restarts and crashes.

    Args:
        bytes_per_day: Maximum number of bytes sent and received per day, without the overhead of HTTP/2 and TLS. A
            transfer in progress stops after the chunk that exceeds it, and resumes on the next day. An answer that
            alone exceeds it is declined.
        compute_seconds_per_day: Maximum seconds per day in which the device computes answers.
        memory_bytes: Maximum resident memory of the app's process. The device does not request work above it, and
            declines an ask that exceeds it. Requires psutil.
        threads: Maximum number of compute threads that a run may require, at least 1. A run that requires more is
            refused at check-in.
        niceness: Niceness of the thread that computes, 1 to 19, on Linux. Other threads of the app are not affected.
        seconds_per_ask: Time limit for one ask in seconds, above 0. The device declines an ask that takes longer.
        spool_bytes: Maximum size in bytes of an answer with its states, and of one download. The device declines asks
            that exceed it or the free disk space.
        privacy: Maximum `(epsilon, delta)` of all private releases of the state directory together. The device uses the
            smaller of the run's and this epsilon, and declines a release beyond it. None for the run's epsilon and
            delta, so one release. With a budget, the device takes part only in private runs.

    Raises:
        ConfigurationError: A value is out of range or not supported on this machine.
    """

    bytes_per_day: int | None = None
    compute_seconds_per_day: float | None = None
    memory_bytes: int | None = None
    threads: int = MAX_THREADS
    niceness: int | None = None
    seconds_per_ask: float = MAX_SECONDS_PER_ASK
    spool_bytes: int = MAX_SPOOL_BYTES
    privacy: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name in ("bytes_per_day", "memory_bytes", "threads", "niceness", "spool_bytes"):
            value = getattr(self, name)
            optional = value is None and name not in ("threads", "spool_bytes")
            if not optional and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigurationError(f"{name} is {value!r}, expected an integer of at least 1")
        seconds = self.compute_seconds_per_day
        if seconds is not None and (not isinstance(seconds, int | float) or not 0 < seconds < math.inf):
            raise ConfigurationError(f"compute_seconds_per_day is {seconds!r}, expected a finite number above 0")
        if self.memory_bytes is not None and resident_bytes() is None:
            raise ConfigurationError("memory_bytes requires psutil; install it or leave the limit out")
        check_number("seconds_per_ask", self.seconds_per_ask)
        if not self.seconds_per_ask > 0:
            raise ConfigurationError(f"seconds_per_ask is {self.seconds_per_ask}, must be above 0")
        self.privacy_budget()  # checks it
        self._check_niceness()

    def privacy_budget(self) -> PrivacyBudget | None:
        """Returns `privacy`. Raises ConfigurationError unless it is None or a valid `(epsilon, delta)`."""
        if self.privacy is None:
            return None
        pair = tuple(self.privacy) if isinstance(self.privacy, tuple | list) else ()
        if len(pair) != 2 or not all(isinstance(value, int | float) for value in pair):
            raise ConfigurationError(
                f"privacy is {self.privacy!r}, expected a pair (epsilon, delta), such as (1, 1e-5)"
            )
        return PrivacyBudget(*pair)

    def _check_niceness(self) -> None:
        if self.niceness is None:
            return
        if self.niceness > _MAX_NICE:
            raise ConfigurationError(f"niceness is {self.niceness}, must be {_MIN_NICE} to {_MAX_NICE}")
        if not sys.platform.startswith("linux"):
            raise ConfigurationError(
                f"niceness requires Linux; on {sys.platform} it would apply to the whole app. Leave it out"
            )
