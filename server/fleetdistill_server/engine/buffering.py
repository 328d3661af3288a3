"""Buffered (asynchronous) rounds: a round ends at K answers or after T seconds, and late answers count in later rounds.

A device that has not answered when a round ends is not asked again: its ask stays open, and its answer joins the round
in which it arrives, with a weight that decreases with its age. Which answers a round has depends on their times of
arrival, so two runs of the same devices differ; each answer is still used at most once, or reported.

References:
    Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation (FedBuff), 2022; the polynomial weight is
    that of Xie et al., Asynchronous Federated Optimization, 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.config.run_config import RunSection
from fleetdistill_server.engine.arrivals import MAX_ROWS
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.service.wakeups import Waker
from fleetdistill_server.store.asks import Asks
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.states import AskStatus


@dataclass(frozen=True)
class BufferTerms:
    """Settings of buffered rounds.

    Attributes:
        answers: Number of answers K that end a round.
        seconds: Time T after which a round with an answer ends; 0 for no limit.
        limit: Number of rounds after which an ask is closed.
        exponent: Exponent of an answer's weight.
    """

    answers: int
    seconds: float
    limit: int
    exponent: float

    @classmethod
    def of(cls, run: RunSection) -> BufferTerms | None:
        """Returns the terms of a run, or None if its rounds are not buffered."""
        if not run.buffer_answers:
            return None
        return cls(run.buffer_answers, run.buffer_seconds, run.staleness_limit, run.staleness_exponent)

    def decay(self, staleness: int) -> float:
        """Returns the factor (1 + s)^-a of an answer to an ask that is s rounds old."""
        return float((1 + staleness) ** -self.exponent)

    def settled(self, number: int, *, ends: bool) -> tuple[int, int]:
        """Returns the first and the last round whose asks end with a round; all of them if the run `ends`."""
        return number - self.limit, number if ends else number - self.limit


def check_buffered(run: RunSection, method: ServerMethod) -> None:
    """Raises ConfigurationError if the rounds of a method cannot be buffered."""
    steps = list(dict.fromkeys(exchange.step for exchange in method.run_exchanges()))
    if run.buffer_answers and len(steps) != 1:
        raise ConfigurationError(
            f"[run] buffer_answers requires a method with one step per round, but {run.method} asks the steps "
            f"{', '.join(steps)}; remove buffer_answers, or use fedavg, feddkc, cdkt or dafkd"
        )


class Buffer:
    """The asks of one step that are open or answered, from this round and earlier ones.

    Args:
        asks: Asks of the store.
        run: Name of the run.
        number: Number of the round.
        step: Name of the step.
        terms: Settings.
    """

    def __init__(self, asks: Asks, run: str, number: int, step: str, terms: BufferTerms) -> None:
        self._asks = asks
        self._run = run
        self._terms = terms
        first = number - terms.limit
        self._pool = partial(asks.unsettled, run, step, first)
        self._count = partial(asks.count_unsettled, run, step, first, number)
        self._number = number
        self.busy = {ask.device for ask in self._pool(number - 1)}

    def answered_after(self, device: str) -> list[Ask]:
        """Returns the answered asks for devices after `device`, ordered by device, at most `MAX_ROWS`."""
        return self._pool(self._number, status=AskStatus.ANSWERED, after=device, most=MAX_ROWS)

    async def filled(self, read_one: Callable[[], bool], waker: Waker) -> list[Ask]:
        """Waits until the round has its answers; returns their asks ordered by device.

        Args:
            read_one: Reads one answer that has arrived; returns False if there is no new one.
            waker: Waits for answers.
        """
        begun = self._asks.clock.now()
        while True:
            self._asks.expire(self._run, self._asks.clock.now())
            answered, still_open = self._count()
            late = self._terms.seconds and self._asks.clock.now() - begun >= self._terms.seconds
            if answered >= self._terms.answers or not still_open or (answered and late):
                return self._pool(self._number, status=AskStatus.ANSWERED)
            if not read_one():
                await waker.wait()
