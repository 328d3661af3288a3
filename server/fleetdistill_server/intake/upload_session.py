"""One stream of one upload, from its first chunk to its receipt."""

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
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.intake.receipts import receipt_of
from fleetdistill_server.logs import about
from fleetdistill_server.store.blobs import Staging
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.traffic import Counted, tensor_bytes

if TYPE_CHECKING:
    from fleetdistill_server.intake.uploads import Uploads

T = TypeVar("T")
logger = logging.getLogger("fleetdistill.server.intake")
GOES_ON = (Code.INCOMPLETE, Code.OUT_OF_STEP)
"""Refusals after which the next stream goes on from what is staged."""


@dataclass
class Stream:
    """One stream's claim to its ask.

    Attributes:
        ask: The ask that it answers.
        key: Of the staging area.
        lock: Held while anything of the stream is worked on.
        places: Its shares of limits.
        session: What takes its chunks, once its header is checked.
        stored: Bytes that have come to rest in the store.
    """

    ask: Row
    key: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    places: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    session: UploadSession | RepeatedUpload | None = None
    stored: int = 0


class RepeatedUpload:
    """One stream of an upload whose answer is accepted already: it takes nothing and gives the same receipt."""

    held = 0
    """Bytes of the upload that are staged."""

    def __init__(self, uploads: Uploads, stream: Stream, header: service_pb2.UploadHeader, accepted: Row) -> None:
        self._uploads = uploads
        self._stream = stream
        self._header = header
        self._accepted = accepted
        self._came = header.payload.ByteSize()

    def feed(self, chunk: wire.AnyChunk) -> None:
        """Counts a chunk."""
        self._came += len(chunk.data)

    def finish(self) -> service_pb2.Receipt:
        """Ends the stream with the receipt of the accepted answer."""
        self.abandon()
        return receipt_of(self._header.name, self._accepted)

    def abandon(self) -> None:
        """Ends the stream; what it brought has travelled in vain."""
        self._uploads.forget(self._stream)
        came, self._came = self._came, 0
        self._uploads.count_refused(self._stream.ask, came)


class UploadSession:
    """One stream of one upload. `feed` its chunks, then `finish` for the receipt; `abandon` when the stream breaks."""

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
        """Goes on from what is staged; `checked` is what an earlier stream has checked of it."""
        self._refusing(partial(self._start, checked))

    def _start(self, checked: Ingest | None) -> None:
        held = self._ingest.start(self._staging, checked)
        # What an earlier stream brought counts as it is, whether it was packed or not.
        self._counted = Counted(tensor_bytes(self._ingest.slots), tensor_bytes(self._ingest.slots, held))
        if held != self._header.first_byte:
            text = f"device {self._stream.ask['device']}: the upload goes on at byte {self._header.first_byte}"
            raise RefusedError(Code.OUT_OF_STEP, f"{text}, the server has {held}; ask for its status")

    @property
    def held(self) -> int:
        """Bytes of the upload that are staged."""
        return self._staging.length

    def feed(self, chunk: wire.AnyChunk) -> None:
        """Takes a chunk."""
        with self._stream.lock:
            self._assert_open()
            sent = self._refusing(lambda: self._ingest.feed(chunk), chunk)
            self._counted.sent[self._ingest.slots[chunk.tensor].kind] += sent

    def finish(self) -> service_pb2.Receipt:
        """Checks the whole, makes it durable, commits, and only then gives the receipt."""
        with self._stream.lock:
            self._assert_open()
            self._refusing(self._store)
            self._abandoned = True
        self._uploads.forget(self._stream)
        ask = self._stream.ask
        receipt = self._uploads.accept(self._run, ask, self._header, self._counted)
        of = {"round": ask["round"], "device": ask["device"], "ask": ask["id"]}
        logger.debug("step %r is answered", ask["step"], extra=about(run=self._run, **of))
        return receipt

    def _store(self) -> None:
        self._ingest.finish()
        self._staging.commit(self._header.payload.sha256)
        self._stream.stored = self._header.payload.data_bytes

    def abandon(self) -> None:
        """Ends the session; what was staged stays for the next one."""
        with self._stream.lock:
            if not self._abandoned:
                self._staging.close()
                self._uploads.keep_checked(self._stream.key, self._ingest)
            self._abandoned = True
        self._uploads.forget(self._stream)

    def _assert_open(self) -> None:
        if self._abandoned:
            raise RefusedError(Code.OUT_OF_STEP, "another stream of the same upload has taken over")

    def _refusing(self, step: Callable[[], T], chunk: wire.AnyChunk | None = None) -> T:
        """Runs a step on a chunk; whatever goes wrong ends the session.

        On a refusal what was staged is thrown away, where going on is useless. Otherwise it stays, for the next stream
        to go on from, and counts with the answer that it becomes.
        """
        try:
            return step()
        except RefusedError as refusal:
            keep = refusal.code in GOES_ON
            came = len(chunk.data) if chunk is not None else 0
            came += 0 if keep else self._header.payload.ByteSize() + (self._counted.sent.total() or self.held)
            self._end(keep=keep)
            raise self._uploads.refuse(self._run, self._stream.ask, refusal, came) from refusal
        except BaseException:
            self._end(keep=True)
            raise

    def _end(self, *, keep: bool) -> None:
        """Lets go of what is staged, and only then of the ask: a newer stream may be waiting for both."""
        try:
            self._staging.close() if keep else self._staging.discard()
            if keep:
                self._uploads.keep_checked(self._stream.key, self._ingest)
        finally:
            self._abandoned = True
            self._uploads.forget(self._stream)
