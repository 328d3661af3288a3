"""Class statistics in this process: a server half and device halves on small images, and rounds that they play."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleetdistill.errors import QuorumNotReached
from fleetdistill.knowledge import Kind, Parts
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, Local
from fleetdistill.methods.classstats.averaged import AveragedDevice
from fleetdistill.methods.classstats.averaged_config import AveragedConfig
from fleetdistill.models import build_model
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import check_local_model
from fleetdistill.wire.codec import decode, encode
from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.methods.classstats.averaged import AveragedServer
from fleetdistill_server.methods.context import MethodContext
from fleetdistill_server.testing import FakeCohort

CLASSES, SHAPE = 4, (1, 8, 8)
CPU = torch.device("cpu")
QUICK: dict[str, Any] = {"extractor_rounds": 1, "local_epochs": 1, "server_epochs": 4, "drawn_rows": 10}


def config_of(**settings: Any) -> AveragedConfig:
    return AveragedConfig.from_settings({**QUICK, **settings}).for_classes(CLASSES)


def make_server(extractor: str = "digits_extractor", shape: tuple[int, ...] = SHAPE, **settings: Any) -> AveragedServer:
    models = ModelSection(extractor=extractor, server="digits_server")
    context = MethodContext(classes=CLASSES, input_shape=shape, models=models, torch_device=CPU, seed=3)
    return AveragedServer(config_of(**settings), context)


def rows_of(counts: Sequence[int], seed: int) -> TensorData:
    """Rows whose label can be seen: a bright row of pixels for each class."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    inputs = 0.2 * torch.rand(len(labels), *SHAPE, generator=torch.Generator().manual_seed(seed))
    inputs[torch.arange(len(labels)), 0, 2 * labels] += 1
    return TensorData(inputs, labels)


def make_device(
    counts: Sequence[int], seed: int = 1, model: Any = "digits_mlp_small", **settings: Any
) -> AveragedDevice:
    torch.manual_seed(seed)
    module = build_model(model, classes=CLASSES) if isinstance(model, str) else model
    local = Local(
        model=module, taps=check_local_model(module), data=rows_of(counts, seed), classes=CLASSES, torch_device=CPU
    )
    return AveragedDevice(config_of(**settings), local)


class Rounds:
    """Rounds of a server half with device halves in this process, one `FakeCohort` each; keeps what was asked."""

    def __init__(self, server: ServerMethod, devices: Mapping[str, DeviceMethod]) -> None:
        self.server: Any = server  # of either form of class statistics, whose tests know which
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
        answered = [(one, one.answer) for one in cohort.asked if one.answer is not None]
        through = lambda parts: decode(encode(parts, np.float16))  # noqa: E731
        self.asked = [(one.step, one.device, through(one.parts)) for one in cohort.asked]
        self.answered = [(one.step, one.device, through(answer.parts)) for one, answer in answered]
        self.declined = [(one.step, one.device, one.declined) for one in cohort.asked if one.declined]
        self.notes_of |= {(one.step, one.device): answer.notes for one, answer in answered}
        asks = dict.fromkeys((one.number, one.step, one.quorum) for one in cohort.asked)
        self.quorums += [(step, quorum) for _, step, quorum in asks]
        self.events += [(one.kind, one.text) for one in cohort.events]
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


def two_devices(**settings: Any) -> dict[str, AveragedDevice]:
    return {
        "a": make_device([20, 12, 3, 0], seed=1, **settings),
        "b": make_device([0, 9, 14, 8], seed=2, model="digits_cnn_small", **settings),
    }


def fleet(**settings: Any) -> Rounds:
    return Rounds(make_server(**settings), two_devices(**settings))


def copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
