"""Measures the sizes of a run's models and data for `fleetdistill methods run.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import torch
from torch import nn

from fleetdistill.knowledge import Weights
from fleetdistill.training.model import embedding_tap, logits_and_embedding, output_shape
from fleetdistill.training.parameters import model_parameters
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.engine.contract import build_method
from fleetdistill_server.methods.base import MethodContext
from fleetdistill_server.methods.traffic import Sizes

__all__ = ["RunSizes", "measure_run"]


@dataclass(frozen=True)
class RunSizes:
    """Sizes of a run's models and data, as determined by its run.toml.

    Attributes:
        method: Name of the run's method.
        config: The method's configuration.
        fleet: Sizes from [contract], [model] and [proxy], which apply to every method; the others are defaults.
        own: Sizes that apply to the run's method only, by field name.
    """

    method: str
    config: Any
    fleet: Sizes
    own: Mapping[str, Any]

    def of_method(self, sizes: Sizes) -> Sizes:
        """Returns the sizes for the run's own method: `own`, except where `sizes` already overrides `fleet`."""
        free = {name for name in self.own if getattr(sizes, name) == getattr(self.fleet, name)}
        return replace(sizes, **{name: self.own[name] for name in free})


def measure_run(config: RunConfig) -> RunSizes:
    """Builds a run's models and measures them.

    Raises:
        ConfigurationError: A model cannot be built, or the proxy set cannot be read.
    """
    half = build_method(config)
    own = half.sizes()
    default = Sizes()
    names = [field.name for field in fields(Sizes) if field.name not in ("samples", "cuts")]
    measured = {name: getattr(own, name) for name in names if getattr(own, name) != getattr(default, name)}
    return RunSizes(config.run.method, config.method_config(), _fleet_sizes(half.context), measured)


def _fleet_sizes(context: MethodContext) -> Sizes:
    result: dict[str, Any] = {"classes": context.classes}
    if context.proxy is not None:
        result["proxy_samples"] = len(context.proxy)
    if context.models.extractor:
        shape = output_shape(context.extractor(), context.input_shape)
        result |= {"features": prod(shape), "channels": shape[0]}
    if context.models.device:
        model = context.device_model()
        result |= {"model": Weights.of(model_parameters(model)), **_embedding_size(model, context.input_shape)}
    return Sizes(**result)


def _embedding_size(model: nn.Module, input_shape: tuple[int, ...]) -> dict[str, int]:
    """Returns a model's embedding size as a field of `Sizes`; an empty dict if the model has no embedding."""
    if embedding_tap(model) is None:
        return {}
    with torch.inference_mode():
        _, embedding = logits_and_embedding(model.eval(), torch.zeros(1, *input_shape))
    return {"embedding": prod(embedding.shape[1:])}
