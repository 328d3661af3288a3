"""Similarity of reconstructed images and their originals."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_SMALL_SIDE = 16
_C1, _C2 = 0.01**2, 0.03**2


def ssim(first_bchw: Tensor, second_bchw: Tensor) -> Tensor:
    """Returns the structural similarity of image pairs with values in [0, 1].

    Uniform windows of 7x7 pixels, of 3x3 for images below 16 pixels a side.

    Args:
        first_bchw: `[batch, channels, height, width]`.
        second_bchw: Of the same shape.

    Returns:
        `[batch]`, at most 1.

    References:
        Wang et al., Image Quality Assessment: From Error Visibility to Structural Similarity, 2004, eq. (13).
    """
    window = 7 if min(first_bchw.shape[2:]) >= _SMALL_SIDE else 3
    pixels = window * window

    def mean(values: Tensor) -> Tensor:
        return functional.avg_pool2d(values, window, stride=1)

    x, y = first_bchw.double(), second_bchw.double()
    mean_x, mean_y = mean(x), mean(y)
    unbiased = pixels / (pixels - 1)
    var_x, var_y = unbiased * (mean(x * x) - mean_x**2), unbiased * (mean(y * y) - mean_y**2)
    covariance = unbiased * (mean(x * y) - mean_x * mean_y)
    numerator = (2 * mean_x * mean_y + _C1) * (2 * covariance + _C2)
    return (numerator / ((mean_x**2 + mean_y**2 + _C1) * (var_x + var_y + _C2))).mean(dim=(1, 2, 3))


def psnr(first_bchw: Tensor, second_bchw: Tensor) -> Tensor:
    """Returns the peak signal-to-noise ratio of image pairs with values in [0, 1], in dB; `[batch]`."""
    error = (first_bchw - second_bchw).double().square().mean(dim=(1, 2, 3))
    return -10 * torch.log10(error.clamp_min(1e-12))


def reidentified(pictures_bchw: Tensor, originals_bchw: Tensor, others_nchw: Tensor) -> float:
    """Returns the share of pictures that are nearer to their original than to every other image (mean squared error).

    Args:
        pictures_bchw: Reconstructions.
        originals_bchw: The image behind each.
        others_nchw: Images to tell it from.
    """
    pictures, originals = pictures_bchw.flatten(1).double(), originals_bchw.flatten(1).double()
    own = (pictures - originals).norm(dim=1)
    nearest = torch.cdist(pictures, others_nchw.flatten(1).double()).min(dim=1).values
    return float((own < nearest).double().mean())
