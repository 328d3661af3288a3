"""The devices of one round, as a method uses them, and what they hold.

`Cohort` is implemented by the engine, and for tests by `FakeCohort`. `Deliveries` is for methods that ask only the
devices that need something:

    async for answer in self.deliveries.ask(cohort, "learn", self.message, to=asked, unless_held=digest): ...
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch

from fleetdistill.knowledge import Kind, Parts
from fleetdistill.methods.base import PartKind
from fleetdistill.seeds import derive_seed
from fleetdistill.wire.codec import Payload, decode

_MAX_PAUSE_SECONDS = 86_400.0
"""Longest time after which a present device that did not answer is asked again, if nothing else makes a round due."""

__all__ = ["Cohort", "ColumnsFor", "Deliveries", "DeviceAnswer", "Notes", "PayloadFor", "Prepare"]

Version = Any
"""Identifies the content that a device holds, such as a digest; never None."""
PayloadFor = Parts | Callable[[str], Parts] | None
"""Parts for all devices, or a function from device id to parts."""
ColumnsFor = Callable[[str], Sequence[str]]
"""A function that maps a device id to the feature columns, or paths of a model's tensors, of the device's answer."""


class DeviceAnswer:
    """One device's accepted answer; arrays are read from the store on first use.

    Attributes:
        device: Id of the device.
        samples: Number of local samples.
        digest: Digest that identifies the payload.
        staleness: Number of rounds since the ask; 0 unless rounds are buffered.
        decay: Factor of the answer's weight because of its staleness, in (0, 1].
        prepared: Result of `prepare` of `Cohort.ask` for this answer; None without it.
    """

    prepared: Any = None
    staleness: int = 0
    decay: float = 1.0

    @property
    def weight(self) -> float:
        """The answer's weight in averages: its samples, less with staleness."""
        return self.samples * self.decay if self.staleness else self.samples

    def __init__(self, device: str, samples: int, payload: Payload) -> None:
        self.device = device
        self.samples = samples
        self.digest = payload.digest
        self._payload = payload
        self._decoded: dict[str, Kind] = {}

    @cached_property
    def parts(self) -> Mapping[str, Kind]:
        """All parts of the answer by name."""
        return decode(self._payload)

    def part(self, name: str, kind: type[PartKind]) -> PartKind:
        """Returns the named part; the front has checked its presence and kind."""
        if name not in self._decoded:
            self._decoded |= decode(self._payload, name)
        result = self._decoded[name]
        assert isinstance(result, kind)
        return result


Prepare = Callable[[DeviceAnswer], Any]
"""A function that computes whatever depends on one answer only; it must not change the method's state."""


class Notes(Protocol):
    """Receives a method's events and figures, in a round (`Cohort`) or between rounds."""

    def event(self, kind: str, text: str, device: str = "", *, once: bool = False) -> None:
        """Adds an event; with `once` only if the run has no event of this kind for the device yet."""

    def guard(self, name: str, text: str, device: str = "") -> None:
        """Adds the event `<name>-guard`: a guard of the method fired."""

    def report(self, name: str, value: Any) -> None:
        """Adds a figure, any JSON value; mappings of the same name are merged."""

    def generator(self, name: str) -> torch.Generator:
        """Returns a random number generator for one named purpose, seeded from the run's seed tree."""


class Cohort(Notes, Protocol):
    """The devices of one round; `ask` sends them a step and yields their answers."""

    @property
    def round(self) -> int:
        """Number of the round, from 1; rounds that fell short of the quorum are included."""

    @property
    def completed(self) -> int:
        """Number of rounds completed before this one."""

    @property
    def devices(self) -> Sequence[str]:
        """Ids of the cohort's devices in bytewise order."""

    @property
    def data_versions(self) -> Mapping[str, str]:
        """Data version of each device of the cohort, hexadecimal; empty if the device reports none.

        Versions are those of the devices' profiles when the round started, also in a replay. An answer of this round is
        computed from that version or a newer one. A method that stores the version with an answer may therefore request
        an answer unnecessarily, but never misses a change.
        """

    @property
    def remaining(self) -> Sequence[str]:
        """Ids of the devices that have not missed an ask of this round, in bytewise order."""

    def ask(
        self,
        step: str,
        payload: PayloadFor = None,
        *,
        to: Sequence[str] | None = None,
        quorum: float | None = None,
        columns: ColumnsFor | None = None,
        prepare: Prepare | None = None,
    ) -> AsyncIterator[DeviceAnswer]:
        """Asks a step of the cohort and yields the answers in device-id order.

        Answers are verified, decoded and prepared as they arrive, while other devices are still uploading.

        Args:
            step: Name of the device half's handler.
            payload: Parts for all devices, or a function that maps a device id to the device's parts.
            to: Devices to ask; by default those that answered every earlier ask of this round.
            quorum: Share of the asked devices that must answer; by default the run's.
            columns: Feature columns of the contract, or tensors of its model by path in `ModelParameters`, that each
                device's answer must have; by default all of them.
            prepare: Called once with each answer when it arrives, in any order of the devices; its result is
                `DeviceAnswer.prepared`.

        With `devices_per_round` a step ends after that many answers, and the other devices are out for the round. A
        device whose payload cannot be encoded is not asked; an event is added, and the device is out for the round.

        Raises:
            QuorumNotReached: Too few devices answered before the deadline.
        """

    def declined(self, step: str) -> Mapping[str, str]:
        """Returns the reasons of the devices that declined a step of this round, by device; a replay has the same."""

    async def deliver(self, payload: PayloadFor, *, step: str = "deliver") -> None:
        """Sends a payload without requesting knowledge; waits until each device has received it or has left."""

    def needed(self, asked: int, quorum: float | None = None) -> int:
        """Returns how many of `asked` devices must answer under `quorum`, which defaults to the run's quorum."""

    def sample(self, ratio: float) -> list[str]:
        """Draws the round's participants: max(1, floor(ratio * K)) of the cohort's K devices, in id order."""

    def model_fingerprint(self, device: str) -> str:
        """Returns the `fleetdistill.training.model.fingerprint` of the device's model, from its profile."""


def ask_seed(run_seed: int, round_number: int, step: str, step_number: int, device: str) -> int:
    """Returns the seed of a device's ask in one step of a round; steps are numbered from 1."""
    return derive_seed(run_seed, round_number, step, step_number, device)


def round_generator(run_seed: int, round_number: int, name: str) -> torch.Generator:
    """Returns the server's random number generator for one named purpose of a round."""
    return torch.Generator().manual_seed(derive_seed(run_seed, round_number, name, "server"))


def sample_devices(devices: Sequence[str], ratio: float, generator: torch.Generator) -> list[str]:
    """Draws max(1, floor(ratio * K)) of K devices, in id order."""
    count = max(1, math.floor(ratio * len(devices) + 1e-9))
    order = torch.randperm(len(devices), generator=generator)
    return sorted(devices[number] for number in order[:count].tolist())


def devices_needed(asked: int, quorum: float) -> int:
    """Returns how many of `asked` devices are needed for a quorum in [0, 1]."""
    return math.ceil(quorum * asked - 1e-9)


class Deliveries:
    """The part of a method's state that tracks acknowledgements and unresponsive devices.

    A device holds the version that it acknowledged last. A round that falls short of its quorum rolls the method's
    state back, but its devices may hold what it sent; after such a round all acknowledgements are discarded. A device
    that does not answer is asked again after 1, 2, 4, ... rounds: the other devices wait for it until the deadline. A
    run in which nothing else changes has no rounds, so a device that is present is asked after as many minutes, too.

    Args:
        clock: Returns monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._acknowledged: dict[str, Version] = {}
        self._missed: dict[str, list[int]] = {}  # unresponsive devices: round of the next ask, next pause in rounds
        self._round = 0
        # Not part of the state: an engine that starts again asks all devices that are present.
        self._present: set[str] = set()  # at the last `update_present`
        self._pauses_until: dict[str, float] = {}  # unresponsive devices: time of the next ask
        self._due_again: set[str] = set()  # unresponsive devices whose time has come

    def begin(self, round_number: int) -> None:
        """Starts a round; must be called before the round's first ask."""
        if round_number > self._round + 1:
            self._acknowledged.clear()
        self._round = round_number

    async def ask(
        self,
        cohort: Cohort,
        step: str,
        payload: PayloadFor,
        *,
        to: Sequence[str],
        unless_held: Version | None = None,
        quorum: float | None = None,
    ) -> AsyncIterator[DeviceAnswer]:
        """Asks a step of the devices that need it and are not paused, and yields their answers.

        Args:
            cohort: The round's cohort.
            step: Name of the device half's handler.
            payload: As in `Cohort.ask`.
            to: Devices to consider.
            unless_held: Version that the step delivers. Devices that hold it are not asked, and devices that answer
                hold it afterwards. None for a step that delivers nothing.
            quorum: Share of the asked devices that must answer; by default the run's.
        """
        due = [item for item in to if self.is_askable(item) and (unless_held is None or self.lacks(item, unless_held))]
        if not due:
            return
        answered = []
        async for answer in cohort.ask(step, payload, to=due, quorum=quorum):
            answered.append(answer.device)
            if unless_held is not None:
                self._acknowledged[answer.device] = unless_held
            yield answer
        for device in answered:
            self.mark_responsive(device)
        self.mark_unresponsive([device for device in due if device not in answered])

    def lacks(self, device: str, digest: Version) -> bool:
        """Returns whether a device holds a version other than this one, or no version."""
        return bool(self._acknowledged.get(device) != digest)

    @property
    def any_acknowledged(self) -> bool:
        """Whether at least one device has acknowledged a version."""
        return bool(self._acknowledged)

    # --- devices that do not answer

    def is_unresponsive(self, device: str) -> bool:
        """Returns whether a device did not answer its last ask, and is not to be asked again now."""
        return device in self._missed and device not in self._due_again

    def is_askable(self, device: str) -> bool:
        """Returns whether a device is not paused."""
        return not self.is_unresponsive(device) or self._round >= self._missed[device][0]

    def mark_unresponsive(self, devices: Sequence[str]) -> None:
        """Pauses devices that did not answer, each for twice as many rounds and minutes as before, a day at most."""
        for device in devices:
            if self.is_askable(device):
                _, pause = self._missed.get(device, [0, 1])
                self._missed[device] = [self._round + 1 + pause, 2 * pause]
                self._pauses_until[device] = self._clock() + min(60.0 * pause, _MAX_PAUSE_SECONDS)
                self._due_again.discard(device)

    def mark_responsive(self, device: str) -> None:
        """Ends a device's pause."""
        self._missed.pop(device, None)
        self._pauses_until.pop(device, None)
        self._due_again.discard(device)

    def update_present(self, present: Collection[str]) -> None:
        """Ends the pause of devices that reconnected or have paused long enough; called between rounds.

        Args:
            present: The present devices.
        """
        for device in set(present) - self._present:
            self.mark_responsive(device)
        self._present, now = set(present), self._clock()
        self._due_again |= {device for device, until in self._pauses_until.items() if now >= until}

    # --- state

    def forget(self, device: str) -> None:
        """Removes one device's entries."""
        self._acknowledged.pop(device, None)
        self.mark_responsive(device)

    def state_dict(self) -> dict[str, Any]:
        """Returns the entries `held`, `silent` and `round` for a method's state."""
        return {"held": dict(self._acknowledged), "silent": dict(self._missed), "round": self._round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the entries of `state_dict` from a method's state."""
        self._acknowledged, self._missed, self._round = dict(state["held"]), dict(state["silent"]), state["round"]
