"""What the server says to devices, without a transport: the gRPC front and the in-memory link both stand on this.

It knows contracts, asks and receipts, but no method and no torch. Every call is synchronous and may run in any thread;
writes go through `commit`, which the front replaces by its group-committing writer thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import re
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from fleetdistill import failpoints
from fleetdistill.errors import NoSpaceError, RefusedError, StoreError
from fleetdistill.knowledge import Metrics
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload, decode
from fleetdistill.wire.codes import Code, is_final
from fleetdistill.wire.compression import RAW, choose
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2
from fleetdistill_server.admission import check_profile
from fleetdistill_server.counting import Counted, Sending, tensor_bytes
from fleetdistill_server.disk_space import DiskSpace
from fleetdistill_server.ingest import Ingest
from fleetdistill_server.limits import Limiter, Limits, RefusalNotes, Who
from fleetdistill_server.store import DEADLINE_PASSED, Row, Store

T = TypeVar("T")
_LARGEST_NUMBER = (1 << 63) - 1  # that SQLite can hold; the wire's uint64 goes further
_NOTE_SECONDS = 5.0
_COUNT_SECONDS = 1.0
_LONGEST_SENTENCE = 1000
_LONGEST_REASON = 512  # characters of a device's reason to decline
_DEVICE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Commit(Protocol):
    """Runs a job in a durable transaction and returns its result."""

    def __call__(self, job: Callable[[Store], T], /) -> T:
        """Returns once the job's writes are on the disk; raises what the job raises."""


class _DirectCommit:
    """Runs a job in a transaction of its own, at once."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __call__(self, job: Callable[[Store], T], /) -> T:
        with self._store.transaction():
            return job(self._store)


class Desk:
    """Answers devices. See the module's docstring.

    Args:
        store: Read by every call.
        commit: Runs a job in a durable transaction and returns its result.
        wake_engine: Called after something was committed that the engine may wait for.
        lease_seconds: A device that is silent for longer is taken for gone.
        compression: How chunks travel to and from devices that know it.
        limits: What devices may ask for; None for no limits.

    Attributes:
        limiter: Counts what is under way.
        space: Room on the disk for uploads; None: nothing is refused before the disk itself does.
    """

    def __init__(
        self,
        store: Store,
        commit: Commit | None = None,
        wake_engine: Callable[[], None] = lambda: None,
        lease_seconds: float = 60.0,
        compression: knowledge_pb2.Compression.ValueType = RAW,
        limits: Limits | None = None,
    ) -> None:
        self.store = store
        self.limiter = Limiter(limits)
        self._notes = RefusalNotes(limits.refusals_per_hour if limits else None)
        self._notes_rows: dict[Who, int | None] = {}
        self._registered: dict[str, tuple[int, float]] = {}
        self._commit: Commit = commit or _DirectCommit(store)
        self.wake_engine = wake_engine
        self.lease_seconds = lease_seconds
        self.compression = compression
        self.space: DiskSpace | None = None
        self._no_space = False
        self._contracts: dict[str, contract_pb2.Contract] = {}
        self._leases: dict[tuple[str, str], float] = {}
        self._seen: dict[tuple[str, str], float] = {}
        self._noted = time.monotonic()
        self._uploads: dict[str, UploadSession] = {}
        self._uploads_lock = threading.Lock()

    @property
    def commit(self) -> Commit:
        """Runs a job in a durable transaction, for services beside this desk."""
        return self._commit

    # --- presence

    def check_in(self, request: service_pb2.CheckInRequest) -> service_pb2.CheckInResponse:
        """Registers a device that fits the contract; without a profile only tells the contract."""
        run = self._run(request.identity.run)
        contract = self.contract(run)
        answer = service_pb2.CheckInResponse(contract=contract)
        if request.HasField("profile"):
            device = request.identity.device
            secret = self._admit(run, device, request.identity.secret)
            self._check_profile(run, device, contract, request.profile)
            answer.secret = b"" if request.identity.secret else secret
            hashed, profile = _hashed(secret), request.profile.SerializeToString()
            if not self._commit(lambda store: store.register_device(run, device, hashed, profile)):
                raise _id_taken(device)  # another device of the same id was quicker
            self._renew(run, device)
            self.wake_engine()
        answer.lease_seconds = self.lease_seconds
        answer.heartbeat_seconds = self.lease_seconds / 4
        answer.compression = choose(self.compression, request.profile.compressions)
        return answer

    def _check_profile(
        self, run: str, device: str, contract: contract_pb2.Contract, profile: contract_pb2.DeviceProfile
    ) -> None:
        try:
            check_profile(contract, profile)
        except RefusedError as refusal:
            self._note_refusal(run, 0, device, refusal, known=self.store.device(run, device) is not None)
            raise

    def contract(self, run: str) -> contract_pb2.Contract:
        """The run's contract. Raises RefusedError until the engine has prepared it."""
        if run not in self._contracts:
            row = self.store.run(run)
            if row is None:
                raise RefusedError(Code.UNKNOWN_RUN, f"the server has no run {run!r}")
            if row["contract"] is None:
                raise RefusedError(Code.NOT_READY, f"run {run!r} is being prepared")
            self._contracts[run] = contract_pb2.Contract.FromString(row["contract"])
        return self._contracts[run]

    def next_ask(self, identity: service_pb2.Identity) -> service_pb2.NextAskResponse | None:
        """The device's oldest open ask, or the end of the run; None when there is nothing to do."""
        run, device = self.authenticate(identity)
        row = self.store.next_ask(run, device)
        if row is not None:
            return service_pb2.NextAskResponse(ask=self._ask_message(run, row))
        status = self.store.run(run)
        if status is not None and status["status"] in ("finished", "stopped"):
            return service_pb2.NextAskResponse(finished=f"{status['status']}: {status['reason']}")
        return None

    def heartbeat(self, request: service_pb2.HeartbeatRequest) -> service_pb2.HeartbeatResponse:
        """Renews the lease."""
        run, device = self.authenticate(request.identity)
        return service_pb2.HeartbeatResponse(ask_open=self.store.next_ask(run, device) is not None)

    def leave(self, request: service_pb2.LeaveRequest) -> service_pb2.LeaveResponse:
        """Ends the lease at the device's wish."""
        run, device = self.authenticate(request.identity)
        self._gone(run, device, "device left")
        return service_pb2.LeaveResponse()

    def decline(self, request: service_pb2.DeclineRequest) -> service_pb2.DeclineResponse:
        """Closes an ask that a device cannot answer, with an event; the device stays present and is asked again."""
        run, device = self.authenticate(request.identity)
        ask = self.store.ask(run, min(request.round, _LARGEST_NUMBER), request.step_number, device)
        if ask is not None and ask["status"] == "open":
            text = f"step {ask['step']!r}: {request.reason[:_LONGEST_REASON]}"
            self._commit(partial(_close_declined, run, ask, text))
            self.wake_engine()
        return service_pb2.DeclineResponse()

    def adopt_present_devices(self) -> None:
        """Gives every device that was present before a restart a fresh lease."""
        for run in self.store.runs():
            for device in self.store.present_devices(run["name"]):
                self._renew(run["name"], device)

    def end_leases(self) -> None:
        """Takes devices that were silent for too long for gone."""
        self._note_seen()
        now = time.monotonic()
        for (run, device), until in list(self._leases.items()):
            if until < now:
                self._gone(run, device, "lease ended")
                text = f"{device} was silent for {self.lease_seconds:g} s"
                self._commit(partial(_note_lease_end, run, device, text))

    def authenticate(self, identity: service_pb2.Identity) -> tuple[str, str]:
        """Checks who calls and renews the lease, also one that had ended; returns run and device.

        Raises:
            RefusedError: The device never checked in to this run, or the secret is wrong.
        """
        run = self._run(identity.run)
        row = self.store.device(run, identity.device)
        if row is None or not hmac.compare_digest(row["secret_hash"], _hashed(identity.secret)):
            # A server that was restored from a backup may not know a device any more, which then checks in again.
            details = {"check_in": "again"} if row is None else None
            text = f"device {identity.device!r} is not checked in with this secret"
            raise RefusedError(Code.BAD_IDENTITY, text, details)
        self._renew(run, identity.device)
        if not row["present"]:
            self._commit(lambda store: store.device_back(run, identity.device))
            self.wake_engine()
        return run, identity.device

    def _admit(self, run: str, device: str, secret: bytes) -> bytes:
        if not _DEVICE_ID.fullmatch(device):
            raise RefusedError(
                Code.BAD_IDENTITY, f"device id {device[:70]!r} must be 1 to 64 letters, digits, '-', '_' or '.'"
            )
        row = self.store.device(run, device)
        if row is None:
            self._check_room(run, device)
            return secret or secrets.token_bytes(32)
        if not hmac.compare_digest(row["secret_hash"], _hashed(secret)):
            raise _id_taken(device)
        return secret

    def _check_room(self, run: str, device: str) -> None:
        """Whether a run takes one more device; counted now and then, not at every check-in."""
        now = time.monotonic()
        counted, at = self._registered.get(run, (0, -math.inf))
        if now - at > _COUNT_SECONDS:
            counted, at = self._registered[run] = self.store.count_devices(run), now
        self.limiter.check_devices((run, device), counted)

    def _run(self, name: str) -> str:
        if name:
            return name
        runs = [row["name"] for row in self.store.runs()]
        if len(runs) != 1:
            listed = ", ".join(runs) or "none"
            raise RefusedError(Code.UNKNOWN_RUN if runs else Code.NOT_READY, f"name the run; the server has: {listed}")
        return str(runs[0])

    def _renew(self, run: str, device: str) -> None:
        self._leases[run, device] = time.monotonic() + self.lease_seconds
        self._seen[run, device] = time.time()

    def _note_seen(self) -> None:
        """Writes down when devices last called; now and then, not at every call."""
        if self._seen and time.monotonic() - self._noted > _NOTE_SECONDS:
            seen, self._seen, self._noted = self._seen, {}, time.monotonic()
            self._commit(lambda store: store.note_seen(seen))
            self._note_left_out()

    def _gone(self, run: str, device: str, reason: str) -> None:
        self._leases.pop((run, device), None)
        self._commit(lambda store: store.device_gone(run, device, reason))
        self.wake_engine()

    def _ask_message(self, run: str, row: Row) -> service_pb2.Ask:
        return service_pb2.Ask(
            round=row["round"],
            step_number=row["step_number"],
            step=row["step"],
            payload=row["payload"] or b"",
            payload_bytes=row["payload_bytes"],
            seed=row["seed"],
            deadline_seconds=max(row["deadline_at"] - time.time(), 0.0),
            completed_rounds=(self.store.run(run) or {"completed_rounds": 0})["completed_rounds"],
            first_attempt=self.store.attempts_spent(row["id"]) + 1,
        )

    # --- downloads

    def download(self, request: service_pb2.DownloadRequest) -> tuple[Payload, Sending]:
        """Opens a payload that an ask or the contract names, and its chunks from the wanted byte on.

        Who takes the chunks calls `end` on them where the device stops taking them.
        """
        run, device = self.authenticate(request.identity)
        wanted = request.sha256
        contract = self.contract(run)
        for_all = wanted in {contract.initial_weights, contract.proxy_digest} - {b""}
        if not wanted or not (for_all or self.store.is_payload_for(run, device, wanted)):
            raise RefusedError(Code.NOT_FOUND, f"device {device}: payload {wanted.hex()} is not meant for it")
        ask = self.store.next_ask(run, device)
        try:
            payload = self.store.blobs.open(wanted)
        except StoreError as error:
            if for_all or (ask is not None and ask["payload"] == wanted):
                raise
            text = f"device {device}: payload {wanted.hex()} is gone, the round that it belonged to is over"
            raise RefusedError(Code.NOT_FOUND, text) from error
        header_bytes = payload.header().ByteSize()
        number = ask["round"] if ask else 0

        def count(sent: Counted) -> None:
            with contextlib.suppress(StoreError):  # a download is worth more than its count
                self._commit(lambda store: store.add_traffic(run, number, device, "down", sent, header_bytes))

        packed = choose(self.compression, request.compressions)
        chunks = wire.chunks(payload.source, payload.slots, request.first_byte, packed)
        return payload, Sending(chunks, payload.slots, count)

    # --- uploads

    def upload_status(self, request: service_pb2.UploadStatusRequest) -> service_pb2.UploadStatusResponse:
        """Tells how far an upload has come."""
        run, device = self.authenticate(request.identity)
        ask = self._asked(run, device, request.name)
        answer = service_pb2.UploadStatusResponse(ask_open=ask["status"] == "open")
        accepted = self.store.upload_of(ask["id"])
        if accepted is not None:
            answer.receipt.CopyFrom(_receipt(request.name, accepted))
        else:
            answer.next_byte = self.store.blobs.staged(_staging_key(ask, request.name.attempt))
            if not answer.ask_open:
                refusal = _closed(ask)
                answer.closed_code, answer.closed_text = refusal.code, str(refusal)
        return answer

    def begin_upload(self, header: service_pb2.UploadHeader) -> UploadSession:
        """Checks an upload's header; the session takes its chunks.

        A session of the same upload that is still open elsewhere is ended: the newest stream wins.
        """
        run, device = self.authenticate(header.identity)
        self.limiter.begin_upload((run, device))
        ask = self._asked(run, device, header.name)
        session = UploadSession(self, run, ask, header, _staging_key(ask, header.name.attempt))
        session.places.enter_context(self.limiter.open_call((run, device)))
        try:
            session.open()
        except BaseException:
            session.places.close()
            raise
        return session

    def reserve(self, run: str, ask: Row, key: str, size: int) -> Callable[[], None]:
        """Sets room on the disk aside for an upload; returns what gives it back.

        Raises:
            NoSpaceError: There is none; the first time in a row with an event.
        """
        if self.space is None:
            return lambda: None
        try:
            reserved = self.space.reserve(key, size)
        except NoSpaceError as error:
            if not self._no_space:
                self._no_space, text = True, f"uploads are refused: {error}"
                self._commit(lambda store: store.add_event(run, "no-space", text, number=ask["round"]))
            raise
        self._no_space = False
        return reserved.release

    def take_over(self, key: str, session: UploadSession) -> UploadSession | None:
        """Makes a session the one that counts for its upload; returns the one that did so far."""
        with self._uploads_lock:
            older = self._uploads.get(key)
            self._uploads[key] = session
        return older

    def _asked(self, run: str, device: str, name: service_pb2.UploadName) -> Row:
        number = min(name.round, _LARGEST_NUMBER)
        ask = self.store.ask(run, number, name.step_number, device)
        if ask is None:
            text = f"device {device} was not asked step {name.step_number} of round {name.round}"
            refusal = RefusedError(Code.NOT_ASKED, text)
            self._note_refusal(run, number, device, refusal)
            raise refusal
        return ask

    def accept(self, run: str, ask: Row, header: service_pb2.UploadHeader, counted: Counted) -> service_pb2.Receipt:
        """Commits a payload that is durable in the blobs; the receipt exists only after the commit."""
        payload = header.payload
        device = ask["device"]

        def record(store: Store) -> Row | None:
            first = store.upload_of(ask["id"]) is None
            if first and not store.blobs.has(payload.sha256):  # who deletes payloads holds the same lock as this job
                raise RefusedError(Code.INCOMPLETE, f"device {device}: the payload has to be sent again")
            row = store.accept_upload(
                ask["id"], header.name.attempt, payload.sha256, payload.data_bytes, header.samples
            )
            if row is not None and first:
                store.add_traffic(run, ask["round"], device, "up", counted, payload.ByteSize())
                for part in payload.parts.parts:
                    if part.WhichOneof("kind") == "metrics":
                        store.add_figures(run, ask["round"], device, _metrics(part))
            failpoints.hit("front.receipt.before-commit")
            return row

        row = self._commit(record)
        if row is None:
            raise self.refuse(run, ask, _closed(self.store.ask(*_name_of(run, ask))))
        failpoints.hit("front.receipt.before-send")
        self.wake_engine()
        return _receipt(header.name, row)

    def refuse(self, run: str, ask: Row, refusal: RefusedError) -> RefusedError:
        """Notes a refusal; a final one puts the device out for the round, so that nobody waits for it."""
        self._note_refusal(run, ask["round"], ask["device"], refusal)
        if is_final(refusal.code):
            self._commit(lambda store: store.close_ask(ask["id"], f"refused: {refusal}"))
            self.wake_engine()
        return refusal

    def _note_refusal(self, run: str, number: int, device: str, refusal: RefusedError, *, known: bool = True) -> None:
        if not self._notes.take(run, device if known else ""):
            return  # it is counted; see `_note_left_out`
        self._commit(
            lambda store: store.add_event(
                run, "refused", str(refusal), number=number, device=device[:64], code=refusal.code
            )
        )

    def _note_left_out(self) -> None:
        """Writes down how many refusals were left out, one event for each device; called now and then."""
        for who, count in self._notes.news().items():
            row = self._notes_rows.get(who)
            self._notes_rows[who] = self._commit(partial(_note_refusals_left_out, who, count, row))

    def forget(self, key: str, session: UploadSession) -> None:
        """Removes a session that has ended."""
        session.places.close()
        with self._uploads_lock:
            if self._uploads.get(key) is session:
                del self._uploads[key]


class UploadSession:
    """One stream of one upload. `feed` its chunks, then `finish` for the receipt; `abandon` when the stream breaks."""

    def __init__(self, desk: Desk, run: str, ask: Row, header: service_pb2.UploadHeader, key: str) -> None:
        self._desk = desk
        self._run = run
        self._ask = ask
        self._header = header
        self._key = key
        self._lock = threading.Lock()
        self._abandoned = False
        self._accepted: Row | None = None
        self.places = contextlib.ExitStack()

    def open(self) -> None:
        """Takes over from an older session of the same upload, once that has let go of what is staged."""
        with self._lock:
            older = self._desk.take_over(self._key, self)
            if older is not None:
                older.places.close()
                older.abandon()
            self._accepted = self._desk.store.upload_of(self._ask["id"])
            if self._accepted is None:
                self._refusing(self._open)

    def _open(self) -> None:
        if self._ask["status"] != "open":
            raise _closed(self._ask)
        if not 1 <= self._header.samples <= _LARGEST_NUMBER:
            text = f"device {self._ask['device']}: the answer is weighted with {self._header.samples} samples"
            raise RefusedError(Code.BAD_VALUE, f"{text}, must be 1 to 2**63 - 1")
        contract = self._desk.contract(self._run)
        self._ingest = Ingest(
            self._ask["device"],
            self._header.payload,
            contract,
            json.loads(self._ask["expects"]),
            self._declared_samples(),
        )
        who = (self._run, self._ask["device"])
        self.places.enter_context(self._desk.limiter.hold_bytes(who, self._header.payload.data_bytes))
        self.places.callback(self._desk.reserve(self._run, self._ask, self._key, self._header.payload.data_bytes))
        self._staging = self._desk.store.blobs.stage(self._key, self._header.payload.parts)
        held = self._ingest.start(self._staging)
        # What an earlier stream brought counts as it is, whether it was packed or not.
        self._counted = Counted(tensor_bytes(self._ingest.slots), tensor_bytes(self._ingest.slots, held))
        if held != self._header.first_byte:
            text = f"device {self._ask['device']}: the upload goes on at byte {self._header.first_byte}"
            raise RefusedError(Code.OUT_OF_STEP, f"{text}, the server has {held}; ask for its status")

    def _declared_samples(self) -> int | None:
        """What the device said at its last check-in; it may have fewer by now, not more."""
        row = self._desk.store.device(self._run, self._ask["device"])
        return None if row is None else contract_pb2.DeviceProfile.FromString(row["profile"]).samples

    @property
    def held(self) -> int:
        """Bytes of the upload that are staged."""
        return self._staging.length if hasattr(self, "_staging") else 0

    def feed(self, chunk: knowledge_pb2.TensorChunk) -> None:
        """Takes a chunk; of an upload that is accepted already it takes nothing."""
        if self._accepted is None:
            with self._lock:
                self._assert_open()
                sent = self._refusing(lambda: self._ingest.feed(chunk))
                self._counted.sent[self._ingest.slots[chunk.tensor].kind] += sent

    def finish(self) -> service_pb2.Receipt:
        """Checks the whole, makes it durable, commits, and only then gives the receipt."""
        if self._accepted is not None:
            self._desk.forget(self._key, self)
            return _receipt(self._header.name, self._accepted)
        with self._lock:
            self._assert_open()
            self._refusing(self._ingest.finish)
            self._staging.commit(self._header.payload.sha256)
            self._abandoned = True
        self._desk.forget(self._key, self)
        return self._desk.accept(self._run, self._ask, self._header, self._counted)

    def abandon(self) -> None:
        """Ends the session; what was staged stays for the next one."""
        with self._lock:
            if not self._abandoned and self._accepted is None and hasattr(self, "_staging"):
                self._staging.close()
            self._abandoned = True
        self._desk.forget(self._key, self)

    def _assert_open(self) -> None:
        if self._abandoned:
            raise RefusedError(Code.OUT_OF_STEP, "another stream of the same upload has taken over")

    def _refusing(self, step: Callable[[], T]) -> T:
        """Runs a step; on a refusal throws away what was staged, where going on is useless."""
        try:
            return step()
        except RefusedError as refusal:
            if hasattr(self, "_staging"):
                keep = refusal.code in (Code.INCOMPLETE, Code.OUT_OF_STEP)
                self._staging.close() if keep else self._staging.discard()
            self._abandoned = True
            self._desk.forget(self._key, self)
            raise self._desk.refuse(self._run, self._ask, refusal) from refusal
        except StoreError:
            if hasattr(self, "_staging"):
                self._staging.close()  # what is on the disk stays, for the next stream to go on from
            self._abandoned = True
            self._desk.forget(self._key, self)
            raise


def _id_taken(device: str) -> RefusedError:
    return RefusedError(
        Code.BAD_IDENTITY, f"device id {device!r} belongs to another device; choose another id or restore its secret"
    )


def _close_declined(run: str, ask: Row, text: str, store: Store) -> None:
    with store.transaction():
        store.close_ask(ask["id"], "declined")
        store.add_event(run, "declined", text, number=ask["round"], device=ask["device"])


def _note_lease_end(run: str, device: str, text: str, store: Store) -> None:
    store.add_event(run, "lease-ended", text, device=device)


def _note_refusals_left_out(who: Who, count: int, row: int | None, store: Store) -> int | None:
    run, device = who
    whose = f"of device {device}" if device else "of devices that are not registered"
    return store.note_refusals_left_out(run, device, f"{count} further refusals {whose} are only counted", row)


def _name_of(run: str, ask: Row) -> tuple[str, int, int, str]:
    return run, ask["round"], ask["step_number"], ask["device"]


def _staging_key(ask: Row, attempt: int) -> str:
    return f"ask-{ask['id']}-attempt-{attempt}"


def _closed(ask: Row | None) -> RefusedError:
    """Why an ask takes no answer any more: its deadline has passed, or its round is over for this device."""
    if ask is None:
        return RefusedError(Code.CLOSED, "the ask is gone")
    why = ask["reason"] or ask["status"]
    text = f"device {ask['device']}: step {ask['step']!r} of round {ask['round']} takes no answer any more ({why})"
    return RefusedError(Code.LATE if why == DEADLINE_PASSED else Code.CLOSED, text[:_LONGEST_SENTENCE])


def _receipt(name: service_pb2.UploadName, row: Row) -> service_pb2.Receipt:
    return service_pb2.Receipt(
        id=row["receipt"],
        name=service_pb2.UploadName(round=name.round, step_number=name.step_number, attempt=row["attempt"]),
        sha256=row["sha256"],
        data_bytes=row["data_bytes"],
        received_at_ms=int(row["received_at"] * 1000),
    )


def _hashed(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _metrics(part: knowledge_pb2.Part) -> Metrics:
    parts = knowledge_pb2.Parts(parts=[part])
    found = decode(Payload(parts, (), _NoData(), b""))[part.name]
    assert isinstance(found, Metrics)
    return found


class _NoData:
    def read(self, start: int, size: int) -> bytes:
        return b""
