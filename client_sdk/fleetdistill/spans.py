"""Spans of a device's work, recorded with the app's OpenTelemetry tracer provider; off by default.

OpenTelemetry is imported only if the app passes a provider. No span has a payload, a label, a secret or the text of an
error. The place in a trace goes with a gRPC call in the header `traceparent` of W3C Trace Context.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fleetdistill.errors import ConfigurationError, RefusedError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

KEY = "traceparent"
"""Key of the header in a call's metadata."""
SAMPLED = 1
"""The flag of a trace that is recorded."""
_VERSION_00 = re.compile(r"00-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})")
Headers = tuple[tuple[str, str], ...]
"""Metadata of a gRPC call."""


class Place(NamedTuple):
    """A place in a trace.

    Attributes:
        trace: Id of the trace, in [1, 2**128).
        span: Id of the span, in [1, 2**64).
        sampled: Whether the trace is recorded.
    """

    trace: int
    span: int
    sampled: bool = True

    def header(self) -> str:
        """Returns the value of the header."""
        return f"00-{self.trace:032x}-{self.span:016x}-{SAMPLED if self.sampled else 0:02x}"


def place_in(metadata: object) -> Place | None:
    """Returns the place that a call's metadata name, or None without a valid header.

    The other end chose the metadata, so anything but exactly one header of version 00 counts as none.

    Args:
        metadata: Pairs of key and value, as gRPC returns them; None for none.
    """
    result = [value for key, value in metadata or () if key == KEY]  # type: ignore[attr-defined]
    matched = _VERSION_00.fullmatch(result[0]) if len(result) == 1 and isinstance(result[0], str) else None
    if matched is None:
        return None
    place = Place(int(matched["trace"], 16), int(matched["span"], 16), bool(int(matched["flags"], 16) & SAMPLED))
    return place if place.trace and place.span else None


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
