"""Numbers as steps of one byte: uint8 elements on a scale that each channel of a feature column has for itself.

A channel is a position on axis 1: a feature map [N, D, H, W] has D of them, a row of features [N, D] too. Element e of
channel d stands for `minimum[d] + e * step[d]`, computed in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = float(np.finfo(np.float16).max)
"""Largest size of a number that can be encoded, the same as float16's, so that runs of both types take the same."""
LARGEST_SCALE = float(np.float32(2 * LARGEST / 255))
_LEVELS = np.float32(255)
# Numbers closer together than this are taken for alike: dividing would leave what float32 holds exactly.
_LEAST_SPAN = np.float32(2.0**-110)


def quantize(numbers: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Encodes finite float32 numbers of at most `LARGEST`.

    A channel whose numbers are all alike has step 0, and so has a channel without numbers, whose minimum is 0. In any
    other, a number is off by at most half its channel's step, and the rounding of float32.

    Args:
        numbers: `[N, D, ...]` float32.

    Returns:
        `(elements, step, minimum)`: uint8 of the shape of `numbers`, and `[D]` float32 each.
    """
    across = tuple(axis for axis in range(numbers.ndim) if axis != 1)
    if not numbers.size:
        none = np.zeros(numbers.shape[1], np.float32)
        return np.zeros(numbers.shape, np.uint8), none, none
    minimum = numbers.min(axis=across)
    span = numbers.max(axis=across) - minimum
    step = np.where(span < _LEAST_SPAN, np.float32(0), span / _LEVELS)
    shape = (1, -1, *[1] * (numbers.ndim - 2))
    divisor = np.where(step > 0, step, np.float32(1)).reshape(shape)
    elements = np.rint((numbers - minimum.reshape(shape)) / divisor)
    return np.minimum(elements, _LEVELS).astype(np.uint8), step, minimum


def dequantize(elements: NDArray[Any], step: NDArray[Any], minimum: NDArray[Any]) -> NDArray[Any]:
    """Decodes what `quantize` encoded; read-only float32 of the shape of `elements`."""
    shape = (1, -1, *[1] * (elements.ndim - 2))
    found: NDArray[Any] = elements * step.reshape(shape)
    found += minimum.reshape(shape)
    found.flags.writeable = False
    return found
