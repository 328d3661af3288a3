"""The devices of one round, as a method sees them. The engine has the implementation; tests may have another."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch

from fleetdistill.knowledge import Kind, Parts
from fleetdistill.methods.base import PartKind
from fleetdistill.seeds import derive_seed
from fleetdistill.wire.codec import Payload, decode

__all__ = ["Cohort", "ColumnsFor", "DeviceAnswer", "Notes", "PayloadFor"]

PayloadFor = Parts | Callable[[str], Parts] | None
"""Parts for all devices, or a function of the device id."""
ColumnsFor = Callable[[str], Sequence[str]]
"""A function of the device id: the feature columns that its answer must have."""


class DeviceAnswer:
    """One device's accepted answer; its arrays are read from the store when they are used.

    Attributes:
        device: Who answered.
        samples: Local samples behind it, the weight in averages.
    """

    def __init__(self, device: str, samples: int, payload: Payload) -> None:
        self.device = device
        self.samples = samples
        self._payload = payload

    @cached_property
    def parts(self) -> Mapping[str, Kind]:
        """All parts by name."""
        return decode(self._payload)

    def part(self, name: str, kind: type[PartKind]) -> PartKind:
        """The part of that name; the front has checked that it is there and of this kind."""
        found = self.parts[name]
        assert isinstance(found, kind)
        return found


class Notes(Protocol):
    """What a method reports of its work: to a round's `Cohort`, or to whoever calls it between rounds."""

    def event(self, kind: str, text: str, device: str = "", *, once: bool = False) -> None:
        """Notes something out of the ordinary; with `once` only where the run has no such event of the device yet."""

    def guard(self, name: str, text: str, device: str = "") -> None:
        """Notes that a guard of the method fired: the event `<name>-guard`, which is counted as one."""

    def report(self, name: str, value: Any) -> None:
        """Adds a figure, JSON; mappings are merged."""

    def generator(self, name: str) -> torch.Generator:
        """Random numbers for one named purpose."""


class Cohort(Notes, Protocol):
    """The devices of one round: `ask` a step, iterate over the answers."""

    @property
    def round(self) -> int:
        """Number of the round, from 1, short rounds included."""

    @property
    def completed(self) -> int:
        """Rounds completed before this one."""

    @property
    def devices(self) -> Sequence[str]:
        """Ids of the cohort in bytewise order."""

    @property
    def data_versions(self) -> Mapping[str, str]:
        """For each device of the cohort the version of its data, hex; empty where it names none.

        It is what its profile said when the round was started, also when the round is replayed, so an answer of this
        round is made of the rows of that version or of newer ones: a method that keeps it with the answer's part may
        ask once more than is needed, never once less.
        """

    @property
    def remaining(self) -> Sequence[str]:
        """Ids of the devices that have missed no ask of this round, in bytewise order."""

    def ask(
        self,
        step: str,
        payload: PayloadFor = None,
        *,
        to: Sequence[str] | None = None,
        quorum: float | None = None,
        columns: ColumnsFor | None = None,
    ) -> AsyncIterator[DeviceAnswer]:
        """Asks a step of the cohort and yields the answers in device-id order.

        Args:
            step: Name of the device half's handler.
            payload: Parts for all devices, or a function of the device id that gives each its own.
            to: Devices to ask; by default those that answered every earlier ask of this round.
            quorum: Part of the asked devices that must answer; by default the run's.
            columns: For a step that wants other feature columns of each device: those of the contract that its
                answer must have, and no others. By default all of them.

        With `devices_per_round` a step ends with that many answers: who has not answered by then is out for the round.
        A device whose payload cannot be encoded is not asked, with an event: it is out for the round too.

        Raises:
            QuorumNotReached: Too few answered before the deadline.
        """

    async def deliver(self, payload: PayloadFor, *, step: str = "deliver") -> None:
        """Sends something that wants no knowledge back; waits until every device took it or is gone."""

    def needed(self, asked: int, quorum: float | None = None) -> int:
        """How many of so many asked devices must answer: the run's quorum of them, or another."""

    def sample(self, ratio: float) -> list[str]:
        """A random part of the cohort for this round: of K devices max(1, floor(ratio * K)), in id order."""

    def model_fingerprint(self, device: str) -> str:
        """The device's model as its profile names it, a `fleetdistill.training.model.fingerprint`."""


def ask_seed(run_seed: int, round_number: int, step: str, step_number: int, device: str) -> int:
    """Seed of a device's answer: the ask of one device in the round's step of that number, from 1."""
    return derive_seed(run_seed, round_number, step, step_number, device)


def round_generator(run_seed: int, round_number: int, name: str) -> torch.Generator:
    """The server's random numbers for one named purpose of a round."""
    return torch.Generator().manual_seed(derive_seed(run_seed, round_number, name, "server"))


def sample_devices(devices: Sequence[str], ratio: float, generator: torch.Generator) -> list[str]:
    """A random part: of K devices max(1, floor(ratio * K)), in id order."""
    count = max(1, math.floor(ratio * len(devices) + 1e-9))
    order = torch.randperm(len(devices), generator=generator)
    return sorted(devices[number] for number in order[:count].tolist())


def devices_needed(asked: int, quorum: float) -> int:
    """How many of so many devices a quorum in [0, 1] asks for."""
    return math.ceil(quorum * asked - 1e-9)
