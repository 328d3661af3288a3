"""Uploads through the front, with checks, fsync and receipt, against a bare gRPC stream of the same chunks.

Both are measured in alternation in one run: a client in this process, a server in another one, on the loopback. The
bare server reads the chunks and does nothing. Prints the ratio of the two rates (1 is as fast as the bare stream).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from fleetdistill.grpc_link import GrpcLink
from fleetdistill.knowledge import SampleKnowledge
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.v1 import contract_pb2, service_pb2, service_pb2_grpc, tensor_pb2
from fleetdistill_server.store import Store

ROWS, SHAPE, ROUNDS = 4_000, (16, 16, 16), 7


class BareService(service_pb2_grpc.DeviceServiceServicer):
    """Reads an upload and throws it away."""

    async def Upload(self, request_iterator: Any, context: Any) -> service_pb2.UploadResponse:
        async for _ in request_iterator:
            pass
        return service_pb2.UploadResponse()


def serve_bare(ports: Any) -> None:
    """Runs the bare server and says its port."""

    async def run() -> None:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", 4 << 20)])
        service_pb2_grpc.add_DeviceServiceServicer_to_server(BareService(), server)
        ports.put(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    asyncio.run(run())


def prepare_store(directory: Path) -> None:
    """A run whose one device is asked once for every upload of the benchmark."""
    store = Store.open(directory)
    contract = contract_pb2.Contract(
        run="bench",
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
    store.begin_run("bench", {})
    store.publish_contract("bench", contract.SerializeToString())
    store.start_round("bench", ["device"])
    ask = {"run": "bench", "round": 1, "device": "device", "step": "train", "payload": None, "payload_bytes": 0}
    ask |= {"expects": {"knowledge": "sample_knowledge"}, "seed": 0, "deadline_at": time.time() + 3600}
    store.write_asks([{**ask, "step_number": number} for number in range(1, ROUNDS + 2)])
    store.close()


def check_in(link: GrpcLink) -> service_pb2.Identity:
    """Registers the benchmark's device."""
    identity = service_pb2.Identity(run="bench", device="device")
    profile = contract_pb2.DeviceProfile(
        classes=10,
        samples=1,
        input_shape=[1],
        features=[contract_pb2.NamedShape(name="cut", shape=SHAPE)],
        knowledge_types=[tensor_pb2.ELEMENT_TYPE_FLOAT32],
        allowed_columns=["features", "logits", "labels"],
    )
    identity.secret = link.check_in(identity, profile).secret
    return identity


def make_payload() -> Payload:
    """Knowledge of random features, so that nothing is zero pages."""
    rng = np.random.default_rng(0)
    return encode(
        {
            "knowledge": SampleKnowledge(
                sample_ids=np.arange(ROWS),
                features={"cut": rng.random((ROWS, *SHAPE), np.float32)},
                logits=rng.random((ROWS, 10), np.float32),
                labels=np.zeros(ROWS, np.int32),
            )
        }
    )


def send(link: GrpcLink, identity: service_pb2.Identity, payload: Payload, number: int) -> float:
    """Seconds for one upload, receipt included."""
    header = service_pb2.UploadHeader(
        identity=identity,
        name=service_pb2.UploadName(round=1, step_number=number, attempt=1),
        payload=payload.header(),
        samples=ROWS,
    )
    started = time.perf_counter()
    link.upload(header, wire.chunks(payload.source, payload.slots))
    return time.perf_counter() - started


def main() -> None:
    """Measures and prints."""
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    bare_server = context.Process(target=serve_bare, args=(ports,), daemon=True)
    bare_server.start()
    with tempfile.TemporaryDirectory() as directory:
        prepare_store(Path(directory))
        command = [sys.executable, "-m", "fleetdistill_server.front", "--store", directory, "--listen", "127.0.0.1:0"]
        front = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert front.stdout is not None
        port = int(front.stdout.readline().split()[1])
        ours, bare = GrpcLink(f"127.0.0.1:{port}"), GrpcLink(f"127.0.0.1:{ports.get()}")
        identity, payload = check_in(ours), make_payload()
        send(ours, identity, payload, ROUNDS + 1)
        send(bare, identity, payload, ROUNDS + 1)
        pairs = [(send(bare, identity, payload, n), send(ours, identity, payload, n)) for n in range(1, ROUNDS + 1)]
        front.terminate()
        front.wait()
    bare_server.terminate()
    ratios = sorted(raw / with_checks for raw, with_checks in pairs)
    size = payload.data_bytes / 1e6
    rate = size / statistics.median(with_checks for _, with_checks in pairs)
    print(f"uploads of {size:.0f} MB: {statistics.median(ratios):.2f} of a bare gRPC stream "
          f"(min {ratios[0]:.2f}, max {ratios[-1]:.2f}, {ROUNDS} pairs), about {rate:.0f} MB/s here")  # fmt: skip


if __name__ == "__main__":
    main()
