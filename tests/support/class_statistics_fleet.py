"""Class statistics in this process: a server half and device halves on small images, and rounds that they play."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleetdistill.errors import CannotAnswer, QuorumNotReached, WireError
from fleetdistill.knowledge import Kind, Parts
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, Local
from fleetdistill.methods.classstats.averaged import AveragedDevice
from fleetdistill.methods.classstats.averaged_config import AveragedConfig
from fleetdistill.models import build_model
from fleetdistill.seeds import derive_seed
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import check_local_model
from fleetdistill.wire.codec import decode, encode
from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.methods.classstats.averaged import AveragedServer
from fleetdistill_server.methods.context import MethodContext

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


class Answered:
    def __init__(self, device: str, samples: int, parts: Parts) -> None:
        self.device, self.samples, self.parts = device, samples, parts

    def part(self, name: str, kind: type[Kind]) -> Any:
        assert isinstance(self.parts[name], kind)
        return self.parts[name]


class Rounds:
    """Device halves that answer a server half in this process, over the wire's types; keeps all that was said."""

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
        self._out: set[str] = set()

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
            self.asked, self.answered, self.declined, self._out = [], [], [], set()
            self.round += 1
            torch.manual_seed(11)
            asyncio.run(self.server.round(self))
            self.completed += 1
        return self

    async def ask(
        self, step: str, payload: Any, *, to: Sequence[str], quorum: float | None = None
    ) -> AsyncIterator[Any]:
        self.quorums.append((step, quorum))
        answered = 0
        for device in to:
            parts = decode(encode(payload(device) if callable(payload) else payload, np.float16))
            self.asked.append((step, device, parts))
            seed = derive_seed(7, self.round, step, device)
            torch.manual_seed(seed)
            answer = self._answer(step, device, Ask(round=self.round, step=step, seed=seed, parts=parts))
            if answer is None:
                self._out.add(device)
                continue
            figures = {"metrics": self.metrics[device]} if device in self.metrics else {}
            sent = decode(encode({**answer.parts, **figures}, np.float16))
            self.notes_of[step, device] = answer.notes
            self.answered.append((step, device, sent))
            answered += 1
            yield Answered(device, answer.samples, sent)
        needed = math.ceil((2 / 3 if quorum is None else quorum) * len(to) - 1e-9)
        if answered < needed:
            raise QuorumNotReached(step, answered, needed)

    def _answer(self, step: str, device: str, ask: Ask) -> Answer | None:
        if (step, device) in self.deaf:
            return None
        try:
            return self.halves[device].handle(ask)
        except (CannotAnswer, WireError) as reason:
            self.declined.append((step, device, str(reason)))
            return None

    @property
    def data_versions(self) -> dict[str, str]:
        return {device: self.versions.get(device, "") for device in self.halves}

    @property
    def remaining(self) -> list[str]:
        return sorted(set(self.sample(1.0)) - self._out)

    def sample(self, ratio: float) -> list[str]:
        return sorted(set(self.halves) - self.away)

    def generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(derive_seed(7, self.round, name))

    def event(self, kind: str, text: str, device: str = "", *, once: bool = False) -> None:
        self.events.append((kind, text))

    def guard(self, name: str, text: str, device: str = "") -> None:
        self.event(f"{name}-guard", text, device)

    def report(self, name: str, value: Any) -> None:
        self.figures[name] = value

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
