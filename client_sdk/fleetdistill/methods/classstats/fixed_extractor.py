"""The fixed extractor of a run with one exchange, equal on the server and on every device."""

from __future__ import annotations

from math import prod

import torch
from torch import nn

from fleetdistill.methods.classstats.config import SCATTERING, SpaceConfig
from fleetdistill.methods.classstats.kept_features import FixedFeatures
from fleetdistill.models import build_model
from fleetdistill.training.model import output_shape


def fixed_features(
    config: SpaceConfig, extractor: nn.Module, input_shape: tuple[int, ...], torch_device: torch.device | str = "cpu"
) -> FixedFeatures:
    """Returns the extractor with the projection that a run's settings name.

    Args:
        config: Settings of either method.
        extractor: The method's extractor.
        input_shape: Shape of one input.
        torch_device: Device to compute on.

    Raises:
        ConfigurationError: The inputs do not fit the extractor.
    """
    extractor = extractor.cpu().eval()  # too little computation for a GPU
    features = prod(output_shape(extractor, input_shape))
    return FixedFeatures(extractor, features, config.dimensions_for(input_shape, features), torch_device)


def usual_extractor(given: nn.Module | None, input_shape: tuple[int, ...]) -> nn.Module:
    """Returns the extractor of classstats: `given`, the run's own, or without one the scattering.

    Raises:
        ConfigurationError: The inputs are not images for the scattering.
    """
    return given if given is not None else build_model(SCATTERING, input_shape=input_shape)
