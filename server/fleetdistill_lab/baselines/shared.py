"""What several baselines use: registration, frozen models and their distillation, and tensors added to FedAvg's."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.errors import WireError
from fleetdistill.knowledge import ModelParameters, NamedTensors, Parts, Weights
from fleetdistill.methods import register as register_device
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, Local, answers, check_range
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill.training.losses import distillation_loss, soft_targets
from fleetdistill.training.model import embedding_tap
from fleetdistill.training.parameters import load_parameters, take_weights
from fleetdistill_server.methods import register as register_server
from fleetdistill_server.methods.base import MethodContext, ServerMethod
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer, Notes
from fleetdistill_server.methods.fedavg import FedAvgServer
from fleetdistill_server.methods.traffic import Message, Sizes

__all__ = [
    "CorrectedServer",
    "OwnModelDevice",
    "TaughtConfig",
    "TaughtDevice",
    "class_sums",
    "counts_of",
    "counts_schema",
    "embeddings_of",
    "frozen_copy",
    "inner_product",
    "named_copies",
    "of_parameters",
    "received_tables",
    "received_tensors",
    "register",
    "sent_counts",
    "sent_tensors",
    "teachers_of",
]


def register(method: str, config: type[Any], device: type[DeviceMethod], server: type[ServerMethod]) -> None:
    """Registers both halves of a method. Raises ConfigurationError if the name belongs to another method."""
    register_device(method, config, device)
    register_server(method, server)


class OwnModelDevice(FedAvgDevice):
    """Device half that trains its own model further, of any architecture, and sends no parameters.

    Methods override `begin`, `loss` and `end`, which returns the parts of the answer.
    """

    shares_fleet_model = False

    def first_ask(self) -> Ask:
        return Ask(round=1, step="train", seed=0)

    @answers("train")
    def train(self, ask: Ask) -> Answer:
        """Trains the device's own model for a round's local epochs."""
        self.begin(ask)
        self.fit(ask)
        return Answer(parts=self.end(ask), samples=len(self.local.data))

    def fleet_model(self, ask: Ask) -> None:
        """Returns None: an ask contains no model."""


def frozen_copy(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Returns a copy of a model in eval mode that needs no gradients, with another state if one is given."""
    result = copy.deepcopy(model)
    if state is not None:
        result.load_state_dict(state)
    return result.eval().requires_grad_(False)


def teachers_of(model: nn.Module, received: Iterable[DeviceAnswer]) -> list[nn.Module]:
    """Returns the models of a round's answers, frozen; `model` has their architecture."""
    teachers = []
    for answer in received:
        teachers.append(frozen_copy(model))
        load_parameters(teachers[-1], answer.part("parameters", ModelParameters))
    return teachers


def named_copies(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of a model's trainable parameters by name, without gradients."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def of_parameters(weights: Weights) -> Weights:
    """Returns the size of a model's trainable parameters alone."""
    tensors = {path: shape for path, shape in weights.tensors.items() if path.startswith("parameters/")}
    return Weights(weights.parameters, 0, tensors)


def sent_tensors(tensors: Mapping[str, Tensor], scope: str) -> ModelParameters:
    """Returns tensors by parameter name as a part of a message, in float32."""
    return ModelParameters(parameters={name: one.float().cpu().numpy() for name, one in tensors.items()}, scope=scope)


def received_tensors(model: nn.Module, sent: ModelParameters) -> dict[str, Tensor]:
    """Returns received tensors by parameter name, on the model's device.

    Raises:
        WireError: The names or shapes are not those of the model's parameters, or a value is not finite.
    """
    holder = copy.deepcopy(model)
    take_weights(holder, sent, without=holder.state_dict().keys() - dict(holder.named_parameters()).keys())
    return named_copies(holder)


def counts_schema(sizes: Sizes) -> Message:
    """Returns the part `counts` of an answer, 4C bytes: how many rows of each class a device has."""
    schema = NamedTensors.schema({"counts": (sizes.classes,)}, reveals=["counts"], dtype=np.int32)
    return {"counts": schema}


def sent_counts(local: Local) -> Parts:
    """Returns the part `counts` of a device's answer."""
    counts_c = np.bincount(local.data.labels.cpu().numpy(), minlength=local.classes).astype(np.int32)
    return {"counts": NamedTensors(tensors={"counts": counts_c}, reveals=["counts"])}


def counts_of(answer: DeviceAnswer) -> Tensor:
    """Returns a device's rows of each class, `[C]` float64; a negative number counts as 0."""
    return torch.tensor(answer.part("counts", NamedTensors).tensors["counts"], dtype=torch.float64).clamp_min(0)


def class_sums(rows: Tensor, labels_n: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Returns the sum of each class's rows, `[C, ...]` float64, and the classes' numbers of rows, `[C]` int64.

    Args:
        rows: `[N, ...]`, on the CPU.
        labels_n: Classes of the rows, `[N]` int64, on the CPU.
        classes: C.
    """
    sums = torch.zeros(classes, *rows.shape[1:], dtype=torch.float64)
    return sums.index_add_(0, labels_n, rows.double()), torch.bincount(labels_n, minlength=classes)


def received_tables(sent: NamedTensors, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Returns tensors that a server sent, by name.

    Raises:
        WireError: The names or shapes are not these, or a value is not finite.
    """
    found = {name: tuple(array.shape) for name, array in sent.tensors.items()}
    expected = {name: tuple(shape) for name, shape in shapes.items()}
    if found != expected:
        raise WireError(f"the server's tensors have the shapes {found}, expected {expected}; use the run's models")
    for name, array in sent.tensors.items():
        if not np.isfinite(array).all():
            raise WireError(f"the server's {name} contain NaN or infinity; ask the run's operator to check the run")
    return {name: torch.from_numpy(np.array(array)) for name, array in sent.tensors.items()}


def embeddings_of(model: nn.Module, inputs_b: Tensor) -> Tensor:
    """Returns the inputs of a model's last layer, `[batch, features]`; see `training.model.check_embedding`."""
    tap = embedding_tap(model)
    assert tap is not None
    return tap(inputs_b)


def inner_product(tensors: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the sum over pairs of tensors of their inner products, a scalar."""
    return torch.stack([(one * other).sum() for one, other in tensors]).sum()


class CorrectedServer(FedAvgServer):
    """Stores the global model, an accumulated tensor for each of its parameters, and which devices there are.

    Attributes:
        accumulated: SCAFFOLD's c or FedDyn's h by parameter name, float64, at first 0.
    """

    def __init__(self, config: Any, context: MethodContext) -> None:
        super().__init__(config, context)
        self.accumulated = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in self.model.named_parameters()}
        self._devices: set[str] = set()

    def share(self, cohort: Cohort, received: Sequence[DeviceAnswer]) -> float:
        """Returns |S| / N: the devices that answered, of all that a round has had."""
        self._devices |= set(cohort.devices)
        return len(received) / len(self._devices)

    def forget(self, device: str, notes: Notes) -> None:
        self._devices.discard(device)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "accumulated": self.accumulated, "devices": sorted(self._devices)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.accumulated = {name: one.to(self.context.torch_device) for name, one in state["accumulated"].items()}
        self._devices = set(state["devices"])


@dataclass(frozen=True, kw_only=True)
class TaughtConfig(FedAvgConfig):
    """Settings of distillation on the device in addition to those of FedAvg.

    Attributes:
        beta: Weight of the distillation loss, at least 0; with 0 it is FedAvg.
        temperature: The paper's tau, above 0.
    """

    beta: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta", self.beta, 0)
        check_range("temperature", self.temperature, 0, open_low=True)


class TaughtDevice(FedAvgDevice):
    """Minimises cross-entropy + beta tau^2 KL(teacher || model), or cross-entropy alone without a teacher.

    Attributes:
        teacher: The round's teacher, in eval mode; None without one. `begin` sets it, by default to the received model.
    """

    config: TaughtConfig
    teacher: nn.Module | None = None

    def begin(self, ask: Ask) -> None:
        self.teacher = frozen_copy(self.local.model)

    def loss(self, inputs_b: Tensor, labels_b: Tensor) -> Tensor:
        logits_bc = self.local.model(inputs_b)
        own = functional.cross_entropy(logits_bc, labels_b)
        if self.teacher is None:
            return own
        with torch.no_grad():
            teacher_bc = self.teacher(inputs_b)
        return self.total(own, self.distillation(logits_bc, teacher_bc, labels_b))

    def total(self, own: Tensor, distillation: Tensor) -> Tensor:
        """Returns the loss of a mini-batch from its cross-entropy and its distillation loss."""
        return own + self.config.beta * distillation

    def distillation(self, logits_bc: Tensor, teacher_bc: Tensor, labels_b: Tensor) -> Tensor:
        """Returns tau^2 KL(teacher || model), the mean over rows, from both models' logits `[batch, classes]`."""
        temperature = self.config.temperature
        return distillation_loss(logits_bc, soft_targets(teacher_bc, temperature), temperature)
