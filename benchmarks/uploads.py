"""Uploads through the front, with checks, fsync and receipt, against a bare gRPC stream of the same chunks.

Both are measured in alternation in one run. The bare client sends messages of 1 MiB that were made beforehand, the
bare server reads them and does nothing. 1 is as fast as the bare stream. Beside it stands the ratio to the slower of
that stream and a plain write + fsync of the same bytes on the same disk, which is what counts above 256 MB. At last:
by how much an upload of 2.5 GB moves the front's peak memory after one of 64 MB. In brackets stand the processor
milliseconds of client and server for one megabyte.

    python benchmarks/uploads.py [--sizes 16 64 256] [--pairs 15] [--tls] [--digest sha256] [--no-memory]
    python benchmarks/uploads.py --sizes 1024 --pairs 3 --no-memory
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

from _wire import (
    MB,
    Bare,
    Front,
    Work,
    bare_server,
    elapsed,
    in_turns,
    live_front,
    make_payload,
    processor,
    rate,
    ratios_text,
    secured,
)

from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.digests import Algorithm
from fleetdistill.wire.framing import frame
from fleetdistill.wire.v1 import service_pb2

LARGE_BYTES = 2_500 * MB


def write_and_fsync(path: Path, payload: Payload) -> None:
    """The disk alone: the same bytes into a file."""
    with path.open("wb", buffering=0) as file:
        for piece in wire.pieces(payload.source, 0, payload.data_bytes):
            file.write(piece)
        os.fsync(file.fileno())


def measure(front: Front, bare: Bare, size: int, pairs: int, algorithm: Algorithm) -> None:
    """Prints the figures of one size."""
    payload = make_payload(size, algorithm)
    messages = [
        service_pb2.UploadRequest.FromString(frame(chunk)) for chunk in wire.chunks(payload.source, payload.slots)
    ]
    stream, ours, disk = in_turns(
        [
            Work(lambda: bare.stub.Upload(iter(messages)), bare.cpu_seconds),
            Work(partial(front.upload, payload), front.cpu_seconds),
            Work(partial(write_and_fsync, front.directory / "disk-alone", payload)),
        ],
        pairs,
        front.forget_uploads,
    )
    slower = [max(pair) for pair in zip(elapsed(stream), elapsed(disk), strict=True)]
    size = payload.data_bytes
    print(
        f"{size / MB:5.0f} MB: {ratios_text(elapsed(ours), elapsed(stream))} of a bare stream,"
        f" by processor time {ratios_text(processor(ours), processor(stream))};"
        f" {ratios_text(elapsed(ours), slower)} of the slower of stream and disk;"
        f" here {rate(size, ours)}, bare {rate(size, stream)}, disk {rate(size, disk)}",
        flush=True,
    )


def measure_memory() -> None:
    """Prints by how much a large upload moves the front's peak memory."""
    with live_front() as front:
        front.upload(make_payload(64 * MB, Algorithm.BLAKE3))
        before = front.peak_memory()
        front.upload(make_payload(LARGE_BYTES, Algorithm.BLAKE3))
        grown = front.peak_memory() - before
    print(f"an upload of {LARGE_BYTES / MB:.0f} MB moves the front's peak memory of {before / MB:.0f} MB by "
          f"{grown / MB:.0f} MB")  # fmt: skip


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Speed of uploads.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256], help="in MB")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--no-memory", action="store_true", help="leave out the 2.5 GB")
    parser.add_argument("--tls", action="store_true", help="TLS with certificates on both sides, against the same")
    parser.add_argument("--digest", type=Algorithm, choices=list(Algorithm), default=Algorithm.BLAKE3)
    given = parser.parse_args()
    with secured(given.tls) as tls, bare_server(tls) as bare, live_front(tls=tls) as front:
        for size in given.sizes:
            measure(front, bare, size * MB, given.pairs, given.digest)
    if not given.no_memory:
        measure_memory()


if __name__ == "__main__":
    main()
