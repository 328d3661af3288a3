"""A server beyond one machine against a server on one: SQLite and files, or PostgreSQL and an object store.

One front over SQLite and files, then one and three fronts over PostgreSQL (pgserver, fsync on) and an S3-compatible
object store (moto's server, a Python process that keeps objects in memory). Callers are threads of this process, spread
over the fronts. All of it runs on this machine and shares its cores, so three fronts show what coordination costs and
not what three machines would give. The kinds take turns; each figure is the median of the turns.

- check-ins: a device's first call: several reads, one durable transaction
- heartbeats: a read of two rows
- small uploads: 10 kB with checks, durable payload and receipt
- large uploads: 16 MB

    python benchmarks/several_machines.py [--turns 5] [--seconds 2] [--callers 16] [--only "uploads of 10 kB"]

With `--latency 20`, the object store answers each request 20 ms later, as a store in another building does.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _wire import MB, SHAPE, cpu_seconds, make_payload
from calls import RUN, make_contract, make_request

from fleetdistill.link.grpc_link import GrpcLink
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.config.server_config import ServerConfig, ServerSection
from fleetdistill_server.service.processes import front_environment
from fleetdistill_server.store.location import Location, set_location
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store

UNLIMITED = Limits(devices=1 << 30, **{name: 1 << 30 for name in Limits.model_fields if "_per_" in name})
ASKS = 2000
SMALL, LARGE = "10 kB", "16 MB"


@contextlib.contextmanager
def postgres(directory: Path) -> Iterator[str]:
    """Runs a PostgreSQL server; yields its URL."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pgserver
    server = pgserver.get_server(directory / "postgres", cleanup_mode="stop")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


@contextlib.contextmanager
def object_store(latency_ms: float = 0, port: int = 5995) -> Iterator[str]:
    """Runs an object store; yields the URL of a prefix in it. The environment of this process then leads to it."""
    address = f"http://127.0.0.1:{port}"
    code = f"import several_machines; several_machines.serve_objects({port}, {latency_ms / 1000})"
    command, folder = [sys.executable, "-c", code], Path(__file__).parent
    os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
    os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
    server = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(urllib.request.Request(f"{address}/bench", method="PUT")).close()
                break
            time.sleep(0.1)
        yield "s3://bench/store"
    finally:
        server.terminate()
        server.wait()


def serve_objects(port: int, latency_seconds: float) -> None:
    """Serves moto's object store until the process is killed; each request is answered after a pause."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    store = DomainDispatcherApplication(create_backend_app)

    def answer(environment: dict[str, Any], start: Callable[..., Any]) -> Any:
        time.sleep(latency_seconds)
        return store(environment, start)

    run_simple("127.0.0.1", port, answer, threaded=True)


@dataclass
class Front:
    """A front process."""

    process: subprocess.Popen[str]
    port: int


@contextlib.contextmanager
def front(directory: Path, location: Location) -> Iterator[Front]:
    """Runs a front with a directory of its own over a store."""
    set_location(directory, location)
    config = directory / "served.toml"
    server = ServerSection(store=str(directory), listen="127.0.0.1:0", lease_seconds=36_000)
    config.write_text(as_toml(ServerConfig(server=server, limits=UNLIMITED)))
    process = subprocess.Popen(
        [sys.executable, "-m", "fleetdistill_server.front", str(config), "--log-level", "WARNING"],
        stdout=subprocess.PIPE,
        text=True,
        env=front_environment(),
    )
    try:
        assert process.stdout is not None
        yield Front(process, int(process.stdout.readline().split()[1]))
    finally:
        process.terminate()
        process.wait()


def contract() -> contract_pb2.Contract:
    """A contract for the payloads of `make_payload`."""
    made = make_contract()
    made.features[0].shape[:] = SHAPE
    return made


def check_in(link: GrpcLink, device: str) -> bytes:
    """The first check-in of a device; returns its secret."""
    request = make_request(device)
    request.profile.features[0].shape[:] = SHAPE
    request.profile.samples = 1_000_000
    return link.check_in(request.identity, request.profile).secret


class Caller:
    """A device on one front, which calls as fast as it can."""

    def __init__(self, name: str, port: int) -> None:
        self.link = GrpcLink(f"127.0.0.1:{port}")
        self.name = name
        self.identity = service_pb2.Identity(run=RUN, device=name, secret=check_in(self.link, name))
        self._others, self._asks = itertools.count(), itertools.count(1)

    def check_in(self) -> None:
        """The first check-in of another device."""
        check_in(self.link, f"{self.name}-{next(self._others)}")

    def heartbeat(self) -> None:
        """A heartbeat."""
        self.link.heartbeat(self.identity)

    def upload(self, payload: Payload) -> None:
        """An answer to the next ask, receipt included."""
        name = service_pb2.UploadName(round=1, step_number=next(self._asks), attempt=1)
        header = service_pb2.UploadHeader(identity=self.identity, name=name, payload=payload.header(), samples=1)
        self.link.upload(header, wire.chunks(payload.source, payload.slots))


class Kind:
    """A store with fronts, and the callers of these fronts."""

    def __init__(self, title: str, store: Store, fronts: Sequence[Front], callers: int) -> None:
        self.title = title
        self._fronts = fronts
        self.callers = [
            Caller(f"{title[:4].lower()}{len(fronts)}-{number}", fronts[number % len(fronts)].port)
            for number in range(callers)
        ]
        row = {"run": RUN, "round": 1, "step": "train", "seed": 0}
        row |= {"expects": {"knowledge": "sample_knowledge"}, "deadline_at": time.time() + 36_000}
        for caller in self.callers:
            store.asks.add([Ask(**row, device=caller.name, step_number=item + 1) for item in range(ASKS)])

    def turn(self, work: Callable[[Caller], object], seconds: float, most: int) -> tuple[float, float]:
        """Lets the first `most` callers work; returns calls a second, and the fronts' processor ms for a call."""
        until, counts, used = time.perf_counter() + seconds, [0] * most, self._processor_seconds()
        began = time.perf_counter()

        def call(number: int) -> None:
            while time.perf_counter() < until:
                work(self.callers[number])
                counts[number] += 1

        threads = [threading.Thread(target=call, args=(number,)) for number in range(most)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took, calls = time.perf_counter() - began, sum(counts)
        return calls / took, 1000 * (self._processor_seconds() - used) / calls

    def _processor_seconds(self) -> float:
        return sum(cpu_seconds(front.process.pid) for front in self._fronts)


def measure(kinds: Sequence[Kind], turns: int, seconds: float, only: str) -> None:
    """Prints a table of calls (all, or those of a name) and kinds, and their ratios to the first kind."""
    small, large = make_payload(10_000), make_payload(16 * MB)
    works: dict[str, tuple[Callable[[Caller], object], int]] = {
        "check-ins": (Caller.check_in, len(kinds[0].callers)),
        "heartbeats": (Caller.heartbeat, len(kinds[0].callers)),
        f"uploads of {SMALL}": (lambda caller: caller.upload(small), len(kinds[0].callers)),
        f"uploads of {LARGE}": (lambda caller: caller.upload(large), 3),
    }
    print("| a second (fronts' processor ms for one) |", " | ".join(kind.title for kind in kinds), "|")
    print("|---" * (len(kinds) + 1) + "|")
    for title, (work, most) in works.items():
        if only not in ("", title):
            continue
        result: list[list[tuple[float, float]]] = [[] for _ in kinds]
        for number in range(turns + 1):  # the first does not count
            for kind, figures in zip(kinds, result, strict=True):
                figures.append(kind.turn(work, seconds, most))
                del figures[: number == 0]
        rates = [statistics.median(rate for rate, _ in item) for item in result]
        costs = [statistics.median(cost for _, cost in item) for item in result]
        cells = [f"{rate:.3g} ({cost:.2g} ms)" for rate, cost in zip(rates, costs, strict=True)]
        cells = [
            f"{cell}, {rate / rates[0]:.2f}" if number else cell
            for number, (cell, rate) in enumerate(zip(cells, rates, strict=True))
        ]
        print(f"| {title} |", " | ".join(cells), "|", flush=True)


def prepared(directory: Path, location: Location, stack: contextlib.ExitStack) -> Store:
    """A store with a run that takes answers."""
    set_location(directory, location)
    store = Store.open(directory)
    stack.callback(store.close)
    store.runs.begin(RUN, {})
    store.runs.publish_contract(RUN, contract().SerializeToString())
    store.runs.start_round(RUN, [])
    return store


def main() -> None:
    """Measures all kinds in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument(
        "--latency", type=float, default=0.0, help="pause before each answer of the object store, in ms"
    )
    parser.add_argument("--only", default="", help="name of the only calls to measure")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        location = Location(stack.enter_context(postgres(work)), stack.enter_context(object_store(given.latency)))
        alone = prepared(work / "alone", Location(), stack)
        fronts = [stack.enter_context(front(work / "alone", Location()))]
        kinds = [Kind("SQLite + files, 1 front", alone, fronts, given.callers)]
        apart = prepared(work / "apart", location, stack)
        fronts = [stack.enter_context(front(work / f"front-{number}", location)) for number in range(3)]
        for count in (1, 3):
            title = f"PostgreSQL + S3, {count} front{'s' if count > 1 else ''}"
            kinds.append(Kind(title, apart, fronts[:count], given.callers))
        measure(kinds, given.turns, given.seconds, given.only)


if __name__ == "__main__":
    main()
