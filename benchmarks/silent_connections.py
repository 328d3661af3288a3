"""What connections without a certificate cost a front with TLS: its memory during and after bursts of them.

Each front of its own gets bursts of connections on 127.0.0.1, all begun at once: they say nothing, or half of what a
client says first, and stay open for 15 s. Growth is that of the resident memory since before the bursts: the most that
it ever was, and what is left once it no longer changes.

    python benchmarks/silent_connections.py                          # three bursts of 15,000 connections
    python benchmarks/silent_connections.py --connections 4000
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import socket
import ssl
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
OPEN_SECONDS = 15.0
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


def half_of_hello() -> bytes:
    """The first half of the first message of a TLS client."""
    said = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), said, server_hostname="localhost").do_handshake()
    message = said.read()
    return message[: len(message) // 2]


def settled(pid: int) -> float:
    """VmRSS once it has been the same within 1 MiB for 3 s, after at most 30 s."""
    seen = [mebibytes(pid, "VmRSS")]
    while len(seen) < 30 and (len(seen) < 4 or max(seen[-4:]) - min(seen[-4:]) > 1):
        time.sleep(1.0)
        seen.append(mebibytes(pid, "VmRSS"))
    return seen[-1]


def burst(port: int, count: int, first: bytes) -> int:
    """Connections that say this first and then nothing; returns how many the kernel had made when they were closed."""
    made = 0
    with contextlib.ExitStack() as opened, select.epoll() as events:
        connections = {}
        for _ in range(count):
            connection = opened.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
            connections[connection.fileno()] = connection
            events.register(connection, select.EPOLLOUT)
        until = time.monotonic() + OPEN_SECONDS
        while time.monotonic() < until:
            for number, _ in events.poll(0.1):
                events.unregister(number)
                made += 1
                with contextlib.suppress(OSError):  # the front has closed it
                    connections[number].send(first)
    return made


def measure(name: str, limits: Limits, count: int, first: bytes, bursts: int) -> None:
    """Prints what the connections cost one front."""
    with tempfile.TemporaryDirectory() as folder, front(Path(folder), limits) as (pid, port):
        before = settled(pid)
        made = [burst(port, count, first) for _ in range(bursts)]
        after, peak = settled(pid), mebibytes(pid, "VmHWM")
        print(
            f"{name}: {bursts} bursts of {count:,} connections (made: {', '.join(f'{one:,}' for one in made)}); "
            f"growth at most {peak - before:.0f} MiB, {after - before:.0f} MiB left",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=15_000, help=f"at most {MAX_CONNECTIONS:,}")
    count = min(parser.parse_args().connections, MAX_CONNECTIONS)
    allow_open_files()
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    measure("silent, with the limits", Limits(), count, b"", 3)
    measure("half a hello, with the limits", Limits(), count, half_of_hello(), 3)
    measure("silent, without", UNLIMITED, count, b"", 1)


if __name__ == "__main__":
    main()
