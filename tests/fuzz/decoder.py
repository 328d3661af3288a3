"""atheris on the decoder: bytes that a coverage-guided fuzzer makes, read as every message that a device sends.

Run by `make fuzz`. atheris mutates what reached new lines before, so it finds what random changes do not.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(
    include=["fleetdistill.wire", "fleetdistill_server.intake.ingest", "fleetdistill_server.intake.ingest"]
):
    from fleetdistill.wire import payload as wire
    from fleetdistill_server.intake import ingest

from fuzz.in_process import Bytes
from fuzz.specimens import contract_for, specimens
from google.protobuf.message import DecodeError

from fleetdistill.errors import RefusedError
from fleetdistill.wire.codec import Payload, decode
from fleetdistill.wire.codes import Code
from fleetdistill.wire.digests import digest
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2
from fleetdistill_server.store.memory_blobs import MemoryBlobs

_SPECIMENS = specimens()
_CONTRACT = contract_for(_SPECIMENS)
_EXPECTS = [specimen.expects for _, specimen in sorted(_SPECIMENS.items())]


def read(data: bytes) -> None:
    """Parses bytes as an upload's header and takes it in with data of the size that it says, if that is small."""
    try:
        header = service_pb2.UploadHeader.FromString(data[1:])
    except DecodeError:  # the front refuses these before our checks see them
        return
    expects = _EXPECTS[data[0] % len(_EXPECTS)] if data else _EXPECTS[0]
    try:
        take_in(header.payload, expects)
    except RefusedError as refusal:
        if Code(refusal.code) is Code.INTERNAL:
            raise


def take_in(header: knowledge_pb2.PayloadHeader, expects: dict[str, str]) -> None:
    """The checks, and what the engine does with what they let through."""
    taking = ingest.Ingest("d1", header, _CONTRACT, expects)
    size = sum(slot.nbytes for slot in taking.slots)
    if size > 1 << 16:
        return
    data = bytes(size)
    header.sha256 = digest(header.parts, iter([data]))
    again = ingest.Ingest("d1", header, _CONTRACT, expects)
    again.start(MemoryBlobs().stage("key", header.parts))
    for chunk in wire.chunks(Bytes(data), again.slots):
        again.feed(chunk)
    again.finish()
    decode(Payload(header.parts, again.slots, Bytes(data), header.sha256))


def main() -> None:
    """Hands over to atheris: the corpus folder first, where valid headers are laid to begin with, then its options."""
    corpus = Path(sys.argv[1])
    corpus.mkdir(parents=True, exist_ok=True)
    for number, (name, specimen) in enumerate(sorted(_SPECIMENS.items())):
        header = service_pb2.UploadHeader(payload=specimen.payload.header(), samples=4)
        (corpus / name).write_bytes(bytes([number]) + header.SerializeToString())
    atheris.Setup(sys.argv, read)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
