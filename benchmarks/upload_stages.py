"""Where the processor time of an upload goes: a gRPC stream whose server does more with each stage.

Each stage includes the ones before it. All stages run in alternation in one run, with the front's environment and
window. The last line is the front itself: its checks of calls, the ask, the receipt and the commit are added.
Processor milliseconds for one megabyte, median and minimum of the client and of the server, and elapsed milliseconds.

    python benchmarks/upload_stages.py [--size 64] [--repeats 15]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import blake3
import grpc
import numpy as np
from _wire import MB, Turn, Work, cpu_seconds, in_turns, live_front, make_payload

from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.digests import Algorithm
from fleetdistill.wire.framing import frame, unframe
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.front.server import channel_options
from fleetdistill_server.front.streams import Lane
from fleetdistill_server.service.processes import front_environment
from fleetdistill_server.store.file_blobs import FileBlobs

STAGES = ["bare stream", "+ framing", "+ CRC-32C", "+ BLAKE3", "+ finite values", "+ write", "+ fsync", "+ a thread"]
METHOD = "/stages/Upload"


class Stages:
    """The work of the first stages on one upload.

    Args:
        stage: Index of the last stage in `STAGES`.
        directory: Folder of the store.
    """

    def __init__(self, stage: int, directory: Path) -> None:
        self._stage = stage
        self._digest = blake3.blake3()
        blobs = FileBlobs(directory)
        self._file = blobs.stage("stages", service_pb2.UploadRequest().header.payload.parts) if stage > 4 else None
        self._path = blobs.staging_path("stages")

    def take(self, message: bytes) -> None:
        """Does the stages' work on one message."""
        if self._stage < 1:
            return
        chunk = unframe(message, service_pb2.UploadRequest)
        if self._stage > 1:
            assert wire.checksum(chunk.data) == chunk.crc32c
        if self._stage > 2:
            self._digest.update(chunk.data)
        if self._stage > 3:
            assert np.isfinite(np.frombuffer(chunk.data, np.float32, len(chunk.data) // 4)).all()
        if self._file is not None:
            self._file.append(chunk.data)

    def end(self) -> None:
        """Makes the file durable if that is a stage, and deletes it."""
        if self._file is None:
            return
        if self._stage > 5:
            with self._path.open("rb") as file:
                os.fsync(file.fileno())
        self._file.discard()


async def upload(pool: ThreadPoolExecutor, directory: Path, requests: Any, context: Any) -> bytes:
    """Receives an upload with the stages that its metadata name."""
    stage = int(dict(context.invocation_metadata())["stage"])
    work = Stages(stage, directory)
    if STAGES[stage] == "+ a thread":
        await Lane(pool, work.take, work.end).process(requests)
    else:
        async for message in requests:
            work.take(message)
        work.end()
    return b""


def serve(ports: Any, directory: Path) -> None:
    """Serves uploads until the process ends."""

    async def run() -> None:
        with ThreadPoolExecutor(4) as pool:
            options = [("grpc.max_receive_message_length", 4 << 20), *channel_options(Limits())]
            server = grpc.aio.server(options=options)
            method = grpc.stream_unary_rpc_method_handler(partial(upload, pool, directory))
            service = grpc.method_handlers_generic_handler("stages", {"Upload": method})
            server.add_generic_rpc_handlers((service,))
            ports.put(server.add_insecure_port("127.0.0.1:0"))
            await server.start()
            await server.wait_for_termination()

    asyncio.run(run())


def messages(payload: Payload) -> Iterator[bytes]:
    """Yields the messages that a device would send after the header."""
    return (frame(chunk) for chunk in wire.chunks(payload.source, payload.slots))


def works(call: Callable[..., Any], server: Callable[[], float], payload: Payload) -> dict[str, Work]:
    """Returns the streams to measure, by name."""
    prepared = list(messages(payload))
    result = {
        name: Work(lambda stage=stage: call(iter(prepared), metadata=[("stage", str(stage))]), server)  # type: ignore[misc]
        for stage, name in enumerate(STAGES)
    }
    last = [("stage", str(len(STAGES) - 1))]
    return {**result, "+ made while sending": Work(lambda: call(messages(payload), metadata=last), server)}


def show(name: str, turns: list[Turn], size: int) -> None:
    """Prints one line of the table."""
    columns = ([t.client for t in turns], [t.server for t in turns], [t.seconds for t in turns])
    texts = [f"{statistics.median(column) * 1e9 / size:5.2f} ({min(column) * 1e9 / size:4.2f})" for column in columns]
    print(f"{name:22}", *texts, sep="  ", flush=True)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Processor time of an upload's stages.")
    parser.add_argument("--size", type=int, default=64, help="in MB")
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    os.environ.update(front_environment())
    context = multiprocessing.get_context("spawn")
    ports = context.Queue()
    with tempfile.TemporaryDirectory() as name, live_front() as front:
        server = context.Process(target=serve, args=(ports, Path(name)), daemon=True)
        server.start()
        payload = make_payload(given.size * MB, Algorithm.BLAKE3)
        with grpc.insecure_channel(f"127.0.0.1:{ports.get()}") as channel:
            result = works(channel.stream_unary(METHOD), partial(cpu_seconds, server.pid), payload)
            result["the front"] = Work(partial(front.upload, payload), front.cpu_seconds)
            turns = in_turns(list(result.values()), given.repeats, front.forget_uploads)
        server.terminate()
        server.join()
    print(f"{'ms a MB':22}  client        server        elapsed")
    for name, column in zip(result, turns, strict=True):
        show(name, column, payload.data_bytes)


if __name__ == "__main__":
    main()
