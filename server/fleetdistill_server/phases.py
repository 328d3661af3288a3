"""Phases of a round's work in the engine, such as distillation, for traces and metrics.

    with observed_by(observer):
        ...
            with phase("distillation"):  # enters observer("distillation")

Applies to the current context. Without an observer, `phase` does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar

__all__ = ["PHASES", "observed_by"]

PHASES = ("asks", "refinement", "distillation", "averaging", "evaluation", "checkpoint")
"""Names of the phases."""

Observer = Callable[[str], AbstractContextManager[object]]
"""Function of a phase's name; the context that it returns is entered for the phase."""

_observers: ContextVar[tuple[Observer, ...]] = ContextVar("fleetdistill_phases", default=())


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Makes every `phase` in the block enter `observer`'s context too."""
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Marks the block as one of `PHASES`."""
    with ExitStack() as stack:
        for observer in _observers.get():
            stack.enter_context(observer(name))
        yield
