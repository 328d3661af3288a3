"""A cohort in this process: device halves or scripted answers instead of devices, and no store.

    members = {"a": MyDevice(config, local_a), "b": MyDevice(config, local_b)}
    (cohort,) = play(MyServer(config, context), members)
    assert [one.step for one in cohort.asked] == ["train", "train"]

Payloads and answers go through the wire's encoding, seeds and samples of devices are those of a run, and a device that
does not answer is out for the round, so a method computes here what it computes in a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from fleetdistill.errors import CannotAnswer, KnowledgeError, QuorumNotReached, WireError
from fleetdistill.knowledge import Parts
from fleetdistill.methods.base import Answer, Ask, DeviceMethod
from fleetdistill.seeds import derive_seed
from fleetdistill.training.model import fingerprint
from fleetdistill.wire.codec import Payload, decode, encode
from fleetdistill_server.event_kinds import GUARD
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.methods.cohort import (
    ColumnsFor,
    DeviceAnswer,
    PayloadFor,
    ask_seed,
    devices_needed,
    round_generator,
    sample_devices,
)

Member = DeviceMethod | Callable[[Ask], Answer | None]
"""What stands for a device: its half of the method, or a function from an ask to an answer, None for no answer."""


def always(parts: Parts, samples: int = 1) -> Member:
    """A member that answers every ask with the same parts.

    Args:
        parts: Part name to kind.
        samples: Local samples that it claims, at least 1: its weight in averages.
    """
    return lambda ask: Answer(parts=parts, samples=samples)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One ask of one device.

    Attributes:
        step: Name of the step.
        number: Number of the step in its round, from 1.
        device: Who was asked.
        parts: What came along, as the method made it: before the wire's rounding.
        columns: Feature columns that the answer must have; None for all of the contract.
        quorum: Part of the asked devices that had to answer, as the method gave it; None for the run's.
        answer: What the device answered, before the wire's rounding; None if it did not.
        declined: Why the device declined the ask; empty if it did not.
    """

    step: str
    number: int
    device: str
    parts: Parts
    columns: tuple[str, ...] | None = None
    quorum: float | None = None
    answer: Answer | None = None
    declined: str = ""


class Event(NamedTuple):
    """What a method noted; `device` is empty where it is about none."""

    kind: str
    device: str
    text: str


class FakeCohort:
    """A `fleetdistill_server.methods.cohort.Cohort` of one round, over members in this process.

    Args:
        members: Device id to what stands for the device. Ids are asked in bytewise order.
        completed: Rounds completed before this one.
        number: Number of the round; by default the one after `completed`.
        seed: Root of the run's seed tree.
        quorum: Part of the asked devices that must answer, in (0, 1], where the method names no other.
        knowledge_type: float16, float32 or uint8, what knowledge travels in.
        silent: Asks that get no answer, as (step name or step number, device).
        data_versions: Device id to the version of its data; empty for the others.
        fingerprints: Device id to the model that its profile names; of a device half by default its local model's.

    Attributes:
        asked: Every ask, in the order in which the method made them.
        events: What `event` and `guard` were given.
        figures: What `report` was given.
        silent: As given; may change between asks.
    """

    def __init__(
        self,
        members: Mapping[str, Member],
        *,
        completed: int = 0,
        number: int | None = None,
        seed: int = 1,
        quorum: float = 2 / 3,
        knowledge_type: str = "float32",
        silent: Collection[tuple[str | int, str]] = (),
        data_versions: Mapping[str, str] | None = None,
        fingerprints: Mapping[str, str] | None = None,
    ) -> None:
        self.members = dict(members)
        self.completed = completed
        self.round = completed + 1 if number is None else number
        self.devices = tuple(sorted(members))
        self.data_versions = {device: (data_versions or {}).get(device, "") for device in self.devices}
        self.asked: list[Asked] = []
        self.events: list[Event] = []
        self.figures: dict[str, Any] = {}
        self.silent = set(silent)
        self._seed, self._quorum = seed, quorum
        self._knowledge_type = np.dtype(knowledge_type)
        self._fingerprints = dict(fingerprints or {})
        self._steps = 0
        self._in_round = set(members)

    async def ask(
        self,
        step: str,
        payload: PayloadFor = None,
        *,
        to: Sequence[str] | None = None,
        quorum: float | None = None,
        columns: ColumnsFor | None = None,
    ) -> AsyncIterator[DeviceAnswer]:
        """Asks a step of the members and yields the answers in device-id order; see `Cohort.ask`."""
        devices = sorted(self._in_round if to is None else to)
        self._steps += 1
        number, answered = self._steps, 0
        messages = {device: self._message(step, device, payload) for device in devices}
        for device, message in messages.items():
            if message is None:
                continue
            parts, sent = message
            answer, declined = self._answer(step, number, device, sent)
            wanted = None if columns is None else tuple(columns(device))
            self.asked.append(
                Asked(
                    step=step,
                    number=number,
                    device=device,
                    parts=parts,
                    columns=wanted,
                    quorum=quorum,
                    answer=answer,
                    declined=declined,
                )
            )
            if answer is None:
                self._in_round.discard(device)
                continue
            answered += 1
            yield DeviceAnswer(device, answer.samples, encode(answer.parts, self._knowledge_type))
        needed = self.needed(len(devices), quorum)
        if answered < needed:
            raise QuorumNotReached(step, answered, needed)

    def _message(self, step: str, device: str, payload: PayloadFor) -> tuple[Parts, Payload] | None:
        """What one device is sent; None, with an event, if it cannot be encoded: the device is out for the round."""
        try:
            parts = payload(device) if callable(payload) else payload or {}
            return parts, encode(parts, self._knowledge_type)
        except (KnowledgeError, WireError) as error:
            self.event(
                "not-asked", f"step {step!r} cannot be sent to {device}; it is out for the round: {error}", device
            )
            self._in_round.discard(device)
            return None

    def _answer(self, step: str, number: int, device: str, sent: Payload) -> tuple[Answer | None, str]:
        """The answer, if there is one, and why the device declined, if it did."""
        if {(step, device), (number, device)} & self.silent:
            return None, ""
        seed = ask_seed(self._seed, self.round, step, number, device)
        member = self.members[device]
        handle = member.handle if isinstance(member, DeviceMethod) else member
        with torch.random.fork_rng(devices=[]):  # a device is another process: it takes nothing of the server's numbers
            torch.manual_seed(seed)
            try:
                return handle(Ask(round=self.round, step=step, seed=seed, parts=decode(sent))), ""
            except (CannotAnswer, WireError) as reason:
                return None, str(reason)

    async def deliver(self, payload: PayloadFor, *, step: str = "deliver") -> None:
        """Sends something that wants no knowledge back."""
        async for _ in self.ask(step, payload, quorum=0.0):
            pass

    def needed(self, asked: int, quorum: float | None = None) -> int:
        """How many of so many asked devices must answer: the cohort's quorum of them, or another."""
        return devices_needed(asked, self._quorum if quorum is None else quorum)

    @property
    def remaining(self) -> list[str]:
        """Ids of the devices that have missed no ask of this round, in bytewise order."""
        return sorted(self._in_round)

    def sample(self, ratio: float) -> list[str]:
        """The same random part of the members that a run of this seed would take."""
        return sample_devices(self.devices, ratio, self.generator("participants"))

    def model_fingerprint(self, device: str) -> str:
        """The device's model: as it was given, else the local model of a device half, else the empty text."""
        member = self.members[device]
        if device in self._fingerprints or not isinstance(member, DeviceMethod):
            return self._fingerprints.get(device, "")
        return fingerprint(member.local.model)

    def event(self, kind: str, text: str, device: str = "", *, once: bool = False) -> None:
        """Notes something out of the ordinary."""
        known = {(one.kind, one.device) for one in self.events}
        if not once or (kind, device) not in known:
            self.events.append(Event(kind, device, text))

    def guard(self, name: str, text: str, device: str = "") -> None:
        """Notes that a guard of the method fired: the event `<name>-guard`."""
        self.event(f"{name}{GUARD}", text, device)

    def report(self, name: str, value: Any) -> None:
        """Adds a figure of this round; mappings are merged."""
        if isinstance(value, Mapping):
            self.figures.setdefault(name, {}).update(value)
        else:
            self.figures[name] = value

    def generator(self, name: str) -> torch.Generator:
        """Random numbers for one named purpose of this round."""
        return round_generator(self._seed, self.round, name)

    # --- for assertions

    def sent(self, device: str, step: str | None = None) -> list[Parts]:
        """What a device was sent, ask after ask, of one step or of all."""
        return [one.parts for one in self.asked if one.device == device and step in (None, one.step)]

    def answers(self, device: str, step: str | None = None) -> list[Parts]:
        """What a device answered, ask after ask, of one step or of all."""
        found = [one.answer for one in self.asked if one.device == device and step in (None, one.step)]
        return [answer.parts for answer in found if answer is not None]

    @property
    def kinds(self) -> list[str]:
        """Kinds of the events, in their order."""
        return [one.kind for one in self.events]


def play(server: ServerMethod, members: Mapping[str, Member], rounds: int = 1, **terms: Any) -> list[FakeCohort]:
    """Plays rounds of a server half, each with all members, and returns their cohorts.

    Args:
        server: Its state changes with every round.
        members: As in `FakeCohort`.
        rounds: How many.
        terms: Further arguments of `FakeCohort`, the same for each round.

    Raises:
        QuorumNotReached: Too few members answered.
    """
    played = []
    for completed in range(rounds):
        cohort = FakeCohort(members, **{"completed": completed, **terms})
        torch.manual_seed(derive_seed(terms.get("seed", 1), cohort.round, "round", "server"))
        asyncio.run(server.round(cohort))
        played.append(cohort)
    return played
