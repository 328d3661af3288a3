"""Reports a simulation's progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fleetdistill_lab.simulation.links.links import Watch
from fleetdistill_lab.simulation.spec.plan import (
    RUN,
)
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.store.store import Store

Phase = Literal["fleet", "alone", "fedavg"]


@dataclass(frozen=True)
class Progress:
    """A simulation's progress.

    Attributes:
        phase: `fleet`, then the controls `alone` (local-only training) and `fedavg`.
        completed: Completed rounds of the phase; for `alone`, the sum over all devices.
        total: All rounds of the phase, counted like `completed`.
        accuracy: The devices' mean accuracy on the test set after the last round, in [0, 1]; None if unknown.
    """

    phase: Phase
    completed: int
    total: int
    accuracy: float | None = None


OnProgress = Callable[[Progress], None]


def watcher(phase: Phase, config: RunConfig, on_progress: OnProgress) -> Watch:
    """Returns a function that calls `on_progress` whenever the store has another completed round."""
    last = -1

    def watch(store: Store) -> None:
        nonlocal last
        completed = store.runs.completed_rounds(RUN)
        if completed != last:
            last = completed
            on_progress(Progress(phase, completed, config.run.rounds, _latest_accuracy(store)))

    return watch


def _latest_accuracy(store: Store) -> float | None:
    figures = store.history.figures_of_last_round(RUN, "accuracy", "test")
    return sum(figure.sum / figure.count for figure in figures) / len(figures) if figures else None
