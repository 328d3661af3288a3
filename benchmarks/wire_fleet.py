"""Fleets over gRPC: whole simulations, and thousands of connected devices with one round under way.

    python benchmarks/wire_fleet.py fleet --devices 20 200 1000
    python benchmarks/wire_fleet.py fleet --devices 1000 --per-round 200
    python benchmarks/wire_fleet.py waiting --devices 5000

`fleet`: time and CPU time to the end of the first round, memory of all processes, CPU time a device and round, and of
it the front's. Every device is an SDK `Device` with its state directory, and FedAvg's work is as small as it can be
(650 parameters, 20 samples, one epoch), so that the figures are those of the link. Memory is the proportional set size
(PSS), which counts a page that N processes share as 1/N in each.

`waiting`: memory and CPU time of a front for each device that waits for work, and a round of 200 of them. The devices
are bare clients: the links of simulated devices, which check in, wait and send an answer, without `Device`.

Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from calls import RUN, make_request, prepare_store

from fleetdistill.knowledge import Metric, Metrics
from fleetdistill.link.grpc_link import Connection
from fleetdistill.wire.codec import encode
from fleetdistill.wire.payload import chunks
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_lab.simulation.links.multiplexer import DEVICES_PER_CONNECTION, ParkingLink
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.config.server_config import ServerConfig, ServerSection
from fleetdistill_server.service.processes import front_environment
from fleetdistill_server.service.wakeups import Ends, make_ends
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store

SAMPLES, ROUNDS = 20, 3
COLUMNS = (
    "devices",
    "a round",
    "s to round 1",
    "s a round",
    "MB PSS",
    "MB RSS",
    "CPU s to round 1",
    "CPU ms a device and round",
    "the front's",
)
FRONT = "fleetdistill_server.front"
COHORT, IDLE_SECONDS = 200, 60.0
_TICKS = os.sysconf("SC_CLK_TCK")
_LOOK_SECONDS = 0.25


def main() -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["fleet", "waiting"])
    parser.add_argument("--devices", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--per-round", type=int, default=0, help="devices of a round; 0 for all")
    given = parser.parse_args()
    if given.what == "fleet":
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
        for devices in given.devices or [20, 200, 1000]:
            print(measured(devices, given.per_round, given.rounds), flush=True)
    else:
        for devices in given.devices or [1000, 5000]:
            waiting(devices)
    return 0


@dataclass
class Tree:
    """This process and its descendants, watched by a thread.

    Attributes:
        peak_pss: Largest sum of the processes' proportional set sizes, in bytes.
        peak_rss: The same of the resident set sizes.
    """

    peak_pss: int = 0
    peak_rss: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        """Looks until `stop`."""
        while not self._ended.wait(_LOOK_SECONDS):
            sizes = [memory(pid) for pid in tree()]
            self.peak_pss = max(self.peak_pss, sum(pss for pss, _ in sizes))
            self.peak_rss = max(self.peak_rss, sum(rss for _, rss in sizes))

    def stop(self) -> None:
        """Ends `watch`."""
        self._ended.set()


def tree() -> list[int]:
    """This process and its descendants."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    result = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in result} - result:
        result |= more
    return sorted(result)


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def memory(pid: int) -> tuple[int, int]:
    """Proportional and resident set size in bytes."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    return sizes.get("Pss:", 0), sizes.get("Rss:", 0)


def cpu_seconds(module: str = "") -> float:
    """CPU seconds so far of the tree with its ended children, or of its processes that run a module."""
    pids = [pid for pid in tree() if module in command(pid)]
    return sum(sum(int(field) for field in fields[11:15]) for pid in pids if (fields := stat(pid))) / _TICKS


def command(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return ""


def measured(devices: int, per_round: int, rounds: int) -> str:
    """One row, measured in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        row = run(devices, per_round, rounds)
        os.write(write, row.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        row = pipe.read()
    os.waitpid(child, 0)
    return row or "failed"


def run(devices: int, per_round: int, rounds: int) -> str:
    """Runs a simulation in this process; returns its row."""
    began = time.monotonic()
    from fleetdistill_lab import Progress, Simulation, simulate

    at: dict[int, tuple[float, float, float]] = {}

    def note(progress: Progress) -> None:
        if progress.phase == "fleet" and progress.completed not in at:
            at[progress.completed] = time.monotonic() - began, cpu_seconds(), cpu_seconds(FRONT)

    watched = Tree()
    watcher = threading.Thread(target=watched.watch, daemon=True)
    rng = np.random.default_rng(0)
    rows = devices * SAMPLES
    labels = np.arange(rows) % 10
    inputs = rng.random((rows, 1, 8, 8), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        watcher.start()
        simulate(
            Simulation(
                method="fedavg",
                models=("digits_linear",),
                dataset={
                    "train_inputs": inputs,
                    "train_labels": labels,
                    "test_inputs": inputs[:100],
                    "test_labels": labels[:100],
                },
                partition="iid",
                settings={"local_epochs": 1},
                devices=devices,
                devices_per_round=per_round,
                rounds=rounds,
                link="grpc",
                torch_device="cpu",
                with_alone=False,
                with_fedavg=False,
                out=Path(folder) / "out",
            ),
            note,
        )
    watched.stop()
    watcher.join()
    first = at[1]
    seconds, cpu, front = ((end - start) / max(rounds - 1, 1) for start, end in zip(first, at[rounds], strict=True))
    mb, asked = 1 << 20, per_round or devices
    return (
        f"| {devices} | {asked} | {first[0]:.1f} | {seconds:.1f} | {watched.peak_pss / mb:.0f} | "
        f"{watched.peak_rss / mb:.0f} | {first[1]:.0f} | {1000 * cpu / asked:.0f} | {1000 * front / asked:.0f} |"
    )


# --- connected devices


def waiting(devices: int) -> None:
    """Prints what waiting devices cost a front, and how long a round of some of them takes."""
    from _wire import cpu_seconds as cpu_of

    ends, (engine_ends,) = make_ends()
    with tempfile.TemporaryDirectory() as name, contextlib.closing(prepare_store(Path(name))) as store:
        front, port = start_front(Path(name), ends, devices)
        try:
            fleet = BareFleet(f"127.0.0.1:{port}", devices)
            empty = memory(front.pid)[1]
            began, used = time.monotonic(), cpu_of(front.pid)
            fleet.check_in()
            seconds, used = time.monotonic() - began, cpu_of(front.pid) - used
            print(
                f"{devices} devices checked in within {seconds:.0f} s, {1000 * used / devices:.2f} ms CPU of the front"
            )
            asyncio.run(fleet.wait(front.pid, empty, store, engine_ends))
        finally:
            front.terminate()
            front.wait()


def start_front(directory: Path, ends: Ends, devices: int) -> tuple[subprocess.Popen[str], int]:
    """Starts a front whose limits let all devices check in at once, as those of a simulation."""
    limits = Limits(new_devices_per_minute=2 * devices, new_devices_per_minute_per_address=2 * devices)
    config = directory / "served.toml"
    config.write_text(
        as_toml(ServerConfig(server=ServerSection(store=str(directory), listen="127.0.0.1:0"), limits=limits))
    )
    command = [sys.executable, "-m", "fleetdistill_server.front", str(config), f"--wakeups={ends}"]
    front = subprocess.Popen(
        [*command, "--log-level", "WARNING"],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=ends.all(),
        env=front_environment(),
    )
    assert front.stdout is not None
    return front, int(next(line.split()[1] for line in front.stdout if line.startswith("listening")))


class BareFleet:
    """The links of devices, without the devices."""

    def __init__(self, server: str, devices: int) -> None:
        shared = [Connection(server) for _ in range(0, devices, DEVICES_PER_CONNECTION)]
        self.links = {
            f"device-{number}": ParkingLink(server, shared[number % len(shared)]) for number in range(devices)
        }
        self.identities = {name: service_pb2.Identity(run=RUN, device=name) for name in self.links}

    def check_in(self) -> None:
        """Checks all devices in, 32 at a time."""

        def one(name: str) -> None:
            reply = self.links[name].check_in(self.identities[name], make_request(name).profile)
            self.identities[name].secret = reply.secret
            self.links[name].next_ask(self.identities[name], 0.0)  # stores the identity for `wait_for_work`

        with ThreadPoolExecutor(32) as pool:
            list(pool.map(one, self.links))

    async def wait(self, front: int, empty: int, store: Store, ends: Ends) -> None:
        """All devices wait; after a minute some are asked and answer, while the others go on waiting."""
        from _wire import cpu_seconds as cpu_of

        count = len(self.links)
        calls = {name: asyncio.ensure_future(link.wait_for_work()) for name, link in self.links.items()}
        await asyncio.sleep(count / 500)
        used, own = cpu_of(front), time.process_time()
        await asyncio.sleep(IDLE_SECONDS)
        idle, own = (cpu_of(front) - used) / IDLE_SECONDS, (time.process_time() - own) / IDLE_SECONDS
        held = memory(front)[1] - empty
        each, clients = 1000 * idle / count, 1000 * own / count
        print(
            f"{count} waiting devices: {held / count / 1000:.0f} kB of the front each; {each:.3f} ms CPU a second and "
            f"device ({100 * idle:.0f} % of a processor), {clients:.3f} ms of the clients' process",
            flush=True,
        )
        cohort = list(self.links)[:: max(count // COHORT, 1)][:COHORT]
        began, used = time.monotonic(), cpu_of(front)
        write_asks(store, cohort)
        os.write(ends.writes[0], b"x")
        await asyncio.gather(*(calls[name] for name in cohort))
        asked = time.monotonic() - began
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self.answer, cohort))
        took, used = time.monotonic() - began, cpu_of(front) - used
        assert sum(call.done() for call in calls.values()) == len(cohort), "only the asked devices have stopped waiting"
        print(
            f"a round of {len(cohort)} of them: all asked after {asked:.2f} s, all answers stored after {took:.2f} s; "
            f"{1000 * used / len(cohort):.1f} ms CPU of the front for each",
            flush=True,
        )
        for call in calls.values():
            call.cancel()

    def answer(self, name: str) -> None:
        """Sends a small answer to an ask and receives its receipt."""
        link, identity = self.links[name], self.identities[name]
        ask = link.next_ask(identity, 0.0).ask
        upload = service_pb2.UploadName(round=ask.round, step_number=ask.step_number, attempt=1)
        header = service_pb2.UploadHeader(identity=identity, name=upload, payload=ANSWER.header(), samples=1)
        assert link.upload(header, chunks(ANSWER.source, ANSWER.slots)).id


def write_asks(store: Store, cohort: list[str]) -> None:
    """Opens a round and asks, as the engine does."""
    number = store.runs.start_round(RUN, sorted(cohort))
    row = {"run": RUN, "round": number, "step_number": 1, "step": "train", "expects": {"metrics": "metrics"}}
    row |= {"seed": 1, "deadline_at": time.time() + 600}
    store.asks.add([Ask(**row, device=device) for device in cohort])


ANSWER = encode({"metrics": Metrics(metrics=[Metric(name="loss", split="train", sum=1.0, count=1)])})


if __name__ == "__main__":
    sys.exit(main())
