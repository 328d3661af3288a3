"""FedDKD's two halves on tiny models, and rounds of them without a store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from methods.tiny_context import CLASSES, INPUTS, tiny_context
from torch import Tensor, nn

from fleetdistill.knowledge import DistillationGradient, Kind, ModelParameters, Parts, Plan
from fleetdistill.methods.base import Ask, Local
from fleetdistill.methods.feddkd.config import FedDKDConfig
from fleetdistill.methods.feddkd.device import FedDKDDevice
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import SplitModel, check_local_model
from fleetdistill.training.parameters import model_parameters
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.methods.base import MethodContext
from fleetdistill_server.methods.feddkd import FedDKDServer
from fleetdistill_server.testing import FakeCohort

HIDDEN = 8


def tiny_model(input_shape: Sequence[int] = (INPUTS,), classes: int = CLASSES) -> SplitModel:
    """Two layers and dropout, no batch-norm."""
    layers = {"body": nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Dropout(0.2))}
    return SplitModel({**layers, "head": nn.Linear(HIDDEN, classes)}, cut="body")


def norm_model(input_shape: Sequence[int] = (INPUTS,), classes: int = CLASSES) -> SplitModel:
    """The same with batch-norm that no name tells of."""
    body = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU())
    return SplitModel({"body": body, "head": nn.Linear(HIDDEN, classes)}, cut="body")


def scalar_model(input_shape: Sequence[int] = (1,), classes: int = CLASSES) -> nn.Module:
    """Three weights and nothing else."""
    return nn.Linear(1, classes, bias=False)


def make_context(model: str = "methods.feddkd.feddkd_fleet:tiny_model", **changes: Any) -> MethodContext:
    return tiny_context(model, **changes)


def make_config(**settings: Any) -> FedDKDConfig:
    return FedDKDConfig.from_settings({"batch_size": 8, "local_epochs": 2, **settings}).for_classes(CLASSES)


def make_server(model: str = "methods.feddkd.feddkd_fleet:tiny_model", **settings: Any) -> FedDKDServer:
    return FedDKDServer(make_config(**settings), make_context(model))


def make_data(seed: int, rows: int = 20) -> TensorData:
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(rows) + seed) % CLASSES
    return TensorData(torch.randn(rows, INPUTS, generator=generator) + labels[:, None], labels)


def make_device(
    seed: int = 0, rows: int = 20, model: str = "methods.feddkd.feddkd_fleet:tiny_model", **settings: Any
) -> FedDKDDevice:
    module = make_context(model).device_model()
    local = Local(
        model=module,
        taps=check_local_model(module),
        data=make_data(seed, rows),
        classes=CLASSES,
        torch_device=torch.device("cpu"),
    )
    return FedDKDDevice(make_config(**settings), local)


Handle = Callable[[Ask], Any]


def fleet_of(members: Mapping[str, Handle], completed: int = 0, silent: Collection[tuple[int, str]] = ()) -> FakeCohort:
    """A round's cohort; `silent` has the (number of the ask in the round, device) that get no answer."""
    return FakeCohort(members, completed=completed, silent=silent)


def asked(cohort: FakeCohort) -> list[tuple[str, tuple[str, ...]]]:
    """Step and devices of each ask of the round."""
    asks = groupby(cohort.asked, key=lambda one: (one.number, one.step))
    return [(step, tuple(item.device for item in group)) for (_, step), group in asks]


def sent(cohort: FakeCohort) -> list[Parts]:
    """What each ask of the round brought, the same to all its devices."""
    return [next(group).parts for _, group in groupby(cohort.asked, key=lambda one: one.number)]


def answers(cohort: FakeCohort) -> list[dict[str, Parts]]:
    """For each ask of the round what each device answered."""
    asks = groupby(cohort.asked, key=lambda one: one.number)
    return [{item.device: item.answer.parts for item in group if item.answer is not None} for _, group in asks]


def run_round(server: FedDKDServer, fleet: FakeCohort) -> FakeCohort:
    asyncio.run(server.round(fleet))
    return fleet


def make_fleet(
    count: int = 2, completed: int = 0, model: str = "methods.feddkd.feddkd_fleet:tiny_model", **settings: Any
) -> FakeCohort:
    devices = {f"d{i}": make_device(i, model=model, **settings) for i in range(count)}
    return fleet_of({name: device.handle for name, device in devices.items()}, completed)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def scripted(
    weight: float = 0.0, gradient: float = 0.0, samples: int = 1, losses: Sequence[float] = (), fall: float = 0.9
) -> Handle:
    """A device whose three weights, gradient and losses a test made up; without losses they fall step by step."""

    def handle(ask: Ask) -> Any:
        if ask.step == "train":
            sent: Kind = ModelParameters(parameters={"weight": np.full((CLASSES, 1), weight, np.float32)})
            return SimpleNamespace(parts={"parameters": sent}, samples=samples)
        step = int(ask.part("plan", Plan).values["dkd_step"])  # type: ignore[arg-type]
        loss = losses[step - 1] if losses else fall**step
        gradients = {"weight": np.full((CLASSES, 1), gradient, np.float32)}
        sent = DistillationGradient(gradients=gradients, batch_size=1, loss=loss)
        return SimpleNamespace(parts={"gradient": sent}, samples=samples)

    return handle


def scalar_server(**settings: Any) -> FedDKDServer:
    context = make_context("methods.feddkd.feddkd_fleet:scalar_model", input_shape=(1,))
    return FedDKDServer(make_config(**settings), context)


def weight_of(server: FedDKDServer) -> float:
    values = server.model.state_dict()["weight"]
    assert torch.equal(values, values[0].expand_as(values))
    return float(values[0])


def teach(ask_round: int = 1, server: FedDKDServer | None = None, learning_rate: float = 0.02) -> Ask:
    parts: Parts = {
        "parameters": (server or make_server()).shared_parameters(),
        "plan": Plan(values={"learning_rate": learning_rate}),
    }
    return Ask(round=ask_round, step="train", seed=1, parts=parts)


def distil(
    step: int, ask_round: int = 1, seed: int = 2, server: FedDKDServer | None = None, model: nn.Module | None = None
) -> Ask:
    student = model_parameters(model) if model is not None else (server or make_server()).shared_parameters()
    parts: Parts = {"parameters": student, "plan": Plan(values={"dkd_step": step})}
    return Ask(round=ask_round, step="distil", seed=seed, parts=parts)


def tapless_model(input_shape: Sequence[int] = (INPUTS,), classes: int = CLASSES) -> nn.Module:
    """The tensors of `tiny_model` in an app's own module, which offers a cut and no embedding."""

    class Tapless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.extractor, self.predictor = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, classes)

        def features(self, x: Tensor) -> Tensor:
            return self.extractor(x)

        def predict(self, h: Tensor) -> Tensor:
            return self.predictor(h)

        def forward(self, x: Tensor) -> Tensor:
            return self.predict(self.features(x))

    return Tapless()


def gradient_of(server: FedDKDServer, **changes: Any) -> DistillationGradient:
    values = {"gradients": server.shared_parameters().parameters, "batch_size": 4, "loss": 0.5}
    return DistillationGradient(**{**values, **changes})


def small(**changes: Any) -> Simulation:
    settings: dict[str, Any] = {
        "method": "feddkd",
        "models": ("cdkt_digits_small",),
        "devices": 3,
        "rounds": 2,
        "train_limit": 90,
        "test_limit": 20,
        "torch_device": "cpu",
    }
    return Simulation(**{**settings, **changes})
