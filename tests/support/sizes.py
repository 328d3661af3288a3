"""What `fleetdistill_server.methods.traffic` needs to know about a run, read from its own models."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch
from torch import nn

from fleetdistill.knowledge import Weights
from fleetdistill.models.discriminators import shared_features
from fleetdistill.training.local_training import extract
from fleetdistill.training.model import SplitModel
from fleetdistill.training.parameters import model_parameters
from fleetdistill_server.methods.base import ServerMethod
from fleetdistill_server.methods.classstats.averaged import AveragedServer
from fleetdistill_server.methods.context import MethodContext
from fleetdistill_server.methods.traffic import Sizes


def weights(module: nn.Module) -> Weights:
    """Parameters and buffers of a module as they travel."""
    return Weights.of(model_parameters(module))


def sizes_of(half: ServerMethod, samples: int) -> Sizes:
    """The sizes of a run for a device with so many samples; at FedD2S's last layer."""
    context = half.context
    generator = getattr(half, "generator", None)
    fixed = getattr(half, "fixed", None)  # an extractor with its projection, whose numbers are what travels
    model = context.device_model() if context.models.device else nn.Module()
    return Sizes(
        samples=samples,
        features=fixed.dimensions if fixed else next((prod(shape) for shape in half.features().values()), 1),
        channels=next((shape[0] for shape in half.features().values()), 1),
        classes=context.classes,
        model=weights(model),
        proxy_samples=len(context.proxy) if context.proxy is not None else 0,
        embedding=_shared_numbers(model, context) if generator is not None else 0,
        extractor=weights(half.extractor) if isinstance(half, AveragedServer) else Weights(0),
        generator=Weights(0) if generator is None else weights(generator),
    )


def at_layer(sizes: Sizes, model: SplitModel, cut: str, input_shape: tuple[int, ...]) -> Sizes:
    """The same with FedD2S's distillation layer at a stage of the model."""
    above = model.stages[model.depth_of(cut) :]
    if not len(above):
        return sizes
    shape = model.stage_shapes(input_shape)[cut] if model.depth_of(cut) > 1 else (0,)
    return replace(sizes, layer_features=prod(shape), layer_channels=shape[0], head=weights(above))


def _shared_numbers(model: nn.Module, context: MethodContext) -> int:
    zeros = torch.zeros(1, *context.input_shape)
    return prod(extract(lambda x: shared_features(model, x), zeros, model=model).shape[1:])
