"""What several baselines use: registration, frozen copies of a model, and tensors by a model's names."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleetdistill.errors import WireError
from fleetdistill.knowledge import ModelParameters, NamedTensors, Parts, Weights
from fleetdistill.methods import register as register_device
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, Local, answers
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill.training.model import embedding_tap
from fleetdistill.training.parameters import load_parameters, take_weights
from fleetdistill_server.methods import register as register_server
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.methods.cohort import DeviceAnswer
from fleetdistill_server.methods.traffic import Message, Sizes

__all__ = [
    "OwnModelDevice",
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
