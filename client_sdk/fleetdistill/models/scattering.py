"""Wavelet scattering: a fixed extractor without parameters, equal on server and devices and never sent.

Computes two orders of Morlet wavelets, modulus and low-pass filter as convolutions, so that ONNX can represent them
(Bruna and Mallat, Invariant Scattering Convolution Networks, 2013). The library `kymatio` has had no release since 2022
and has a separate backend for each framework; this module needs about a hundred lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import Array
from fleetdistill.models.shapes import check_image, check_shape

ANGLES = 8
"""L, orientations of the wavelets."""
SMALLEST_SIDE = 8
"""Minimum height and width in pixels, required for two scales."""
_SIGMA = 0.8  # sigma of the finest wavelet, and of the low-pass filter on the coarsest grid
_FREQUENCY = 3 * math.pi / 4  # frequency of the finest wavelet, in radians per pixel
_SLANT = 0.5
_CUT = 3.0  # half-width of a kernel in sigmas
_EPSILON = 0.01  # numbers below it are scaled linearly, larger ones logarithmically
_TINY = 1e-12  # added under the root of the modulus
_COLOURS = ((1 / 3, 1 / 3, 1 / 3), (1 / 2, -1 / 2, 0.0), (1 / 4, 1 / 4, -1 / 2))


def scattering(input_shape: Sequence[int] = (1, 28, 28)) -> Scattering:
    """Returns the scattering extractor for images of one shape.

    Args:
        input_shape: Channels, height and width; height and width at least 8.

    Raises:
        ConfigurationError: `input_shape` is not the shape of an image, or the image is too small.
    """
    return Scattering(input_shape)


def identity(input_shape: Sequence[int] = (64,)) -> nn.Identity:
    """Returns the identity as an extractor, for inputs that are features, such as embeddings of an external network.

    Raises:
        ConfigurationError: `input_shape` is not one or more positive integers.
    """
    check_shape(input_shape)
    return nn.Identity()


def scales_of(side: int) -> tuple[int, int]:
    """Returns J, the number of scales, and S, the last grid's step in pixels, for an image's smaller side in pixels."""
    levels = max(round(math.log2(side / 4)), 1)
    return max(2, levels), 2**levels


def morlet(scale: int, angle: float) -> Array:
    """Returns a Morlet wavelet on an integer grid, with zero mean and moduli that sum to 1.

    Args:
        scale: j - i, number of times that the finest wavelet's size is doubled.
        angle: Direction of the wave in radians.

    Returns:
        `[2, k, k]` float64, the real and the imaginary part; rows are y, columns x.
    """
    sigma, frequency = _SIGMA * 2**scale, _FREQUENCY / 2**scale
    y, x = _grid(sigma)
    u, v = x * math.cos(angle) + y * math.sin(angle), -x * math.sin(angle) + y * math.cos(angle)
    window = np.exp(-(u**2 + (_SLANT * v) ** 2) / (2 * sigma**2))
    wave = np.exp(1j * frequency * u)
    kernel = window * (wave - (window * wave).sum() / window.sum())
    kernel = kernel / np.abs(kernel).sum()
    return np.stack([kernel.real, kernel.imag])


def low_pass(scale: int) -> Array:
    """Returns a Gaussian with sigma 0.8 * 2**scale on an integer grid, `[k, k]` float64 with sum 1."""
    sigma = _SIGMA * 2**scale
    y, x = _grid(sigma)
    window = np.exp(-(x**2 + y**2) / (2 * sigma**2))
    return np.asarray(window / window.sum())


def _grid(sigma: float) -> tuple[Array, Array]:
    half = math.ceil(_CUT * sigma)
    line = np.arange(-half, half + 1, dtype=np.float64)
    y, x = np.meshgrid(line, line, indexing="ij")
    return y, x


class Scattering(nn.Module):
    """Maps images `[batch, channels, height, width]` in [0, 1] to `[batch, maps, ceil(height / S), ceil(width / S)]`.

    `maps` is channels * (1 + J L + J (J - 1) / 2 L**2). The module has no parameters. The constructor computes the
    kernels, which are not part of the state.

    Attributes:
        scales: J, number of scales.
        step: S, the last grid's step in pixels.
    """

    def __init__(self, input_shape: Sequence[int], step: int | None = None) -> None:
        """Computes the kernels.

        Args:
            input_shape: Channels, height and width; height and width at least 8.
            step: S, a power of two; None for the default of the image's size.

        Raises:
            ConfigurationError: `input_shape` is not the shape of an image of at least 8x8 pixels, or `step` is not a
                power of two.
        """
        super().__init__()
        channels, height, width = check_image(input_shape, smallest=SMALLEST_SIDE)
        self.scales, usual = scales_of(min(height, width))
        self.step = usual if step is None else step
        if self.step < 1 or self.step & (self.step - 1):
            raise ConfigurationError(f"step is {step}, must be a power of two")
        self._last = self.step.bit_length() - 1
        self._in_colour = channels == 3
        self._add("colours", np.array(_COLOURS)[:, :, None, None])
        for scale in range(self.scales):
            self._add(f"low_{scale}", low_pass(self.scales - 1 - scale)[None, None])
            for grid in range(scale + 1):  # a scale's kernel on a grid of every 2**grid-th pixel
                bank = np.concatenate([morlet(scale - grid, math.pi * n / ANGLES) for n in range(ANGLES)])
                self._add(f"wave_{scale}_{grid}", bank[:, None])

    def _add(self, name: str, kernel: Array) -> None:
        self.register_buffer(name, torch.tensor(kernel, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the log-scaled maps: the low-pass map, then each scale's first- and second-order maps."""
        if self._in_colour:
            x = functional.conv2d(x, self.get_buffer("colours"))
        result = [self._averaged(x, 0)]
        for first in range(self.scales):
            grid = min(first, self._last)  # grid of this scale's moduli
            moduli = self._moduli(x, first, 0, grid)
            result.append(self._averaged(moduli, grid))
            for second in range(first + 1, self.scales):
                coarser = min(second, self._last)
                result.append(self._averaged(self._moduli(moduli, second, grid, coarser), coarser))
        numbers = torch.cat(result, dim=1)
        return numbers.sign() * torch.log(1 + numbers.abs() / _EPSILON)

    def _moduli(self, x: Tensor, scale: int, grid: int, kept_on: int) -> Tensor:
        """Returns the moduli of each channel's convolution with a scale's wavelets, at every 2**kept_on-th pixel."""
        waves = _each_channel(x, self.get_buffer(f"wave_{scale}_{grid}"), 2 ** (kept_on - grid))
        parts = waves.reshape(-1, waves.shape[1] // 2, 2, *waves.shape[2:])  # real and imaginary
        return torch.sqrt(parts[:, :, 0] ** 2 + parts[:, :, 1] ** 2 + _TINY)

    def _averaged(self, x: Tensor, grid: int) -> Tensor:
        return _each_channel(x, self.get_buffer(f"low_{grid}"), max(self.step // 2**grid, 1))


def _each_channel(x: Tensor, kernels: Tensor, step: int) -> Tensor:
    """Correlates each channel with each kernel at every step-th pixel, with repeated edges; ordered by channel."""
    half = kernels.shape[-1] // 2
    padded = functional.pad(x, (half, half, half, half), mode="replicate")
    single = padded.flatten(0, 1).unsqueeze(1)
    result = functional.conv2d(single, kernels, stride=step)
    return result.reshape(-1, x.shape[1] * kernels.shape[0], *result.shape[2:])
