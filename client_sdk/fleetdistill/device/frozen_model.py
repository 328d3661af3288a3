"""A copy of a torch model that only predicts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fleetdistill.deployment.batch import check_batch
from fleetdistill.device.compute import FAULTS
from fleetdistill.errors import ModelError
from fleetdistill.training.model import place_of_inputs


class FrozenModel:
    """Copies a torch model; call it with a batch of inputs. Thread-safe if the module's `forward` is.

    Args:
        model: Maps inputs `[batch, *input_shape]` to logits `[batch, classes]`.
        input_shape: Shape of one input, with None where any size is accepted, as with `Deployment(dynamic_size=True)`;
            None before the device knows its run.
    """

    def __init__(self, model: nn.Module, input_shape: Sequence[int | None] | None) -> None:
        self._model = copy.deepcopy(model).eval().requires_grad_(False)
        self._device, self._dtype = place_of_inputs(self._model)
        self._input_shape = None if input_shape is None else tuple(input_shape)

    def __call__(self, inputs: Any) -> Any:
        """Returns logits `[batch, classes]` float32, of the type of the inputs: NumPy array or torch tensor."""
        check_batch(inputs, self._input_shape)
        given = torch.as_tensor(inputs)
        with torch.no_grad():
            try:
                logits = self._model(given.to(self._device, self._dtype))
            except FAULTS as error:
                shape = list(given.shape)
                reason = str(error).strip().split("\n")[0]
                raise ModelError(f"the model cannot process a batch of shape {shape}: {reason}") from error
        made = logits.to(given.device, torch.float32)
        return made if isinstance(inputs, torch.Tensor) else made.numpy()
