"""A live front over a store that the test prepares, and a client of raw generated stubs.

The front runs as a process of its own on a free port of the loopback. The run's method is never imported: the contract
is made by hand, asks are rows that the test writes, and answers are `wire_samples` payloads.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.processes import PATIENCE_SECONDS, wait_until
from support.wire_samples import EXPECTS, make_contract, make_profile

from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.framing import frame
from fleetdistill.wire.payload import AnyChunk
from fleetdistill.wire.v1 import contract_pb2, service_pb2, service_pb2_grpc
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.config.server_config import ServerConfig, ServerSection
from fleetdistill_server.figures import Figure
from fleetdistill_server.service.processes import front_environment
from fleetdistill_server.service.wakeups import Ends
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.store import Store

RUN = "digits"
CALL_SECONDS = PATIENCE_SECONDS


def prepare_store(
    directory: Path, privacy: dict[str, Any] | None = None, figures: Mapping[str, Figure] | None = None, **contract: Any
) -> Store:
    """A store with one running run, as the engine would have left it."""
    store = Store.open(directory)
    private = {} if privacy is None else {"run": {"method": "classstats_private"}, "method": privacy}
    store.runs.begin(RUN, {"made": "by hand", **private})
    store.runs.publish_contract(RUN, make_contract(run=RUN, **contract).SerializeToString(), figures or {})
    return store


def open_round(store: Store, *devices: str) -> int:
    """Opens a round with these devices; asks nothing yet."""
    return store.runs.start_round(RUN, sorted(devices))


def write_asks(
    store: Store,
    number: int,
    *devices: str,
    step_number: int = 1,
    payload: Payload | None = None,
    run: str = RUN,
    expects: Mapping[str, str] = EXPECTS,
) -> None:
    """Asks `train` of devices, as the engine's cohort does."""
    if payload is not None:
        store.blobs.put(payload)
    rows: list[dict[str, Any]] = [
        {
            "run": run,
            "round": number,
            "step_number": step_number,
            "device": device,
            "step": "train",
            "expects": expects,
            "payload": payload.sha256 if payload else None,
            "payload_bytes": payload.data_bytes if payload else 0,
            "seed": 7,
            "deadline_at": time.time() + 600,
        }
        for device in devices
    ]
    store.asks.add([Ask(**row) for row in rows])


def write_server_config(store: Path, config: ServerConfig) -> Path:
    """Writes what a front reads into the store's directory, by default without compression and reserve."""
    defaults = {"store": str(store), "compression": "none", "keep_free_bytes": 0}
    given = config.server.model_dump(exclude_unset=True)
    store.mkdir(parents=True, exist_ok=True)
    path = store / "served.toml"
    path.write_text(as_toml(config.model_copy(update={"server": ServerSection(**{**defaults, **given})})))
    return path


class LiveFront:
    """One front process at a time, always on the same port once it has one. Made by `live_front`."""

    def __init__(
        self, directory: Path, lease_seconds: float, ends: Ends, limits: Limits, settings: Mapping[str, Any]
    ) -> None:
        server = {"lease_seconds": lease_seconds, "listen": "127.0.0.1:0", **settings}
        self._config = write_server_config(directory, ServerConfig(server=ServerSection(**server), limits=limits))
        self._ends = ends
        self._fds = [end for end in ends.all() if end >= 0]
        self.port = 0
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        options = [f"--port={self.port}", f"--wakeups={self._ends}"]
        command = [sys.executable, "-m", "fleetdistill_server.front", str(self._config), *options]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, pass_fds=self._fds, env=front_environment()
        )
        assert process.stdout is not None
        word, _, port = process.stdout.readline().partition(" ")
        assert word == "listening", "the front ended before it listened; what it said stands above"
        self.port = int(port)
        return process

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def start_again(self) -> None:
        """Starts a new process on the same port."""
        self.process = self._start()

    def stop(self) -> None:
        """Ends the process, by force if need be."""
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_SECONDS)
        finally:
            self.kill()


@contextlib.contextmanager
def live_front(
    directory: Path,
    lease_seconds: float = 60.0,
    ends: Ends | None = None,
    limits: Limits | None = None,
    **settings: Any,
) -> Iterator[LiveFront]:
    """Runs a front, with further settings of [server], until the end of the block."""
    front = LiveFront(directory, lease_seconds, ends or Ends(), limits or Limits(), settings)
    try:
        yield front
    finally:
        front.stop()


@dataclass
class Client:
    """A device made of raw stubs; knows no retries and no checks of its own."""

    port: int
    device: str = "d1"
    secret: bytes = b""
    stub: Any = field(init=False)
    channel: grpc.Channel = field(init=False)

    def __post_init__(self) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.max_reconnect_backoff_ms", 200)]
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}", options)
        self.stub = service_pb2_grpc.DeviceServiceStub(self.channel)

    @property
    def identity(self) -> service_pb2.Identity:
        return service_pb2.Identity(run=RUN, device=self.device, secret=self.secret)

    def check_in(self, profile: contract_pb2.DeviceProfile | None = None, **changes: Any) -> contract_pb2.Contract:
        """Checks in with a profile that fits, but for the changes; keeps the secret."""
        request = service_pb2.CheckInRequest(identity=self.identity, profile=profile or make_profile(**changes))
        response: service_pb2.CheckInResponse = self.stub.CheckIn(request, timeout=CALL_SECONDS)
        self.secret = response.secret or self.secret
        return response.contract

    def next_ask(self, wait_seconds: float) -> service_pb2.NextAskResponse:
        request = service_pb2.NextAskRequest(identity=self.identity, wait_seconds=wait_seconds)
        answer: service_pb2.NextAskResponse = self.stub.NextAsk(request, timeout=CALL_SECONDS)
        return answer

    def start_next_ask(self, wait_seconds: float) -> Any:
        """The same as a future."""
        request = service_pb2.NextAskRequest(identity=self.identity, wait_seconds=wait_seconds)
        return self.stub.NextAsk.future(request, timeout=CALL_SECONDS)

    def status(self, name: service_pb2.UploadName) -> service_pb2.UploadStatusResponse:
        request = service_pb2.UploadStatusRequest(identity=self.identity, name=name)
        answer: service_pb2.UploadStatusResponse = self.stub.UploadStatus(request, timeout=CALL_SECONDS)
        return answer

    def staged(self, name: service_pb2.UploadName, at_least: int) -> int:
        """Waits until the server holds this many bytes of an upload."""
        wait_until(lambda: self.status(name).next_byte >= at_least, f"{at_least} staged bytes")
        return self.status(name).next_byte

    def header(self, name: service_pb2.UploadName, payload: Payload, **changes: Any) -> service_pb2.UploadRequest:
        """The first message of an upload."""
        settings = {"identity": self.identity, "name": name, "payload": payload.header(), "samples": 4}
        return service_pb2.UploadRequest(header=service_pb2.UploadHeader(**{**settings, **changes}))

    def send(self, messages: Iterable[service_pb2.UploadRequest]) -> service_pb2.Receipt:
        """Any stream of upload messages."""
        answer: service_pb2.UploadResponse = self.stub.Upload(iter(messages), timeout=CALL_SECONDS)
        return answer.receipt

    def upload(self, name: service_pb2.UploadName, payload: Payload, first_byte: int = 0) -> service_pb2.Receipt:
        """A whole upload, or the rest of one from a byte on."""
        chunks = wire.chunks(payload.source, payload.slots, first_byte)
        return self.send([self.header(name, payload, first_byte=first_byte), *as_messages(chunks)])

    def download(self, sha256: bytes, first_byte: int = 0) -> list[service_pb2.DownloadResponse]:
        """Every message of a download."""
        request = service_pb2.DownloadRequest(identity=self.identity, sha256=sha256, first_byte=first_byte)
        return list(self.stub.Download(request, timeout=CALL_SECONDS))


@contextlib.contextmanager
def client_of(front: LiveFront, device: str = "d1") -> Iterator[Client]:
    """A client, with its channel closed at the end of the block."""
    client = Client(front.port, device)
    try:
        yield client
    finally:
        client.channel.close()


def as_messages(chunks: Iterable[AnyChunk]) -> list[service_pb2.UploadRequest]:
    """Chunks as the messages of an upload."""
    return [service_pb2.UploadRequest.FromString(frame(chunk)) for chunk in chunks]


def upload_name(number: int, step_number: int = 1, attempt: int = 1) -> service_pb2.UploadName:
    """Names an attempt to answer an ask."""
    return service_pb2.UploadName(round=number, step_number=step_number, attempt=attempt)


@dataclass(frozen=True)
class Refusal:
    """What the server said no with."""

    status: grpc.StatusCode
    text: str
    reason: str = ""
    details: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def refused() -> Iterator[list[Refusal]]:
    """Expects the block to end with an error of gRPC; the list then holds what it said."""
    result: list[Refusal] = []
    try:
        yield result
    except grpc.RpcError as error:
        result.append(refusal_of(error))
    assert result, "the server did not refuse"


def refusal_of(error: Any) -> Refusal:
    """What an error of gRPC says."""
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    if status is None or not status.details or not status.details[0].Unpack(info):
        return Refusal(error.code(), error.details())
    assert info.domain == "fleetdistill"
    return Refusal(error.code(), error.details(), info.reason, dict(info.metadata))


def poke(end: int) -> None:
    """Wakes whoever reads the other end of a wake-up pipe."""
    os.write(end, b"x")
