"""What `fleetdistill_server.methods.traffic` needs to know about a run, read from its own models."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from torch import nn

from fleetdistill.knowledge import Weights
from fleetdistill.training.model import SplitModel
from fleetdistill.training.parameters import model_parameters
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.methods.traffic import Sizes


def weights(module: nn.Module) -> Weights:
    """Parameters and buffers of a module as they travel."""
    return Weights.of(model_parameters(module))


def sizes_of(half: ServerMethod, samples: int) -> Sizes:
    """The sizes of a run for a device with so many samples; at FedD2S's last layer, of which it knows numbers alone."""
    return replace(half.sizes(), samples=samples, cuts={})


def at_layer(sizes: Sizes, model: SplitModel, cut: str, input_shape: tuple[int, ...]) -> Sizes:
    """The same with FedD2S's distillation layer at a stage of the model."""
    above = model.stages[model.depth_of(cut) :]
    if not len(above):
        return sizes
    shape = model.stage_shapes(input_shape)[cut] if model.depth_of(cut) > 1 else (0,)
    return replace(sizes, layer_features=prod(shape), layer_channels=shape[0], head=weights(above))
