"""`make fuzz`: hostile messages without end. Ends with one line, and well only if nothing broke.

    python tests/fuzz/run.py --messages 1000000 --socket-messages 10000 --device-messages 100000 --seed 1

A seed that breaks something is printed, and `--only ingest --seed N --messages 1` plays it again.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
import traceback
from pathlib import Path
from random import Random
from typing import Any

from fuzz.device_side import DeviceTarget, device_target
from fuzz.in_process import ApiTarget, IngestTarget
from fuzz.over_sockets import SocketTarget, socket_target
from fuzz.played import Played, play_all
from support.fleets import RUNS
from support.processes import own_peak_memory

MAX_GROWTH = 200 << 20
"""Bytes that memory may grow by, whatever the number of messages; the largest payload that fits is far smaller."""
MAX_SECONDS = 60.0
"""Longest step of a device that is given `fuzz.device_side.SECONDS_PER_ASK` for an ask, on a busy machine."""
_REOPEN_EVERY = 20


def fuzz_in_process(target: IngestTarget | ApiTarget | DeviceTarget, messages: int, seed: int) -> tuple[int, list[int]]:
    """Sends at least so many messages; returns how many and the seeds that broke something."""
    sent, broken = 0, []
    while sent < messages:
        try:
            sent += target.turn(Random(seed))
        except Exception:
            traceback.print_exc()
            broken.append(seed)
            sent += 1
        seed += 1
    return sent, broken


def fuzz_sockets(target: SocketTarget, messages: int, seed: int) -> tuple[int, list[int]]:
    """The same over a connection; at the end the front must still serve."""
    sent, broken = 0, []
    while sent < messages:
        if seed % _REOPEN_EVERY == 0:
            target.reopen()
        try:
            sent += target.turn(Random(seed))
        except AssertionError:
            traceback.print_exc()
            broken.append(seed)
            sent += 1
        seed += 1
    target.assert_serves()
    return sent, broken


def _in_process(name: str, make: Any, messages: int, seed: int) -> tuple[int, int]:
    target = make()
    before, started = own_peak_memory(), time.perf_counter()
    sent, broken = fuzz_in_process(target, messages, seed)
    return _said(name, sent, broken, target.outcomes, own_peak_memory() - before, started)


def _devices(name: str, messages: int, seed: int, runs: list[Played], *, remote: bool) -> tuple[int, int]:
    with device_target(runs, remote=remote) as target:
        before, started = own_peak_memory(), time.perf_counter()
        sent, broken = fuzz_in_process(target, messages, seed)
        told, failed = _said(name, sent, broken, target.outcomes, own_peak_memory() - before, started)
        left = sorted(target.liar.untouched())
        print(f"  {len(target.liar.touched)} fields changed, {len(left)} not {left[:5]}; ", end="")
        print(f"longest step {target.slowest:.1f} s")
        return told, failed + bool(left) + (target.slowest > MAX_SECONDS)


def _device_runs() -> list[Played]:
    """Every method, and every variant of `support.fleets`."""
    with tempfile.TemporaryDirectory() as folder:
        return play_all(list(RUNS), Path(folder))


def _over_sockets(messages: int, seed: int) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as directory, socket_target(Path(directory)) as target:
        before, started = target.peak_memory, time.perf_counter()
        sent, broken = fuzz_sockets(target, messages, seed)
        return _said("sockets", sent, broken, target.outcomes, target.peak_memory - before, started)


def _said(name: str, sent: int, broken: list[int], outcomes: Any, grown: int, started: float) -> tuple[int, int]:
    rate = sent / (time.perf_counter() - started)
    print(f"{name}: {sent:,} messages, {rate:,.0f} a second, peak memory +{grown >> 20} MiB")
    for outcome, count in outcomes.most_common():
        print(f"  {count:>9,}  {outcome}")
    if broken:
        print(f"  broken by seeds {broken[:20]}")
    if grown > MAX_GROWTH:
        print(f"  memory grew by more than {MAX_GROWTH >> 20} MiB")
    return sent, len(broken) + (grown > MAX_GROWTH)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000, help="through the ingest code in process")
    parser.add_argument("--api-messages", type=int, default=100_000, help="through every call in process")
    parser.add_argument("--socket-messages", type=int, default=10_000, help="to a front over the loopback")
    parser.add_argument("--device-messages", type=int, default=100_000, help="to devices in process")
    parser.add_argument("--device-socket-messages", type=int, default=5_000, help="to devices over the loopback")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["ingest", "api", "sockets", "devices", "device-sockets"])
    given = parser.parse_args()
    runs = functools.cache(_device_runs)
    parts = {
        "ingest": lambda: _in_process("ingest", IngestTarget, given.messages, given.seed),
        "api": lambda: _in_process("api", ApiTarget, given.api_messages, given.seed),
        "sockets": lambda: _over_sockets(given.socket_messages, given.seed),
        "devices": lambda: _devices("devices", given.device_messages, given.seed, runs(), remote=False),
        "device-sockets": lambda: _devices(
            "device-sockets", given.device_socket_messages, given.seed, runs(), remote=True
        ),
    }
    done = {name: part() for name, part in parts.items() if given.only in (None, name)}
    failures = sum(failed for _, failed in done.values())
    said = ", ".join(f"{sent:,} through {name}" for name, (sent, _) in done.items())
    print(f"fuzz: {said}, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
