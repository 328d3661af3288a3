"""Implements a method's `Cohort` on top of the store.

Asks are written to the store and answers are read from it, so a round that restarts after a crash finds both again.
Answers are yielded in device-id order, each as soon as it and all earlier ones have arrived or can no longer arrive.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from fleetdistill.errors import DamagedError, KnowledgeError, NoSpaceError, QuorumNotReached, StoreError, WireError
from fleetdistill.knowledge import Parts
from fleetdistill.state import failpoints
from fleetdistill.wire.codec import Payload, encode
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.engine.arrivals import MAX_ROWS, Arrivals
from fleetdistill_server.engine.buffering import Buffer, BufferTerms
from fleetdistill_server.engine.group import EndOfStep, Group, PassedAnswer
from fleetdistill_server.event_kinds import GUARD
from fleetdistill_server.logs import about
from fleetdistill_server.methods.cohort import (
    ColumnsFor,
    DeviceAnswer,
    PayloadFor,
    Prepare,
    ask_seed,
    devices_needed,
    round_generator,
    sample_devices,
)
from fleetdistill_server.phases import phase
from fleetdistill_server.service.wakeups import Waker
from fleetdistill_server.store.records import Ask
from fleetdistill_server.store.states import STALENESS, AskStatus
from fleetdistill_server.store.store import Store

logger = logging.getLogger("fleetdistill.server.cohort")
_MAX_EVENT = 1000


@dataclass(frozen=True)
class RoundTerms:
    """Settings that apply to every round of a run.

    Attributes:
        run: Name of the run.
        seed: Root of the run's seed tree.
        quorum: Fraction of the cohort that must answer, in (0, 1].
        deadline_seconds: Seconds from an ask to its deadline.
        devices_per_round: Number of answers that complete a step; 0 waits for every device that is asked.
        knowledge_type: Element type in which knowledge is sent: float16, float32 or uint8.
        steps: For each step of the method, maps the names of an answer's parts to their kinds.
        buffer: Settings of buffered rounds; None if rounds are not buffered.
    """

    run: str
    seed: int
    quorum: float
    deadline_seconds: float
    devices_per_round: int
    knowledge_type: np.dtype
    steps: Mapping[str, Mapping[str, str]]
    buffer: BufferTerms | None = None


def with_columns(kinds: Mapping[str, str], columns: Sequence[str]) -> dict[str, str]:
    """Returns the kinds of an answer's parts, with the paths of its feature columns or its model's tensors."""
    folders = {"sample_knowledge": "features/", "model_parameters": ""}
    paths = [f"{part}/{folders[kind]}{name}" for part, kind in kinds.items() if kind in folders for name in columns]
    return {**kinds, **dict.fromkeys(paths, "tensor")}


class StoreCohort:
    """A `fleetdistill_server.methods.cohort.Cohort` that keeps asks and answers in the store.

    Attributes:
        round, completed, devices, data_versions: As in `Cohort`.
        figures: Figures passed to `report`, by name.
        used: Ids of the asks whose answers the method received.
        verified: Receipts of the answers whose payloads this round has verified.
        group: Processes that receive the same answers; None if the engine is one process.
    """

    def __init__(
        self,
        store: Store,
        terms: RoundTerms,
        waker: Waker,
        *,
        number: int,
        completed: int,
        devices: Sequence[str],
        data_versions: Mapping[str, str] | None = None,
    ) -> None:
        self.round = number
        self.completed = completed
        self.devices = tuple(devices)
        self.data_versions = {device: (data_versions or {}).get(device, "") for device in self.devices}
        self.figures: dict[str, Any] = {}
        self.used: list[int] = []
        self.verified: set[str] = set()
        self.group: Group | None = None
        self._store = store
        self._terms = terms
        self._waker = waker
        self._steps = 0
        self._in_round = set(devices)

    async def ask(
        self,
        step: str,
        payload: PayloadFor = None,
        *,
        to: Sequence[str] | None = None,
        quorum: float | None = None,
        columns: ColumnsFor | None = None,
        prepare: Prepare | None = None,
    ) -> AsyncIterator[DeviceAnswer]:
        """Sends a step's ask to the cohort and yields the answers in device-id order; see `Cohort.ask`."""
        asked = sorted(self._in_round if to is None else to)
        self._steps += 1
        if self._terms.buffer is not None and quorum != 0:
            async for result in self._ask_buffered(step, payload, asked, columns, prepare):
                yield result
            return
        await self._retry_until_written(step, partial(self._write_asks, step, self._steps, asked, payload, columns))
        self._waker.wake_other()
        # A step with quorum 0 delivers something that every device should receive.
        enough = 0 if quorum == 0 else self._terms.devices_per_round
        answered = 0
        among = set(asked)
        of_step = self._terms.run, self.round, self._steps
        answered_after = partial(self._store.asks.answered_after, *of_step, MAX_ROWS)
        arrivals = Arrivals(answered_after, self._accepted, prepare if self.group is None else None)
        self._in_round -= among - self._store.asks.devices_of_step(*of_step)
        for ask in self._store.asks.each_of_step(*of_step, MAX_ROWS):
            if ask.device not in among:  # asked before a crash, but its answer to an earlier step is lost now
                self._store.asks.close(ask.id, "no longer part of this step after the round was replayed")
                continue
            is_out = ask.status is AskStatus.OUT  # for good
            answer = None if is_out else await self._answer_to(ask, enough, asked, arrivals)
            if answer is None:
                self._in_round.discard(ask.device)
                continue
            answered += 1
            yield self._pass_on(ask, answer, prepare)
        self._end_step(step, answered, self.needed(min(len(asked), enough or len(asked)), quorum))

    async def _ask_buffered(
        self,
        step: str,
        payload: PayloadFor,
        asked: Sequence[str],
        columns: ColumnsFor | None,
        prepare: Prepare | None,
    ) -> AsyncIterator[DeviceAnswer]:
        """Asks the devices that have no open ask of an earlier round; yields the answers that fill the buffer."""
        assert self._terms.buffer is not None
        buffer = Buffer(self._store.asks, self._terms.run, self.round, step, self._terms.buffer)
        free = [device for device in asked if device not in buffer.busy]
        await self._retry_until_written(step, partial(self._write_asks, step, self._steps, free, payload, columns))
        self._waker.wake_other()
        arrivals = Arrivals(buffer.answered_after, self._accepted, prepare if self.group is None else None)
        answered = 0
        for item in await buffer.filled(lambda: arrivals.read_one(""), self._waker):
            answer = arrivals.take(item)
            if answer is not None:
                answered += 1
                self.report(STALENESS, {answer.device: answer.staleness})
                self.report("staleness_weight", {answer.device: answer.decay})
                yield self._pass_on(item, answer, prepare)
        self._end_step(step, answered, 1)

    def _pass_on(self, ask: Ask, answer: DeviceAnswer, prepare: Prepare | None) -> DeviceAnswer:
        """Notes that the method uses an answer, and passes it to the other processes."""
        self.used.append(ask.id)
        if self.group is not None:  # all processes prepare the same answers in the same order
            self.group.send(PassedAnswer(answer.device, answer.samples, answer.digest, answer.staleness, answer.decay))
            answer.prepared = None if prepare is None else prepare(answer)
        return answer

    def _end_step(self, step: str, answered: int, needed: int) -> None:
        missed = (step, answered, needed) if answered < needed else None
        if self.group is not None:
            self.group.send(EndOfStep(self.remaining, missed))
        if missed is not None:
            raise QuorumNotReached(*missed)

    def needed(self, asked: int, quorum: float | None = None) -> int:
        """Returns how many of `asked` devices must answer under `quorum`, which defaults to the run's quorum."""
        return devices_needed(asked, self._terms.quorum if quorum is None else quorum)

    def add_newcomers(self, devices: Sequence[str]) -> None:
        """Adds devices outside this round's cohort, so that they also receive the final result."""
        self._in_round |= set(devices) - set(self.devices)

    @property
    def remaining(self) -> list[str]:
        """Ids of the devices that have not missed an ask of this round, in bytewise order."""
        return sorted(self._in_round)

    def sample(self, ratio: float) -> list[str]:
        """Draws max(1, floor(ratio * K)) of the cohort's K devices at random; returns their ids in id order."""
        return sample_devices(self.devices, ratio, self.generator("participants"))

    def model_fingerprint(self, device: str) -> str:
        """Returns the `fleetdistill.training.model.fingerprint` that a device reported for its model."""
        known = self._store.devices.get(self._terms.run, device)
        assert known is not None  # every device of the cohort has checked in
        return contract_pb2.DeviceProfile.FromString(known.profile).model_fingerprint

    def declined(self, step: str) -> Mapping[str, str]:
        """Returns the reasons of the devices that declined a step; see `Cohort.declined`."""
        return self._store.history.declined(self._terms.run, self.round, step)

    async def deliver(self, payload: PayloadFor, *, step: str = "deliver") -> None:
        """Sends a payload without requesting knowledge; waits until each device has it or is out of the round."""
        async for _ in self.ask(step, payload, quorum=0.0):
            pass

    def event(self, kind: str, text: str, device: str = "", *, once: bool = False) -> None:
        """Records an event for `fleetdistill runs show`; see `Notes.event`."""
        run, number = self._terms.run, self.round
        known = (run, kind, device) if once else (run, kind, device, number, text)
        if not self._store.history.has_event(*known):
            self._store.history.add_event(run, kind, text, number=number, device=device)

    def guard(self, name: str, text: str, device: str = "") -> None:
        """Records that a guard of the method fired, as the event `<name>-guard`."""
        self.event(f"{name}{GUARD}", text, device)

    def report(self, name: str, value: Any) -> None:
        """Adds a JSON-serializable figure to this round; mappings of the same name are merged."""
        if isinstance(value, Mapping):
            self.figures.setdefault(name, {}).update(value)
        else:
            self.figures[name] = value

    def generator(self, name: str) -> torch.Generator:
        """Returns this round's random generator for one named purpose."""
        return round_generator(self._terms.seed, self.round, name)

    async def _retry_until_written(self, step: str, write: Callable[[], bool]) -> None:
        """Calls `write` until it succeeds; while the disk is full, the step waits and the run stays open."""
        waits, where = False, about(run=self._terms.run, round=self.round)
        while True:
            try:
                if write():
                    break
                continue
            except NoSpaceError as error:
                with contextlib.suppress(NoSpaceError):  # the event itself needs space
                    self.event("no-space", f"step {step!r} cannot be sent to the devices until the disk has space")
                if not waits:
                    logger.warning("step %r waits for disk space: %s", step, error, extra=where)
                waits = True
            await self._waker.wait()
        if waits:
            logger.warning("step %r no longer waits for disk space", step, extra=where)

    def _write_asks(
        self, step: str, number: int, asked: Sequence[str], payload: PayloadFor, columns: ColumnsFor | None
    ) -> bool:
        """Writes the asks of a step; returns False and writes nothing if a sweep has deleted one of their payloads."""
        with phase("asks"):
            return self._encode_and_write(step, number, asked, payload, columns)

    def _encode_and_write(
        self, step: str, number: int, asked: Sequence[str], payload: PayloadFor, columns: ColumnsFor | None
    ) -> bool:
        run = self._terms.run
        kinds = self._terms.steps.get(step, {})
        known = {ask.device: ask for ask in self._store.asks.of_step(run, self.round, number)}
        if self._store.blobs.space is not None and not known.keys() >= set(asked):
            self._store.blobs.space.check(1)  # else devices would train for answers that the front refuses
        asks = []
        encoded = self._encoder(payload)
        for device in asked:
            expects = with_columns(kinds, columns(device)) if columns else kinds
            try:
                asks.append(self._new_ask(step, number, device, encoded(device), expects))
            except (KnowledgeError, WireError) as error:  # one device's payload must not end the run for all
                text = f"step {step!r} cannot be sent to {device}; the device drops out of the round: {error}"
                self.event("not-asked", text[:_MAX_EVENT], device)
        for ask in asks:
            old = known.get(ask.device)
            if old is not None and old.payload != ask.payload:
                text = f"replaying step {step!r} produced a different payload; the stored payload is used"
                self.event("replay-differs", text, ask.device)
                if old.status is AskStatus.OPEN and old.payload:
                    self._check_asked(old)
        failpoints.hit("engine.asks.before-commit")
        with self._store.transaction():  # excludes sweeps, which hold the same lock
            if not all(self._store.blobs.has(sha256) for sha256 in {ask.payload for ask in asks} - {b""}):
                return False
            self._store.runs.assert_not_cancelled(run)
            self._store.asks.add(asks)
        failpoints.hit("engine.asks.after-commit")
        return True

    def _check_asked(self, ask: Ask) -> None:
        """Drops a device from the round if its ask's stored payload is lost, since a replay may compute another one."""
        try:
            self._store.blobs.open(ask.payload, verify=True)
        except DamagedError as damage:
            self._store.blobs.quarantine(damage.sha256)
            with self._store.transaction():
                self._store.asks.close(ask.id, f"the payload of the ask was lost on the server: {damage}")
                text = f"the payload of step {ask.step!r} for {ask.device} was lost on the server"
                self.event("quarantined", f"{text}; the device drops out of the round. {damage}", ask.device)

    def _encoder(self, payload: PayloadFor) -> Callable[[str], Payload | None]:
        """Returns a function from a device to its encoded and stored payload; one for all devices is encoded once."""
        if callable(payload):
            return lambda device: self._stored(payload(device))
        parts = payload
        stored = cache(lambda: self._stored(parts))
        return lambda device: stored()

    def _stored(self, parts: Parts | None) -> Payload | None:
        """Encodes and stores the parts of an ask."""
        if parts is None:
            return None
        encoded = encode(parts, self._terms.knowledge_type)
        self._store.blobs.put(encoded)
        return encoded

    def _new_ask(self, step: str, number: int, device: str, encoded: Payload | None, expects: Mapping[str, str]) -> Ask:
        return Ask(
            run=self._terms.run,
            round=self.round,
            step_number=number,
            device=device,
            step=step,
            expects=expects,
            payload=encoded.sha256 if encoded else b"",
            payload_bytes=encoded.data_bytes if encoded else 0,
            seed=ask_seed(self._terms.seed, self.round, step, number, device),
            deadline_at=self._store.asks.clock.now() + self._terms.deadline_seconds,
        )

    async def _answer_to(self, ask: Ask, enough: int, asked: Sequence[str], arrivals: Arrivals) -> DeviceAnswer | None:
        name = (self._terms.run, ask.round, ask.step_number, ask.device)
        while True:
            now = self._store.asks.get(*name)
            if now is None:
                raise StoreError(f"the ask {name} is missing from the store")
            if now.status is AskStatus.OUT:
                return None
            if now.status is AskStatus.ANSWERED:
                answer = arrivals.take(now)
                if answer is not None:
                    return answer
                continue
            if self._store.asks.expire(self._terms.run, self._store.asks.clock.now()):
                continue
            if enough and self._store.asks.end_step(self._terms.run, self.round, ask.step_number, enough, asked):
                continue
            if not arrivals.read_one(ask.device):
                await self._waker.wait()

    def _accepted(self, ask: Ask) -> DeviceAnswer | None:
        """Returns the verified answer to an ask, or None if its payload is lost and the ask was reopened or closed."""
        upload = self._store.asks.upload_of(ask.id)
        assert upload is not None  # status and row are written in one transaction
        try:
            payload = self._store.blobs.open(upload.sha256, verify=True)  # again, if it was read early
        except DamagedError as damage:
            self._withdraw(ask, damage)
            return None
        self.verified.add(upload.receipt)
        answer = DeviceAnswer(ask.device, upload.samples, payload)
        if self._terms.buffer is not None:
            answer.staleness = self.round - ask.round
            answer.decay = self._terms.buffer.decay(answer.staleness)
        failpoints.hit("engine.answer.after-read")
        return answer

    def _withdraw(self, ask: Ask, damage: DamagedError) -> None:
        """Withdraws a damaged answer: quarantines the file, then updates the row.

        After a crash in between, the file is missing and the withdrawal is repeated.
        """
        failpoints.hit("engine.quarantine.before-move")
        self._store.blobs.quarantine(damage.sha256)
        failpoints.hit("engine.quarantine.after-move")
        self._store.asks.withdraw_upload(ask.id, str(damage))
        failpoints.hit("engine.quarantine.after-commit")
        self._waker.wake_other()
