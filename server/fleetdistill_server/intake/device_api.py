"""Implements the server side of the device API without a transport; the gRPC front and the in-memory link use it.

It handles contracts, asks and receipts, and imports neither methods nor torch. Every call is synchronous and
thread-safe. Writes go through `commit`, for which the front passes its group-committing writer thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from fleetdistill.errors import RefusedError
from fleetdistill.wire.compression import RAW, choose
from fleetdistill.wire.digests import has_blake3
from fleetdistill.wire.v1 import contract_pb2, knowledge_pb2, service_pb2
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.event_kinds import LARGE_DEVICE
from fleetdistill_server.intake.admission import check_profile, fitting_run
from fleetdistill_server.intake.downloads import Downloads
from fleetdistill_server.intake.limiter import Limiter
from fleetdistill_server.intake.refusal_log import RefusalLog
from fleetdistill_server.intake.sessions import SENT, AskTimes, Sessions, hash_name, id_taken, unknown_run
from fleetdistill_server.intake.uploads import MAX_NUMBER, Uploads
from fleetdistill_server.logs import about
from fleetdistill_server.store.fleet_sizes import FleetSizes
from fleetdistill_server.store.group_commit import Commit
from fleetdistill_server.store.records import Ask, Work
from fleetdistill_server.store.states import OVER, AskStatus, RunStatus
from fleetdistill_server.store.store import Store

__all__ = ["DeviceApi"]

logger = logging.getLogger("fleetdistill.server.intake")
STOPPED_SECONDS = 30.0
"""Shortest wait, in seconds, before a stopped run's devices call again, or a quarter of the lease if that is less."""
_MAX_SENTENCE = 1000
_MAX_REASON = 512  # characters of a device's reason to decline
T = TypeVar("T")


class DirectCommit:
    """Runs each job immediately in its own transaction."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __call__(self, job: Callable[[Store], T], /) -> T:
        with self._store.transaction():
            return job(self._store)


class DeviceApi:
    """Handles devices' calls.

    Args:
        store: Store that contains the runs.
        commit: Runs a job in a durable transaction and returns its result.
        wake_engine: Called after a commit that the engine may be waiting for.
        lease_seconds: Seconds without a call after which a device counts as gone.
        compression: Compression of chunks to and from devices that support it.
        limits: Limits on devices' calls; None for no limits.
        clock: Returns monotonic seconds, which leases are measured in.

    Attributes:
        limiter: Enforces the limits.
        sessions: Authenticates devices and tracks their leases.
        uploads: Receives answers.
        downloads: Serves payloads.
        times: Notes when asks are sent, for people; None notes nothing.
    """

    def __init__(
        self,
        store: Store,
        commit: Commit | None = None,
        wake_engine: Callable[[], None] = lambda: None,
        lease_seconds: float = 60.0,
        compression: knowledge_pb2.Compression.ValueType = RAW,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.commit: Commit = commit or DirectCommit(store)
        self.wake_engine = wake_engine
        self.compression = compression
        self.limiter = Limiter(limits)
        self._refusals = RefusalLog(self.commit, limits.refusals_per_hour if limits else None)
        to_engine = (self.commit, wake_engine)
        self.sessions = Sessions(store, *to_engine, lease_seconds, self.limiter, self._refusals, clock)
        self.uploads = Uploads(store, self.commit, wake_engine, self.sessions, self.limiter, self._refusals)
        self.downloads = Downloads(store, self.commit, self.sessions, compression)
        self.times: AskTimes | None = None
        self._sizes = FleetSizes(store)

    def note_times(self) -> AskTimes:
        """Starts noting when devices receive asks, download and upload; `AskTimes.write` must be called regularly."""
        self.times = self.uploads.times = self.downloads.times = AskTimes(self.commit)
        return self.times

    def check_in(self, request: service_pb2.CheckInRequest, address: str = "") -> service_pb2.CheckInResponse:
        """Registers a device whose profile fits the contract; without a profile, only returns the contract.

        Args:
            request: The device's call.
            address: Address that the call comes from; new device ids are limited per address.

        Raises:
            RefusedError: The run is unknown or not ready, the device's id or secret is wrong, the profile does not
                fit, or a limit is reached.
        """
        run = self._run_of(request.identity)
        contract = self.sessions.contract(run)
        answer = service_pb2.CheckInResponse(contract=contract)
        if request.HasField("profile"):
            device = request.identity.device
            secret = self.sessions.admit(run, device, request.identity.secret, address)
            self._check_profile(run, device, contract, request.profile)
            answer.secret = b"" if request.identity.secret else secret
            secret_hash = hash_name(secret)
            profile = request.profile.SerializeToString()
            if not self.commit(partial(self._register, run, device, secret_hash, profile)):
                raise id_taken(device)  # another device registered the id in the meantime
            self.sessions.renew(run, device)
            for large, text in self._sizes.add(run, device, request.profile.samples):
                self.commit(partial(_note, run, LARGE_DEVICE, text, large))
            logger.info("checked in", extra=about(run=run, device=device))
            self.wake_engine()
        answer.lease_seconds = self.sessions.lease_seconds
        answer.heartbeat_seconds = self.sessions.lease_seconds / 4
        answer.compression = choose(self.compression, request.profile.compressions)
        answer.blake3 = has_blake3()
        return answer

    def register(self, run: str, devices: Iterable[tuple[str, bytes, contract_pb2.DeviceProfile]]) -> None:
        """Registers new devices in one transaction, as if each had checked in; for simulations of large fleets.

        Args:
            run: Name of the run.
            devices: Id, secret and profile of each device.

        Raises:
            RefusedError: A profile does not fit.
        """
        contract = self.sessions.contract(run)
        rows, samples = [], {}
        for device, secret, profile in devices:
            self._check_profile(run, device, contract, profile)
            rows.append((device, hash_name(secret), profile.SerializeToString()))
            samples[device] = profile.samples
        self.commit(lambda store: store.devices.register_new(run, rows))
        for device, count in samples.items():
            self.sessions.renew(run, device)
            for large, text in self._sizes.add(run, device, count):
                self.commit(partial(_note, run, LARGE_DEVICE, text, large))
        self.wake_engine()

    def _run_of(self, identity: service_pb2.Identity) -> str:
        if identity.run or not identity.HasField("abilities"):
            return self.sessions.run_name(identity.run)
        return fitting_run(self.store, identity.abilities, self.sessions.contract)

    def _register(self, run: str, device: str, hashed: bytes, profile: bytes, store: Store) -> bool:
        if store.runs.get(run) is None:  # deleted after its contract was cached
            self.sessions.forget_run(run)
            self._sizes.forget(run)
            raise unknown_run(run)
        return store.devices.register(run, device, hashed, profile)

    def _check_profile(
        self, run: str, device: str, contract: contract_pb2.Contract, profile: contract_pb2.DeviceProfile
    ) -> None:
        try:
            known_run = self.store.runs.get(run)
            check_profile(contract, profile, None if known_run is None else known_run.config.get("model"))
        except RefusedError as refusal:
            self._refusals.note(run, 0, device, refusal, known=self.store.devices.get(run, device) is not None)
            raise

    def note_refusal(self, runs: Sequence[str], device: str, refusal: RefusedError, *, is_proven: bool = True) -> None:
        """Records a refusal outside this API as an event of a run; none if no run can be told.

        Args:
            runs: Names of runs that the call was for, the likeliest first; the first that exists gets the event. If
                there is none, the newest run to which the device belongs does, or else the only one.
            device: Id of the device.
            refusal: The refusal.
            is_proven: Whether the caller has proven its id; one that has not must not use up the device's quota.
        """
        names = self.store.runs.names()
        fitting = [name for name in runs if name in names]
        if not fitting:
            fitting = [name for name in reversed(names) if self.store.devices.get(name, device) is not None]
        for run in (fitting or (names if len(names) == 1 else []))[:1]:
            known = is_proven and self.store.devices.get(run, device) is not None
            self._refusals.note(run, 0, device, refusal, known=known)

    def next_ask(self, identity: service_pb2.Identity) -> service_pb2.NextAskResponse | None:
        """Returns the device's oldest open ask, a request to wait, or the run's end; None if none of these applies."""
        caller = self.sessions.caller(identity)
        run, device = caller.run, caller.id
        work = self.store.asks.work_of(run, device)
        if work is None or work.status is RunStatus.PAUSED:
            return None  # the device waits; work that it has begun is accepted
        if work.ask is not None:
            if self.times is not None:
                self.times.note(work.ask.id, SENT)
            return service_pb2.NextAskResponse(ask=self._ask_message(work, work.ask))
        if work.status in OVER:
            return service_pb2.NextAskResponse(finished=f"{work.status}: {work.reason}")
        if caller.forget_asked_at is not None:
            text = f"{device} was removed from run {run!r}, and its deletion was requested; the app keeps its model"
            return service_pb2.NextAskResponse(finished=f"{text} and may join under another id")
        if work.status is RunStatus.STOPPED:
            return _wait_for_restart(work.reason, min(STOPPED_SECONDS, self.sessions.lease_seconds / 4))
        return None

    def heartbeat(self, request: service_pb2.HeartbeatRequest) -> service_pb2.HeartbeatResponse:
        """Renews the device's lease."""
        run, device = self.sessions.authenticate(request.identity)
        return service_pb2.HeartbeatResponse(ask_open=self.store.asks.next_open(run, device) is not None)

    def leave(self, request: service_pb2.LeaveRequest) -> service_pb2.LeaveResponse:
        """Ends the lease of a device that leaves the run, and records its request to be forgotten."""
        run, device = self.sessions.authenticate(request.identity)
        self.sessions.end(run, device, "device left")
        if request.forget:
            self.commit(partial(_ask_to_forget, run, device))
            self.wake_engine()
        return service_pb2.LeaveResponse(forget_recorded=request.forget)

    def decline(self, request: service_pb2.DeclineRequest) -> service_pb2.DeclineResponse:
        """Closes an ask that a device cannot answer and records an event; later asks still go to the device."""
        run, device = self.sessions.authenticate(request.identity)
        ask = self.store.asks.get(run, min(request.round, MAX_NUMBER), request.step_number, device)
        if ask is not None and ask.status is AskStatus.OPEN:
            self.commit(partial(_close_declined, ask, request.reason[:_MAX_REASON]))
            self.wake_engine()
        return service_pb2.DeclineResponse()

    def _ask_message(self, work: Work, ask: Ask) -> service_pb2.Ask:
        return service_pb2.Ask(
            round=ask.round,
            step_number=ask.step_number,
            step=ask.step,
            payload=ask.payload,
            payload_bytes=ask.payload_bytes,
            seed=ask.seed,
            deadline_seconds=max(ask.deadline_at - self.store.asks.clock.now(), 0.0),
            completed_rounds=work.completed_rounds,
            first_attempt=work.lost_attempt + 1,
        )


def _wait_for_restart(reason: str, seconds: float) -> service_pb2.NextAskResponse:
    """Returns a request to wait, for devices of a stopped run, because the operator may restart the run."""
    come_back = service_pb2.ComeBack(after_seconds=seconds, before_seconds=2 * seconds)
    what = reason.partition(": ")[0]  # what follows is for operators, and can name files of the server
    come_back.reason = f"the run is stopped until its operator restarts it: {what}"[:_MAX_SENTENCE]
    return service_pb2.NextAskResponse(come_back=come_back)


def _ask_to_forget(run: str, device: str, store: Store) -> None:
    with store.transaction():
        known = store.devices.get(run, device)
        store.devices.ask_to_forget(run, device)
        if known is not None and known.forget_asked_at is None:
            text = (
                "the device requested the deletion of its data, before the next round or, if the run is over, at once"
            )
            store.history.add_event(run, "forget-requested", text, device=device)


def _note(run: str, kind: str, text: str, device: str, store: Store) -> None:
    store.history.add_event(run, kind, text, device=device)


def _close_declined(ask: Ask, reason: str, store: Store) -> None:
    with store.transaction():
        store.asks.close(ask.id, "declined")
        store.history.add_declined(ask.run, ask, reason)
