"""Converts between a module's state and the arrays of messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fleetdistill.errors import ModelError, WireError
from fleetdistill.knowledge import Array, ModelParameters

__all__ = [
    "batch_norm_names",
    "load_parameters",
    "model_parameters",
    "state_tensors",
    "take_weights",
    "tensors_of",
]


def model_parameters(module: nn.Module, scope: str = "model", without: Collection[str] = ()) -> ModelParameters:
    """Copies a module's parameters and buffers to a part of a message.

    Args:
        module: Any module.
        scope: Role of the part: "model", "extractor", "base" or "head".
        without: State-dict names to omit, such as `batch_norm_names(module)`.
    """
    trainable = {name for name, _ in module.named_parameters()}
    state = {name: tensor for name, tensor in module.state_dict().items() if name not in without}
    arrays = {name: tensor.detach().cpu().numpy().copy() for name, tensor in state.items()}
    return ModelParameters(
        parameters={name: array for name, array in arrays.items() if name in trainable},
        buffers={name: array for name, array in arrays.items() if name not in trainable},
        scope=scope,
    )


def state_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Returns a module's own parameter and buffer tensors, in state-dict order."""
    return list(module.state_dict(keep_vars=True).values())


def load_parameters(module: nn.Module, sent: ModelParameters, without: Collection[str] = ()) -> None:
    """Copies received parameters into a module; the names in `without` keep their values.

    Raises:
        ModelError: A name or a shape does not match; the error names it.
    """
    arrays = {**sent.parameters, **sent.buffers}
    own = {name: tensor for name, tensor in module.state_dict().items() if name not in without}
    if own.keys() != arrays.keys():
        odd = sorted(own.keys() ^ arrays.keys())
        raise ModelError(f"the weights do not match {type(module).__name__}: names differ at {', '.join(odd[:5])}")
    for name, tensor in own.items():
        if tuple(tensor.shape) != arrays[name].shape:
            raise ModelError(
                f"weight {name} has shape {list(tensor.shape)}, but received shape {list(arrays[name].shape)}"
            )
    module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}, strict=False)


def take_weights(module: nn.Module, sent: ModelParameters, without: Collection[str] = ()) -> None:
    """Loads parameters from a server, which may be faulty or hostile; see `load_parameters`.

    Raises:
        WireError: A name or a shape does not match, or a value is not finite; the module is unchanged.
    """
    for name, array in {**sent.parameters, **sent.buffers}.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise WireError(
                f"weight {name} from the server contains NaN or infinity; ask the run's operator to check the run"
            )
    try:
        load_parameters(module, sent, without)
    except ModelError as error:
        raise WireError(f"the server sent unusable weights: {error}") from error


def batch_norm_names(module: nn.Module) -> frozenset[str]:
    """Returns the state-dict names of all batch-norm parameters and buffers."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if isinstance(part, _BatchNorm)
        for name in part.state_dict()
    )


def tensors_of(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Copies arrays to tensors."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
