"""The fixed random projection of features: the same on every device, in every run, in any language; never sent.

Its signs are the bits of SplitMix64 with seed 1. Numpy alone: a device without torch projects too.
"""

from __future__ import annotations

import numpy as np

from fleetdistill.knowledge import Array
from fleetdistill.training.portable_noise import splitmix64

SEED = 1
"""One for all runs, so that a summary serves every run."""
_SMALL_SIDE = 12
_FEW, _USUAL = 256, 384


def usual_dimensions(input_shape: tuple[int, ...]) -> int:
    """D where the operator names none: 256 for images below 12 pixels a side, else 384."""
    small = len(input_shape) == 3 and min(input_shape[1:]) < _SMALL_SIDE
    return _FEW if small else _USUAL


def projection(features: int, dimensions: int) -> Array:
    """G, whose entries are +-1 / sqrt(F): bit f D + d of the random words decides the sign of entry (f, d).

    Args:
        features: F, at least 1.
        dimensions: D, at least 1.

    Returns:
        `[F, D]` float32; `[F, F]`, the unit matrix, where D is not below F.
    """
    if features <= dimensions:
        return np.eye(features, dtype=np.float32)
    count = features * dimensions
    words = splitmix64(SEED, (count + 63) // 64)
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little")[:count]
    return np.asarray((2.0 * bits.reshape(features, dimensions) - 1) / np.sqrt(features), dtype=np.float32)


def project(features_nf: Array, dimensions: int) -> Array:
    """z = h G.

    Args:
        features_nf: `[n, F]`, any float type.
        dimensions: D; features of at most so many numbers stay as they are.

    Returns:
        `[n, min(F, D)]` float64.
    """
    features = features_nf.shape[1]
    rows = features_nf.astype(np.float64)
    return rows if features <= dimensions else np.asarray(rows @ projection(features, dimensions).astype(np.float64))
