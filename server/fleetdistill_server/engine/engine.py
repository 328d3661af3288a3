"""The engine: runs the server half of one run's method over the store, in a process of its own.

It talks to devices only through the store: asks are written, answers are read. Killed and started again, it goes on
from the last checkpoint with the open round's asks and answers. Run by `fleetdistill serve` as
`python -m fleetdistill_server.engine`.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fleetdistill.errors import DamagedError, KnowledgeError, QuorumNotReached, RunError
from fleetdistill.seeds import derive_seed
from fleetdistill.state import failpoints
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData, evaluate
from fleetdistill.wire.codec import Payload
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.engine.cohort import RoundTerms, StoreCohort, Waker
from fleetdistill_server.engine.contract import build_method, extractor_payload, initial_payload, make_contract
from fleetdistill_server.engine.forgetting import forget_asked
from fleetdistill_server.engine.starting_model import begin_with
from fleetdistill_server.engine.usable import reason_not_usable
from fleetdistill_server.logs import about
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.methods.evaluation import load_evaluation
from fleetdistill_server.service.registration import register
from fleetdistill_server.service.wakeups import POLL_SECONDS
from fleetdistill_server.store.back_off import available
from fleetdistill_server.store.retention import free_after_round
from fleetdistill_server.store.store import Store

logger = logging.getLogger("fleetdistill.server.engine")
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 60.0
_DOUBLINGS = 16
"""More of them would only make the numbers larger: the longest pause comes long before."""
_TOLD_AFTER = 3
"""So many short rounds in a row are told in the run's row; the log has each, and tells their number at every tenth."""


class _NotUsable(Exception):
    """What a round has made of the method's state is nothing to go on from."""


class Engine:
    """Runs one run to its end, or without one until it is stopped.

    Args:
        store: Where the run lives.
        config: The run's configuration.
        waker: How to wait for devices.
        most_short_rounds: In a simulation: rounds that may fall short one after the other, without a pause. By default
            the engine goes on for ever, with pauses, because devices that answer may come at any time.
    """

    def __init__(self, store: Store, config: RunConfig, waker: Waker, most_short_rounds: int | None = None) -> None:
        self._most_short_rounds = most_short_rounds
        self._store = store
        self._config = config
        self._waker = waker
        self._name = config.run.name
        register(store, config)
        store.runs.set_keep_rounds(self._name, config.server.keep_rounds)
        store.runs.set_keep_checkpoints(self._name, config.server.keep_checkpoints)
        self.token = store.runs.own(self._name)
        self.method = build_method(config)
        self._evaluation: TensorData | None = None
        self._checkpoint: bytes | None = None  # whose state the method has, or goes on from
        self._endless = config.run.rounds == 0
        self._unanswered = 0  # rounds in a row
        self._terms = RoundTerms(
            run=self._name,
            seed=config.run.seed,
            quorum=config.run.quorum,
            deadline_seconds=config.run.deadline_seconds,
            devices_per_round=config.run.devices_per_round,
            knowledge_type=np.dtype(config.contract.knowledge_type),
            steps=self.method.answer_kinds(),
        )

    async def run(self) -> None:
        """Completes the rounds that the run still lacks; where it wants no number of them, it returns never.

        Raises:
            RunError: Another engine took the run over, or `most_short_rounds` fell short.
            NoSpaceError: The disk is full; the run goes on from here with another engine.
        """
        torch.set_num_threads(self._config.run.threads)
        self.prepare()
        while self._endless or self._completed() < self._config.run.rounds:
            cohort = await self.next_cohort()
            if not await self._round(cohort):
                await self._after_short_round(self._store.runs.short_rounds_in_a_row(self._name))
            elif self._endless:
                await self._after_round_without_end(cohort)
        while not self._end():
            await self._waker.wait()
        self._waker.wake_other()

    def _end(self) -> bool:
        """Ends the run; False while a device is to be forgotten, for after the end nobody does it by himself."""
        self.forget()
        with self._store.transaction():
            if self._store.devices.to_forget(self._name):
                return False
            self._store.runs.assert_owner(self._name, self.token)
            failpoints.hit("engine.end.before-commit")
            self._store.runs.end(self._name, "finished", f"{self._config.run.rounds} rounds completed")
        failpoints.hit("engine.end.after-commit")
        return True

    async def _after_short_round(self, short: int) -> None:
        """Says that rounds fall short, and waits before the next; a simulation, where nobody comes, ends at its cap."""
        text = f"{short} rounds in a row fell short of the quorum; {self._last_event()}"
        over = self._most_short_rounds is not None and short >= self._most_short_rounds
        if over or short >= _TOLD_AFTER:
            with self._store.transaction():
                self._store.runs.assert_owner(self._name, self.token)
                self._store.runs.end(self._name, "stopped" if over else "running", text)
        if over:
            raise RunError(text)
        if short % 10 == 0:
            logger.warning("%s", text, extra=about(run=self._name))
        if self._most_short_rounds is None:
            await self._pause(short)

    async def _after_round_without_end(self, cohort: StoreCohort) -> None:
        """Pauses after rounds that nobody answered: a device that never does must not make round after round."""
        self._unanswered = 0 if cohort.used else self._unanswered + 1
        if self._unanswered:
            await self._pause(self._unanswered)

    async def _pause(self, failures: int) -> None:
        """Waits the longer the more failed, but not when other devices, or devices with other data, come meanwhile."""
        seconds = min(_FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, _DOUBLINGS), _LONGEST_PAUSE_SECONDS)
        before, until = self._store.devices.present_profiles(self._name), time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self._store.devices.present_profiles(self._name) == before:
            await self._waker.wait(min(left, POLL_SECONDS))

    def forget(self) -> None:
        """Between rounds: what the run keeps of devices that are to be forgotten goes; if it cannot, the next time."""
        runs = self._store.runs
        forget_asked(self._store, self._name, self.method, lambda: runs.assert_owner(self._name, self.token))

    def _last_event(self) -> str:
        """What went wrong last: in a simulation nobody can look the store up."""
        last = self._store.history.last_event(self._name)
        if last is None:
            return "look at `fleetdistill runs show`"
        return f"the last event is of round {last['round']}: {last['device']} {last['kind']}, {last['text']}"

    def prepare(self) -> None:
        """Publishes the contract, or takes up the state of an earlier start."""
        row = self._row()
        begun = ""
        if row["checkpoint"] is None and self._config.run.start_from:
            begun = begin_with(self._store, self._config, self.method)
        if row["contract"] is None:
            contract, initial, extractor = make_contract(self._config, self.method)
            with self._store.transaction():  # who deletes what nothing names yet holds the same lock
                for payload in (initial, extractor, self.method.context.proxy_payload):
                    if payload is not None:
                        self._store.blobs.put(payload)
                self._store.runs.assert_owner(self._name, self.token)
                failpoints.hit("engine.contract.before-commit")
                self._store.runs.publish_contract(self._name, contract.SerializeToString())
                if begun:
                    self._store.history.add_event(self._name, "started-from", begun)
            failpoints.hit("engine.contract.after-commit")
        elif row["status"] == "stopped":
            with self._store.transaction():
                self._store.runs.assert_owner(self._name, self.token)
                self._store.runs.end(self._name, "running", "started again")
        self._store.asks.bound_deadlines(self._name, self._config.run.deadline_seconds)
        self._check_proxy()
        self._check_readable()
        self._restore()

    def _check_proxy(self) -> None:
        """A run keeps the proxy set that it began with: all knowledge is about its rows."""
        began = contract_pb2.Contract.FromString(self._row()["contract"]).proxy_digest
        now = self.method.context.proxy_digest
        if began != now:
            raise RunError(
                f"[proxy] data: run {self._name!r} began with proxy set {began.hex()[:12] or 'none'}, the file is "
                f"{now.hex()[:12] or 'none'}; put the first one back, or start a run of another name"
            )

    def _check_readable(self) -> None:
        """What every new device fetches must be whole; nobody else would find out but they."""
        contract = contract_pb2.Contract.FromString(self._row()["contract"])
        if self.method.context.proxy_payload is not None:
            self._store.blobs.put(self.method.context.proxy_payload)  # mends it
        if contract.initial_weights:
            self._mend(contract.initial_weights, initial_payload)
        if contract.extractor_file:
            self._mend(contract.extractor_file, extractor_payload)

    def _mend(self, sha256: bytes, make: Callable[[ServerMethod], Payload | None]) -> None:
        """To make the file takes a while, so it is made again only where the one that is there cannot be read."""
        try:
            self._store.blobs.open(sha256, verify=True)
        except DamagedError:
            made = make(self.method)
            if made is None or made.sha256 != sha256:
                raise
            self._store.blobs.forget_verified()
            self._store.blobs.put(made)

    def _restore(self) -> None:
        checkpoint = self._row()["checkpoint"]
        if checkpoint is None:
            state = pack_state(self.method.state_dict())
            checkpoint = self._store.blobs.put_state(state)
            with self._store.transaction():
                self._store.runs.assert_owner(self._name, self.token)
                self._store.secure_state(checkpoint, state)
                self._store.runs.set_checkpoint(self._name, checkpoint)
        self.method.load_state_dict(unpack_state(self._store.blobs.get_state(checkpoint)))
        self._checkpoint = checkpoint

    async def next_cohort(self) -> StoreCohort:
        """The open round of before a crash, or a new one as soon as enough devices are present and it is due."""
        row = self._store.runs.open_round(self._name)
        if row is not None:
            return self._cohort(row["round"], row["cohort"], row["data_versions"])
        present = await self._until_due()
        with self._store.transaction():
            self._store.runs.assert_owner(self._name, self.token)
            self._take_up_newest()
            chosen = self._chosen(list(present))
            versions = {device: present[device] for device in chosen if present[device]}
            number = self._store.runs.start_round(self._name, chosen, versions)
            failpoints.hit("engine.start.before-commit")
        failpoints.hit("engine.start.after-commit")
        return self._cohort(number, chosen, versions)

    async def _until_due(self) -> Mapping[str, str]:
        """Waits for enough devices, and in a run without an end for work; who is present then, with data versions.

        Meanwhile devices are forgotten, and nothing else is done: a run may wait for months.
        """
        looked_at: tuple[object, ...] = ()
        told = ""
        while True:
            self.forget()
            self._take_up_newest()
            profiles = self._store.devices.present_profiles(self._name)
            enough = len(profiles) >= self._needed_devices()
            if enough and (self._checkpoint, profiles) != looked_at:
                looked_at = (self._checkpoint, profiles)
                due = self._due(profiles)
                if due is not None:
                    return due
            waits = "nothing to do until devices come, go or have other data"
            text = waits if enough else f"waiting for {_devices(self._needed_devices())}, {len(profiles)} present"
            if text != told:
                logger.info("%s", text, extra=about(run=self._name))
                told = text
            await self._waker.wait()

    def _due(self, profiles: Mapping[str, bytes]) -> Mapping[str, str] | None:
        """Who may take part in the next round, with data versions; None where it is not due.

        Without those who were late again and again, as long as the others are enough for the quorum of the smallest
        round; in a run without an end with them too where they alone have work, so that nobody else waits for them.
        """
        left_out = self._store.devices.left_out(self._name, self._row()["next_round"])
        least = math.ceil(self._config.run.quorum * self._needed_devices() - 1e-9)
        for those in (available(profiles, left_out, least), profiles):
            present = {device: _data_version(profile) for device, profile in those.items()}
            if not self._endless or self.method.is_due(present):
                return present
        return None

    def _needed_devices(self) -> int:
        """How many must be present for a round to begin."""
        alone = self._endless and self.method.picks_devices and self._completed() > 0
        return 1 if alone else self._config.run.min_devices

    def _take_up_newest(self) -> None:
        """The method goes on from the run's state: a device may have been forgotten, here or by a command."""
        if self._row()["checkpoint"] != self._checkpoint:
            self._restore()

    def _chosen(self, present: list[str]) -> list[str]:
        """Who is asked: everybody, or as many as a round wants and some more, for those that will not answer."""
        settings = self._config.run
        count = math.ceil(settings.devices_per_round * settings.over_selection - 1e-9)
        picks_itself = self._endless and self.method.picks_devices
        if picks_itself or not 0 < count < len(present):
            return present
        seed = derive_seed(settings.seed, self._row()["next_round"], "devices", "server")
        return sorted(random.Random(seed).sample(present, count))

    def _cohort(self, number: int, devices: list[str], data_versions: Mapping[str, str]) -> StoreCohort:
        return StoreCohort(
            self._store,
            self._terms,
            self._waker,
            number=number,
            completed=self._completed(),
            devices=devices,
            data_versions=data_versions,
        )

    async def _round(self, cohort: StoreCohort) -> bool:
        """One round; True if it completed, False if it fell short and was taken back."""
        torch.manual_seed(derive_seed(self._config.run.seed, cohort.round, "round", "server"))
        try:
            await self.method.round(cohort)
            self._check_usable(cohort)
            if cohort.completed + 1 == self._config.run.rounds:
                cohort.add_newcomers(self._store.devices.present(self._name))
                await self.method.finish(cohort)
        except (QuorumNotReached, _NotUsable) as reason:
            logger.warning("the round fell short: %s", reason, extra=about(run=self._name, round=cohort.round))
            if isinstance(reason, _NotUsable):
                cohort.event("round-undone", str(reason))
            with self._store.transaction():
                self._store.runs.assert_owner(self._name, self.token)
                self._store.runs.close_short_round(self._name, cohort.round, str(reason))
                failpoints.hit("engine.short.before-commit")
            failpoints.hit("engine.short.after-commit")
            self._store.blobs.forget_verified()  # devices may have found damage in what they fetched; it is put again
            self._restore()
            return False
        self._close(cohort)
        return True

    def _check_usable(self, cohort: StoreCohort) -> None:
        """No state becomes a checkpoint from which no later round could go on."""
        reason = reason_not_usable(self.method.state_dict())
        if reason:
            raise _NotUsable(f"{reason} after it; the state of before the round is kept")
        self._score(cohort)

    def _close(self, cohort: StoreCohort) -> None:
        failpoints.hit("engine.checkpoint.before-write")
        state = pack_state(self.method.state_dict())
        self._checkpoint = self._store.blobs.put_state(state)
        failpoints.hit("engine.checkpoint.after-write")
        short = self._store.runs.short_rounds_in_a_row(self._name)
        with self._store.transaction():
            self._store.runs.assert_owner(self._name, self.token)
            self._store.secure_state(self._checkpoint, state)
            if short:
                self._store.runs.end(self._name, "running", "")  # what was told of short rounds is over
            spent = self._store.runs.close_round(
                self._name, cohort.round, self._checkpoint, cohort.used, cohort.figures
            )
            failpoints.hit("engine.close.before-commit")
        failpoints.hit("engine.close.after-commit")
        free_after_round(self._store, self._name, spent)
        of = f" of {self._config.run.rounds}" if not self._endless else ""
        done = cohort.completed + 1
        logger.info("round closed, %d%s completed", done, of, extra=about(run=self._name, round=cohort.round))

    def _score(self, cohort: StoreCohort) -> None:
        """Scores the global model on the operator's data, where the run has both."""
        model = self.method.global_model()
        if model is None or not self._config.evaluation.data:
            return
        if self._evaluation is None:
            self._evaluation = load_evaluation(self._config.evaluation.data, self.method.context.classes)
        try:
            counts = evaluate(model, self._evaluation, self.method.context.classes)
        except KnowledgeError as error:
            raise _NotUsable(
                f"the global model cannot be scored: {error}; the state of before the round is kept"
            ) from error
        cohort.report("global_accuracy", counts.accuracy)
        cohort.report("global_confusion", counts.confusion.tolist())

    def _row(self) -> dict[str, Any]:
        row = self._store.runs.get(self._name)
        assert row is not None  # written by __init__
        return row

    def _completed(self) -> int:
        return int(self._row()["completed_rounds"])


def _devices(count: int) -> str:
    return f"{count} device{'s' if count != 1 else ''}"


def _data_version(profile: bytes) -> str:
    return contract_pb2.DeviceProfile.FromString(profile).data_version.hex()
