"""An OTLP collector: a real gRPC server with the service TraceService, which keeps the spans that it receives."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

APP = "app"
"""`service.name` of an app with a device."""


@dataclass(frozen=True)
class Received:
    """One span.

    Attributes:
        service: `service.name` of the process.
        attributes: Attributes, without the prefix `fleetdistill.`.
    """

    service: str
    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    failed: bool
    attributes: dict[str, Any] = field(hash=False)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans of all requests; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Received] = []
        self.text = ""

    def Export(self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any) -> Any:
        with self._lock:
            self.text += str(request)
            for one in request.resource_spans:
                service = _values(one.resource.attributes)["service.name"]
                self._spans += [_received(service, span) for scope in one.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, **fields: Any) -> list[Received]:
        """The spans with these attributes, or this name or service, oldest first."""
        with self._lock:
            result = list(self._spans)
        known = ("name", "service", "trace", "id", "parent")
        wanted = [(getattr, key, value) for key, value in fields.items() if key in known]
        of = [item for item in result if all(get(item, key) == value for get, key, value in wanted)]
        rest = {key: value for key, value in fields.items() if key not in known}
        of = [item for item in of if rest.items() <= item.attributes.items()]
        return sorted(of, key=lambda one: one.start)


@contextlib.contextmanager
def collecting() -> Iterator[tuple[Collector, dict[str, str]]]:
    """Runs a collector on a free port; yields it, and the environment of processes that export to it."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, environment(port)
    finally:
        server.stop(None).wait()


@contextlib.contextmanager
def silent() -> Iterator[tuple[list[socket.socket], dict[str, str]]]:
    """Accepts connections on a free port and never answers; yields them, and the environment of exporting processes.

    An exporter that waits for an answer waits for an hour.
    """
    accepted: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with contextlib.suppress(OSError):  # it is closed
                while True:
                    accepted.append(listening.accept()[0])

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield accepted, environment(listening.getsockname()[1]) | {"OTEL_EXPORTER_OTLP_TIMEOUT": "3600"}
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            for item in accepted:
                item.close()


def environment(port: int) -> dict[str, str]:
    """Variables with which a process exports its spans to a port, ten times a second."""
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}", "OTEL_BSP_SCHEDULE_DELAY": "100"}


def app_provider(variables: dict[str, str]) -> TracerProvider | None:
    """What an app sets up to record spans, with the variables of an exporter; None without them."""
    if "OTEL_EXPORTER_OTLP_ENDPOINT" not in variables:
        return None
    exporter = OTLPSpanExporter(endpoint=variables["OTEL_EXPORTER_OTLP_ENDPOINT"], insecure=True)
    provider = TracerProvider(resource=Resource.create({"service.name": APP}))
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=100))
    return provider


def _received(service: str, span: trace_pb2.Span) -> Received:
    times = span.start_time_unix_nano, span.end_time_unix_nano
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
    return Received(service, span.name, *ids, *times, failed, _values(span.attributes))


def _values(attributes: Any) -> dict[str, Any]:
    return {
        attribute.key.removeprefix("fleetdistill."): getattr(attribute.value, str(attribute.value.WhichOneof("value")))
        for attribute in attributes
    }
