"""What a device sent and what was acknowledged: written down by its link, as it came over the wire.

One file a device, a JSON object a line, each fsynced before the SDK acts on it. A device that is killed leaves at most
its last line torn, and that line is then about something that nobody was told.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fleetdistill.errors import FleetDistillError, RefusedError
from fleetdistill.link.grpc_link import GrpcLink
from fleetdistill.wire.digests import identity
from fleetdistill.wire.v1 import knowledge_pb2, service_pb2

SENT = "sent"
RECEIPT = "receipt"
REFUSED = "refused"


@dataclass(frozen=True)
class Record:
    """One line.

    Attributes:
        what: `sent` before an upload is begun, `receipt` or `refused` for what the server said.
        round, step, attempt: Name of the upload that was sent or asked for.
        sha256: Of what was sent; in a receipt, of what the server says that it has.
        receipt: Id of the receipt.
        text: Why it was refused.
        first_byte: Where the sending went on; 0 for a whole upload.
    """

    what: str
    round: int
    step: int
    attempt: int
    sha256: str = ""
    receipt: str = ""
    text: str = ""
    first_byte: int = 0


class Log:
    """Appends records. May be used from several threads."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # the life before was killed within a line
        self._lock = threading.Lock()

    def add(self, record: Record) -> None:
        """Returns when the record is on the disk."""
        with self._lock:
            os.write(self._file, json.dumps(asdict(record)).encode() + b"\n")
            os.fsync(self._file)


def read_log(path: Path) -> list[Record]:
    """Every whole line."""
    return _records(path.read_bytes()) if path.exists() else []


def _records(data: bytes) -> list[Record]:
    records = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError):  # torn
            records.append(Record(**json.loads(line)))
    return records


class ReceiptCounter:
    """How many receipts the logs of a running fleet have; reads only what is new."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._read = dict.fromkeys(paths, 0)
        self._receipts: set[str] = set()

    def count(self) -> int:
        """Different receipts so far."""
        for path, start in self._read.items():
            if path.exists() and path.stat().st_size > start:
                with path.open("rb") as file:
                    file.seek(start)
                    data = file.read()
                whole = data.rfind(b"\n") + 1
                self._read[path] = start + whole
                self._receipts |= {record.receipt for record in _records(data[:whole]) if record.what == RECEIPT}
        return len(self._receipts)


class LoggedLink(GrpcLink):
    """The SDK's own link, with a log. Now and then it sends an upload a second time, as a confused network might.

    Args:
        server: Where to call.
        log: Where to write.
        rng: Decides which uploads are sent twice.
        twice: Part of the uploads that are.
    """

    def __init__(self, server: str, log: Log, rng: random.Random, twice: float) -> None:
        super().__init__(server)
        self._log = log
        self._rng = rng
        self._twice = twice

    def upload_status(
        self, identity: service_pb2.Identity, name: service_pb2.UploadName
    ) -> service_pb2.UploadStatusResponse:
        status = super().upload_status(identity, name)
        if status.HasField("receipt"):
            self._note_receipt(name, status.receipt)
        return status

    def upload(
        self,
        header: service_pb2.UploadHeader,
        chunks: Iterator[knowledge_pb2.Chunk],  # type: ignore[override]
    ) -> service_pb2.Receipt:
        again = self._rng.choice(("after", "during", "other attempt")) if self._rng.random() < self._twice else ""
        if not again or header.first_byte:
            return self._upload(header, chunks)
        data = list(chunks)
        if again == "during":
            with self._meanwhile(header, data):
                return self._upload(header, iter(data))
        receipt = self._upload(header, iter(data))
        copy = service_pb2.UploadHeader()
        copy.CopyFrom(header)
        copy.name.attempt += again == "other attempt"
        with contextlib.suppress(FleetDistillError):
            self._upload(copy, iter(data))
        return receipt

    def _upload(self, header: service_pb2.UploadHeader, chunks: Iterator[knowledge_pb2.Chunk]) -> service_pb2.Receipt:
        name = header.name
        sent = Record(SENT, name.round, name.step_number, name.attempt, identity(header.payload).hex())
        self._log.add(replace(sent, first_byte=header.first_byte))
        try:
            receipt = super().upload(header, chunks)
        except RefusedError as refusal:
            text = f"{refusal.code}: {refusal}"
            self._log.add(Record(REFUSED, name.round, name.step_number, name.attempt, text=text))
            raise
        self._note_receipt(name, receipt)
        return receipt

    @contextlib.contextmanager
    def _meanwhile(self, header: service_pb2.UploadHeader, data: list[knowledge_pb2.Chunk]) -> Iterator[None]:
        """Sends the same upload from another thread at the same time."""

        def send() -> None:
            with contextlib.suppress(FleetDistillError):
                self._upload(header, iter(data))

        other = threading.Thread(target=send, daemon=True)
        other.start()
        try:
            yield
        finally:
            other.join(5.0)

    def _note_receipt(self, name: service_pb2.UploadName, receipt: service_pb2.Receipt) -> None:
        self._log.add(Record(RECEIPT, name.round, name.step_number, name.attempt, receipt.sha256.hex(), receipt.id))
