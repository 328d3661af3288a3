"""Quantization of feature columns to uint8, with a separate scale for each channel.

A channel is a position on axis 1: feature maps [N, D, H, W] and rows of features [N, D] have D channels. Element e of
channel d represents `minimum[d] + e * step[d]`, computed in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGEST = float(np.finfo(np.float16).max)
"""Largest absolute value that can be encoded; equal to float16's, so that both types accept the same values."""
MAX_SCALE = float(np.float32(2 * LARGEST / 255))
_LEVELS = np.float32(255)
# Smaller spans are treated as 0, because the division would leave float32's normal range.
_MIN_SPAN = np.float32(2.0**-110)


def quantize(numbers: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Encodes finite float32 numbers of absolute value at most `LARGEST`.

    A channel with equal numbers has step 0; a channel without numbers has step 0 and minimum 0. In other channels the
    error is at most half the channel's step, plus float32 rounding.

    Args:
        numbers: Array `[N, D, ...]`, float32.

    Returns:
        `(elements, step, minimum)`: uint8 in the shape of `numbers`, and twice `[D]` float32.
    """
    across = tuple(axis for axis in range(numbers.ndim) if axis != 1)
    if not numbers.size:
        none = np.zeros(numbers.shape[1], np.float32)
        return np.zeros(numbers.shape, np.uint8), none, none
    minimum = numbers.min(axis=across)
    span = numbers.max(axis=across) - minimum
    step = np.where(span < _MIN_SPAN, np.float32(0), span / _LEVELS)
    shape = (1, -1, *[1] * (numbers.ndim - 2))
    divisor = np.where(step > 0, step, np.float32(1)).reshape(shape)
    elements = np.rint((numbers - minimum.reshape(shape)) / divisor)
    return np.minimum(elements, _LEVELS).astype(np.uint8), step, minimum


def dequantize(elements: NDArray[Any], step: NDArray[Any], minimum: NDArray[Any]) -> NDArray[Any]:
    """Decodes the result of `quantize` to read-only float32 in the shape of `elements`."""
    shape = (1, -1, *[1] * (elements.ndim - 2))
    result: NDArray[Any] = elements * step.reshape(shape)
    result += minimum.reshape(shape)
    result.flags.writeable = False
    return result
