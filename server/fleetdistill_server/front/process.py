"""The main function of the front's process."""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path

from fleetdistill.errors import ConfigurationError, FleetDistillError, RunError
from fleetdistill_server.config.server_config import load_server_config
from fleetdistill_server.front.server import serve
from fleetdistill_server.front.tls import Ports
from fleetdistill_server.logs import LogFormat, LogLevel, configure
from fleetdistill_server.service.processes import (
    EXIT_CANNOT_LISTEN,
    EXIT_CONFIGURATION,
    allow_open_files,
    end_with_parent,
)
from fleetdistill_server.service.wakeups import Ends
from fleetdistill_server.tracing.spans import check_traces

logger = logging.getLogger("fleetdistill.server.front")


def main() -> int:
    """Runs a front and returns the process's exit status."""
    parser = argparse.ArgumentParser(prog="fleetdistill-front", description="Serves a store over gRPC.")
    parser.add_argument("config", type=Path, help="The run.toml; [server] and [limits] are read.")
    parser.add_argument("--port", type=int, help="Port of [server] listen, to keep it through a restart.")
    parser.add_argument("--enrol-port", type=int, help="Port of [server] enrol_listen, to keep it through a restart.")
    parser.add_argument("--wakeups", type=Ends.parse, default=Ends())
    parser.add_argument("--parent", type=int)
    parser.add_argument("--log-format", choices=list(LogFormat), default=LogFormat.TEXT)
    parser.add_argument("--log-level", choices=list(LogLevel), default=LogLevel.INFO)
    options = parser.parse_args()
    configure("front", options.log_format, options.log_level)
    allow_open_files()
    end_with_parent(options.parent)
    try:
        config = load_server_config(options.config)
        check_traces(config.server.traces)
    except ConfigurationError as error:
        return _fail(error, EXIT_CONFIGURATION)
    server = config.server.on_ports(options.port, options.enrol_port)
    try:
        asyncio.run(serve(server, config.limits, options.wakeups, _print_ports))
    except RunError as error:
        return _fail(error, EXIT_CANNOT_LISTEN)
    return 0


def _fail(error: FleetDistillError, status: int) -> int:
    """Tells the supervisor why the front ends, which logs it and shows it to operators; returns the exit status."""
    print(f"failed {' '.join(str(error).split())}", flush=True)
    return status


def _print_ports(ports: Ports) -> None:
    if ports.enrol is not None:
        print(f"enrolling {ports.enrol}", flush=True)
    print(f"listening {ports.devices}", flush=True)
