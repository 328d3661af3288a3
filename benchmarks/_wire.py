"""What the benchmarks of the wire share: a live front, a bare server beside it, payloads, and paired figures.

Everything runs on the loopback: the client in this process, the front and the bare server in processes of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from fleetdistill.knowledge import SampleKnowledge
from fleetdistill.link.credentials import AUTHORITIES, Credentials, split
from fleetdistill.link.grpc_link import GrpcLink
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.digests import Algorithm
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2, service_pb2_grpc, tensor_pb2
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.config.server_config import ServerConfig, ServerSection
from fleetdistill_server.security.pki import SERVER
from fleetdistill_server.service.processes import front_environment
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store

MB = 10**6
SHAPE = (16, 16, 16)
ROW_BYTES = 4 * 16**3
RUN, DEVICE = "bench", "device"
MAX_ASKS = 200
MAX_ROWS = 1 << 30
_DISTINCT = 64
STREAM_OPTIONS = [("grpc.max_receive_message_length", 4 << 20), ("grpc.max_send_message_length", 4 << 20)]


class BareService(service_pb2_grpc.DeviceServiceServicer):
    """Reads an upload and throws it away; sends chunks that it made beforehand, more than a cache holds."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        chunks = [knowledge_pb2.Chunk(data=random.bytes(wire.CHUNK_BYTES)) for _ in range(_DISTINCT)]
        self._responses = [service_pb2.DownloadResponse(chunk=chunk) for chunk in chunks]

    async def Upload(self, request_iterator: Any, context: Any) -> service_pb2.UploadResponse:
        """Reads to the end."""
        async for _ in request_iterator:
            pass
        return service_pb2.UploadResponse()

    async def Download(self, request: service_pb2.DownloadRequest, context: Any) -> Any:
        """Sends as many chunks as `first_byte` says."""
        for number in range(request.first_byte):
            yield self._responses[number % _DISTINCT]


@dataclass(frozen=True)
class Secured:
    """A PKI and the device's credentials from it, for TLS on both sides."""

    directory: Path
    device: Credentials

    def current(self) -> Credentials:
        """As `GrpcLink` asks for them."""
        return self.device

    def enrol_again(self) -> bool:
        return False


@contextlib.contextmanager
def secured(wanted: bool) -> Iterator[Secured | None]:
    """A PKI made for the benchmark, or None for plain text."""
    if not wanted:
        yield None
        return
    from fleetdistill.link import x509
    from fleetdistill_server.security.certificates import read_request
    from fleetdistill_server.security.pki import make_authority

    with tempfile.TemporaryDirectory() as name:
        authority = make_authority(Path(name) / "pki")
        authority.issue_server([], days=1.0)
        key = x509.new_key()
        issued = authority.sign_device(read_request(x509.signing_request(key)), DEVICE, "", days=1.0)
        yield Secured(authority.directory, Credentials(key, issued.pem, authority.bundle))


def _bare_port(server: Any, pki: Path | None) -> int:
    if pki is None:
        return int(server.add_insecure_port("127.0.0.1:0"))
    key, chain = split((pki / SERVER).read_bytes())
    authorities = (pki / AUTHORITIES).read_bytes()
    return int(server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)], authorities, True)))


def _serve_bare(ports: Any, pki: Path | None) -> None:
    async def run() -> None:
        server = grpc.aio.server(options=STREAM_OPTIONS)
        service_pb2_grpc.add_DeviceServiceServicer_to_server(BareService(), server)
        ports.put(_bare_port(server, pki))
        await server.start()
        await server.wait_for_termination()

    asyncio.run(run())


@dataclass(frozen=True)
class Bare:
    """A server in another process that does nothing but stream, and a stub of it."""

    stub: Any
    pid: int

    def cpu_seconds(self) -> float:
        """Processor time of the server so far."""
        return cpu_seconds(self.pid)


@contextlib.contextmanager
def bare_server(tls: Secured | None = None) -> Iterator[Bare]:
    """Runs a server that does nothing but stream, in another process with the environment of a front."""
    os.environ.update(front_environment())
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    server = context.Process(target=_serve_bare, args=(ports, tls and tls.directory), daemon=True)
    server.start()
    address = f"127.0.0.1:{ports.get()}"
    with (
        grpc.secure_channel(address, tls.device.channel(), options=STREAM_OPTIONS)
        if tls
        else grpc.insecure_channel(address, options=STREAM_OPTIONS)
    ) as channel:
        assert server.pid is not None
        yield Bare(service_pb2_grpc.DeviceServiceStub(channel), server.pid)
    server.terminate()
    server.join()


@dataclass
class Front:
    """A live front, its store, and a device that is checked in and asked `MAX_ASKS` times."""

    process: subprocess.Popen[str]
    store: Store
    directory: Path
    link: GrpcLink
    identity: service_pb2.Identity
    asks: Iterator[int]

    def upload(self, payload: Payload) -> None:
        """One upload as a device does it, receipt included."""
        header = service_pb2.UploadHeader(
            identity=self.identity,
            name=service_pb2.UploadName(round=1, step_number=next(self.asks), attempt=1),
            payload=payload.header(),
            samples=1,
        )
        self.link.upload(header, wire.chunks(payload.source, payload.slots))

    def forget_uploads(self) -> None:
        """Deletes what was uploaded: devices do not send the same again, and replacing a file means deleting one."""
        for path in self.directory.rglob("*.safetensors"):
            path.unlink()

    def cpu_seconds(self) -> float:
        """Processor time of the front so far."""
        return cpu_seconds(self.process.pid)

    def peak_memory(self) -> int:
        """Most bytes that the front ever had in memory (Linux)."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@contextlib.contextmanager
def live_front(handed_out: list[Payload] | None = None, tls: Secured | None = None) -> Iterator[Front]:
    """Runs a front over a store of its own.

    Args:
        handed_out: What the device may download.
        tls: What to speak TLS with, None for plain text.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        store = _prepared_store(directory, handed_out or [])
        server = ServerSection(store=name, listen="127.0.0.1:0", compression="none")
        if tls:
            server = server.model_copy(update={"pki": str(tls.directory), "enrol_listen": "127.0.0.1:0"})
        config = directory / "served.toml"
        config.write_text(as_toml(ServerConfig(server=server)))
        command = [sys.executable, "-m", "fleetdistill_server.front", str(config)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=front_environment())
        try:
            assert process.stdout is not None
            port = next(line.split()[1] for line in process.stdout if line.startswith("listening"))
            link = GrpcLink(f"127.0.0.1:{port}", tls)
            yield Front(process, store, directory, link, _check_in(link), itertools.count(1))
            link.close()
        finally:
            process.terminate()
            process.wait()
            store.close()


def _prepared_store(directory: Path, handed_out: list[Payload]) -> Store:
    store = Store.open(directory)
    contract = contract_pb2.Contract(
        run=RUN,
        method="none",
        classes=[str(label) for label in range(10)],
        input_shape=[1],
        features=[contract_pb2.NamedShape(name="cut", shape=SHAPE)],
        knowledge_type=tensor_pb2.ELEMENT_TYPE_FLOAT32,
        requirements=contract_pb2.Requirements(columns=["features", "logits", "labels"]),
        rounds=1,
        threads=1,
        max_upload_bytes=8 << 30,
    )
    store.runs.begin(RUN, {})
    store.runs.publish_contract(RUN, contract.SerializeToString())
    store.runs.start_round(RUN, [DEVICE])
    ask = {"run": RUN, "round": 1, "device": DEVICE, "step": "train"}
    ask |= {"expects": {"knowledge": "sample_knowledge"}, "seed": 0, "deadline_at": time.time() + 3600}
    asks = [{**ask, "step_number": number} for number in range(1, MAX_ASKS + 1)]
    for asked, payload in zip(reversed(asks), handed_out, strict=False):
        store.blobs.put(payload)
        asked |= {"payload": payload.sha256, "payload_bytes": payload.data_bytes}
    store.asks.add([Ask(**row) for row in asks])
    return store


def _check_in(link: GrpcLink) -> service_pb2.Identity:
    identity = service_pb2.Identity(run=RUN, device=DEVICE)
    profile = contract_pb2.DeviceProfile(
        classes=10,
        samples=MAX_ROWS,
        input_shape=[1],
        features=[contract_pb2.NamedShape(name="cut", shape=SHAPE)],
        knowledge_types=[tensor_pb2.ELEMENT_TYPE_FLOAT32],
        allowed_columns=["features", "logits", "labels"],
    )
    identity.secret = link.check_in(identity, profile).secret
    return identity


def make_payload(size: int, algorithm: Algorithm = Algorithm.SHA256) -> Payload:
    """Knowledge of about `size` bytes of random features, so that nothing is zero pages."""
    rng, rows = np.random.default_rng(0), max(size // ROW_BYTES, 1)
    return encode(
        {
            "knowledge": SampleKnowledge(
                sample_ids=np.arange(rows),
                features={"cut": rng.random((rows, *SHAPE), np.float32)},
                logits=rng.random((rows, 10), np.float32),
                labels=np.zeros(rows, np.int32),
            )
        },
        algorithm=algorithm,
    )


@dataclass(frozen=True)
class Turn:
    """Seconds of one piece of work: elapsed, and processor time of this process and of the server."""

    seconds: float
    client: float
    server: float


@dataclass(frozen=True)
class Work:
    """A piece of work to measure, and the processor time so far of the server that takes part in it."""

    run: Callable[[], object]
    server_seconds: Callable[[], float] = lambda: 0.0

    def turn(self) -> Turn:
        """Runs the work once."""
        server, client, started = self.server_seconds(), time.process_time(), time.perf_counter()
        self.run()
        ended = time.perf_counter()
        return Turn(ended - started, time.process_time() - client, self.server_seconds() - server)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far (Linux)."""
    return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3)


def in_turns(works: list[Work], repeats: int, between: Callable[[], object] = lambda: None) -> list[list[Turn]]:
    """Returns the turns of each work, `repeats` times in alternation, after one turn that does not count.

    Args:
        works: What is measured.
        repeats: Turns.
        between: Done after each turn, and not measured.
    """
    result = []
    for _ in range(repeats + 1):
        result.append([work.turn() for work in works])
        between()
    return [list(column) for column in zip(*result[1:], strict=True)]


def ratios_text(ours: list[float], bare: list[float]) -> str:
    """Median, least and largest of the paired ratios of two rates, from their seconds; 1 is as fast."""
    ratios = sorted(its / our for our, its in zip(ours, bare, strict=True))
    return f"{statistics.median(ratios):.2f} (min {ratios[0]:.2f}, max {ratios[-1]:.2f}, {len(ratios)} pairs)"


def elapsed(turns: list[Turn]) -> list[float]:
    """The elapsed seconds of turns."""
    return [turn.seconds for turn in turns]


def processor(turns: list[Turn]) -> list[float]:
    """The processor seconds of client and server."""
    return [turn.client + turn.server for turn in turns]


def rate(size: int, turns: list[Turn]) -> str:
    """The median rate and the median processor times in words."""
    per_mb = 1000 * MB / size
    client, server = (
        per_mb * statistics.median(column) for column in ([t.client for t in turns], [t.server for t in turns])
    )
    return f"{size / MB / statistics.median(elapsed(turns)):.0f} MB/s ({client:.2f} + {server:.2f} ms/MB)"
