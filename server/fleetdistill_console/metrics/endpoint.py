"""The HTTP endpoint of `[server] metrics`: plain HTTP, no authentication, and nothing secret in it.

The supervisor's process opens it, so it also answers while the front or an engine is being restarted.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from fleetdistill.errors import RunError, in_words
from fleetdistill_console.metrics.files import FilesCollector, clear
from fleetdistill_console.metrics.machine import MachineCollector, Processes
from fleetdistill_console.metrics.runs import RunsCollector
from fleetdistill_server.config.server_config import ServerSection

_STALL_SECONDS = 10.0
"""Longest wait for a part of a request, and for a caller to read a part of the answer."""
_MAX_CONNECTIONS = 32


class Endpoint:
    """Answers scrapes until it is closed. Create it before the front and the engines start.

    Args:
        config: Settings of the server, with `metrics`.
        processes: Returns the processes that the supervisor runs.
        with_runs: Whether to report the runs in the store. Of several supervisors of one store, only the one that runs
            the engine should.

    Attributes:
        port: Port on which it listens.

    Raises:
        RunError: The address is in use or not one of this machine.
        StoreError: The store's directory cannot be written.
    """

    def __init__(self, config: ServerSection, processes: Processes, with_runs: bool = True) -> None:
        clear(Path(config.store))
        registry = CollectorRegistry()
        registry.register(MachineCollector(config, processes))
        registry.register(FilesCollector(Path(config.store)))
        self._runs = RunsCollector(Path(config.store)) if with_runs else None
        if self._runs is not None:
            registry.register(self._runs)
        host, _, port = config.metrics.rpartition(":")
        try:
            self._server = _Server(host.strip("[]"), int(port))
        except OSError as error:
            text = "the address is in use or not this machine's; set another in [server] metrics"
            raise RunError(f"cannot listen on {config.metrics}: {in_words(error)}; {text}") from error
        self._server.set_app(make_wsgi_app(registry))
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the endpoint."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if self._runs is not None:
            self._runs.close()


class _Handler(WSGIRequestHandler):
    timeout = _STALL_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: every scrape would be a line."""


class _Server(ThreadingMixIn, WSGIServer):
    """An HTTP server with a thread for each of a few connections; a further one closes the oldest."""

    daemon_threads = True
    request_queue_size = 128  # with Python's 5, a caller in a burst waits for seconds

    def __init__(self, host: str, port: int) -> None:
        result = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = result[0][0]
        self._lock = threading.Lock()
        self._open: list[Any] = []  # oldest first
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.append(request)
            surplus = self._open[:-_MAX_CONNECTIONS]
            for connection in surplus:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # its thread then closes it
            self._open = self._open[-_MAX_CONNECTIONS:]
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open = [item for item in self._open if item is not request]
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a caller that stalls or hangs up."""
