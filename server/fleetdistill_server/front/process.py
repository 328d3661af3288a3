"""The front as a process of its own."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from fleetdistill.wire.compression import RAW, compression_of
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.config.tls import Tls
from fleetdistill_server.front.server import serve
from fleetdistill_server.front.tls import Ports
from fleetdistill_server.logs import LogFormat, LogLevel, configure
from fleetdistill_server.service.processes import allow_open_files, end_with_parent, keep_freed_memory
from fleetdistill_server.service.wakeups import Ends
from fleetdistill_server.store.disk_space import Bounds


def main() -> int:
    """Entry point of the front's process."""
    parser = argparse.ArgumentParser(prog="fleetdistill-front", description="The gRPC front of a store.")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--wakeups", type=Ends.parse, default=Ends())
    parser.add_argument("--parent", type=int)
    parser.add_argument("--lease-seconds", type=float, default=60.0)
    parser.add_argument("--limits", type=Limits.parse, default=Limits())
    parser.add_argument("--compression", type=compression_of, default=RAW)
    parser.add_argument("--disk-budget-bytes", type=int, default=0)
    parser.add_argument("--keep-free-bytes", type=int, default=0)
    parser.add_argument("--pki", type=Path)
    parser.add_argument("--enrol-listen", default="")
    parser.add_argument("--certificate-days", type=float, default=0.0)
    parser.add_argument("--log-format", choices=list(LogFormat), default=LogFormat.TEXT)
    parser.add_argument("--log-level", choices=list(LogLevel), default=LogLevel.INFO)
    given = parser.parse_args()
    tls = Tls(given.pki, given.enrol_listen, given.certificate_days) if given.pki else None
    bounds = Bounds(given.disk_budget_bytes, given.keep_free_bytes)
    configure("front", given.log_format, given.log_level)
    keep_freed_memory()
    allow_open_files()
    end_with_parent(given.parent)
    settings = (given.lease_seconds, _say_ports, given.compression, bounds, given.limits, tls)
    return asyncio.run(serve(given.store, given.listen, given.wakeups, *settings))


def _say_ports(ports: Ports) -> None:
    if ports.enrol is not None:
        print(f"enrolling {ports.enrol}", flush=True)
    print(f"listening {ports.devices}", flush=True)
