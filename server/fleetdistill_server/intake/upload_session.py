"""Receives one stream of an upload, from its first chunk to its receipt."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from fleetdistill.errors import RefusedError
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.codes import Code
from fleetdistill.wire.digests import identity
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.intake.receipts import receipt_of
from fleetdistill_server.logs import about
from fleetdistill_server.store.blobs import Staging
from fleetdistill_server.store.records import Ask, Upload
from fleetdistill_server.store.traffic import Counted, counted, tensor_bytes

if TYPE_CHECKING:
    from fleetdistill_server.intake.uploads import Uploads

T = TypeVar("T")
logger = logging.getLogger("fleetdistill.server.intake")
RESUMABLE = (Code.INCOMPLETE, Code.OUT_OF_STEP)
"""Codes of refusals after which the next stream continues from the staged bytes."""


@dataclass
class Stream:
    """A stream that uploads the answer to an ask.

    Attributes:
        ask: The ask that the stream answers.
        key: Key of the staging area.
        lock: Held while a call changes the stream's state.
        reservations: The stream's shares of limits and disk space.
        session: Receives the chunks; None until the header is checked.
        stored: Number of the stream's bytes that are durable in the store.
    """

    ask: Ask
    key: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    reservations: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    session: UploadSession | RepeatedUpload | None = None
    stored: int = 0


class RepeatedUpload:
    """A stream for an ask whose answer is already accepted: ignores the chunks and returns the same receipt."""

    held = 0
    """Number of staged bytes; always 0."""

    def __init__(self, uploads: Uploads, stream: Stream, header: service_pb2.UploadHeader, accepted: Upload) -> None:
        self._uploads = uploads
        self._stream = stream
        self._header = header
        self._accepted = accepted
        self._received = header.payload.ByteSize()

    def feed(self, chunk: wire.AnyChunk) -> None:
        """Counts a chunk's bytes and ignores its data."""
        self._received += len(chunk.data)

    def take(self, payload: Payload) -> service_pb2.Receipt:
        """Counts the bytes of a whole payload and returns the accepted answer's receipt."""
        self._received += payload.data_bytes
        return self.finish()

    def finish(self) -> service_pb2.Receipt:
        """Ends the stream and returns the accepted answer's receipt."""
        self.abandon()
        return receipt_of(self._header.name, self._accepted)

    def abandon(self) -> None:
        """Ends the stream and counts its bytes as refused traffic."""
        self._uploads.forget(self._stream)
        received, self._received = self._received, 0
        self._uploads.count_refused(self._stream.ask, received)


class UploadSession:
    """Receives one stream of an upload.

    Call `feed` for each chunk, then `finish` for the receipt; call `abandon` if the stream breaks.
    """

    def __init__(
        self,
        uploads: Uploads,
        stream: Stream,
        run: str,
        header: service_pb2.UploadHeader,
        ingest: Ingest,
        staging: Staging,
    ) -> None:
        self._uploads = uploads
        self._stream = stream
        self._run = run
        self._header = header
        self._ingest = ingest
        self._staging = staging
        self._abandoned = False
        self._counted = Counted()

    def start(self, checked: Ingest | None) -> None:
        """Continues from the staged bytes; `checked` is an earlier stream's check of them, or None."""
        self._refusing(partial(self._start, checked))

    def _start(self, checked: Ingest | None) -> None:
        held = self._ingest.start(self._staging, checked)
        # Bytes from earlier streams count with their uncompressed size.
        self._counted = Counted(tensor_bytes(self._ingest.slots), tensor_bytes(self._ingest.slots, held))
        if held != self._header.first_byte:
            text = f"device {self._stream.ask.device}: the upload continues at byte {self._header.first_byte}"
            raise RefusedError(
                Code.OUT_OF_STEP, f"{text}, but the server has {held} bytes; request the upload's status"
            )

    @property
    def held(self) -> int:
        """Number of staged bytes of the upload."""
        return self._staging.length

    def feed(self, chunk: wire.AnyChunk) -> None:
        """Checks and stages a chunk.

        Raises:
            RefusedError: The chunk is invalid, or a newer stream has replaced this one.
            StoreError: The disk is full.
        """
        with self._stream.lock:
            self._assert_open()
            sent = self._refusing(lambda: self._ingest.feed(chunk), chunk)
            self._counted.sent[self._ingest.slots[chunk.tensor].kind] += sent

    def take(self, payload: Payload) -> service_pb2.Receipt:
        """Receives a whole payload, which was encoded in this process, and commits the answer; returns the receipt.

        Raises:
            RefusedError: The payload is invalid, or the ask no longer accepts answers.
        """
        with self._stream.lock:
            self._assert_open()
            self._refusing(partial(self._check, payload))
            self._counted = counted(payload, self._uploads.compression)
        return self._commit(partial(self._uploads.put, payload))

    def _check(self, payload: Payload) -> None:
        if payload.digest != identity(self._header.payload):
            raise RefusedError(Code.CHECKSUM, "the digest of the payload does not match the header")
        self._ingest.check(payload.source)

    def finish(self) -> service_pb2.Receipt:
        """Checks the whole payload, makes it durable and commits the answer; returns the receipt.

        Raises:
            RefusedError: The payload is invalid or incomplete, or the ask no longer accepts answers.
        """
        return self._commit(self._store)

    def _commit(self, store: Callable[[], None]) -> service_pb2.Receipt:
        with self._stream.lock:
            self._assert_open()
            self._refusing(partial(self._uploads.check_open, self._run, self._stream.ask))
            deletions = self._refusing(self._uploads.deletions)
            self._refusing(store)
            self._abandoned = True
            self._staging.close()
        self._uploads.forget(self._stream)
        ask = self._stream.ask
        receipt = self._uploads.accept(self._run, ask, self._header, self._counted, deletions)
        of = {"round": ask.round, "device": ask.device, "ask": ask.id}
        logger.debug("step %r is answered", ask.step, extra=about(run=self._run, **of))
        return receipt

    def _store(self) -> None:
        self._ingest.finish()
        self._staging.commit(identity(self._header.payload))
        self._stream.stored = self._header.payload.data_bytes

    def abandon(self) -> None:
        """Ends the session and keeps the staged bytes for the next one."""
        with self._stream.lock:
            if not self._abandoned:
                self._staging.close()
                self._uploads.keep_checked(self._stream.key, self._ingest)
            self._abandoned = True
        self._uploads.forget(self._stream)

    def _assert_open(self) -> None:
        if self._abandoned:
            raise RefusedError(Code.OUT_OF_STEP, "a newer stream of the same upload has replaced this one")

    def _refusing(self, step: Callable[[], T], chunk: wire.AnyChunk | None = None) -> T:
        """Runs a step on a chunk and ends the session on any error.

        A refusal that cannot be resumed discards the staged bytes and counts them as refused traffic. After any
        other error they stay for the next stream.
        """
        try:
            return step()
        except RefusedError as refusal:
            keep = refusal.code in RESUMABLE
            received = len(chunk.data) if chunk is not None else 0
            received += 0 if keep else self._header.payload.ByteSize() + (self._counted.sent.total() or self.held)
            self._end(keep=keep)
            raise self._uploads.refuse(self._run, self._stream.ask, refusal, received) from refusal
        except BaseException:
            self._end(keep=True)
            raise

    def _end(self, *, keep: bool) -> None:
        """Releases the staging area first and then the ask, because a newer stream may be waiting for both."""
        try:
            self._staging.close() if keep else self._staging.discard()
            if keep:
                self._uploads.keep_checked(self._stream.key, self._ingest)
        finally:
            self._abandoned = True
            self._uploads.forget(self._stream)
