"""Runs one run's server half on top of the store, in a separate process.

The engine communicates with devices only through the store: it writes asks and reads answers. After a restart it
continues from the last checkpoint with the open round's asks and answers.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetdistill.errors import KnowledgeError, QuorumNotReached, RunError
from fleetdistill.seeds import derive_seed
from fleetdistill.state import failpoints
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData, evaluate
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.engine.buffering import BufferTerms
from fleetdistill_server.engine.cohort import RoundTerms, StoreCohort
from fleetdistill_server.engine.contract import build_method, check_proxy, check_readable, make_contract, pace_warning
from fleetdistill_server.engine.forgetting import forget_requested
from fleetdistill_server.engine.group import Group
from fleetdistill_server.engine.round_training import RoundTraining
from fleetdistill_server.engine.starting_model import load_starting_model
from fleetdistill_server.figures import SECURE_SUMS
from fleetdistill_server.logs import about
from fleetdistill_server.phases import phase
from fleetdistill_server.service.registration import register
from fleetdistill_server.service.wakeups import POLL_SECONDS, Waker
from fleetdistill_server.store.back_off import available
from fleetdistill_server.store.records import Run
from fleetdistill_server.store.retention import drop_unneeded, free_after_round
from fleetdistill_server.store.rollback import read_checkpoint
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import counted
from fleetdistill_server.training.evaluation import load_evaluation

__all__ = ["Engine"]

logger = logging.getLogger("fleetdistill.server.engine")
_REPORTED_AFTER = 3
"""Number of consecutive short rounds after which the reason in the run's status reports them."""
_DUE_SECONDS = 10.0
"""Time after which a method is asked again whether a round is due, though nothing has changed."""
_FIRST_PAUSE_SECONDS = 0.1
_MAX_PAUSE_SECONDS = 60.0
_DOUBLINGS = 16
"""Upper bound on the exponent; pauses reach `_MAX_PAUSE_SECONDS` before it."""
_MAX_REASONS = 3
"""Largest number of reasons for devices out of a round that the text of a short round has."""


def pause_seconds(failures: int) -> float:
    """Returns the pause after this many consecutive failures, at least 1: 0.1 s, doubled each time, at most 60 s."""
    return float(min(_FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, _DOUBLINGS), _MAX_PAUSE_SECONDS))


class _UnusableState(Exception):
    """Raised if a round leaves the method in a state from which no later round can continue."""


class Engine:
    """Runs one run until its last round is completed, or, with `rounds = 0`, until the process is stopped.

    Args:
        store: Store that contains the run.
        config: The run's configuration.
        waker: Waits for devices' answers and wakes the front.
        max_short_rounds: Number of consecutive short rounds after which the run stops with a RunError; for simulations.
            None retries without a limit, since devices may return at any time.
        directory: Directory for the file that names the resume point of a long training; None for no resume points.
        group: Processes that train together; None for this one alone.
        token: Fencing token with which a supervisor made this engine the run's only one; None to register the run and
            take it over here.

    Attributes:
        pauses: Whether to pause after short rounds; by default only without `max_short_rounds`.
        around_round: Function of a round's number; the context that it returns is entered for the round.
        waits_for: For how many devices the run waits, as the log says already; None if it says nothing.
    """

    def __init__(
        self,
        store: Store,
        config: RunConfig,
        waker: Waker,
        max_short_rounds: int | None = None,
        directory: Path | None = None,
        group: Group | None = None,
        token: str | None = None,
    ) -> None:
        self._max_short_rounds = max_short_rounds
        self.pauses = max_short_rounds is None
        self.waits_for: int | None = None
        self.around_round: Callable[[int], AbstractContextManager[object]] = nullcontext
        self._store = store
        self._config = config
        self._waker = waker
        self._name = config.run.name
        if token is None:
            register(store, config)
        store.runs.set_keep_rounds(self._name, config.server.keep_rounds)
        store.runs.set_keep_checkpoints(self._name, config.server.keep_checkpoints)
        self.token = token or store.runs.own(self._name)
        self.method = build_method(config)
        every = config.engine.checkpoint_seconds
        self._training = RoundTraining(self.method.context.trainer, store, self._name, every, directory, group)
        self._evaluation: TensorData | None = None
        self._checkpoint: bytes | None = None  # the checkpoint that the method's state was loaded from or saved to
        self._endless = config.run.rounds == 0
        self._fault = ""  # of all devices of the last round
        self._unanswered = 0  # consecutive rounds without an answer
        self._terms = RoundTerms(
            run=self._name,
            seed=config.run.seed,
            quorum=config.run.quorum,
            deadline_seconds=config.run.deadline_seconds,
            devices_per_round=config.run.devices_per_round,
            knowledge_type=np.dtype(config.contract.knowledge_type),
            steps=self.method.answer_kinds(),
            buffer=BufferTerms.of(config.run),
        )

    async def run(self) -> None:
        """Completes the run's remaining rounds; does not return if the run has no round limit.

        Raises:
            RunError: Another engine took over the run, or `max_short_rounds` consecutive rounds fell short.
            NoSpaceError: The disk is full; a restarted engine continues the run.
        """
        torch.set_num_threads(self._config.run.threads)
        self.prepare()
        if warning := pace_warning(self._config):
            logger.warning("%s", warning, extra=about(run=self._name))
        while self._endless or self._completed() < self._config.run.rounds:
            cohort = await self.next_cohort()
            with self.around_round(cohort.round):
                complete = await self._round(cohort)
            if not complete:
                await self._after_short_round(self._store.runs.short_rounds_in_a_row(self._name), cohort)
            elif self._endless:
                await self._pause_if_unanswered(cohort)
        while not self._end():
            await self._waker.wait()
        self._waker.wake_other()

    def _end(self) -> bool:
        """Ends the run. Returns False if devices still have to be forgotten, which an ended run does not allow."""
        self.forget()
        with self._store.transaction():
            if self._store.devices.to_forget(self._name):
                return False
            self._store.runs.assert_owner(self._name, self.token)
            failpoints.hit("engine.end.before-commit")
            self._store.runs.set_status(
                self._name, RunStatus.FINISHED, f"{counted(self._config.run.rounds, 'round')} completed"
            )
        failpoints.hit("engine.end.after-commit")
        return True

    async def _after_short_round(self, short: int, cohort: StoreCohort) -> None:
        """Reports consecutive short rounds and pauses before the next; raises RunError at `max_short_rounds`.

        With `max_short_rounds` it also does so once all devices have failed with one error in two rounds in a row.
        """
        before, self._fault = self._fault, self._fault_of(cohort)
        alike = self._fault != "" and self._fault == before
        every = "all devices failed with the same error; " if alike else ""
        text = f"{counted(short, 'round')} in a row fell short of the quorum; {every}{self._last_event()}"
        over = self._max_short_rounds is not None and (alike or short >= self._max_short_rounds)
        if over or short >= _REPORTED_AFTER:
            with self._store.transaction():
                self._store.runs.assert_owner(self._name, self.token)
                self._store.runs.set_status(self._name, RunStatus.STOPPED if over else RunStatus.RUNNING, text)
        if over:
            raise RunError(text)
        if short % 10 == 0:
            logger.warning("%s", text, extra=about(run=self._name))
        if self.pauses:
            await self._pause(short)

    def _fault_of(self, cohort: StoreCohort) -> str:
        """Returns the error with which all devices of a simulation's round failed; empty if they did not."""
        if self._max_short_rounds is None:
            return ""
        events = self._store.history.newest_events(self._name, 2 * len(cohort.devices))
        declined = {one.device: one.text for one in events if one.kind == "declined" and one.round == cohort.round}
        text, *others = {*declined.values()} or {""}
        return text if " failed with " in text and not others and declined.keys() == set(cohort.devices) else ""

    async def _pause_if_unanswered(self, cohort: StoreCohort) -> None:
        """Pauses after a round without answers, so that unresponsive devices do not cause frequent rounds."""
        self._unanswered = 0 if cohort.used else self._unanswered + 1
        if self._unanswered:
            await self._pause(self._unanswered)

    async def _pause(self, failures: int) -> None:
        """Waits with exponential back-off; returns early if the present devices or their data change."""
        now, profiles = self._store.asks.clock.now, self._store.devices.present_profiles
        before = profiles(self._name)
        until = now() + pause_seconds(failures)
        while (left := until - now()) > 0 and profiles(self._name) == before:
            await self._waker.wait(min(left, POLL_SECONDS))

    def forget(self) -> None:
        """Forgets the devices whose deletion was requested, or leaves it to the next call. Call between rounds."""
        runs = self._store.runs
        forget_requested(self._store, self._name, self.method, lambda: runs.assert_owner(self._name, self.token))

    def _last_event(self) -> str:
        """Describes the run's last event, because the user of a simulation cannot inspect its store."""
        last = self._store.history.last_event(self._name)
        if last is None:
            return "run `fleetdistill runs show` for details"
        kind = f"{last.device} {last.kind}" if last.device else last.kind
        return f"the last event is from round {last.round}: {kind}, {last.text}"

    def prepare(self) -> None:
        """Publishes the contract of a new run, or restores the state of an earlier start."""
        result = self._stored()
        begun = ""
        if not result.checkpoint and self._config.run.start_from:
            begun = load_starting_model(self._store, self._config, self.method)
        if not result.contract:
            contract, initial, extractor = make_contract(self._config, self.method)
            with self._store.transaction():  # prevents sweeps, which would delete blobs that no row refers to yet
                for payload in (initial, extractor, self.method.context.proxy_payload):
                    if payload is not None:
                        self._store.blobs.put(payload)
                self._store.runs.assert_owner(self._name, self.token)
                failpoints.hit("engine.contract.before-commit")
                self._store.runs.publish_contract(self._name, contract.SerializeToString(), self.method.figures)
                if begun:
                    self._store.history.add_event(self._name, "started-from", begun)
            failpoints.hit("engine.contract.after-commit")
        elif result.status is RunStatus.STOPPED:
            with self._store.transaction():
                self._store.runs.assert_owner(self._name, self.token)
                self._store.runs.set_status(self._name, RunStatus.RUNNING, "started again")
        self._store.asks.bound_deadlines(self._name, self._config.run.deadline_seconds)
        contract = contract_pb2.Contract.FromString(self._stored().contract)
        self.method.extractor_digest = contract.extractor_file
        check_proxy(self._name, contract, self.method)
        check_readable(self._store, contract, self.method)
        self._restore()

    def _restore(self) -> None:
        checkpoint = self._stored().checkpoint
        if not checkpoint:
            state = pack_state(self.method.state_dict())
            checkpoint = self._store.blobs.put_state(state)
            with self._store.transaction():
                self._store.runs.assert_owner(self._name, self.token)
                self._store.secure_state(checkpoint, state)
                self._store.runs.set_checkpoint(self._name, checkpoint)
        state = read_checkpoint(self._store, self._name, checkpoint)  # the run stops with the reason of an error
        self.method.load_state_dict(unpack_state(state))
        self._checkpoint = checkpoint

    async def next_cohort(self) -> StoreCohort:
        """Returns the round left open by a crash, or waits until a new round is due and opens it."""
        left = self._store.runs.open_round(self._name)
        if left is not None:
            return self._cohort(left.number, list(left.cohort), left.data_versions)
        present = await self._until_due()
        with self._store.transaction():
            self._store.runs.assert_owner(self._name, self.token)
            self._reload_if_changed()
            chosen = self._chosen(list(present))
            versions = self._data_versions(chosen)
            number = self._store.runs.start_round(self._name, chosen, versions)
            failpoints.hit("engine.start.before-commit")
        failpoints.hit("engine.start.after-commit")
        return self._cohort(number, chosen, versions)

    def _data_versions(self, devices: Sequence[str]) -> dict[str, str]:
        """Returns the data versions of the devices that report one."""
        profiles = self._store.devices.profiles(self._name, devices)
        return {device: version for device, profile in profiles.items() if (version := _data_version(profile))}

    def _present(self) -> Mapping[str, bytes]:
        """Returns the devices that are checked in, with their profiles where these decide whether a round is due."""
        devices = self._store.devices
        if self._endless:
            return devices.present_profiles(self._name)
        return dict.fromkeys(devices.present(self._name), b"")  # a fleet of 100,000 has 50 MB of profiles

    async def _until_due(self) -> Collection[str]:
        """Waits until a round is due; returns the devices that may take part.

        The wait can take months, so requests to forget a device are processed during it.
        """
        checked: tuple[object, ...] = ()
        waits, check_at = "" if self.waits_for is None else _waiting(self.waits_for), 0.0
        self.waits_for = None
        now, start_at = self._store.asks.clock.now, self._next_start()
        if start_at > now():
            text = f"the next round starts in {start_at - now():.0f} seconds, because of min_round_seconds"
            logger.info("%s", text, extra=about(run=self._name))
        while True:
            self.forget()
            self._reload_if_changed()
            if (left := start_at - now()) > 0:
                if self._stored().waits_until != start_at:  # also after a request to forget a device has ended the wait
                    with self._store.transaction():
                        self._store.runs.assert_owner(self._name, self.token)
                        self._store.run_control.begin_wait_until(self._name, start_at)
                await self._waker.wait(min(left, POLL_SECONDS))
                continue
            profiles = self._present()
            enough = len(profiles) >= self._needed_devices()
            if (self._checkpoint, profiles) != checked or now() >= check_at:
                checked, check_at = (self._checkpoint, profiles), now() + _DUE_SECONDS
                if self._endless:
                    self.method.update_present(profiles)
                due = self._due(profiles) if enough else None
                if due is not None:
                    break
            waits = self._wait(waits, 0 if enough else self._needed_devices())
            await self._waker.wait()
        if self._stored().waits_since is not None:
            self._store.run_control.end_wait(self._name)
        if waits:
            logger.info("a round is due after a wait", extra=about(run=self._name))
        return due

    def _next_start(self) -> float:
        """Returns the time before which `min_round_seconds` allows no round, in seconds since 1970; 0 without one."""
        seconds, number = self._config.run.min_round_seconds, self._store.summaries.last_round(self._name)
        if not seconds or not number:
            return 0.0
        started, _ = self._store.summaries.times_of_rounds(self._name, number - 1)[number]
        return min(started, self._store.asks.clock.now()) + seconds  # the system's clock may have been set back

    def _wait(self, waits: str, needed: int) -> str:
        """Records that the run waits for devices, or for 0 for a change of them; returns this in words."""
        now = _waiting(needed)
        if self._stored().waits_for != needed:
            with self._store.transaction():
                self._store.runs.assert_owner(self._name, self.token)
                self._store.run_control.begin_wait(self._name, needed)
        if now != waits:
            logger.info("%s", now, extra=about(run=self._name))
        return now

    def _due(self, profiles: Mapping[str, bytes]) -> Collection[str] | None:
        """Returns the devices that may take part in the next round; None if no round is due.

        Devices that were late repeatedly are left out as long as the others suffice for the quorum of `min_devices`,
        and for the fewest devices with which the method has a result. In a run without a last round they take part only
        when the other devices alone make no round due.
        """
        left_out = self._store.devices.left_out(self._name, self._stored().next_round)
        quorum = math.ceil(self._config.run.quorum * self._needed_devices() - 1e-9)
        least = max(quorum, min(self._needed_devices(), self._method_needs()))
        for those in (available(profiles, left_out, least), profiles):
            if not self._endless or self.method.is_due({name: _data_version(of) for name, of in those.items()}):
                return those.keys()
        return None

    def _needed_devices(self) -> int:
        """Returns how many devices must be present for a round to begin."""
        alone = self._endless and self.method.picks_devices and self._completed() > 0
        return 1 if alone else max(self._config.run.min_devices, self._method_needs())

    def _method_needs(self) -> int:
        return self.method.needs(self.method.config).min_devices

    def _reload_if_changed(self) -> None:
        """Reloads the method's state if the run's checkpoint has changed, for example after a device was forgotten."""
        if self._stored().checkpoint != self._checkpoint:
            self._restore()

    def _chosen(self, present: list[str]) -> list[str]:
        """Returns the round's cohort: all present devices, or devices_per_round * over_selection drawn at random."""
        settings = self._config.run
        count = math.ceil(settings.devices_per_round * settings.over_selection - 1e-9)
        picks_itself = self._endless and self.method.picks_devices
        if picks_itself or not 0 < count < len(present):
            return present
        seed = derive_seed(settings.seed, self._stored().next_round, "devices", "server")
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
        """Runs one round; returns False if it fell short and the method's state was rolled back."""
        torch.manual_seed(derive_seed(self._config.run.seed, cohort.round, "round", "server"))
        assert self._checkpoint is not None  # set by `prepare`
        try:
            with self._training.of_round(cohort, self._checkpoint):
                await self.method.round(cohort)
            self._check_usable(cohort)
            if cohort.completed + 1 == self._config.run.rounds:
                cohort.add_newcomers(self._store.devices.present(self._name))
                await self.method.finish(cohort)
        except (QuorumNotReached, _UnusableState) as reason:
            why = str(reason)
            if isinstance(reason, QuorumNotReached):
                why += _devices_out(self._store.asks.reasons_out(self._name, cohort.round))
            logger.warning("the round fell short: %s", why, extra=about(run=self._name, round=cohort.round))
            if isinstance(reason, _UnusableState):
                cohort.event("round-undone", str(reason))
            checkpoint, state = self._state_to_keep(reason)
            with self._store.transaction():
                self._store.runs.assert_owner(self._name, self.token)
                if checkpoint:
                    self._store.secure_state(checkpoint, state)
                    self._store.runs.set_checkpoint(self._name, checkpoint)
                kept = {name: value for name, value in cohort.figures.items() if name == SECURE_SUMS}
                self._store.runs.close_short_round(self._name, cohort.round, why, kept)
                failpoints.hit("engine.short.before-commit")
            failpoints.hit("engine.short.after-commit")
            if of_sums := self._store.runs.payloads_of_sums(self._name, cohort.round):
                drop_unneeded(self._store, of_sums, wait_seconds=0.0)
            self._store.blobs.forget_verified()  # devices may have fetched a damaged blob; the next put rewrites it
            self._training.end_round()
            self._restore()
            return False
        self._close(cohort)
        return True

    def _state_to_keep(self, reason: Exception) -> tuple[bytes, bytes]:
        """Returns digest and bytes of the state that a short round leaves; empty for the state from before it."""
        if not self.method.keeps_short_rounds or isinstance(reason, _UnusableState):
            return b"", b""
        state = pack_state(self.method.state_dict())
        return self._store.blobs.put_state(state), state

    def _check_usable(self, cohort: StoreCohort) -> None:
        """Raises _UnusableState if a later round could not continue from the method's state."""
        reason = reason_not_usable(self.method.state_dict())
        if reason:
            raise _UnusableState(f"{reason} after the round; the run keeps the state from before the round")
        self._score(cohort)

    def _close(self, cohort: StoreCohort) -> None:
        failpoints.hit("engine.checkpoint.before-write")
        with phase("checkpoint"):
            state = pack_state(self.method.state_dict())
            self._checkpoint = self._store.blobs.put_state(state)
        failpoints.hit("engine.checkpoint.after-write")
        short = self._store.runs.short_rounds_in_a_row(self._name)
        with self._store.transaction():
            self._store.runs.assert_owner(self._name, self.token)
            self._store.secure_state(self._checkpoint, state)
            if short or self._training.is_shown():
                self._store.runs.set_status(self._name, RunStatus.RUNNING, "")  # clears the reason
            spent = self._store.runs.close_round(
                self._name, cohort.round, self._checkpoint, cohort.used, cohort.figures, self._settle(cohort)
            )
            failpoints.hit("engine.close.before-commit")
        failpoints.hit("engine.close.after-commit")
        self._training.end_round()
        of_sums = self._store.runs.payloads_of_sums(self._name, cohort.round)
        free_after_round(self._store, self._name, spent | of_sums)
        of = f" of {self._config.run.rounds}" if not self._endless else ""
        where = about(run=self._name, round=cohort.round)
        logger.info("round closed, %d%s completed", cohort.completed + 1, of, extra=where)

    def _settle(self, cohort: StoreCohort) -> tuple[int, int] | None:
        """Returns the rounds whose asks end with this round, or None for this round only."""
        buffer = self._terms.buffer
        ends = cohort.completed + 1 == self._config.run.rounds
        return None if buffer is None else buffer.settled(cohort.round, ends=ends)

    def _score(self, cohort: StoreCohort) -> None:
        """Scores the global model on the operator's evaluation data if the run has both."""
        model = self.method.global_model()
        if model is None or not self._config.evaluation.data:
            return
        number = cohort.completed + 1
        if number % self._config.evaluation.every and number != self._config.run.rounds:
            return
        if self._evaluation is None:
            self._evaluation = load_evaluation(self._config.evaluation.data, self.method.context.classes)
        try:
            with phase("evaluation"):
                counts = evaluate(model, self._evaluation, self.method.context.classes)
        except KnowledgeError as error:
            raise _UnusableState(
                f"the global model cannot be scored: {error}; the run keeps the state from before the round"
            ) from error
        cohort.report("global_accuracy", counts.accuracy)
        cohort.report("global_confusion", counts.confusion.cells.tolist())

    def _stored(self) -> Run:
        return self._store.runs.existing(self._name)

    def _completed(self) -> int:
        return self._stored().completed_rounds


def _data_version(profile: bytes) -> str:
    return contract_pb2.DeviceProfile.FromString(profile).data_version.hex()


def _devices_out(reasons: Mapping[str, int]) -> str:
    """Returns why devices are out of a round, to follow how many answered; empty if none is out."""
    shown = [f"{reason} ({devices})" for reason, devices in reasons.items()][:_MAX_REASONS]
    return f"; out of the round: {', '.join(shown)}" if shown else ""


def _waiting(needed: int) -> str:
    idle = "no round is due until a device joins, leaves or changes its data"
    return f"waiting for {_devices(needed)} to be present" if needed else idle


def _devices(count: int) -> str:
    return f"{count} device{'s' if count != 1 else ''}"


def reason_not_usable(state: Mapping[str, Any]) -> str | None:
    """Describes the first tensor in a state that has a non-finite value or a negative batch-norm variance.

    Returns None if the state has no such tensor.
    """
    for name, tensor in _tensors(state, ""):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            return f"{name} is not finite"
        if name.endswith("running_var") and bool((tensor < 0).any()):
            return f"{name} has a negative value, {float(tensor.min()):g}"
    return None


def _tensors(state: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        yield path, state
    items = state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, list | tuple) else ()
    for key, value in items:
        yield from _tensors(value, f"{path}.{key}" if path else str(key))
