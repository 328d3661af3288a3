"""What silent TCP connections cost a front with TLS: its memory during and after a burst, with limits and without.

Each front of its own gets the connections on 127.0.0.1 as fast as it accepts them; they say nothing and stay open until
the figures are taken. Growth is that of the resident memory since before the burst: the most that it ever was, and what
is left once it no longer changes.

    python benchmarks/silent_connections.py                          # 15,000 connections
    python benchmarks/silent_connections.py --connections 4000
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fleetdistill_server.config.limits import Limits
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.config.server_config import ServerConfig, ServerSection
from fleetdistill_server.security.pki import make_authority
from fleetdistill_server.service.processes import allow_open_files, front_environment

MAX_CONNECTIONS = 18_000
MAX_SECONDS = 60.0
"""Longest time for opening the connections."""
UNLIMITED = Limits(unknown_connections=2**31 - 1, unknown_connections_per_address=2**31 - 1)


@contextlib.contextmanager
def front(folder: Path, limits: Limits) -> Iterator[tuple[int, int]]:
    """A front with TLS; yields its process id and its port for devices."""
    make_authority(folder / "pki").issue_server([], 1.0)
    section = ServerSection(
        store=str(folder), listen="127.0.0.1:0", pki=str(folder / "pki"), enrol_listen="127.0.0.1:0"
    )
    (folder / "served.toml").write_text(as_toml(ServerConfig(server=section, limits=limits)))
    command = [sys.executable, "-m", "fleetdistill_server.front", str(folder / "served.toml"), "--log-level", "ERROR"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=front_environment()) as process:
        assert process.stdout is not None
        words = dict(process.stdout.readline().split() for _ in range(2))
        try:
            yield process.pid, int(words["listening"])
        finally:
            process.terminate()


def mebibytes(pid: int, field: str) -> float:
    """VmRSS or VmHWM of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def settled(pid: int) -> float:
    """VmRSS once it has been the same within 1 MiB for 3 s, after at most 30 s."""
    seen = [mebibytes(pid, "VmRSS")]
    while len(seen) < 30 and (len(seen) < 4 or max(seen[-4:]) - min(seen[-4:]) > 1):
        time.sleep(1.0)
        seen.append(mebibytes(pid, "VmRSS"))
    return seen[-1]


def measure(name: str, limits: Limits, count: int) -> None:
    """Prints what the connections cost one front."""
    with (
        tempfile.TemporaryDirectory() as folder,
        front(Path(folder), limits) as (pid, port),
        contextlib.ExitStack() as opened,
    ):
        before = settled(pid)
        began = time.monotonic()
        made = 0
        while made < count and time.monotonic() - began < MAX_SECONDS:
            opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=MAX_SECONDS))
            made += 1
        seconds = time.monotonic() - began
        after, peak = settled(pid), mebibytes(pid, "VmHWM")
        print(
            f"{name}: {made:,} connections in {seconds:.1f} s; growth at most {peak - before:.0f} MiB, "
            f"{after - before:.0f} MiB left; {len(os.listdir(f'/proc/{pid}/fd')):,} files open",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=15_000, help=f"at most {MAX_CONNECTIONS:,}")
    count = min(parser.parse_args().connections, MAX_CONNECTIONS)
    allow_open_files()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    measure("with the limits", Limits(), count)
    measure("without", UNLIMITED, count)


if __name__ == "__main__":
    main()
