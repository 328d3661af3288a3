"""The fixed extractor of a run with one exchange, equal on the server and on every device."""

from __future__ import annotations

from math import prod

import torch
from torch import nn

from fleetdistill.methods.classstats.config import SCATTERING
from fleetdistill.methods.classstats.kept_features import FixedFeatures
from fleetdistill.methods.classstats_private.config import PrivateConfig, Settings
from fleetdistill.methods.classstats_private.public_features import private_extractor
from fleetdistill.models import build_model
from fleetdistill.training.model import output_shape


def fixed_features(
    config: Settings, given: nn.Module | None, input_shape: tuple[int, ...], torch_device: torch.device | str = "cpu"
) -> FixedFeatures:
    """Returns the extractor and the projection that a run's settings name.

    Args:
        config: Settings of the form with or without noise.
        given: The run's extractor, for `features = "model"`; otherwise None.
        input_shape: Shape of one input.
        torch_device: Device to compute on.

    Raises:
        ConfigurationError: The inputs or the extractor do not fit the settings.
    """
    if isinstance(config, PrivateConfig):
        extractor: nn.Module = private_extractor(config.features, given, input_shape, config.dimensions)
    else:
        extractor = given if given is not None else build_model(SCATTERING, input_shape=input_shape)
    extractor = extractor.cpu().eval()  # too little computation for a GPU
    features = prod(output_shape(extractor, input_shape))
    return FixedFeatures(extractor, features, config.dimensions_for(input_shape, features), torch_device)
