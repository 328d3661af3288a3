"""Receives devices' answers, one stream per ask at a time, and issues receipts once answers are committed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial

from fleetdistill.errors import NoSpaceError, RefusedError, StoreError
from fleetdistill.state import failpoints
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.codes import Code, is_final
from fleetdistill.wire.compression import RAW
from fleetdistill.wire.digests import identity
from fleetdistill.wire.v1 import contract_pb2, service_pb2
from fleetdistill_server.intake.ask_times import UPLOAD, AskTimes
from fleetdistill_server.intake.commit import Commit
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.intake.limiter import Limiter
from fleetdistill_server.intake.receipts import LARGEST_NUMBER, closed, drop_if_to_forget, other_ask, receipt_of, record
from fleetdistill_server.intake.refusal_log import RefusalLog
from fleetdistill_server.intake.sessions import Sessions
from fleetdistill_server.intake.upload_session import RESUMABLE, RepeatedUpload, Stream, UploadSession
from fleetdistill_server.store.blobs import Staging, stated
from fleetdistill_server.store.disk_space import DiskSpace
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.states import AskStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Counted

_CHECKED_BYTES = 16 << 20  # bound on the headers of interrupted uploads whose checks are kept in memory


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
        run, device = self._sessions.authenticate(header.identity)
        self._limiter.begin_upload((run, device))
        ask = self._asked(run, device, header.name)
        stream = Stream(ask, _staging_key(ask, header.name.attempt))
        stream.reservations.enter_context(self._limiter.open_call((run, device)))
        if self.times is not None:
            self.times.note(ask.id, UPLOAD)
        try:
            with stream.lock:
                self._end_older(stream)
                stream.session = self._session(stream, run, header)
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

    def _session(self, stream: Stream, run: str, header: service_pb2.UploadHeader) -> UploadSession | RepeatedUpload:
        accepted = self._store.asks.upload_of(stream.ask.id)
        if accepted is not None:
            return RepeatedUpload(self, stream, header, accepted)
        try:
            ingest, staging = self._stage(stream, run, header)
        except RefusedError as refusal:
            self.forget(stream)
            received = 0 if refusal.code in RESUMABLE else header.payload.ByteSize()
            raise self.refuse(run, stream.ask, refusal, received) from refusal
        session = UploadSession(self, stream, run, header, ingest, staging)
        session.start(self.take_checked(stream.key))
        return session

    def _stage(self, stream: Stream, run: str, header: service_pb2.UploadHeader) -> tuple[Ingest, Staging]:
        """Checks an upload's header, reserves limits and disk space, and opens the staging area."""
        ask = stream.ask
        device = stream.ask.device
        if ask.status is not AskStatus.OPEN:
            raise closed(ask)
        declared = self._declared_samples(run, device)
        _check_weight(device, header.samples, declared)
        contract = self._sessions.contract(run)
        ingest = Ingest(device, header.payload, contract, ask.expects, declared)
        if header.name.attempt != 1:  # bounds an ask to two staged attempts; the first needs no search
            self.discard_other_attempts(ask, stream.key)
        size = header.payload.data_bytes
        stream.reservations.enter_context(self._limiter.hold_bytes((run, device), size))
        give_back = self.reserve(run, ask, stream.key, size)
        digests = stated(header.payload.sha256, header.payload.blake3)
        stream.reservations.callback(lambda: give_back(stream.stored))
        return ingest, self._store.blobs.stage(stream.key, header.payload.parts, digests)

    def _declared_samples(self, run: str, device: str) -> int | None:
        """Returns the number of samples from the device's last check-in, an upper bound for its answers."""
        known = self._store.devices.get(run, device)
        return None if known is None else contract_pb2.DeviceProfile.FromString(known.profile).samples

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
        accepted = self._store.asks.upload_of(ask.id)
        if accepted is not None:
            answer.receipt.CopyFrom(receipt_of(request.name, accepted))
        else:
            answer.next_byte = self._store.blobs.staged(_staging_key(ask, request.name.attempt))
            if not answer.ask_open:
                refusal = closed(ask)
                answer.closed_code, answer.closed_text = refusal.code, str(refusal)
        return answer

    def discard_other_attempts(self, ask: Ask, key: str) -> None:
        """Deletes the staged bytes of all other attempts to answer an ask."""
        for one in self._store.blobs.staging():
            if one.key.startswith(_staging_key(ask, "")) and one.key != key:
                received = self._store.blobs.staged(one.key)
                self._store.blobs.discard(one.key)
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
            while sum(one.header.ByteSize() for one in self._checked.values()) > _CHECKED_BYTES:
                del self._checked[next(iter(self._checked))]

    def take_checked(self, key: str) -> Ingest | None:
        """Removes and returns the checks that `keep_checked` stored for an upload; None if there are none."""
        with self._lock:
            return self._checked.pop(key, None)

    def _asked(self, run: str, device: str, name: service_pb2.UploadName) -> Ask:
        number = min(name.round, LARGEST_NUMBER)
        ask = self._store.asks.get(run, number, name.step_number, device)
        if ask is None:
            text = f"device {device} has no ask for step {name.step_number} of round {name.round}"
            refusal = RefusedError(Code.NOT_ASKED, text)
        elif name.payload and name.payload != ask.payload:  # the ask stays open for its own answer
            refusal = other_ask(ask)
        else:
            return ask
        self._refusals.note(run, number, device, refusal, ask=ask.id if ask else 0)
        raise refusal

    def check_open(self, run: str, ask: Ask) -> None:
        """Raises RefusedError if the ask no longer accepts answers. Called before storing an answer's payload, since a
        stored one takes space until a sweep."""
        current = self._store.asks.get(*_name_of(run, ask))
        if current is None or current.status is AskStatus.OUT:
            raise closed(current)

    def deletions(self) -> int:
        """Returns the store's count of deletions, for `accept`. Call this before storing the answer's payload."""
        return self._store.deletions.count()

    def accept(
        self, run: str, ask: Ask, header: service_pb2.UploadHeader, counted: Counted, deletions: int
    ) -> service_pb2.Receipt:
        """Commits an answer whose payload is durable; returns the receipt, which exists only after the commit.

        Raises:
            RefusedError: The ask no longer accepts answers, or the payload was deleted since `deletions` was read.
        """
        upload = self._commit(partial(record, run, ask, header, counted, deletions))
        if upload is None:
            drop_if_to_forget(run, ask.device, identity(header.payload), self._commit)
            received = header.payload.ByteSize() + counted.sent.total()
            raise self.refuse(run, ask, closed(self._store.asks.get(*_name_of(run, ask))), received)
        failpoints.hit("front.receipt.before-send")
        self._wake_engine()
        return receipt_of(header.name, upload)

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


def _check_weight(device: str, samples: int, declared: int | None) -> None:
    text = f"device {device}: the answer has a weight of {samples} samples"
    if not 1 <= samples <= LARGEST_NUMBER:
        raise RefusedError(Code.BAD_VALUE, f"{text}, expected 1 to 2**63 - 1")
    if declared is not None and samples > declared:
        # If this server was restored from a backup, the declaration may be newer; the device then checks in again.
        details = {"check_in": "again"}
        raise RefusedError(Code.BAD_VALUE, f"{text}, but the device declared {declared} samples", details)


def _name_of(run: str, ask: Ask) -> tuple[str, int, int, str]:
    return run, ask.round, ask.step_number, ask.device


def _staging_key(ask: Ask, attempt: int | str) -> str:
    return f"ask-{ask.id}-attempt-{attempt}"
