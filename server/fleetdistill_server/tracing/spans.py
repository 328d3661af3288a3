"""Records spans in the traces of rounds, under ids that every process derives alike, and exports them with OTLP.

`OTEL_*` environment variables say where to and how much. Spans wait in a bounded queue, which a thread empties. A slow
or unreachable collector loses spans and delays nothing.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fleetdistill.errors import ConfigurationError
from fleetdistill.spans import Place
from fleetdistill_server.extras import missing

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_SPAN_BYTES, _TRACE_BYTES = 8, 16
ATTRIBUTE = "fleetdistill."
"""Prefix of the attributes of all spans."""
_MAX_RUNS = 1000
CLOSE_SECONDS = 2.0
"""Longest time that the end of a process waits for its last spans to be exported."""
_QUEUED_SPANS = 1 << 16
"""Default of OTEL_BSP_MAX_QUEUE_SIZE: a round of 10,000 devices ends with as many spans at once."""
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
_SETTING, _EXTRA = "[server] traces", "'fleetdistill[otel]'"
_NEXT_IDS: ContextVar[tuple[int, int]] = ContextVar("fleetdistill_span_ids", default=(0, 0))


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
        next_ids: Variable of the ids that the provider gives to the next span.
    """

    def __init__(self, provider: TracerProvider, next_ids: ContextVar[tuple[int, int]]) -> None:
        self._provider, self._next_ids = provider, next_ids
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

        token = self._next_ids.set(own)
        try:
            kind = SpanKind.SERVER if server else SpanKind.INTERNAL
            return self._tracer.start_span(
                name, context=context_of(parent), kind=kind, start_time=began, attributes=attributes(fields)
            )
        finally:
            self._next_ids.reset(token)

    def close(self) -> None:
        """Exports the remaining spans, and gives up after `CLOSE_SECONDS`."""
        closing = threading.Thread(target=self._provider.shutdown, name="close-tracing", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


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


def make_provider(process: str) -> tuple[TracerProvider, ContextVar[tuple[int, int]]]:
    """Returns a provider that exports spans with OTLP, and the variable with the ids of the next span, 0 for random.

    Args:
        process: Name of the process: front or engine.

    Raises:
        ConfigurationError: A package of the extra `otel` is missing, or a variable has an invalid value.
    """
    _check_endpoint()
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    except ImportError as error:
        raise missing(_SETTING, "opentelemetry-sdk", _EXTRA) from error

    class Ids(RandomIdGenerator):  # type: ignore[misc, unused-ignore]
        """Gives the next span the ids that the caller chose."""

        def generate_span_id(self) -> int:
            return _NEXT_IDS.get()[1] or super().generate_span_id()

        def generate_trace_id(self) -> int:
            return _NEXT_IDS.get()[0] or super().generate_trace_id()

    try:
        exporter = _exporter()
        name = os.environ.get("OTEL_SERVICE_NAME") or f"fleetdistill-{process}"
        provider = TracerProvider(
            resource=Resource.create({"service.name": name, "fleetdistill.process": process}),
            id_generator=Ids(),
            shutdown_on_exit=False,  # `close` has a time limit
        )
        size = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or _QUEUED_SPANS)
        provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=size))
    except ValueError as error:
        raise ConfigurationError(f"an environment variable OTEL_* has an invalid value: {error}") from error
    return provider, _NEXT_IDS


def check_traces(traces: str) -> None:
    """Raises ConfigurationError if `[server] traces` is on and a package is missing or a variable is invalid."""
    if traces != "off":
        _check_endpoint()
        _exporter().shutdown()


def _exporter() -> Any:
    variables = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((os.environ[name] for name in variables if os.environ.get(name)), "grpc")
    if protocol not in _EXPORTERS:
        raise ConfigurationError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}, expected one of {', '.join(sorted(_EXPORTERS))}"
        )
    try:
        return importlib.import_module(_EXPORTERS[protocol]).OTLPSpanExporter()
    except ImportError as error:
        package = f"opentelemetry-exporter-otlp-proto-{protocol.partition('/')[0]}"
        raise missing(_SETTING, package, _EXTRA if protocol == "grpc" else package) from error


def _check_endpoint() -> None:
    """Rejects an endpoint with a password, which the exporter would log."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        if "@" in urlsplit(os.environ.get(name, "")).netloc:
            raise ConfigurationError(f"{name} must not contain a password; set OTEL_EXPORTER_OTLP_HEADERS")


# --- Ids of a round's trace and of its spans, which every process derives alike without shared state.
#
# A process that is killed and restarted therefore continues the same trace, and a span can be the parent of another
# process's span before it has ended.


@dataclass(frozen=True)
class RoundIds:
    """The ids of one round.

    Attributes:
        run: Name of the run.
        created_at: When the run was created, in seconds since 1970; tells a run from a later one of the same name.
        number: Number of the round.
    """

    run: str
    created_at: float
    number: int

    @cached_property
    def trace(self) -> int:
        """Id of the round's trace."""
        return self._derive(_TRACE_BYTES, "trace")

    @cached_property
    def round(self) -> int:
        """Id of the span of the round, the root of its trace."""
        return self._derive(_SPAN_BYTES, "round")

    def ask(self, step_number: int, device: str) -> int:
        """Returns the id of the span of a device's ask."""
        return self._derive(_SPAN_BYTES, "ask", step_number, device)

    def place(self, span: int, sampled: bool) -> Place:
        """Returns the place of a span in this trace."""
        return Place(self.trace, span, sampled)

    def _derive(self, size: int, *what: object) -> int:
        name = json.dumps(["fleetdistill", self.run, self.created_at, self.number, *what])
        return int.from_bytes(sha256(name.encode()).digest()[:size]) or 1  # 0 is invalid
