"""Spans of a device's work, recorded with the app's OpenTelemetry tracer provider; off by default.

OpenTelemetry is imported only if the app passes a provider. No span has a payload, a label, a secret or the text of an
error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from fleetdistill.errors import ConfigurationError, RefusedError
from fleetdistill.traceparent import KEY, Place, place_in

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

Headers = tuple[tuple[str, str], ...]
"""Metadata of a gRPC call."""


class Spans(Protocol):
    """What records a device's spans."""

    on: bool

    def take(self, metadata: object) -> None:
        """Remembers the place in a trace that the server gave with an ask."""

    def headers(self) -> Headers | None:
        """Returns the metadata that tell the server the current span."""

    def span(self, name: str, **fields: object) -> AbstractContextManager[object]:
        """Records the block as a span, below the current one or else below the server's place."""

    def ask(self, **fields: object) -> AbstractContextManager[object]:
        """Records the block as the device's work on an ask, below the server's place."""


class NoSpans:
    """Records nothing."""

    on = False

    def take(self, metadata: object) -> None:
        """Does nothing."""

    def headers(self) -> None:
        """Returns None."""

    def span(self, name: str, **fields: object) -> AbstractContextManager[object]:
        """Returns a context that does nothing."""
        return nullcontext()

    def ask(self, **fields: object) -> AbstractContextManager[object]:
        """Returns a context that does nothing."""
        return nullcontext()


NO_SPANS = NoSpans()


class ProviderSpans:
    """Records spans with a tracer provider. Used by one thread at a time.

    Args:
        provider: An OpenTelemetry `TracerProvider`, which the app has set up and shuts down.

    Raises:
        ConfigurationError: The package opentelemetry-api is missing.
    """

    on = True

    def __init__(self, provider: Any) -> None:
        try:
            import opentelemetry.trace  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(
                "tracer_provider needs opentelemetry-api, which is not installed: pip install 'fleetdistill[otel]'"
            ) from error
        self._tracer = provider.get_tracer("fleetdistill")
        self._given: Place | None = None
        self._current: Span | None = None
        self._about: dict[str, object] = {}  # attributes of the current span, which the spans in it have too

    def take(self, metadata: object) -> None:
        """Remembers the place in a trace that the server gave with an ask."""
        self._given = place_in(metadata)

    def headers(self) -> Headers | None:
        """Returns the metadata that tell the server the current span."""
        if self._current is None:
            return None
        context = self._current.get_span_context()
        return ((KEY, Place(context.trace_id, context.span_id, context.trace_flags.sampled).header()),)

    def ask(self, **fields: object) -> AbstractContextManager[object]:
        """Records the block as the device's work on an ask, below the server's place."""
        return self._recorded("answer", self._given, fields)

    def span(self, name: str, **fields: object) -> AbstractContextManager[object]:
        """Records the block as a span, below the current one or else below the server's place."""
        return self._recorded(name, self._given if self._current is None else None, fields)

    @contextlib.contextmanager
    def _recorded(self, name: str, parent: Place | None, fields: dict[str, object]) -> Iterator[None]:
        about = {**self._about, **fields}
        attributes: Any = {f"fleetdistill.{key}": value for key, value in about.items() if value not in (None, "")}
        outer = self._current
        known = _context(parent) if self._current is None else None
        with self._tracer.start_as_current_span(
            name, context=known, attributes=attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            outside, self._current, self._about = self._about, span, about
            try:
                yield
            except BaseException as error:
                _fail(span, error)
                raise
            finally:
                self._current, self._about = outer, outside


def _context(parent: Place | None) -> Context:
    """Returns a context below the server's span, or one that begins a trace even within a span of the app."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if parent is None:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT)
    return set_span_in_context(NonRecordingSpan(SpanContext(parent.trace, parent.span, True, flags)))


def _fail(span: Span, error: BaseException) -> None:
    """Marks a span as failed with a code or a class, never with a text, which might quote data."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", error.code if isinstance(error, RefusedError) else type(error).__name__)
    span.set_status(Status(StatusCode.ERROR))
