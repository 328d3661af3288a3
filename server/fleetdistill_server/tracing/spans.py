"""Records spans in the traces of rounds, under the ids of `ids.py`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from fleetdistill.spans import Place
from fleetdistill_server.tracing.export import close, make_provider
from fleetdistill_server.tracing.ids import RoundIds

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

ATTRIBUTE = "fleetdistill."
"""Prefix of the attributes of all spans."""
_MAX_RUNS = 1000


def open_spans(traces: str, process: str) -> Spans | None:
    """Returns what records spans if `[server] traces` is on, else None; the log then has trace ids.

    Args:
        traces: `[server] traces`.
        process: Name of the process: front or engine.

    Raises:
        ConfigurationError: A package of the extra `otel` is missing, or an environment variable is invalid.
    """
    if traces == "off":
        return None
    spans = Spans(*make_provider(process))
    for handler in logging.root.handlers:
        handler.addFilter(_TraceIds(spans))
    return spans


class Spans:
    """Records spans. Thread-safe.

    Args:
        provider: Provider of the tracer.
        given: Variable of the ids that the provider gives to the next span.
    """

    def __init__(self, provider: TracerProvider, given: ContextVar[tuple[int, int]]) -> None:
        self._provider, self._given = provider, given
        self._tracer = provider.get_tracer("fleetdistill")
        self._created: dict[str, float] = {}  # when each run was created, for the log

    def ids(self, run: str, created_at: float, number: int) -> RoundIds:
        """Returns the ids of a round."""
        if run not in self._created and len(self._created) >= _MAX_RUNS:
            self._created.clear()
        self._created[run] = created_at
        return RoundIds(run, created_at, number)

    def known_ids(self, run: str, number: int) -> RoundIds | None:
        """Returns the ids of a round whose run is known from an earlier `ids`, else None."""
        created = self._created.get(run)
        return None if created is None else RoundIds(run, created, number)

    def is_sampled(self, ids: RoundIds) -> bool:
        """Returns whether the round's trace is recorded; all processes with the same settings decide alike."""
        decision = self._provider.sampler.should_sample(context_of(None), ids.trace, "round").decision
        return decision is not decision.DROP

    def place(self, ids: RoundIds, span: int) -> Place:
        """Returns the place of a span in a round's trace."""
        return ids.place(span, self.is_sampled(ids))

    def start(
        self,
        name: str,
        parent: Place | None,
        began: int,
        *,
        own: tuple[int, int] = (0, 0),
        server: bool = False,
        fields: Mapping[str, object],
    ) -> Span:
        """Starts a span.

        Args:
            name: Name of the span.
            parent: Place of its parent; None for the root of a trace.
            began: Start, in nanoseconds since 1970.
            own: Ids of the trace and of the span; 0 for the parent's trace and for a random id.
            server: Whether the span is the server's part of a call.
            fields: Attributes without their prefix.
        """
        from opentelemetry.trace import SpanKind

        token = self._given.set(own)
        try:
            kind = SpanKind.SERVER if server else SpanKind.INTERNAL
            return self._tracer.start_span(
                name, context=context_of(parent), kind=kind, start_time=began, attributes=attributes(fields)
            )
        finally:
            self._given.reset(token)

    def close(self) -> None:
        """Exports the remaining spans, within a time limit."""
        close(self._provider)


def attributes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes of a span, without empty ones."""
    return {f"{ATTRIBUTE}{name}": value for name, value in fields.items() if value not in (None, "")}


def fail(span: Span, kind: str) -> None:
    """Marks a span as failed with a code or a class, never with a text, which might quote data."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))


def place_of(span: Span) -> Place:
    """Returns the place of a span."""
    context = span.get_span_context()
    return Place(context.trace_id, context.span_id, context.trace_flags.sampled)


def context_of(place: Place | None) -> Context:
    """Returns the OpenTelemetry context with a place as the current span."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if place is None:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED if place.sampled else TraceFlags.DEFAULT)
    parent = SpanContext(place.trace, place.span, is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(parent), Context())


class _TraceIds(logging.Filter):
    """Adds the trace id to the records about a round."""

    def __init__(self, spans: Spans) -> None:
        super().__init__()
        self._spans = spans

    def filter(self, record: logging.LogRecord) -> bool:
        run, number = getattr(record, "about_run", None), getattr(record, "about_round", None)
        ids = self._spans.known_ids(run, number) if run and number else None
        if ids is not None:
            record.about_trace_id = f"{ids.trace:032x}"
        return True
