"""The HTTP endpoint of `[server] metrics`: plain HTTP, no authentication, and nothing secret in it.

The supervisor's process opens it, so it also answers while the front or an engine is being restarted.
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server

from fleetdistill.errors import RunError, in_words
from fleetdistill_server.config.server_config import ServerSection
from fleetdistill_server.metrics.files import FilesCollector, clear
from fleetdistill_server.metrics.machine import MachineCollector, Processes
from fleetdistill_server.metrics.runs import RunsCollector


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
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        except OSError as error:
            text = "the address is in use or not this machine's; set another in [server] metrics"
            raise RunError(f"cannot listen on {config.metrics}: {in_words(error)}; {text}") from error
        self.port = self._server.server_port

    def close(self) -> None:
        """Ends the endpoint."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if self._runs is not None:
            self._runs.close()
