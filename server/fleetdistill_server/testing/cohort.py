"""In-process cohort for tests, with device halves or scripted answers instead of devices and a store.

    members = {"a": MyDevice(config, local_a), "b": MyDevice(config, local_b)}
    (cohort,) = play(MyServer(config, context), members)
    assert [one.step for one in cohort.asked] == ["train", "train"]

A method computes the same values as in a run: payloads and answers are encoded and decoded, seeds and device samples
are the same, and a device that does not answer drops out of the round.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fleetdistill.device.events import DeviceLock, Events
from fleetdistill.device.private import with_noise
from fleetdistill.device.secure import ANY_TERMS, SecureSums
from fleetdistill.errors import CannotAnswer, KnowledgeError, QuorumNotReached, WireError
from fleetdistill.knowledge import Parts
from fleetdistill.methods.base import Answer, Ask, DeviceMethod
from fleetdistill.seeds import derive_seed
from fleetdistill.state.memory import MemoryStorage
from fleetdistill.training.model import fingerprint
from fleetdistill.wire.codec import Payload, decode, encode
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.event_kinds import GUARD
from fleetdistill_server.methods.base import ServerMethod
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

Member = DeviceMethod | Callable[[Ask], Answer | None]
"""Test double of a device: a device half, or a function that maps an ask to an answer, or to None for no answer."""


def always(parts: Parts, samples: int = 1) -> Member:
    """Returns a member that answers every ask with the same parts.

    Args:
        parts: Maps the names of the answer's parts to their contents.
        samples: Number of local samples, at least 1; the member's weight in averages.
    """
    return lambda ask: Answer(parts=parts, samples=samples)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """An ask to one device and its outcome.

    Attributes:
        step: Name of the step.
        number: Number of the step in its round, from 1.
        device: Id of the device.
        parts: The ask's parts as the method made them, before encoding.
        columns: Feature columns that the answer must have; None for all columns of the contract.
        quorum: Fraction of the devices that had to answer, as passed by the method; None for the run's quorum.
        answer: The device's answer before encoding; None if it did not answer.
        declined: The device's reason to decline the ask; empty if it did not decline.
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
    """An event that a method recorded; `device` is empty if the event concerns no single device."""

    kind: str
    device: str
    text: str


class FakeCohort:
    """A `fleetdistill_server.methods.cohort.Cohort` of one round over in-process members.

    Args:
        members: Maps device ids to members, which are asked in bytewise order of the ids.
        completed: Number of rounds completed before this one.
        number: Number of the round; `completed` + 1 by default.
        seed: Root of the run's seed tree.
        quorum: Fraction of the asked devices that must answer, in (0, 1], unless the method passes its own.
        knowledge_type: Element type in which knowledge is encoded: float16, float32 or uint8.
        silent: Asks that get no answer, as (step name or step number, device id).
        data_versions: Maps device ids to data versions; empty for devices that are missing.
        fingerprints: Maps device ids to model fingerprints; by default those of the device halves' local models.

    Attributes:
        members: The members by device id.
        round: Number of the round.
        completed: Number of rounds completed before this one.
        devices: Ids of the devices, in bytewise order.
        data_versions: The data version of each device.
        asked: All asks, in order.
        events: Events from `event` and `guard`.
        figures: Figures from `report`.
        silent: Asks that get no answer; may be changed between asks.
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
        self._sums: dict[str, SecureSums] = {}
        self._in_round = set(members)

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
        """Sends a step's ask to the members and yields the answers in device-id order; see `Cohort.ask`."""
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
            received = DeviceAnswer(device, answer.samples, encode(answer.parts, self._knowledge_type))
            received.prepared = None if prepare is None else prepare(received)
            yield received
        needed = self.needed(len(devices), quorum)
        if answered < needed:
            raise QuorumNotReached(step, answered, needed)

    def _message(self, step: str, device: str, payload: PayloadFor) -> tuple[Parts, Payload] | None:
        """Returns a device's payload and its encoding; None, after an event, if the payload cannot be encoded."""
        try:
            parts = payload(device) if callable(payload) else payload or {}
            return parts, encode(parts, self._knowledge_type)
        except (KnowledgeError, WireError) as error:
            self.event(
                "not-asked",
                f"step {step!r} cannot be sent to {device}; the device drops out of the round: {error}",
                device,
            )
            self._in_round.discard(device)
            return None

    def _answer(self, step: str, number: int, device: str, sent: Payload) -> tuple[Answer | None, str]:
        """Returns a device's answer (None if it declined) and its reason for declining (empty if it answered)."""
        if {(step, device), (number, device)} & self.silent:
            return None, ""
        seed = ask_seed(self._seed, self.round, step, number, device)
        member = self.members[device]
        handle = member.handle if isinstance(member, DeviceMethod) else member
        with torch.random.fork_rng(devices=[]):  # devices must not consume the server's random numbers
            torch.default_generator.manual_seed(seed)
            ask = Ask(round=self.round, step=step, seed=seed, parts=decode(sent))
            try:
                answer = handle(ask)
            except (CannotAnswer, WireError) as reason:
                return None, str(reason)
            if answer is not None and isinstance(member, DeviceMethod) and member.config.hides_rows:
                return self._private(answer, ask, device, member)
        return answer, ""

    def _private(self, answer: Answer, ask: Ask, device: str, member: DeviceMethod) -> tuple[Answer | None, str]:
        """Returns a private answer as the device would send it, and the reason if it declines."""
        if not member.config.sums_securely:
            return with_noise(answer, member.config.guarantee), ""
        if device not in self._sums:
            storage = MemoryStorage(Path(device))
            events = Events(DeviceLock(lambda event: None), device)
            self._sums[device] = SecureSums(storage, device, ANY_TERMS, None, events)
        contract = contract_pb2.Contract(input_shape=member.local.data.first.shape[1:])
        try:
            return self._sums[device].answer(answer, ask, contract, member.config), ""
        except (CannotAnswer, WireError) as reason:
            return None, str(reason)

    def declined(self, step: str) -> Mapping[str, str]:
        """Returns the reasons of the members that declined a step, by device."""
        return {item.device: item.declined for item in self.asked if item.step == step and item.declined}

    async def deliver(self, payload: PayloadFor, *, step: str = "deliver") -> None:
        """Sends a payload without requesting knowledge."""
        async for _ in self.ask(step, payload, quorum=0.0):
            pass

    def needed(self, asked: int, quorum: float | None = None) -> int:
        """Returns how many of `asked` devices must answer under `quorum`, which defaults to the cohort's quorum."""
        return devices_needed(asked, self._quorum if quorum is None else quorum)

    @property
    def remaining(self) -> list[str]:
        """Ids of the devices that have not missed an ask of this round, in bytewise order."""
        return sorted(self._in_round)

    def sample(self, ratio: float) -> list[str]:
        """Draws the same random devices as a run with this seed."""
        return sample_devices(self.devices, ratio, self.generator("participants"))

    def model_fingerprint(self, device: str) -> str:
        """Returns a device's fingerprint: the one given, else its device half's local model's, else an empty string."""
        member = self.members[device]
        if device in self._fingerprints or not isinstance(member, DeviceMethod):
            return self._fingerprints.get(device, "")
        return fingerprint(member.local.model)

    def event(self, kind: str, text: str, device: str = "", *, once: bool = False) -> None:
        """Records an event; with `once`, only the first of each kind and device."""
        known = {(event.kind, event.device) for event in self.events}
        if not once or (kind, device) not in known:
            self.events.append(Event(kind, device, text))

    def guard(self, name: str, text: str, device: str = "") -> None:
        """Records that a guard of the method fired, as the event `<name>-guard`."""
        self.event(f"{name}{GUARD}", text, device)

    def report(self, name: str, value: Any) -> None:
        """Adds a figure of this round; mappings of the same name are merged."""
        if isinstance(value, Mapping):
            self.figures.setdefault(name, {}).update(value)
        else:
            self.figures[name] = value

    def generator(self, name: str) -> torch.Generator:
        """Returns this round's random generator for one named purpose."""
        return round_generator(self._seed, self.round, name)

    # --- for assertions

    def sent(self, device: str, step: str | None = None) -> list[Parts]:
        """Returns the parts sent to a device, one entry per ask, for one step or for all."""
        return [item.parts for item in self.asked if item.device == device and step in (None, item.step)]

    def answers(self, device: str, step: str | None = None) -> list[Parts]:
        """Returns the parts of a device's answers, for one step or for all."""
        result = [item.answer for item in self.asked if item.device == device and step in (None, item.step)]
        return [answer.parts for answer in result if answer is not None]

    @property
    def kinds(self) -> list[str]:
        """Kinds of the events, in the order in which they were recorded."""
        return [event.kind for event in self.events]


def play(server: ServerMethod, members: Mapping[str, Member], rounds: int = 1, **terms: Any) -> list[FakeCohort]:
    """Runs rounds of a server half, each with all members.

    Args:
        server: The server half; its state changes with every round.
        members: Members of the cohorts; see `FakeCohort`.
        rounds: Number of rounds.
        terms: Further arguments of `FakeCohort`, the same for each round.

    Returns:
        The cohort of each round.

    Raises:
        QuorumNotReached: Too few members answered.
    """
    played = []
    for completed in range(rounds):
        cohort = FakeCohort(members, **{"completed": completed, **terms})
        torch.default_generator.manual_seed(derive_seed(terms.get("seed", 1), cohort.round, "round", "server"))
        asyncio.run(server.round(cohort))
        played.append(cohort)
    return played
