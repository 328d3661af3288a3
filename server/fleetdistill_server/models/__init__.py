"""Server models: networks that map the devices' features to logits."""

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
"""Maps the name of each built-in server model to the path of its factory."""


def build_server_model(name_or_path: str, **options: Any) -> nn.Module:
    """Builds a server model, which maps features `[batch, *feature_shape]` to logits `[batch, classes]`.

    Weights are drawn from torch's global random generator.

    Args:
        name_or_path: A name in `SERVER_MODELS`, or `package.module:factory`.
        **options: Arguments of the factory; built-in ones take `feature_shape` and `classes`.

    Raises:
        ConfigurationError: The name is unknown, the path does not lead to a factory of torch modules, or the factory
            does not take the options.
    """
    return build(SERVER_MODELS, "server model", name_or_path, options)
