"""What an engine measures. Imported only if `[server] metrics` is set."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import Gauge

from fleetdistill_server.metrics import catalogue
from fleetdistill_server.metrics.catalogue import Description
from fleetdistill_server.metrics.files import engine_of, keep_values

PHASES = ("preparing", "waiting", "round", "asking", "training", "inference", "closing")
_LOOK_SECONDS = 2.0


class EngineMeter:
    """Keeps the metrics of a run's engine in the store's directory. It is an `engine.phases.Observer`.

    Args:
        store: The store's directory.
        run: Name of the run.

    Raises:
        OSError: There is no space for the files.
    """

    def __init__(self, store: Path, run: str) -> None:
        keep_values(store, engine_of(run))
        self._run = run
        self._phases = _gauge(catalogue.PHASE)
        self._progress = _gauge(catalogue.PROGRESS)
        self._memory = _gauge(catalogue.GPU_MEMORY)
        self.phase("preparing")

    def phase(self, name: str) -> None:
        """Notes what the engine does from now on, one of `PHASES`."""
        for one in PHASES:
            self._phases.labels(self._run, one).set(int(one == name))
        if name not in ("training", "inference"):
            self._progress.labels(self._run).set(0)

    def progress(self, phase: str, fraction: float) -> None:
        """Notes the completed part of a training or inference."""
        self.phase(phase)
        self._progress.labels(self._run).set(fraction)

    def watch(self, measure: Callable[[], dict[str, int]]) -> None:
        """Starts a thread that notes the GPU memory every two seconds, as long as the process lives."""

        def look() -> None:
            while True:
                for state, size in measure().items():
                    self._memory.labels(self._run, state).set(size)
                time.sleep(_LOOK_SECONDS)

        threading.Thread(target=look, name="gpu-memory", daemon=True).start()


def _gauge(what: Description) -> Gauge:
    return Gauge(what.name, what.help, what.labels, registry=None, multiprocess_mode="livemostrecent")
