"""The fixed random projection of features: equal on every device and in every run, and never sent.

The signs are the bits of SplitMix64 with seed 1. Uses NumPy only, for devices without torch.
"""

from __future__ import annotations

import numpy as np

from fleetdistill.knowledge import Array
from fleetdistill.training.portable_noise import splitmix64

SEED = 1
"""Seed of the signs; equal in all runs, so that statistics are comparable between runs."""
_SMALL_SIDE = 12
_FEW, _USUAL = 256, 384


def usual_dimensions(input_shape: tuple[int, ...]) -> int:
    """Returns the default of D: 256 for images below 12 pixels a side, otherwise 384."""
    small = len(input_shape) == 3 and min(input_shape[1:]) < _SMALL_SIDE
    return _FEW if small else _USUAL


def projection(features: int, dimensions: int) -> Array:
    """Returns G with entries ±1 / √F; bit f·D + d of the random words is the sign of entry (f, d).

    Args:
        features: F, at least 1.
        dimensions: D, at least 1.

    Returns:
        `[F, D]` float32; the identity matrix `[F, F]` if D is at least F.
    """
    if features <= dimensions:
        return np.eye(features, dtype=np.float32)
    count = features * dimensions
    words = splitmix64(SEED, (count + 63) // 64)
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little")[:count]
    return np.asarray((2.0 * bits.reshape(features, dimensions) - 1) / np.sqrt(features), dtype=np.float32)


def projection_for(input_shape: tuple[int, ...], features: int) -> Array:
    """Returns the projection G of images of one shape to their default number of dimensions, `[F, D]`."""
    return projection(features, min(usual_dimensions(input_shape), features))
