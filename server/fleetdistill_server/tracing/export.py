"""Exports spans with OTLP; `OTEL_*` environment variables say where to and how much.

Spans wait in a bounded queue, which a thread empties. A slow or unreachable collector loses spans and delays nothing.
"""

from __future__ import annotations

import importlib
import os
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.extras import missing

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

CLOSE_SECONDS = 2.0
"""Longest time that the end of a process waits for its last spans to be exported."""
_QUEUED_SPANS = 1 << 16
"""Default of OTEL_BSP_MAX_QUEUE_SIZE: a round of 10,000 devices ends with as many spans at once."""
_EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}
_SETTING, _EXTRA = "[server] traces", "'fleetdistill[otel]'"
_GIVEN: ContextVar[tuple[int, int]] = ContextVar("fleetdistill_span_ids", default=(0, 0))


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
            return _GIVEN.get()[1] or super().generate_span_id()

        def generate_trace_id(self) -> int:
            return _GIVEN.get()[0] or super().generate_trace_id()

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
    return provider, _GIVEN


def check_traces(traces: str) -> None:
    """Raises ConfigurationError if `[server] traces` is on and a package is missing or a variable is invalid."""
    if traces != "off":
        _check_endpoint()
        _exporter().shutdown()


def close(provider: TracerProvider) -> None:
    """Exports the remaining spans, and gives up after `CLOSE_SECONDS`."""
    closing = threading.Thread(target=provider.shutdown, name="close-tracing", daemon=True)
    closing.start()
    closing.join(CLOSE_SECONDS)


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
