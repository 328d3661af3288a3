"""Receives devices' answers: an upload from its header over its chunks to its receipt, in this order.

`Uploads.begin` checks the header and opens a session, `UploadSession` receives the chunks and commits the answer, and
`_record` stores it; the receipt exists only after that commit. There is one stream per ask at a time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from fleetdistill.errors import NoSpaceError, RefusedError, StoreError
from fleetdistill.knowledge import Metrics
from fleetdistill.state import failpoints
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload, decode
from fleetdistill.wire.codes import Code, is_final
from fleetdistill.wire.compression import RAW
from fleetdistill.wire.digests import identity
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.intake.limiter import Limiter
from fleetdistill_server.intake.refusal_log import RefusalLog
from fleetdistill_server.intake.sessions import UPLOAD, AskTimes, Sessions
from fleetdistill_server.logs import about
from fleetdistill_server.store.asks import is_unchanged
from fleetdistill_server.store.blobs import Staging, stated
from fleetdistill_server.store.disk_space import DiskSpace
from fleetdistill_server.store.group_commit import Commit
from fleetdistill_server.store.records import Ask, Device, Upload
from fleetdistill_server.store.retention import drop_unneeded
from fleetdistill_server.store.states import DEADLINE_PASSED, NO_SPACE, AskStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Counted, counted, kind_at, tensor_bytes

logger = logging.getLogger("fleetdistill.server.intake")
RESUMABLE = (Code.INCOMPLETE, Code.OUT_OF_STEP)
"""Codes of refusals after which the next stream continues from the staged bytes."""
_CHECKED_BYTES = 16 << 20  # bound on the headers of interrupted uploads whose checks are kept in memory
MAX_NUMBER = (1 << 63) - 1
"""Largest integer that SQLite stores; the wire's uint64 allows larger ones."""
_MAX_SENTENCE = 1000


class Uploads:
    """Receives the answers of authenticated devices.

    Attributes:
        space: Disk space budget for uploads; None accepts uploads until the disk is full.
        times: Notes when uploads begin; None notes nothing.
    """

    def __init__(
        self,
        store: Store,
        commit: Commit,
        wake_engine: Callable[[], None],
        sessions: Sessions,
        limiter: Limiter,
        refusals: RefusalLog,
    ) -> None:
        self._store = store
        self._commit = commit
        self._wake_engine = wake_engine
        self._sessions = sessions
        self._limiter = limiter
        self._refusals = refusals
        self.space: DiskSpace | None = None
        self.times: AskTimes | None = None
        self.compression = RAW  # of the answers that `take` receives, for the byte counts
        self._no_space = False
        self._streams: dict[int, Stream] = {}  # by ask
        self._checked: dict[str, Ingest] = {}  # by key of the staging area, the oldest first
        self._lock = threading.Lock()

    def begin(self, header: service_pb2.UploadHeader) -> UploadSession | RepeatedUpload:
        """Checks an upload's header and returns the session that receives the chunks.

        Ends any other open session for the same ask: the newest stream replaces older ones.

        Raises:
            RefusedError: The device, the ask or the header is wrong, or a limit is reached.
            NoSpaceError: The disk has no space for the upload.
        """
        device = self._sessions.caller(header.identity)
        key = device.run, device.id
        self._limiter.begin_upload(key)
        ask = self._asked(*key, header.name)
        stream = Stream(ask, _staging_key(ask, header.name.attempt))
        stream.reservations.enter_context(self._limiter.open_call(key))
        if self.times is not None:
            self.times.note(ask.id, UPLOAD)
        try:
            with stream.lock:
                self._end_older(stream)
                stream.session = self._session(stream, device, header)
        except BaseException:
            self.forget(stream)
            raise
        return stream.session

    def take(self, header: service_pb2.UploadHeader, payload: Payload) -> service_pb2.Receipt:
        """Receives a whole answer from a device in this process; the store keeps the payload as it is.

        Raises:
            RefusedError: As `begin` and `UploadSession.feed`.
        """
        session = self.begin(header)
        try:
            return session.take(payload)
        finally:
            session.abandon()

    def _end_older(self, stream: Stream) -> None:
        """Registers a stream as the current one of its ask, after ending the ask's previous stream."""
        with self._lock:
            older = self._streams.get(stream.ask.id)
            self._streams[stream.ask.id] = stream
        if older is not None:
            older.reservations.close()
            with older.lock:
                session = older.session
            if session is not None:
                session.abandon()

    def _session(
        self, stream: Stream, device: Device, header: service_pb2.UploadHeader
    ) -> UploadSession | RepeatedUpload:
        run = device.run
        accepted = self._accepted(stream.ask)
        if accepted is not None:
            return RepeatedUpload(self, stream, header, accepted)
        try:
            ingest, staging = self._stage(stream, device, header)
        except RefusedError as refusal:
            self.forget(stream)
            received = 0 if refusal.code in RESUMABLE else header.payload.ByteSize()
            raise self.refuse(run, stream.ask, refusal, received) from refusal
        session = UploadSession(self, stream, run, header, ingest, staging)
        session.start(self.take_checked(stream.key))
        return session

    def _accepted(self, ask: Ask) -> Upload | None:
        """Returns the accepted answer to an ask, or None. An open ask has none: one transaction writes both."""
        return None if ask.status is AskStatus.OPEN else self._store.asks.upload_of(ask.id)

    def _stage(self, stream: Stream, device: Device, header: service_pb2.UploadHeader) -> tuple[Ingest, Staging]:
        """Checks an upload's header, reserves limits and disk space, and opens the staging area."""
        ask = stream.ask
        run = device.run
        if ask.status is not AskStatus.OPEN:
            raise _closed(ask)
        declared = contract_pb2.DeviceProfile.FromString(device.profile).samples  # an upper bound for its answers
        _check_weight(device.id, header.samples, declared)
        ingest = Ingest(device.id, header.payload, self._sessions.contract(run), ask.expects, declared)
        if header.name.attempt != 1:  # bounds an ask to two staged attempts; the first needs no search
            self.discard_other_attempts(ask, stream.key)
        size = header.payload.data_bytes
        stream.reservations.enter_context(self._limiter.hold_bytes((run, device.id), size))
        give_back = self.reserve(run, ask, stream.key, size)
        digests = stated(header.payload.sha256, header.payload.blake3)
        stream.reservations.callback(lambda: give_back(stream.stored))
        return ingest, self._store.blobs.stage(stream.key, header.payload.parts, digests)

    def forget(self, stream: Stream) -> None:
        """Releases the reservations of an ended stream and removes it."""
        try:
            stream.reservations.close()
        finally:
            with self._lock:
                if self._streams.get(stream.ask.id) is stream:
                    del self._streams[stream.ask.id]

    def status(self, request: service_pb2.UploadStatusRequest) -> service_pb2.UploadStatusResponse:
        """Returns an upload's receipt, or the offset of its first missing byte and whether the ask is open."""
        run, device = self._sessions.authenticate(request.identity)
        ask = self._asked(run, device, request.name)
        answer = service_pb2.UploadStatusResponse(ask_open=ask.status is AskStatus.OPEN)
        accepted = self._accepted(ask)
        if accepted is not None:
            answer.receipt.CopyFrom(_receipt_of(request.name, accepted))
        else:
            answer.next_byte = self._store.blobs.staged(_staging_key(ask, request.name.attempt))
            if not answer.ask_open:
                refusal = _closed(ask)
                answer.closed_code, answer.closed_text = refusal.code, str(refusal)
        return answer

    def discard_other_attempts(self, ask: Ask, key: str) -> None:
        """Deletes the staged bytes of all other attempts to answer an ask."""
        for item in self._store.blobs.staging():
            if item.key.startswith(_staging_key(ask, "")) and item.key != key:
                received = self._store.blobs.staged(item.key)
                self._store.blobs.discard(item.key)
                self.count_refused(ask, received)

    def reserve(self, run: str, ask: Ask, key: str, size: int) -> Callable[[int], None]:
        """Reserves disk space for an upload.

        Returns:
            A function that releases the reservation; call it with the number of bytes that are stored.

        Raises:
            NoSpaceError: The disk has no space for the upload. The first of consecutive refusals is an event.
        """
        if self.space is None:
            return lambda stored: None
        try:
            reserved = self.space.reserve(key, size)
        except NoSpaceError as error:
            if ask.reason != NO_SPACE:
                self._commit(lambda store: store.asks.note_no_space(ask.id))
            if not self._no_space:
                self._no_space, text = True, f"uploads are refused: {error}"
                self._commit(lambda store: store.history.add_event(run, "no-space", text, number=ask.round))
            raise
        self._no_space = False
        return reserved.release

    def put(self, payload: Payload) -> None:
        """Stores the payload of an answer that passed its checks."""
        self._store.blobs.put(payload)

    def keep_checked(self, key: str, checked: Ingest) -> None:
        """Keeps an interrupted stream's checks, so that the next stream need not read the staged bytes again."""
        with self._lock:
            self._checked.pop(key, None)
            self._checked[key] = checked
            while sum(item.header.ByteSize() for item in self._checked.values()) > _CHECKED_BYTES:
                del self._checked[next(iter(self._checked))]

    def take_checked(self, key: str) -> Ingest | None:
        """Removes and returns the checks that `keep_checked` stored for an upload; None if there are none."""
        with self._lock:
            return self._checked.pop(key, None)

    def _asked(self, run: str, device: str, name: service_pb2.UploadName) -> Ask:
        number = min(name.round, MAX_NUMBER)
        ask = self._store.asks.get(run, number, name.step_number, device)
        if ask is None:
            text = f"device {device} has no ask for step {name.step_number} of round {name.round}"
            refusal = RefusedError(Code.NOT_ASKED, text)
        elif name.payload and name.payload != ask.payload:  # the ask stays open for its own answer
            refusal = _other_ask(ask)
        else:
            return ask
        self._refusals.note(run, number, device, refusal, ask=ask.id if ask else 0)
        raise refusal

    def count_deletions(self, run: str, ask: Ask) -> int:
        """Returns the store's count of deletions, for `accept`. Call this before storing the answer's payload.

        Raises:
            RefusedError: The ask no longer accepts answers; a stored payload would take space until a sweep.
        """
        count = self._store.asks.count_deletions(ask.id)
        if count is None:
            raise _closed(self._store.asks.get(*_name_of(run, ask)))
        return count

    def accept(
        self, run: str, ask: Ask, header: service_pb2.UploadHeader, byte_counts: Counted, deletions: int
    ) -> service_pb2.Receipt:
        """Commits an answer whose payload is durable; returns the receipt, which exists only after the commit.

        Raises:
            RefusedError: The ask no longer accepts answers, or the payload was deleted since `deletions` was read.
        """
        upload = self._commit(partial(_record, run, ask, header, byte_counts, deletions))
        if upload is None:
            _drop_if_to_forget(run, ask.device, identity(header.payload), self._commit)
            received = header.payload.ByteSize() + byte_counts.sent.total()
            raise self.refuse(run, ask, _closed(self._store.asks.get(*_name_of(run, ask))), received)
        failpoints.hit("front.receipt.before-send")
        self._wake_engine()
        return _receipt_of(header.name, upload)

    def refuse(self, run: str, ask: Ask, refusal: RefusedError, received: int = 0) -> RefusedError:
        """Records a refusal; a final one also closes the ask, so that the round does not wait for the device.

        An upload that continues after the refusal is not an event: gRPC reports a lost connection as the end of the
        stream.

        Args:
            run: Name of the run.
            ask: The ask whose answer is refused.
            refusal: The error for the device.
            received: Number of received bytes to count as refused traffic.

        Returns:
            `refusal`, for the caller to raise.
        """
        if refusal.code not in RESUMABLE:
            self._refusals.note(run, ask.round, ask.device, refusal, ask=ask.id)
        self.count_refused(ask, received)
        if is_final(refusal.code):
            self._commit(lambda store: store.asks.close(ask.id, f"refused: {refusal}"))
            self._wake_engine()
        return refusal

    def count_refused(self, ask: Ask, received: int) -> None:
        """Counts bytes that were received for an ask and not stored."""
        if received:
            with contextlib.suppress(StoreError):  # a failed count must not fail the call
                self._commit(lambda store: store.history.add_refused_traffic(ask.id, received))


def _check_weight(device: str, samples: int, declared: int) -> None:
    text = f"device {device}: the answer has a weight of {samples} samples"
    if not 1 <= samples <= MAX_NUMBER:
        raise RefusedError(Code.BAD_VALUE, f"{text}, expected 1 to 2**63 - 1")
    if samples > declared:
        # If this server was restored from a backup, the declaration may be newer; the device then checks in again.
        details = {"check_in": "again"}
        raise RefusedError(Code.BAD_VALUE, f"{text}, but the device declared {declared} samples", details)


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
        self._byte_counts = Counted()

    def start(self, checked: Ingest | None) -> None:
        """Continues from the staged bytes; `checked` is an earlier stream's check of them, or None."""
        with self._end_on_error():
            held = self._ingest.start(self._staging, checked)
            # Bytes from earlier streams count with their uncompressed size.
            self._byte_counts = Counted(tensor_bytes(self._ingest.slots), tensor_bytes(self._ingest.slots, held))
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
            with self._end_on_error(chunk):
                sent = self._ingest.feed(chunk)
            self._byte_counts.sent[kind_at(self._ingest.slots, chunk.offset)] += sent

    def take(self, payload: Payload) -> service_pb2.Receipt:
        """Receives a whole payload, which was encoded in this process, and commits the answer; returns the receipt.

        Raises:
            RefusedError: The payload is invalid, or the ask no longer accepts answers.
        """
        with self._stream.lock:
            self._assert_open()
            with self._end_on_error():
                if payload.digest != identity(self._header.payload):
                    raise RefusedError(Code.CHECKSUM, "the digest of the payload does not match the header")
                self._ingest.check(payload.source)
            self._byte_counts = counted(payload, self._uploads.compression)
        return self._commit(partial(self._uploads.put, payload))

    def finish(self) -> service_pb2.Receipt:
        """Checks the whole payload, makes it durable and commits the answer; returns the receipt.

        Raises:
            RefusedError: The payload is invalid or incomplete, or the ask no longer accepts answers.
        """
        return self._commit(self._finish_staging)

    def _commit(self, make_durable: Callable[[], None]) -> service_pb2.Receipt:
        with self._stream.lock:
            self._assert_open()
            with self._end_on_error():
                deletions = self._uploads.count_deletions(self._run, self._stream.ask)
                make_durable()
            self._abandoned = True
            self._staging.close()
        self._uploads.forget(self._stream)
        ask = self._stream.ask
        receipt = self._uploads.accept(self._run, ask, self._header, self._byte_counts, deletions)
        of = {"round": ask.round, "device": ask.device, "ask": ask.id}
        logger.debug("step %r is answered", ask.step, extra=about(run=self._run, **of))
        return receipt

    def _finish_staging(self) -> None:
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

    @contextlib.contextmanager
    def _end_on_error(self, chunk: wire.AnyChunk | None = None) -> Iterator[None]:
        """Ends the session on any error in the block, which works on a chunk or on the whole upload.

        A refusal that cannot be resumed discards the staged bytes and counts them as refused traffic. After any
        other error they stay for the next stream.
        """
        try:
            yield
        except RefusedError as refusal:
            keep = refusal.code in RESUMABLE
            received = len(chunk.data) if chunk is not None else 0
            received += 0 if keep else self._header.payload.ByteSize() + (self._byte_counts.sent.total() or self.held)
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
        return _receipt_of(self._header.name, self._accepted)

    def abandon(self) -> None:
        """Ends the stream and counts its bytes as refused traffic."""
        self._uploads.forget(self._stream)
        received, self._received = self._received, 0
        self._uploads.count_refused(self._stream.ask, received)


def _record(
    run: str, ask: Ask, header: service_pb2.UploadHeader, byte_counts: Counted, deletions: int, store: Store
) -> Upload | None:
    """Records an answer and its traffic; returns the answer, or None if the ask no longer accepts answers.

    `deletions` is the store's count of deletions from before the payload was stored. If it has changed, the payload is
    looked for again; no deletion runs during this transaction.
    """
    payload = header.payload
    digest = identity(payload)
    accepted = store.asks.accept_upload(ask.id, header.name.attempt, digest, payload.data_bytes, header.samples)
    if accepted is not None and accepted.is_new:
        if not (is_unchanged(deletions, accepted.deletions) or store.blobs.has(digest)):
            raise RefusedError(Code.INCOMPLETE, f"device {ask.device}: the payload is missing; send it again")
        metrics = [_metrics(part) for part in payload.parts.parts if part.WhichOneof("kind") == "metrics"]
        store.history.add_answer(run, ask.round, ask.device, byte_counts, payload.ByteSize(), metrics)
        store.database.after_commit(store.database.meter.acknowledged)
    failpoints.hit("front.receipt.before-commit")
    return None if accepted is None else accepted.upload


def _drop_if_to_forget(run: str, device: str, sha256: bytes, commit: Commit) -> None:
    """Deletes a late answer's payload immediately if its device is to be forgotten; sweeps delete all others.

    Does nothing while a backup is made, since waiting would block all commits; a later sweep deletes the payload.
    """
    if commit(partial(_announce_if_to_forget, run, device)):
        commit(partial(drop_unneeded, digests=[sha256], wait_seconds=0.0))


def _announce_if_to_forget(run: str, device: str, store: Store) -> bool:
    known = store.devices.get(run, device)
    if known is None or known.forget_asked_at is None:
        return False
    store.deletions.announce()
    return True


def _other_ask(ask: Ask) -> RefusedError:
    """Returns the error for an answer whose ask has another payload, which happens after a backup is restored."""
    step = f"step {ask.step!r} of round {ask.round}"
    text = f"device {ask.device}: the answer does not belong to the current ask, {step}"
    return RefusedError(Code.CLOSED, f"{text}; the server was restored from a backup")


def _closed(ask: Ask | None) -> RefusedError:
    """Returns the error for an ask whose deadline has passed or whose round is over for this device."""
    if ask is None:
        return RefusedError(Code.CLOSED, "the ask no longer exists")
    why = ask.reason or ask.status
    text = f"device {ask.device}: step {ask.step!r} of round {ask.round} no longer accepts answers ({why})"
    return RefusedError(Code.LATE if why == DEADLINE_PASSED else Code.CLOSED, text[:_MAX_SENTENCE])


def _receipt_of(name: service_pb2.UploadName, upload: Upload) -> service_pb2.Receipt:
    """Builds the receipt message of an accepted answer."""
    return service_pb2.Receipt(
        id=upload.receipt,
        name=service_pb2.UploadName(round=name.round, step_number=name.step_number, attempt=upload.attempt),
        sha256=upload.sha256,
        data_bytes=upload.data_bytes,
        received_at_ms=int(upload.received_at * 1000),
    )


def _metrics(part: knowledge_pb2.Part) -> Metrics:
    parts = knowledge_pb2.Parts(parts=[part])
    result = decode(Payload(parts, (), _NoData(), b""))[part.name]
    assert isinstance(result, Metrics)
    return result


class _NoData:
    def read(self, start: int, size: int) -> bytes:
        return b""


def _name_of(run: str, ask: Ask) -> tuple[str, int, int, str]:
    return run, ask.round, ask.step_number, ask.device


def _staging_key(ask: Ask, attempt: int | str) -> str:
    return f"ask-{ask.id}-attempt-{attempt}"
