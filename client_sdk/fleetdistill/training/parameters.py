"""Between a module's state and the arrays that travel."""

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
    """A module's parameters and buffers as they travel, on the CPU, copied.

    Args:
        module: Any module.
        scope: What the part is: "model", "extractor", "base", "head".
        without: State-dict names that stay behind, such as `batch_norm_names(module)`.
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
    """A module's parameters and buffers, in the order of its state: the very tensors, not views of them."""
    return list(module.state_dict(keep_vars=True).values())


def load_parameters(module: nn.Module, sent: ModelParameters, without: Collection[str] = ()) -> None:
    """Copies what was sent into a module; the names in `without` keep their values.

    Raises:
        ModelError: A name or a shape does not fit; says which.
    """
    arrays = {**sent.parameters, **sent.buffers}
    own = {name: tensor for name, tensor in module.state_dict().items() if name not in without}
    if own.keys() != arrays.keys():
        odd = sorted(own.keys() ^ arrays.keys())
        raise ModelError(f"the weights do not fit {type(module).__name__}: names differ at {', '.join(odd[:5])}")
    for name, tensor in own.items():
        if tuple(tensor.shape) != arrays[name].shape:
            raise ModelError(f"weight {name} has shape {list(tensor.shape)}, was sent {list(arrays[name].shape)}")
    module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}, strict=False)


def take_weights(module: nn.Module, sent: ModelParameters, without: Collection[str] = ()) -> None:
    """`load_parameters` for what a server sent, which may be broken or hostile.

    Raises:
        WireError: A name or a shape does not fit, or a number is not finite; the module is as before.
    """
    for name, array in {**sent.parameters, **sent.buffers}.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise WireError(f"weight {name} from the server holds NaN or infinity; its operator has to look at the run")
    try:
        load_parameters(module, sent, without)
    except ModelError as error:
        raise WireError(f"{error}; the server sent them") from error


def batch_norm_names(module: nn.Module) -> frozenset[str]:
    """State-dict names of all batch-norm parameters and buffers."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if isinstance(part, _BatchNorm)
        for name in part.state_dict()
    )


def tensors_of(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Arrays as tensors of their own."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
