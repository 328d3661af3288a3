"""Public features of private class statistics: rows of a fixed extractor, scaled to one length.

With `features = "scattering"`, images are resized to one of three sizes; their wavelet features are projected as in
classstats, then whitened to at most 192 numbers with constants made from synthetic shapes (`benchmarks/whitening.py`).
With `features = "model"` the extractor is the run's, with at most 128 outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats.class_space import projection_for
from fleetdistill.methods.classstats.config import SCATTERING
from fleetdistill.methods.classstats_private.config import MAX_OUTPUTS, MAX_WHITENED
from fleetdistill.models.scattering import SMALLEST_SIDE, scattering
from fleetdistill.models.shapes import check_image
from fleetdistill.training.model import output_shape

CONSTANTS = Path(__file__).with_name("whitening.npz")
SIDES = (8, 14, 28)
"""Image sizes in pixels with constants; images of another size are resized to the nearest by ratio."""
_LUMINANCE = (0.299, 0.587, 0.114)  # BT.601
_TINY = 1e-12


class PublicFeatures(nn.Module):
    """Maps inputs to feature rows `[batch, F]` of length sqrt(F); rows of zeros stay zero.

    Attributes:
        before: The public extractor, from inputs to numbers.
        features: F.
    """

    def __init__(self, before: nn.Module, features: int) -> None:
        super().__init__()
        self.before, self.features = before, features

    def forward(self, x: Tensor) -> Tensor:
        """Returns the rows of inputs `[batch, *input_shape]`."""
        rows = self.before(x).flatten(1)
        length = rows.square().sum(dim=1, keepdim=True).clamp_min(_TINY).sqrt()
        scaled: Tensor = rows * (self.features**0.5 / length)
        return scaled


class WhitenedScattering(nn.Module):
    """Maps images `[batch, 1 or 3, height, width]` in [0, 1] to `[batch, dimensions]` whitened wavelet features."""

    def __init__(self, input_shape: Sequence[int], dimensions: int) -> None:
        """Loads the constants of the nearest image size.

        Args:
            input_shape: Channels, 1 or 3, height and width; height and width at least 8.
            dimensions: Number of features, at most 192.

        Raises:
            ConfigurationError: The inputs are not grey or colour images, or `dimensions` is too large.
        """
        super().__init__()
        channels, height, width = check_image(input_shape, smallest=SMALLEST_SIDE)
        if channels not in (1, 3) or dimensions > MAX_WHITENED:
            raise ConfigurationError(
                f"private scattering needs images of 1 or 3 channels and dimensions of at most {MAX_WHITENED}, got "
                f"{channels} channels and dimensions {dimensions}; set features = 'model'"
            )
        self._side = min(SIDES, key=lambda side: abs(np.log(min(height, width) / side)))
        self._resized = (height, width) != (self._side, self._side)
        shape = (1, self._side, self._side)
        self.wavelets = scattering(shape)
        signs = projection_for(shape, prod(output_shape(self.wavelets, shape)))
        constants = _constants()
        directions = constants[f"directions_{self._side}"][:, :dimensions].astype(np.float64)
        self._add("luminance", np.array(_LUMINANCE if channels == 3 else (1.0,)).reshape(1, -1, 1, 1))
        self._add("matrix", signs @ directions)
        self._add("origin", constants[f"mean_{self._side}"].astype(np.float64) @ directions)

    def _add(self, name: str, array: Array) -> None:
        self.register_buffer(name, torch.tensor(array, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the features of images."""
        grey = functional.conv2d(x, self.get_buffer("luminance"))
        if self._resized:
            size = (self._side, self._side)
            grey = functional.interpolate(grey, size=size, mode="bilinear", align_corners=False)
        numbers: Tensor = self.wavelets(grey).flatten(1)
        return numbers @ self.get_buffer("matrix") - self.get_buffer("origin")


@functools.cache
def _constants() -> dict[str, Array]:
    with np.load(CONSTANTS) as arrays:
        return {name: arrays[name] for name in arrays.files}


def private_extractor(
    features: str, given: nn.Module | None, input_shape: tuple[int, ...], size: int
) -> PublicFeatures:
    """Returns the extractor of a private run.

    Args:
        features: `scattering` or `model`.
        given: The run's extractor, for `model`.
        input_shape: Shape of one input.
        size: Number of features of the scattering.

    Raises:
        ConfigurationError: The extractor has more than 128 outputs, or the inputs are not grey or colour images.
    """
    if given is None or features == SCATTERING:
        return PublicFeatures(WhitenedScattering(input_shape, size), size)
    outputs = prod(output_shape(given, input_shape))
    if outputs > MAX_OUTPUTS:
        raise ConfigurationError(
            f"[model] extractor has {outputs} outputs; private statistics need at most {MAX_OUTPUTS}, about white on "
            "public data"
        )
    return PublicFeatures(given, outputs)
