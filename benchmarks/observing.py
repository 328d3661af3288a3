"""What metrics cost a front: calls a second with `[server] metrics` against without.

Two fronts over stores of their own are driven by the same client processes as fast as they answer: a heartbeat, a poll
for work and a check-in, which commits, from each device in turn. The clients change from one front to the other every
half second, so that what else the machine does hits both alike. Each two neighbouring turns give a ratio; their order
changes from pair to pair. Beside the rate stands the processor time that each front needed for a call. The endpoint of
the front with metrics is scraped once a second.

    python benchmarks/observing.py                    # 60 pairs of turns
    python benchmarks/observing.py --pairs 10
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from calls import CALL_SECONDS, RUN, Device, Server, connect, make_request, prepare_store, server

from fleetdistill.wire.v1 import service_pb2
from fleetdistill_console.metrics.endpoint import Endpoint
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.config.server_config import ServerConfig, ServerSection
from fleetdistill_server.service.processes import allow_open_files

CLIENTS = 2
DEVICES = 32
"""Devices of a client process."""
SCRAPE_SECONDS = 1.0
TURN_SECONDS = 0.5


@contextlib.contextmanager
def front(directory: Path, metrics: str) -> Iterator[Server]:
    """A front over a new store, with or without metrics."""
    prepare_store(directory).close()
    section = ServerSection(store=str(directory), listen="127.0.0.1:0", metrics=metrics)
    limits = Limits(new_devices_per_minute=100_000, new_devices_per_minute_per_address=100_000)
    (directory / "served.toml").write_text(as_toml(ServerConfig(server=section, limits=limits)))
    with contextlib.ExitStack() as stack:
        if metrics:
            endpoint = Endpoint(section, list)
            stack.callback(endpoint.close)
            stack.enter_context(scraped(endpoint.port))
        arguments = ["-m", "fleetdistill_server.front", str(directory / "served.toml"), "--log-level", "WARNING"]
        yield stack.enter_context(server(arguments))


@contextlib.contextmanager
def scraped(port: int) -> Iterator[None]:
    """Scrapes an endpoint until the end of the block."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(SCRAPE_SECONDS):
            urlopen(f"http://127.0.0.1:{port}/metrics").read()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def turns(pairs: int) -> list[int]:
    """Which of the two fronts each turn drives."""
    return [front for pair in range(pairs) for front in ((0, 1) if pair % 2 == 0 else (1, 0))]


async def run_client(ports: Sequence[int], prefix: str, pairs: int) -> None:
    """Checks devices in at both fronts, waits for the start, and prints how many calls it made in each turn."""
    fleets = [await check_in(port, prefix) for port in ports]
    print("ready", flush=True)
    start = float(await asyncio.to_thread(sys.stdin.readline))
    counts = []
    for number, front in enumerate(turns(pairs)):
        await asyncio.sleep(max(0.0, start + number * TURN_SECONDS - time.time()))
        until = start + (number + 1) * TURN_SECONDS
        counts.append(sum(await asyncio.gather(*(work(one, secret, until) for one, secret in fleets[front]))))
    print(json.dumps(counts), flush=True)
    await asyncio.gather(*(one.channel.close() for fleet in fleets for one, _ in fleet))


async def check_in(port: int, prefix: str) -> list[tuple[Device, bytes]]:
    """Devices of a front with their secrets."""
    devices = await connect(port, [f"{prefix}-{number}" for number in range(DEVICES)])
    checked = [await device.stub.CheckIn(make_request(device.name), timeout=CALL_SECONDS) for device in devices]
    return [(one, answer.secret) for one, answer in zip(devices, checked, strict=True)]


async def work(device: Device, secret: bytes, until: float) -> int:
    """One call after another; returns their number."""
    identity = service_pb2.Identity(run=RUN, device=device.name, secret=secret)
    again = make_request(device.name)
    again.identity.CopyFrom(identity)
    calls: list[tuple[Any, Any]] = [
        (device.stub.Heartbeat, service_pb2.HeartbeatRequest(identity=identity)),
        (device.stub.NextAsk, service_pb2.NextAskRequest(identity=identity, wait_seconds=0.0)),
        (device.stub.CheckIn, again),
    ]
    number = 0
    while time.time() < until:
        method, request = calls[number % len(calls)]
        await method(request, timeout=CALL_SECONDS)
        number += 1
    return number


def drive(fronts: Sequence[Server], pairs: int) -> tuple[list[int], list[float]]:
    """Lets the clients call both fronts; returns the calls of each turn, and what each front computed, in seconds."""
    ports = ",".join(str(front.port) for front in fronts)
    clients = [
        subprocess.Popen(
            [sys.executable, __file__, "--client", ports, f"client{number}", str(pairs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(CLIENTS)
    ]
    for client in clients:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n", "a client ended; what it said stands above"
    before = [front.processor_seconds() for front in fronts]
    start = time.time() + 0.5
    for client in clients:
        assert client.stdin is not None
        print(start, file=client.stdin, flush=True)
    counts = [json.loads(client.communicate()[0]) for client in clients]
    computed = [one.processor_seconds() - was for one, was in zip(fronts, before, strict=True)]
    return [sum(turn) for turn in zip(*counts, strict=True)], computed


def ratios(calls: Sequence[int]) -> list[float]:
    """Calls of the second front for each call of the first, by pair of turns in which both made some."""
    result = []
    for number in range(0, len(calls), 2):
        first, second = calls[number : number + 2] if number % 4 == 0 else calls[number : number + 2][::-1]
        if first:
            result.append(second / first)
    return result


def compare(pairs: int) -> None:
    """Measures and prints."""
    print(f"load of the machine at the start: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    with contextlib.ExitStack() as stack:
        one, other = (Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2))
        fronts = [stack.enter_context(front(one, "")), stack.enter_context(front(other, "127.0.0.1:0"))]
        calls, computed = drive(fronts, pairs)
    order = turns(pairs)
    totals = [sum(count for count, front in zip(calls, order, strict=True) if front == which) for which in (0, 1)]
    for name, total, seconds in zip(("without", "with metrics"), totals, computed, strict=True):
        rate = total / (pairs * TURN_SECONDS)
        print(f"{name}: {rate:.0f} calls a second, {1e6 * seconds / total:.0f} us of the front for one")
    low, middle, high = statistics.quantiles(ratios(calls), n=4)
    print(f"rate with metrics / without: median {middle:.3f} of {pairs} pairs, half of them {low:.3f} to {high:.3f}")
    print(f"rate with metrics / without, of all calls: {totals[1] / totals[0]:.3f}")
    costs = [seconds / total for seconds, total in zip(computed, totals, strict=True)]
    print(f"processor time for a call with metrics / without: {costs[1] / costs[0]:.3f}")
    print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")


def main() -> None:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=60, help="pairs of turns of half a second")
    parser.add_argument("--client", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    allow_open_files()
    if given.client:
        ports, prefix, pairs = given.client
        asyncio.run(run_client([int(port) for port in ports.split(",")], prefix, int(pairs)))
    else:
        compare(given.pairs)


if __name__ == "__main__":
    main()
