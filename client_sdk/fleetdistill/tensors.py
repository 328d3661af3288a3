"""Between a module's state and the arrays that travel."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from fleetdistill.errors import ModelError
from fleetdistill.knowledge import Array


def arrays_of(module: nn.Module) -> tuple[dict[str, Array], dict[str, Array]]:
    """Parameters and buffers of a module by state-dict name, on the CPU."""
    trainable = {name for name, _ in module.named_parameters()}
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in module.state_dict().items()}
    parameters = {name: array for name, array in arrays.items() if name in trainable}
    return parameters, {name: array for name, array in arrays.items() if name not in trainable}


def load_arrays(module: nn.Module, arrays: Mapping[str, Array]) -> None:
    """Copies arrays into a module's state.

    Raises:
        ModelError: A name or a shape does not fit; says which.
    """
    own = module.state_dict()
    if own.keys() != arrays.keys():
        odd = sorted(own.keys() ^ arrays.keys())
        raise ModelError(f"the weights do not fit {type(module).__name__}: names differ at {', '.join(odd[:5])}")
    for name, tensor in own.items():
        if tuple(tensor.shape) != arrays[name].shape:
            raise ModelError(f"weight {name} has shape {list(tensor.shape)}, was sent {list(arrays[name].shape)}")
    module.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in arrays.items()})
