"""Downloads from the front, against a bare gRPC stream of as many chunks of 1 MiB made beforehand.

All are measured in alternation in one run. `stream` takes the chunks and checks the CRC-32C of each, as every client
has to; `device` is what a device does: it writes them to a file too, hashes them and maps the file. 1 is as fast as the
bare stream. In brackets stand the processor milliseconds of client and server for one megabyte.

    python benchmarks/downloads.py [--sizes 16 64 256] [--pairs 15] [--tls]
"""

from __future__ import annotations

import argparse

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

from fleetdistill.link.downloads import download
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import service_pb2


def stream(front: Front, sha256: bytes) -> None:
    """Takes a whole download and checks its chunks."""
    _, chunks = front.link.download(front.identity, sha256, 0)
    for chunk in chunks:
        assert wire.checksum(chunk.data) == chunk.crc32c


def bare_stream(bare: Bare, count: int) -> None:
    """Takes as many chunks and does nothing with them."""
    for _ in bare.stub.Download(service_pb2.DownloadRequest(first_byte=count)):
        pass


def measure(front: Front, bare: Bare, payload: Payload, pairs: int) -> None:
    """Prints the figures of one size."""
    count = -(-payload.data_bytes // wire.CHUNK_BYTES)
    plain, chunks, device = in_turns(
        [
            Work(lambda: bare_stream(bare, count), bare.cpu_seconds),
            Work(lambda: stream(front, payload.sha256), front.cpu_seconds),
            Work(lambda: download(front.link, front.identity, payload.sha256), front.cpu_seconds),
        ],
        pairs,
    )
    size = payload.data_bytes
    print(
        f"{size / MB:5.0f} MB: stream {ratios_text(elapsed(chunks), elapsed(plain))} of a bare stream,"
        f" device {ratios_text(elapsed(device), elapsed(plain))},"
        f" by processor time {ratios_text(processor(chunks), processor(plain))}"
        f" and {ratios_text(processor(device), processor(plain))};"
        f" here {rate(size, chunks)} and {rate(size, device)}, bare {rate(size, plain)}",
        flush=True,
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Speed of downloads.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256], help="in MB")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--tls", action="store_true", help="TLS with certificates on both sides, against the same")
    given = parser.parse_args()
    payloads = [make_payload(size * MB) for size in given.sizes]
    with secured(given.tls) as tls, bare_server(tls) as bare, live_front(payloads, tls) as front:
        for payload in payloads:
            measure(front, bare, payload, given.pairs)


if __name__ == "__main__":
    main()
