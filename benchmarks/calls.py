"""Small calls of many devices: check-ins, long polls, the memory of an idle device, the latency of an ask.

Every figure is taken with real channels, one for each device, from processes of their own over the loopback, and beside
the raw limit: a bare grpc.aio server that answers the same calls with the same bytes and does nothing else.

    python benchmarks/calls.py                    # everything
    python benchmarks/calls.py --devices 200 --callers 500 --seconds 3
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

from fleetdistill.wire.v1 import contract_pb2, service_pb2, service_pb2_grpc, tensor_pb2
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.config.server_config import ServerConfig, ServerSection
from fleetdistill_server.front.server import OPTIONS as FRONT_OPTIONS
from fleetdistill_server.front.server import channel_options
from fleetdistill_server.service.processes import allow_open_files, front_environment
from fleetdistill_server.service.wakeups import Ends, make_ends
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store

RUN = "bench"
ASKED = "polling"
"""The device whose asks are timed."""
CLIENTS = 2
CALL_SECONDS = 120.0
CALLERS = 32
"""Calls that each client has under way when it goes as fast as it can."""
ASKS = 200
OPTIONS = [("grpc.use_local_subchannel_pool", 1)]  # else channels to one address share a connection


# --- what both servers answer


def make_contract() -> contract_pb2.Contract:
    """A contract as digits have it."""
    return contract_pb2.Contract(
        run=RUN,
        method="none",
        classes=[str(label) for label in range(10)],
        input_shape=[1, 8, 8],
        features=[contract_pb2.NamedShape(name="cut", shape=[16, 4, 4])],
        extractor_fingerprint="0" * 64,
        knowledge_type=tensor_pb2.ELEMENT_TYPE_FLOAT32,
        requirements=contract_pb2.Requirements(columns=["features", "logits", "labels"]),
        rounds=1,
        threads=1,
        max_upload_bytes=1 << 30,
    )


def make_request(device: str) -> service_pb2.CheckInRequest:
    """The first check-in of a device."""
    contract = make_contract()
    profile = contract_pb2.DeviceProfile(
        samples=100,
        classes=len(contract.classes),
        input_shape=contract.input_shape,
        features=contract.features,
        extractor_fingerprint=contract.extractor_fingerprint,
        knowledge_types=[contract.knowledge_type],
        allowed_columns=["features", "logits", "labels", "metrics"],
    )
    return service_pb2.CheckInRequest(identity=service_pb2.Identity(run=RUN, device=device), profile=profile)


class BareService(service_pb2_grpc.DeviceServiceServicer):
    """The raw limit: answers of the same size, and nothing behind them."""

    async def CheckIn(self, request: Any, context: Any) -> service_pb2.CheckInResponse:
        return service_pb2.CheckInResponse(
            contract=make_contract(), secret=b"s" * 32, lease_seconds=60.0, heartbeat_seconds=15.0
        )

    async def NextAsk(self, request: Any, context: Any) -> service_pb2.NextAskResponse:
        await asyncio.sleep(request.wait_seconds)
        return service_pb2.NextAskResponse(come_back=service_pb2.ComeBack(after_seconds=0.0, before_seconds=1.0))


async def serve_bare() -> None:
    """Runs the bare server in this process and says its port."""
    bare = grpc.aio.server(options=[*FRONT_OPTIONS, *channel_options(Limits())])
    service_pb2_grpc.add_DeviceServiceServicer_to_server(BareService(), bare)
    print("listening", bare.add_insecure_port("127.0.0.1:0"), flush=True)
    await bare.start()
    await bare.wait_for_termination()


def prepare_store(directory: Path) -> Store:
    """A store with the run, open for devices."""
    store = Store.open(directory)
    store.runs.begin(RUN, {})
    store.runs.publish_contract(RUN, make_contract().SerializeToString())
    return store


@dataclass
class Server:
    """A server process, the front or the bare one."""

    process: subprocess.Popen[str]
    port: int

    def resident_bytes(self) -> int:
        """Memory that it has now."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    def processor_seconds(self) -> float:
        """Time that it has computed."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def server(arguments: Sequence[str], ends: Ends | None = None) -> Iterator[Server]:
    """Runs a server that says `listening PORT`, until the end of the block."""
    given = ends or Ends()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=front_environment(),
        pass_fds=[x for x in given.all() if x >= 0],
    )
    try:
        assert process.stdout is not None
        yield Server(process, int(process.stdout.readline().split()[1]))
    finally:
        process.terminate()
        process.wait()


def front_command(directory: str, ends: Ends) -> list[str]:
    """How the supervisor starts a front."""
    config = Path(directory) / "served.toml"
    config.write_text(as_toml(ServerConfig(server=ServerSection(store=directory, listen="127.0.0.1:0"))))
    return ["-m", "fleetdistill_server.front", str(config), f"--wakeups={ends}"]


# --- the clients


@dataclass(frozen=True)
class Device:
    """One connected device."""

    name: str
    stub: Any
    channel: Any


async def connect(port: int, names: Sequence[str]) -> list[Device]:
    """Opens a channel for each device; returns once all are ready."""
    devices = []
    for name in names:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)
        devices.append(Device(name, service_pb2_grpc.DeviceServiceStub(channel), channel))
    for start in range(0, len(devices), 100):
        await asyncio.gather(*(device.channel.channel_ready() for device in devices[start : start + 100]))
    return devices


@dataclass(frozen=True)
class Timed:
    """One call: when it began, in seconds since 1970, how long it took, and its status."""

    began: float
    seconds: float
    status: str


async def timed(call: Awaitable[Any]) -> Timed:
    """Times a call, however it ends."""
    began, started, status = time.time(), time.perf_counter(), "OK"
    try:
        await call
    except grpc.aio.AioRpcError as error:
        status = error.code().name
    return Timed(began, time.perf_counter() - started, status)


async def steady_check_ins(devices: Sequence[Device], seconds: int) -> list[Timed]:
    """Each device checks in once a second, at a moment of its own, as a new device every time."""

    async def one(device: Device, begin: float) -> list[Timed]:
        result = []
        for turn in range(seconds):
            await asyncio.sleep(begin + turn - time.perf_counter())
            request = make_request(f"{device.name}-{turn}")
            result.append(await timed(device.stub.CheckIn(request, timeout=CALL_SECONDS)))
        return result

    start = time.perf_counter() + 0.5
    lists = await asyncio.gather(*(one(device, start + random.random()) for device in devices))
    return [item for found in lists for item in found]


async def fast_check_ins(devices: Sequence[Device], seconds: int) -> list[Timed]:
    """As many check-ins as come through."""
    result: list[Timed] = []
    until = time.perf_counter() + seconds
    turns = itertools.count()

    async def work() -> None:
        while time.perf_counter() < until:
            turn = next(turns)
            device = devices[turn % len(devices)]
            result.append(
                await timed(device.stub.CheckIn(make_request(f"{device.name}-f{turn}"), timeout=CALL_SECONDS))
            )

    await asyncio.gather(*(work() for _ in range(CALLERS)))
    return result


async def poll_at_once(devices: Sequence[Device], seconds: int) -> list[Timed]:
    """Every device checks in, tells, and then all ask for work in the same moment, for `seconds`."""
    requests = []
    for start in range(0, len(devices), 100):
        some = devices[start : start + 100]
        answers = await asyncio.gather(
            *(item.stub.CheckIn(make_request(item.name), timeout=CALL_SECONDS) for item in some)
        )
        for one, answer in zip(some, answers, strict=True):
            identity = service_pb2.Identity(run=RUN, device=one.name, secret=answer.secret)
            requests.append(service_pb2.NextAskRequest(identity=identity, wait_seconds=seconds))
    say("ready")
    await asyncio.to_thread(sys.stdin.readline)
    calls = [timed(one.stub.NextAsk(x, timeout=CALL_SECONDS)) for one, x in zip(devices, requests, strict=True)]
    return list(await asyncio.gather(*calls))


JOBS: dict[str, Callable[[Sequence[Device], int], Awaitable[list[Timed]]]] = {
    "steady": steady_check_ins,
    "fast": fast_check_ins,
    "poll": poll_at_once,
}


async def run_client(job: str, port: int, names: Sequence[str], seconds: int) -> None:
    """Connects, waits for the word, works, and prints what was found."""
    devices = await connect(port, names)
    say("connected")
    await asyncio.to_thread(sys.stdin.readline)
    result = await JOBS[job](devices, seconds)
    say(json.dumps([asdict(item) for item in result]))
    await asyncio.gather(*(device.channel.close() for device in devices))


def say(word: str) -> None:
    """One line to whoever started this process."""
    print(word, flush=True)


class Clients:
    """Client processes that do one job together."""

    def __init__(self, job: str, port: int, devices: int, seconds: int) -> None:
        share = [devices // CLIENTS + (number < devices % CLIENTS) for number in range(CLIENTS)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--client", job, str(port), str(count), f"{job}{number}", str(seconds)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number, count in enumerate(share)
        ]
        self.hear()

    def hear(self) -> list[str]:
        """The next line of each."""
        lines = [process.stdout.readline() for process in self._processes if process.stdout]
        assert all(lines), "a client ended; what it said stands above"
        return lines

    def go(self) -> None:
        """Lets all go on together."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

    def found(self) -> list[Timed]:
        """What all of them measured."""
        result = [Timed(**item) for line in self.hear() for item in json.loads(line)]
        for process in self._processes:
            process.wait()
        return result


# --- the figures


@dataclass(frozen=True)
class Pace:
    """What check-ins came to.

    Attributes:
        rate: A second.
        median, high: Seconds that half and 99 % of them took at most.
        cost: Seconds that the server computed for one.
    """

    rate: float
    median: float
    high: float
    cost: float

    def __str__(self) -> str:
        times = f"p50 {1000 * self.median:.0f} ms, p99 {1000 * self.high:.0f} ms"
        return f"{self.rate:.0f} a second, {times}, {1e6 * self.cost:.0f} us of the server for one"


def check_ins(job: str, target: Server, devices: int, seconds: int) -> Pace:
    """Lets devices check in."""
    clients = Clients(job, target.port, devices, seconds)
    worked = target.processor_seconds()
    clients.go()
    result = clients.found()
    worked = target.processor_seconds() - worked
    bad = {item.status for item in result} - {"OK"}
    assert not bad, f"check-ins failed: {sorted(bad)}"
    times = sorted(item.seconds for item in result)
    span = max(item.began + item.seconds for item in result) - min(item.began for item in result)
    return Pace(len(result) / span, statistics.median(times), times[int(0.99 * len(times))], worked / len(result))


def many_polls(target: Server, devices: int, seconds: int) -> tuple[float, float, list[str]]:
    """Bytes that an idle connection and a device that waits cost the server, and how calls ended that went wrong."""
    before = target.resident_bytes()
    clients = Clients("poll", target.port, devices, seconds)
    connected = target.resident_bytes()
    clients.go()
    clients.hear()
    clients.go()
    peak, until = 0, time.monotonic() + seconds - 1
    while time.monotonic() < until:
        peak = max(peak, target.resident_bytes())
        time.sleep(0.2)
    bad = [item.status for item in clients.found() if item.status != "OK"]
    return (connected - before) / devices, (peak - before) / devices, bad


async def ask_latency(store: Store, port: int, wake: Callable[[], None], asks: int) -> list[float]:
    """Seconds from before the engine writes an ask until the polling device has it."""
    (device,) = await connect(port, [ASKED])
    secret = (await device.stub.CheckIn(make_request(ASKED))).secret
    request = service_pb2.NextAskRequest(
        identity=service_pb2.Identity(run=RUN, device=ASKED, secret=secret), wait_seconds=30.0
    )
    number, times = store.runs.start_round(RUN, [ASKED]), []
    for step in range(1, asks + 1):
        call = asyncio.ensure_future(device.stub.NextAsk(request, timeout=CALL_SECONDS))
        await asyncio.sleep(random.uniform(0.03, 0.08))
        started = time.perf_counter()
        await asyncio.to_thread(write_ask, store, number, step, wake)
        assert (await call).ask.step_number == step
        times.append(time.perf_counter() - started)
        row = store.asks.get(RUN, number, step, ASKED)
        assert row is not None
        store.asks.close(row.id, "timed")
    await device.channel.close()
    return times


def write_ask(store: Store, number: int, step: int, wake: Callable[[], None]) -> None:
    """What the engine does."""
    row = {"run": RUN, "round": number, "step_number": step, "device": ASKED, "step": "train", "expects": {}}
    store.asks.add([Ask(**row, seed=1, deadline_at=time.time() + 600)])
    wake()


def report_check_ins(bare: Server, front: Server, devices: int, seconds: int) -> None:
    """The pace that was asked for, then the greatest one against the bare server's."""
    for name, target in (("bare", bare), ("front", front)):
        pace = check_ins("steady", target, devices, seconds)
        print(f"{name}: {devices} connected devices check in once a second each: {pace}", flush=True)
    rates = {}
    for name, target in (("bare", bare), ("front", front)):
        pace = check_ins("fast", target, min(devices, 100), seconds)
        rates[name] = pace.rate
        print(f"{name}: {CLIENTS * CALLERS} callers without a pause: {pace}", flush=True)
    print(f"check-ins: {rates['front'] / rates['bare']:.2f} of the bare server's rate", flush=True)


def report_latency(store: Store, front: Server, ends: Ends) -> None:
    """From the engine to the device."""
    times = sorted(asyncio.run(ask_latency(store, front.port, lambda: poke(ends), ASKS)))
    half, high = (1000 * times[int(part * len(times))] for part in (0.5, 0.99))
    print(f"from before an ask is written to the polling device: p50 {half:.1f} ms, p99 {high:.1f} ms", flush=True)


def report_polls(name: str, target: Server, callers: int, seconds: int) -> None:
    """Many devices that wait."""
    connected, waiting, bad = many_polls(target, callers, seconds)
    print(
        f"{name}: {callers} devices ask at once: {len(bad)} calls ended badly {sorted(set(bad))}; "
        f"{connected / 1e3:.0f} kB for a connection, {waiting / 1e3:.0f} kB for a device that waits",
        flush=True,
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1000, help="connected devices that check in")
    parser.add_argument("--callers", type=int, default=5000, help="devices that ask for work at once")
    parser.add_argument("--seconds", type=int, default=10, help="length of each measurement")
    parser.add_argument("--only", choices=["check-ins", "polls", "latency"], help="one of the measurements")
    parser.add_argument("--client", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    allow_open_files()
    if given.bare:
        asyncio.run(serve_bare())
        return
    if given.client:
        job, port, count, prefix, seconds = given.client
        names = [f"{prefix}-{number}" for number in range(int(count))]
        asyncio.run(run_client(job, int(port), names, int(seconds)))
        return
    with contextlib.ExitStack() as stack:
        measure(stack, given)


def measure(stack: contextlib.ExitStack, given: argparse.Namespace) -> None:
    """Every measurement with servers of its own, so that none finds the other's traces."""
    directory = stack.enter_context(tempfile.TemporaryDirectory())
    ends, (engine_ends,) = make_ends()
    store = stack.enter_context(contextlib.closing(prepare_store(Path(directory))))
    bare_command, command = [__file__, "--bare"], front_command(directory, ends)
    if given.only in (None, "check-ins"):
        with server(bare_command) as bare, server(command, ends) as front:
            report_check_ins(bare, front, given.devices, given.seconds)
    if given.only in (None, "latency"):
        with server(command, ends) as front:
            report_latency(store, front, engine_ends)
    if given.only in (None, "polls"):
        for name, one in (("bare", bare_command), ("front", command)):
            with server(one, ends) as target:
                report_polls(name, target, given.callers, 2 * given.seconds)


def poke(ends: Ends) -> None:
    """Wakes the front, as the engine does."""
    os.write(ends.writes[0], b"x")


if __name__ == "__main__":
    main()
