"""The server's predictors: networks that read the devices' features and answer with logits."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fleetdistill.models import build

if TYPE_CHECKING:
    from torch import nn

SERVER_MODELS: Mapping[str, str] = MappingProxyType(
    {
        "digits_server": "fleetdistill_server.models.digits:digits_server",
        "resnet20": "fleetdistill_server.models.resnet:resnet20",
    }
)
"""Every server predictor: its name, and where its factory is."""


def build_server_model(name_or_path: str, **options: Any) -> nn.Module:
    """Builds a server predictor: features `[batch, *feature_shape]` to logits `[batch, classes]`.

    Weights are drawn from torch's global random generator.

    Args:
        name_or_path: A name of `SERVER_MODELS`, or `package.module:factory` of your own.
        **options: Passed to the factory. Those of the table take `feature_shape` and `classes`.

    Raises:
        ConfigurationError: Unknown name, a path that leads to no factory of modules, or options it does not take.
    """
    return build(SERVER_MODELS, "server model", name_or_path, options)
