"""What several baselines use: registration, frozen copies of a model, and tensors by a model's names."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fleetdistill.errors import ModelError
from fleetdistill.knowledge import ModelParameters, Weights
from fleetdistill.methods import register as register_device
from fleetdistill.methods.base import DeviceMethod
from fleetdistill.training.model import embedding_tap
from fleetdistill.training.parameters import take_weights
from fleetdistill_server.methods import register as register_server
from fleetdistill_server.methods.base import ServerMethod

__all__ = [
    "check_embedding",
    "embeddings_of",
    "frozen_copy",
    "inner_product",
    "named_copies",
    "of_parameters",
    "received_tensors",
    "register",
    "sent_tensors",
]


def register(method: str, config: type[Any], device: type[DeviceMethod], server: type[ServerMethod]) -> None:
    """Registers both halves of a method. Raises ConfigurationError if the name belongs to another method."""
    register_device(method, config, device)
    register_server(method, server)


def frozen_copy(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Returns a copy of a model in eval mode that needs no gradients, with another state if one is given."""
    result = copy.deepcopy(model)
    if state is not None:
        result.load_state_dict(state)
    return result.eval().requires_grad_(False)


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


def embeddings_of(model: nn.Module, inputs_b: Tensor) -> Tensor:
    """Returns the inputs of a model's last layer, `[batch, features]`; see `check_embedding`."""
    tap = embedding_tap(model)
    assert tap is not None
    return tap(inputs_b)


def check_embedding(model: nn.Module, method: str) -> None:
    """Raises ModelError if a model cannot return the input of its last layer."""
    if embedding_tap(model) is None:
        raise ModelError(
            f"{method} needs the input of the last layer, and {type(model).__name__} has no embedding(x) that returns "
            "it; add this method"
        )


def inner_product(tensors: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the sum over pairs of tensors of their inner products, a scalar."""
    return torch.stack([(one * other).sum() for one, other in tensors]).sum()
