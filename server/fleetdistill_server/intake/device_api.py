"""What the server says to devices, without a transport: the gRPC front and the in-memory link both stand on this.

It knows contracts, asks and receipts, but no method and no torch. Every call is synchronous and may run in any thread;
writes go through `commit`, which the front replaces by its group-committing writer thread.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from fleetdistill.errors import DamagedError, NoSpaceError, RefusedError, StoreError
from fleetdistill.knowledge import Metrics
from fleetdistill.names import NAME_RULE, is_name
from fleetdistill.state import failpoints
from fleetdistill.wire import payload as wire
from fleetdistill.wire.codec import Payload, decode
from fleetdistill.wire.codes import Code, is_final
from fleetdistill.wire.compression import RAW, choose
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.event_kinds import LARGE_DEVICE
from fleetdistill_server.intake.admission import check_profile
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.intake.limiter import Limiter, Who
from fleetdistill_server.intake.refusal_log import RefusalNotes
from fleetdistill_server.logs import about
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.disk_space import DiskSpace
from fleetdistill_server.store.fleet_sizes import FleetSizes
from fleetdistill_server.store.retention import drop_unneeded
from fleetdistill_server.store.states import DEADLINE_PASSED, OVER
from fleetdistill_server.store.store import Store
from fleetdistill_server.store.traffic import Counted, Sending, tensor_bytes

logger = logging.getLogger("fleetdistill.server.intake")
T = TypeVar("T")
_LARGEST_NUMBER = (1 << 63) - 1  # that SQLite can hold; the wire's uint64 goes further
_NOTE_SECONDS = 5.0
_COUNT_SECONDS = 1.0
# A sweep comes every second; this process stood still, or the disk did, where none came for so long.
_PAUSE_SECONDS = 5.0
# Devices of a stopped run ask again after this to twice this; sooner where a lease would end before.
_STOPPED_SECONDS = 30.0
_LONGEST_SENTENCE = 1000
_CHECKED_BYTES = 16 << 20  # of headers of uploads that wait for their next stream
_LONGEST_REASON = 512  # characters of a device's reason to decline


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


class DeviceApi:
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
        self._damaged: set[bytes] = set()  # told already
        self._contracts: dict[str, contract_pb2.Contract] = {}
        self._sizes = FleetSizes(store)
        self._leases: dict[tuple[str, str], float] = {}
        self._seen: dict[tuple[str, str], float] = {}
        self._noted = time.monotonic()
        self._swept: float | None = None
        self._paused = 0.0
        self._uploads: dict[int, UploadSession] = {}  # by ask
        self._checked: dict[str, Ingest] = {}  # by key of the staging area, the oldest first
        self._uploads_lock = threading.Lock()

    @property
    def commit(self) -> Commit:
        """Runs a job in a durable transaction, for services beside this one."""
        return self._commit

    # --- presence

    def check_in(self, request: service_pb2.CheckInRequest, address: str = "") -> service_pb2.CheckInResponse:
        """Registers a device that fits the contract; without a profile only tells the contract.

        `address` is where the call comes from: new ids of one place are bounded.
        """
        run = self.run_name(request.identity.run)
        contract = self.contract(run)
        answer = service_pb2.CheckInResponse(contract=contract)
        if request.HasField("profile"):
            device = request.identity.device
            secret = self._admit(run, device, request.identity.secret, address)
            self._check_profile(run, device, contract, request.profile)
            answer.secret = b"" if request.identity.secret else secret
            hashed, profile = _hashed(secret), request.profile.SerializeToString()
            if not self._commit(partial(self._register, run, device, hashed, profile)):
                raise _id_taken(device)  # another device of the same id was quicker
            self._renew(run, device)
            self._note_large(run, device, request.profile.samples)
            logger.info("checked in", extra=about(run=run, device=device))
            self.wake_engine()
        answer.lease_seconds = self.lease_seconds
        answer.heartbeat_seconds = self.lease_seconds / 4
        answer.compression = choose(self.compression, request.profile.compressions)
        return answer

    def _register(self, run: str, device: str, hashed: bytes, profile: bytes, store: Store) -> bool:
        if store.runs.get(run) is None:  # it was deleted after this object had read its contract
            self._contracts.pop(run, None)
            self._sizes.forget(run)
            raise _unknown_run(run)
        return store.devices.register(run, device, hashed, profile)

    def _note_large(self, run: str, device: str, samples: int) -> None:
        for large, text in self._sizes.take(run, device, samples):
            self._commit(partial(_note, run, LARGE_DEVICE, text, large))

    def _check_profile(
        self, run: str, device: str, contract: contract_pb2.Contract, profile: contract_pb2.DeviceProfile
    ) -> None:
        try:
            check_profile(contract, profile)
        except RefusedError as refusal:
            self._note_refusal(run, 0, device, refusal, known=self.store.devices.get(run, device) is not None)
            raise

    def contract(self, run: str) -> contract_pb2.Contract:
        """The run's contract. Raises RefusedError until the engine has prepared it."""
        if run not in self._contracts:
            row = self.store.runs.get(run)
            if row is None:
                raise _unknown_run(run)
            if row["contract"] is None:
                raise RefusedError(Code.NOT_READY, f"run {run!r} is being prepared")
            self._contracts[run] = contract_pb2.Contract.FromString(row["contract"])
        return self._contracts[run]

    def next_ask(self, identity: service_pb2.Identity) -> service_pb2.NextAskResponse | None:
        """The device's oldest open ask, or the end of the run for it; None when there is nothing to do."""
        caller = self._caller(identity)
        run, device = caller["run"], caller["device"]
        row = self.store.asks.next_open(run, device)
        if row is not None:
            return service_pb2.NextAskResponse(ask=self._ask_message(run, row))
        status = self.store.runs.get(run)
        if status is not None and status["status"] in OVER:
            return service_pb2.NextAskResponse(finished=f"{status['status']}: {status['reason']}")
        if caller["forget_asked_at"] is not None:
            text = f"the operator took {device} out of run {run!r} and has it forgotten; the app keeps the model it has"
            return service_pb2.NextAskResponse(finished=f"{text}, and may join under another id")
        if status is not None and status["status"] == "stopped":
            return _come_back_later(status["reason"], min(_STOPPED_SECONDS, self.lease_seconds / 4))
        return None

    def heartbeat(self, request: service_pb2.HeartbeatRequest) -> service_pb2.HeartbeatResponse:
        """Renews the lease."""
        run, device = self.authenticate(request.identity)
        return service_pb2.HeartbeatResponse(ask_open=self.store.asks.next_open(run, device) is not None)

    def leave(self, request: service_pb2.LeaveRequest) -> service_pb2.LeaveResponse:
        """Ends the lease at the device's wish."""
        run, device = self.authenticate(request.identity)
        self._gone(run, device, "device left")
        return service_pb2.LeaveResponse()

    def decline(self, request: service_pb2.DeclineRequest) -> service_pb2.DeclineResponse:
        """Closes an ask that a device cannot answer, with an event; the device stays present and is asked again."""
        run, device = self.authenticate(request.identity)
        ask = self.store.asks.get(run, min(request.round, _LARGEST_NUMBER), request.step_number, device)
        if ask is not None and ask["status"] == "open":
            text = f"step {ask['step']!r}: {request.reason[:_LONGEST_REASON]}"
            self._commit(partial(_close_declined, run, ask, text))
            self.wake_engine()
        return service_pb2.DeclineResponse()

    def adopt_present_devices(self) -> None:
        """Gives every device that was present before a restart a fresh lease."""
        for run in self.store.runs.names():
            for device in self.store.devices.present(run):
                self._renew(run, device)

    def end_leases(self) -> None:
        """Takes devices that were silent for too long for gone, all in one transaction.

        While this process or its disk stood still, no device could be heard: such a time counts for no lease.
        """
        self._note_seen()
        now, swept = time.monotonic(), self._swept
        self._swept = now
        if swept is not None:
            self._paused += max(now - swept - _PAUSE_SECONDS, 0.0)
        silent = self._silent(list(self._leases))
        if silent:
            for who in self._silent(self._commit(partial(self._end_leases_of, silent))):
                self._leases.pop(who, None)
            self.wake_engine()

    def _end_leases_of(self, devices: list[Who], store: Store) -> list[Who]:
        text = f"was silent for {self.lease_seconds:g} s"
        silent = self._silent(devices)  # whoever has called meanwhile is not
        for run, device in silent:
            if store.devices.get(run, device) is not None:
                store.devices.mark_gone(run, device, "lease ended")
                store.history.add_event(run, "lease-ended", f"{device} {text}", device=device)
        return silent

    def _silent(self, devices: list[Who]) -> list[Who]:
        now = self._lease_clock()
        return [who for who in devices if self._leases.get(who, math.inf) < now]

    def _lease_clock(self) -> float:
        """Seconds that do not go on while this process stands still."""
        return time.monotonic() - self._paused

    def authenticate(self, identity: service_pb2.Identity) -> tuple[str, str]:
        """Checks who calls and renews the lease, also one that had ended; returns run and device.

        Raises:
            RefusedError: The device never checked in to this run, or the secret is wrong.
        """
        caller = self._caller(identity)
        return caller["run"], caller["device"]

    def _caller(self, identity: service_pb2.Identity) -> Row:
        """Does what `authenticate` does; returns the device's row as it was."""
        run = self.run_name(identity.run)
        row = self.store.devices.get(run, identity.device)
        if row is None or not hmac.compare_digest(row["secret_hash"], _hashed(identity.secret)):
            # A server that was restored from a backup may not know a device any more, which then checks in again.
            details = {"check_in": "again"} if row is None else None
            text = f"device {identity.device!r} is not checked in with this secret"
            raise RefusedError(Code.BAD_IDENTITY, text, details)
        self._renew(run, identity.device)
        if not row["present"] and row["forget_asked_at"] is None:
            self._commit(lambda store: store.devices.mark_present(run, identity.device))
            self.wake_engine()
        return row

    def _admit(self, run: str, device: str, secret: bytes, address: str) -> bytes:
        if not is_name(device):
            raise RefusedError(Code.BAD_IDENTITY, f"device id {device[:70]!r} must be {NAME_RULE}")
        row = self.store.devices.get(run, device)
        if row is None:
            self._check_room(run, device)
            self.limiter.begin_device(address)
            return secret or secrets.token_bytes(32)
        if not hmac.compare_digest(row["secret_hash"], _hashed(secret)):
            raise _id_taken(device)
        return secret

    def _check_room(self, run: str, device: str) -> None:
        """Whether a run takes one more device; counted now and then, not at every check-in."""
        now = time.monotonic()
        counted, at = self._registered.get(run, (0, -math.inf))
        if now - at > _COUNT_SECONDS:
            counted, at = self._registered[run] = self.store.devices.count(run), now
        self.limiter.check_devices((run, device), counted)

    def run_name(self, name: str) -> str:
        """The run that a device means; it need not name the only one. Raises RefusedError if there is not just one."""
        if name:
            return name
        runs = self.store.runs.names()
        if len(runs) != 1:
            listed = ", ".join(runs) or "none"
            raise RefusedError(Code.UNKNOWN_RUN if runs else Code.NOT_READY, f"name the run; the server has: {listed}")
        return runs[0]

    def _renew(self, run: str, device: str) -> None:
        self._leases[run, device] = self._lease_clock() + self.lease_seconds
        self._seen[run, device] = time.time()

    def _note_seen(self) -> None:
        """Writes down when devices last called; now and then, not at every call."""
        if self._seen and time.monotonic() - self._noted > _NOTE_SECONDS:
            seen, self._seen, self._noted = self._seen, {}, time.monotonic()
            self._commit(lambda store: store.devices.note_seen(seen))
            self._note_left_out()

    def _gone(self, run: str, device: str, reason: str) -> None:
        self._leases.pop((run, device), None)
        self._commit(lambda store: store.devices.mark_gone(run, device, reason))
        self.wake_engine()

    def _ask_message(self, run: str, row: Row) -> service_pb2.Ask:
        return service_pb2.Ask(
            round=row["round"],
            step_number=row["step_number"],
            step=row["step"],
            payload=row["payload"] or b"",
            payload_bytes=row["payload_bytes"],
            seed=row["seed"],
            deadline_seconds=max(row["deadline_at"] - self.store.asks.clock.now(), 0.0),
            completed_rounds=(self.store.runs.get(run) or {"completed_rounds": 0})["completed_rounds"],
            first_attempt=self.store.asks.attempts_spent(row["id"]) + 1,
        )

    # --- downloads

    def download(self, request: service_pb2.DownloadRequest) -> tuple[Payload, Sending]:
        """Opens a payload that an ask or the contract names, and its chunks from the wanted byte on.

        Who takes the chunks calls `end` on them where the device stops taking them.
        """
        run, device = self.authenticate(request.identity)
        wanted = request.sha256
        contract = self.contract(run)
        for_all = wanted in {contract.initial_weights, contract.proxy_digest, contract.extractor_file} - {b""}
        ask = self.store.asks.next_open(run, device) if for_all else self.store.asks.naming(run, device, wanted)
        if not wanted or not (for_all or ask):
            raise RefusedError(Code.NOT_FOUND, f"device {device}: payload {wanted.hex()} is not meant for it")
        try:
            payload = self.store.blobs.open(wanted)
        except StoreError as error:
            if for_all or (ask is not None and ask["status"] == "open"):
                if isinstance(error, DamagedError):
                    self._note_damage(run, ask, error)
                raise
            text = f"device {device}: payload {wanted.hex()} is gone, the round that it belonged to is over"
            raise RefusedError(Code.NOT_FOUND, text) from error
        header_bytes = payload.header().ByteSize()
        number = ask["round"] if ask else 0

        def count(sent: Counted) -> None:
            with contextlib.suppress(StoreError):  # a download is worth more than its count
                self._commit(lambda store: store.history.add_traffic(run, number, device, "down", sent, header_bytes))

        packed = choose(self.compression, request.compressions)
        chunks = wire.chunks(payload.source, payload.slots, request.first_byte, packed)
        return payload, Sending(chunks, payload.slots, count)

    def _note_damage(self, run: str, ask: Row | None, damage: DamagedError) -> None:
        """Says once that what devices are to fetch is lost; the engine makes it again where it can."""
        if damage.sha256 not in self._damaged:
            self._damaged.add(damage.sha256)
            text, number = f"what devices are to fetch is lost on the server. {damage}", ask["round"] if ask else 0
            self._commit(lambda store: store.history.add_event(run, "quarantined", text, number=number))

    # --- uploads

    def upload_status(self, request: service_pb2.UploadStatusRequest) -> service_pb2.UploadStatusResponse:
        """Tells how far an upload has come."""
        run, device = self.authenticate(request.identity)
        ask = self._asked(run, device, request.name)
        answer = service_pb2.UploadStatusResponse(ask_open=ask["status"] == "open")
        accepted = self.store.asks.upload_of(ask["id"])
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
            self.forget(session)
            raise
        return session

    def discard_other_attempts(self, ask: Row, key: str) -> None:
        """Deletes what other attempts to answer an ask have staged: it is one answer that a device may have here."""
        for one in self.store.blobs.staging():
            if one.key.startswith(_staging_key(ask, "")) and one.key != key:
                came = self.store.blobs.staged(one.key)
                self.store.blobs.discard(one.key)
                self.count_refused(ask, came)

    def reserve(self, run: str, ask: Row, key: str, size: int) -> Callable[[int], None]:
        """Sets room on the disk aside for an upload; returns what gives it back, told the bytes that are at rest now.

        Raises:
            NoSpaceError: There is none; the first time in a row with an event.
        """
        if self.space is None:
            return lambda stored: None
        try:
            reserved = self.space.reserve(key, size)
        except NoSpaceError as error:
            if not self._no_space:
                self._no_space, text = True, f"uploads are refused: {error}"
                self._commit(lambda store: store.history.add_event(run, "no-space", text, number=ask["round"]))
            raise
        self._no_space = False
        return reserved.release

    def keep_checked(self, key: str, checked: Ingest) -> None:
        """Remembers of a stream that has ended what was checked, so that the next one need not read it all again."""
        with self._uploads_lock:
            self._checked.pop(key, None)
            self._checked[key] = checked
            while sum(one.header.ByteSize() for one in self._checked.values()) > _CHECKED_BYTES:
                del self._checked[next(iter(self._checked))]

    def take_checked(self, key: str) -> Ingest | None:
        """What `keep_checked` remembers of an upload, once."""
        with self._uploads_lock:
            return self._checked.pop(key, None)

    def take_over(self, session: UploadSession) -> UploadSession | None:
        """Makes a session the one that counts for its ask; returns the one that did so far."""
        with self._uploads_lock:
            older = self._uploads.get(session.ask["id"])
            self._uploads[session.ask["id"]] = session
        return older

    def _asked(self, run: str, device: str, name: service_pb2.UploadName) -> Row:
        number = min(name.round, _LARGEST_NUMBER)
        ask = self.store.asks.get(run, number, name.step_number, device)
        if ask is None:
            text = f"device {device} was not asked step {name.step_number} of round {name.round}"
            refusal = RefusedError(Code.NOT_ASKED, text)
        elif name.payload and name.payload != (ask["payload"] or b""):  # not final for the ask: its own answer may come
            refusal = _other_question(ask)
        else:
            return ask
        self._note_refusal(run, number, device, refusal)
        raise refusal

    def accept(self, run: str, ask: Row, header: service_pb2.UploadHeader, counted: Counted) -> service_pb2.Receipt:
        """Commits a payload that is durable in the blobs; the receipt exists only after the commit."""
        row = self._commit(partial(_record, run, ask, header, counted))
        if row is None:
            came = header.payload.ByteSize() + counted.sent.total()
            raise self.refuse(run, ask, _closed(self.store.asks.get(*_name_of(run, ask))), came)
        failpoints.hit("front.receipt.before-send")
        self.wake_engine()
        return _receipt(header.name, row)

    def refuse(self, run: str, ask: Row, refusal: RefusedError, came: int = 0) -> RefusedError:
        """Notes a refusal; a final one puts the device out for the round, so that nobody waits for it.

        Args:
            run: The run.
            ask: The ask whose answer is refused.
            refusal: Why.
            came: Bytes that have travelled in vain.
        """
        self._note_refusal(run, ask["round"], ask["device"], refusal)
        self.count_refused(ask, came)
        if is_final(refusal.code):
            self._commit(lambda store: store.asks.close(ask["id"], f"refused: {refusal}"))
            self.wake_engine()
        return refusal

    def count_refused(self, ask: Row, came: int) -> None:
        """Counts bytes that came for an ask and were not taken."""
        if came:
            with contextlib.suppress(StoreError):  # what is done with them is worth more than their count
                self._commit(lambda store: store.history.add_refused_traffic(ask["id"], came))

    def _note_refusal(self, run: str, number: int, device: str, refusal: RefusedError, *, known: bool = True) -> None:
        if not self._notes.take(run, device if known else ""):
            return  # it is counted; see `_note_left_out`
        self._commit(
            lambda store: store.history.add_event(
                run, "refused", str(refusal), number=number, device=device[:64], code=refusal.code
            )
        )

    def _note_left_out(self) -> None:
        """Writes down how many refusals were left out, one event for each device; called now and then."""
        for who, count in self._notes.news().items():
            row = self._notes_rows.get(who)
            self._notes_rows[who] = self._commit(partial(_note_refusals_left_out, who, count, row))

    def forget(self, session: UploadSession) -> None:
        """Removes a session that has ended."""
        try:
            session.places.close()
        finally:
            with self._uploads_lock:
                if self._uploads.get(session.ask["id"]) is session:
                    del self._uploads[session.ask["id"]]


class UploadSession:
    """One stream of one upload. `feed` its chunks, then `finish` for the receipt; `abandon` when the stream breaks."""

    def __init__(self, api: DeviceApi, run: str, ask: Row, header: service_pb2.UploadHeader, key: str) -> None:
        self._api = api
        self._run = run
        self.ask = ask
        self._header = header
        self._key = key
        self._lock = threading.Lock()
        self._abandoned = False
        self._accepted: Row | None = None
        self._counted = Counted()
        self._stored = 0
        self._again = 0
        self.places = contextlib.ExitStack()

    def open(self) -> None:
        """Takes over from an older session of the same upload, once that has let go of what is staged."""
        with self._lock:
            older = self._api.take_over(self)
            if older is not None:
                older.places.close()
                older.abandon()
            self._accepted = self._api.store.asks.upload_of(self.ask["id"])
            if self._accepted is None:
                self._refusing(self._open)
            else:
                self._again = self._header.payload.ByteSize()

    def _open(self) -> None:
        if self.ask["status"] != "open":
            raise _closed(self.ask)
        declared = self._declared_samples()
        self._check_weight(declared)
        contract, expects = self._api.contract(self._run), json.loads(self.ask["expects"])
        self._ingest = Ingest(self.ask["device"], self._header.payload, contract, expects, declared)
        if self._header.name.attempt != 1:  # so at most two are ever staged, and the usual one need not look
            self._api.discard_other_attempts(self.ask, self._key)
        size = self._header.payload.data_bytes
        self.places.enter_context(self._api.limiter.hold_bytes((self._run, self.ask["device"]), size))
        give_back = self._api.reserve(self._run, self.ask, self._key, size)
        self.places.callback(lambda: give_back(self._stored))
        self._staging = self._api.store.blobs.stage(self._key, self._header.payload.parts)
        held = self._ingest.start(self._staging, self._api.take_checked(self._key))
        # What an earlier stream brought counts as it is, whether it was packed or not.
        self._counted = Counted(tensor_bytes(self._ingest.slots), tensor_bytes(self._ingest.slots, held))
        if held != self._header.first_byte:
            text = f"device {self.ask['device']}: the upload goes on at byte {self._header.first_byte}"
            raise RefusedError(Code.OUT_OF_STEP, f"{text}, the server has {held}; ask for its status")

    def _check_weight(self, declared: int | None) -> None:
        samples = self._header.samples
        text = f"device {self.ask['device']}: the answer is weighted with {samples} samples"
        if not 1 <= samples <= _LARGEST_NUMBER:
            raise RefusedError(Code.BAD_VALUE, f"{text}, must be 1 to 2**63 - 1")
        if declared is not None and samples > declared:
            # One that was honest has data of after the backup that this server was restored from.
            details = {"check_in": "again"}
            raise RefusedError(Code.BAD_VALUE, f"{text}, the device has declared {declared} samples", details)

    def _declared_samples(self) -> int | None:
        """What the device said at its last check-in; it may have fewer by now, not more."""
        row = self._api.store.devices.get(self._run, self.ask["device"])
        return None if row is None else contract_pb2.DeviceProfile.FromString(row["profile"]).samples

    @property
    def held(self) -> int:
        """Bytes of the upload that are staged."""
        return self._staging.length if hasattr(self, "_staging") else 0

    def feed(self, chunk: wire.AnyChunk) -> None:
        """Takes a chunk; of an upload that is accepted already it takes nothing."""
        if self._accepted is not None:
            self._again += len(chunk.data)
            return
        with self._lock:
            self._assert_open()
            sent = self._refusing(lambda: self._ingest.feed(chunk), chunk)
            self._counted.sent[self._ingest.slots[chunk.tensor].kind] += sent

    def finish(self) -> service_pb2.Receipt:
        """Checks the whole, makes it durable, commits, and only then gives the receipt."""
        if self._accepted is not None:
            self._end_again()
            return _receipt(self._header.name, self._accepted)
        with self._lock:
            self._assert_open()
            self._refusing(self._store)
            self._abandoned = True
        self._api.forget(self)
        receipt = self._api.accept(self._run, self.ask, self._header, self._counted)
        of = {"round": self.ask["round"], "device": self.ask["device"], "ask": self.ask["id"]}
        logger.debug("step %r is answered", self.ask["step"], extra=about(run=self._run, **of))
        return receipt

    def _store(self) -> None:
        self._ingest.finish()
        self._staging.commit(self._header.payload.sha256)
        self._stored = self._header.payload.data_bytes

    def abandon(self) -> None:
        """Ends the session; what was staged stays for the next one."""
        with self._lock:
            if not self._abandoned and self._accepted is None and hasattr(self, "_staging"):
                self._staging.close()
                self._api.keep_checked(self._key, self._ingest)
            self._abandoned = True
        self._end_again()

    def _end_again(self) -> None:
        """Ends a session; what it brought of an answer that is accepted already has travelled in vain."""
        self._api.forget(self)
        again, self._again = self._again, 0
        self._api.count_refused(self.ask, again)

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
            keep = refusal.code in (Code.INCOMPLETE, Code.OUT_OF_STEP)
            came = len(chunk.data) if chunk is not None else 0
            came += 0 if keep else self._header.payload.ByteSize() + (self._counted.sent.total() or self.held)
            self._end(keep=keep)
            raise self._api.refuse(self._run, self.ask, refusal, came) from refusal
        except BaseException:
            self._end(keep=True)
            raise

    def _end(self, *, keep: bool) -> None:
        """Lets go of what is staged, and only then of the ask: a newer stream may be waiting for both."""
        try:
            if hasattr(self, "_staging"):
                self._staging.close() if keep else self._staging.discard()
                if keep:
                    self._api.keep_checked(self._key, self._ingest)
        finally:
            self._abandoned = True
            self._api.forget(self)


def _come_back_later(reason: str, seconds: float) -> service_pb2.NextAskResponse:
    """A stopped run goes on when the operator starts it again, so nobody is sent home."""
    come_back = service_pb2.ComeBack(after_seconds=seconds, before_seconds=2 * seconds)
    come_back.reason = f"the run is stopped until its operator starts it again: {reason}"[:_LONGEST_SENTENCE]
    return service_pb2.NextAskResponse(come_back=come_back)


def _note(run: str, kind: str, text: str, device: str, store: Store) -> None:
    store.history.add_event(run, kind, text, device=device)


def _unknown_run(run: str) -> RefusedError:
    return RefusedError(Code.UNKNOWN_RUN, f"the server has no run {run!r}")


def _id_taken(device: str) -> RefusedError:
    return RefusedError(
        Code.BAD_IDENTITY, f"device id {device!r} belongs to another device; choose another id or restore its secret"
    )


def _close_declined(run: str, ask: Row, text: str, store: Store) -> None:
    with store.transaction():
        store.asks.close(ask["id"], "declined")
        store.history.add_event(run, "declined", text, number=ask["round"], device=ask["device"])


def _record(run: str, ask: Row, header: service_pb2.UploadHeader, counted: Counted, store: Store) -> Row | None:
    """Takes an answer with what is counted of it; returns its receipt's row, None if the ask takes none any more."""
    payload, device = header.payload, ask["device"]
    first = store.asks.upload_of(ask["id"]) is None
    if first and not store.blobs.has(payload.sha256):  # who deletes payloads holds the same lock as this job
        raise RefusedError(Code.INCOMPLETE, f"device {device}: the payload has to be sent again")
    row = store.asks.accept_upload(ask["id"], header.name.attempt, payload.sha256, payload.data_bytes, header.samples)
    if row is None:
        _drop_if_to_forget(run, device, payload.sha256, store)
    elif first:
        store.history.add_traffic(run, ask["round"], device, "up", counted, payload.ByteSize())
        for part in payload.parts.parts:
            if part.WhichOneof("kind") == "metrics":
                store.history.add_figures(run, ask["round"], device, _metrics(part))
    failpoints.hit("front.receipt.before-commit")
    return row


def _drop_if_to_forget(run: str, device: str, sha256: bytes, store: Store) -> None:
    """A late answer of a device that is to be forgotten goes at once; every other one is left to a sweep.

    Also this one is, while a backup is made: who waited here would hold up all commits.
    """
    known = store.devices.get(run, device)
    if known is not None and known["forget_asked_at"] is not None:
        drop_unneeded(store, [sha256], wait_seconds=0.0)


def _note_refusals_left_out(who: Who, count: int, row: int | None, store: Store) -> int | None:
    run, device = who
    whose = f"of device {device}" if device else "of devices that are not registered"
    return store.history.note_refusals_left_out(run, device, f"{count} further refusals {whose} are only counted", row)


def _name_of(run: str, ask: Row) -> tuple[str, int, int, str]:
    return run, ask["round"], ask["step_number"], ask["device"]


def _staging_key(ask: Row, attempt: int | str) -> str:
    return f"ask-{ask['id']}-attempt-{attempt}"


def _other_question(ask: Row) -> RefusedError:
    """An answer from before a backup was restored, whose round has the same number as the one played again."""
    step = f"step {ask['step']!r} of round {ask['round']}"
    text = f"device {ask['device']}: the answer is to another question than {step}"
    return RefusedError(Code.CLOSED, text)


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
