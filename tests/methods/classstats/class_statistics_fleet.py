"""Rounds that a server half of class statistics and device halves play in this process, on small images."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fleetdistill.errors import QuorumNotReached
from fleetdistill.knowledge import Kind, Parts
from fleetdistill.methods.base import Answer, Ask, DeviceMethod
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData
from fleetdistill.wire.codec import decode, encode
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.testing import FakeCohort

CLASSES, SHAPE = 4, (1, 8, 8)
CPU = torch.device("cpu")


def rows_of(counts: Sequence[int], seed: int) -> TensorData:
    """Rows whose label can be seen: a bright row of pixels for each class."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    inputs = 0.2 * torch.rand(len(labels), *SHAPE, generator=torch.Generator().manual_seed(seed))
    inputs[torch.arange(len(labels)), 0, 2 * labels] += 1
    return TensorData(inputs, labels)


class Rounds:
    """Rounds of a server half with device halves in this process, one `FakeCohort` each; keeps what was asked."""

    def __init__(self, server: ServerMethod, devices: Mapping[str, DeviceMethod]) -> None:
        self.server: Any = server  # of any form of class statistics, whose tests know which
        self.halves: dict[str, Any] = dict(devices)
        self.completed = self.round = 0
        self.away: set[str] = set()
        self.asked: list[tuple[str, str, Parts]] = []
        self.answered: list[tuple[str, str, Parts]] = []
        self.quorums: list[tuple[str, float | None]] = []
        self.events: list[tuple[str, str]] = []
        self.figures: dict[str, Any] = {}
        self.notes_of: dict[tuple[str, str], Mapping[str, int]] = {}
        self.versions: dict[str, str] = {}
        self.metrics: dict[str, Kind] = {}
        """What a device adds to its answers, as the SDK does with an app's consent."""
        self.deaf: set[tuple[str, str]] = set()
        """(step, device) of asks that get no answer."""
        self.declined: list[tuple[str, str, str]] = []

    def fall_short(self) -> Rounds:
        """A round whose answers have their receipts, and which the server then takes back."""
        saved = pack_state(self.server.state_dict())
        with contextlib.suppress(QuorumNotReached):
            self.play()
            self.completed -= 1
        self.server.load_state_dict(unpack_state(saved))
        return self

    def play(self, rounds: int = 1) -> Rounds:
        for _ in range(rounds):
            self.round += 1
            cohort = self.cohort()
            torch.manual_seed(11)
            try:
                asyncio.run(self.server.round(cohort))
            finally:
                self._keep(cohort)
            self.completed += 1
        return self

    def cohort(self) -> FakeCohort:
        """The round's: all devices that are not away."""
        return FakeCohort(
            {device: partial(self._handle, device) for device in self.halves.keys() - self.away},
            completed=self.completed,
            number=self.round,
            seed=7,
            knowledge_type="float16",
            silent=self.deaf,
            data_versions=self.versions,
        )

    def _handle(self, device: str, ask: Ask) -> Answer:
        answer = self.halves[device].handle(ask)
        if device not in self.metrics:
            return answer
        return replace(answer, parts={**answer.parts, "metrics": self.metrics[device]})

    def _keep(self, cohort: FakeCohort) -> None:
        answered = [(item, item.answer) for item in cohort.asked if item.answer is not None]
        through = lambda parts: decode(encode(parts, np.float16))  # noqa: E731
        self.asked = [(item.step, item.device, through(item.parts)) for item in cohort.asked]
        self.answered = [(one.step, one.device, through(answer.parts)) for one, answer in answered]
        self.declined = [(item.step, item.device, item.declined) for item in cohort.asked if item.declined]
        self.notes_of |= {(one.step, one.device): answer.notes for one, answer in answered}
        asks = dict.fromkeys((item.number, item.step, item.quorum) for item in cohort.asked)
        self.quorums += [(step, quorum) for _, step, quorum in asks]
        self.events += [(event.kind, event.text) for event in cohort.events]
        self.figures |= cohort.figures

    # what a server half notes between rounds

    def event(self, kind: str, text: str, device: str = "", *, once: bool = False) -> None:
        self.events.append((kind, text))

    def guard(self, name: str, text: str, device: str = "") -> None:
        self.event(f"{name}-guard", text, device)

    def report(self, name: str, value: Any) -> None:
        self.figures[name] = value

    def generator(self, name: str) -> torch.Generator:
        return self.cohort().generator(name)

    def steps(self) -> list[tuple[str, str]]:
        return [(step, device) for step, device, _ in self.asked]
