"""Records the engine's spans of a round: the round, its asks, and its phases.

The round's span is recorded when the round ends, so an engine that is killed leaves none, and the engine that continues
the round records it with the same ids. Asks are read from the store, which knows when they were answered.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fleetdistill_server.phases import observed_by
from fleetdistill_server.store.records import Ask, Round, Upload
from fleetdistill_server.store.states import AskStatus, RoundStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traced import created_at, ended_round
from fleetdistill_server.tracing.spans import RoundIds, Spans, fail

_SECOND = 1_000_000_000


class RoundSpans:
    """Records the spans of one run's rounds.

    Args:
        spans: Records spans.
        store: Store that contains the run.
        run: Name of the run.
        deadline_seconds: Seconds from an ask to its deadline.
    """

    def __init__(self, spans: Spans, store: Store, run: str, deadline_seconds: float) -> None:
        self._spans = spans
        self._store = store
        self._run = run
        self._deadline_seconds = deadline_seconds

    @contextmanager
    def of_round(self, number: int) -> Iterator[None]:
        """Records the round that the block runs; nothing of the round itself if the block fails, as it goes on then."""
        created = created_at(self._store.database, self._run)
        if created is None:  # the run was deleted
            yield
            return
        ids = self._spans.ids(self._run, created, number)
        with observed_by(partial(self._phase, ids)):
            yield
        ended = ended_round(self._store.database, self._run, number)
        if ended is not None:
            self._record(ids, ended)

    @contextmanager
    def _phase(self, ids: RoundIds, name: str) -> Iterator[None]:
        parent = self._spans.place(ids, ids.round)
        span = self._spans.start(name, parent, time.time_ns(), fields={"run": ids.run, "round": ids.number})
        try:
            yield
        except BaseException as error:
            fail(span, type(error).__name__)
            raise
        finally:
            span.end()

    def _record(self, ids: RoundIds, of_round: Round) -> None:
        began, ended = int(of_round.started_at * _SECOND), int((of_round.ended_at or 0.0) * _SECOND)
        asks = self._store.summaries.asks_of_round(ids.run, ids.number, with_open=False)
        for ask, upload in asks:
            self._record_ask(ids, ask, upload, began, ended)
        answers = sum(ask.status is AskStatus.ANSWERED for ask, _ in asks)
        of = {
            "run": ids.run,
            "round": ids.number,
            "status": str(of_round.status),
            "asks": len(asks),
            "answers": answers,
        }
        span = self._spans.start("round", None, began, own=(ids.trace, ids.round), fields=of)
        if of_round.status is RoundStatus.SHORT:
            fail(span, "QuorumNotReached")
        span.end(max(began, ended))

    def _record_ask(self, ids: RoundIds, ask: Ask, upload: Upload | None, began: int, ended: int) -> None:
        asked = min(max(began, int((ask.deadline_at - self._deadline_seconds) * _SECOND)), ended)
        answered = min(ask.deadline_at, ended / _SECOND) if upload is None else upload.received_at
        of = {
            "run": ids.run,
            "round": ids.number,
            "ask": ask.id,
            "device": ask.device,
            "step": ask.step,
            "step_number": ask.step_number,
            "status": str(ask.status),
        }
        own = (0, ids.ask(ask.step_number, ask.device))
        parent = self._spans.place(ids, ids.round)
        span = self._spans.start("ask", parent, asked, own=own, fields=of)
        if ask.status is AskStatus.OUT:
            fail(span, "unanswered")
        span.end(max(asked, int(answered * _SECOND)))
