"""FedD2S's two halves on a tiny chain of layers, and rounds of them without a store."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from methods.tiny_context import CLASSES, INPUTS, tiny_context
from torch import nn

from fleetdistill.knowledge import SampleKnowledge
from fleetdistill.methods.base import Local
from fleetdistill.methods.fedd2s.config import FedD2SConfig
from fleetdistill.methods.fedd2s.device import FedD2SDevice
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import SplitModel, check_local_model
from fleetdistill_server.methods.base import MethodContext
from fleetdistill_server.methods.fedd2s.server import FedD2SServer, Triplets
from fleetdistill_server.testing import FakeCohort, play

WIDTHS = (8, 7, 5, CLASSES)


def tiny_model(input_shape: Sequence[int] = (INPUTS,), classes: int = CLASSES) -> SplitModel:
    """Four layers a, b, c, d; the last without ReLU."""
    stages, inputs = {}, INPUTS
    for name, outputs in zip("abcd", WIDTHS, strict=True):
        layer = nn.Linear(inputs, outputs)
        stages[name] = layer if name == "d" else nn.Sequential(layer, nn.ReLU())
        inputs = outputs
    return SplitModel(stages, cut="a")


def plain_model(input_shape: Sequence[int], classes: int) -> nn.Module:
    """A module that is no chain of stages."""
    return nn.Linear(INPUTS, classes)


def make_context(model: str = "methods.fedd2s.fedd2s_fleet:tiny_model", **changes: Any) -> MethodContext:
    return tiny_context(model, **changes)


def make_config(**settings: Any) -> FedD2SConfig:
    defaults: dict[str, Any] = {"l_min": 1, "batch_size": 8, "teacher_guard": False}
    return FedD2SConfig(**{**defaults, **settings}).for_classes(CLASSES)


def make_server(context: MethodContext | None = None, **settings: Any) -> FedD2SServer:
    return FedD2SServer(make_config(**settings), context or make_context())


def make_device(seed: int = 0, rows: int = 20, config: FedD2SConfig | None = None, **settings: Any) -> FedD2SDevice:
    model = make_context().device_model()
    generator = torch.Generator().manual_seed(seed)
    data = TensorData(torch.randn(rows, INPUTS, generator=generator), torch.arange(rows) % CLASSES)
    return device_of(model, data, CLASSES, config or make_config(**settings))


def device_of(model: nn.Module, data: TensorData, classes: int, config: FedD2SConfig) -> FedD2SDevice:
    taps = check_local_model(model)
    local = Local(model=model, taps=taps, data=data, classes=classes, torch_device=torch.device("cpu"))
    return FedD2SDevice(config, local)


Members = dict[str, FedD2SDevice]


def run_round(
    server: FedD2SServer, members: Members, number: int = 1, silent: Collection[tuple[str, str]] = ()
) -> FakeCohort:
    """A round that needs every device; `silent` has the (step, device) of asks that get no answer."""
    (cohort,) = play(server, members, completed=number - 1, silent=silent, quorum=1.0)
    return cohort


def make_fleet(count: int = 2, **settings: Any) -> Members:
    return {f"d{i}": make_device(i, **settings) for i in range(count)}


def uploaded(cohort: FakeCohort, device: str) -> SampleKnowledge:
    (parts,) = cohort.answers(device, "extract")
    knowledge = parts["knowledge"]
    assert isinstance(knowledge, SampleKnowledge)
    return knowledge


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def changed(module: nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    """First letters of the stages that differ from `before`."""
    return {
        name.removeprefix("stages.").split(".")[0]
        for name, tensor in module.state_dict().items()
        if not torch.equal(tensor, before[name])
    }


def triplets_of(server: FedD2SServer, device: FedD2SDevice, layer: int, name: str = "d0") -> Triplets:
    columns = {key: torch.from_numpy(value) for key, value in device.columns_of(layer).items()}
    first, at_layer = columns[server.names[0]], columns[server.names[layer - 1]]
    return Triplets(name, layer, np.arange(len(first)), first, at_layer, device.local.data.labels)


def disturbed_server(**settings: Any) -> FedD2SServer:
    """A global network that differs from the devices' model."""
    server = make_server(**settings)
    with torch.no_grad():
        for value in server.network.parameters():
            value.add_(0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(4)))
    return server
