"""The checks of a batch of inputs that an app passes to a delivered model, and of its logits."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fleetdistill.data.samples import shape_advice
from fleetdistill.errors import DataError, ModelError

logger = logging.getLogger(__name__)

_FAR = 4
"""A value is far outside a range if it is this many times the range's width away from it."""


def shape_message(found: Sequence[int], input_shape: Sequence[int | None]) -> str:
    """Returns the message for inputs that do not have the shape `[samples, *input_shape]`."""
    expected = ", ".join(["samples", *("any" if item is None else str(item) for item in input_shape)])
    return f"the inputs have shape {list(found)}, expected [{expected}]"


def check_batch(inputs: Any, input_shape: Sequence[int | None] | None) -> None:
    """Checks inputs of a delivered model.

    Args:
        inputs: NumPy array or torch tensor.
        input_shape: Shape of one input, with None where the model accepts any size; None if it is unknown.

    Raises:
        DataError: The inputs are not floats, have another shape than `[samples, *input_shape]`, or are not finite.
    """
    if not _is_of_floats(inputs):
        dtype = getattr(inputs, "dtype", type(inputs).__name__)
        remedy = "scale images like the training data" if hasattr(inputs, "dtype") else "convert with numpy.asarray"
        raise DataError(f"the inputs are {dtype}, expected an array of floats; {remedy}")
    sizes = tuple(inputs.shape[1:])
    input_shape = [None] * max(len(sizes), 1) if input_shape is None else input_shape
    fits = len(sizes) == len(input_shape) and all(
        expected in (None, size) for size, expected in zip(sizes, input_shape, strict=True)
    )
    if not inputs.ndim or not fits:
        raise DataError(f"{shape_message(inputs.shape, input_shape)}{_remedy(tuple(inputs.shape), input_shape)}")
    finite = inputs.isfinite() if hasattr(inputs, "isfinite") else np.isfinite(inputs)
    if not bool(finite.all()):
        row = [bool(item.all()) for item in finite].index(False)
        raise DataError(f"the inputs contain NaN or infinite values, first in row {row}")


def check_logits(logits: Any) -> None:
    """Raises ModelError if a model gives NaN, of which argmax would make a class; infinite logits are allowed.

    Args:
        logits: `[batch, classes]`, a NumPy array or a torch tensor.
    """
    bad = logits != logits
    if bool(bad.any()):
        row = [bool(item.any()) for item in bad].index(True)
        raise ModelError(
            f"the model gives NaN, first for row {row}, because of its weights or of an overflow; check the scale of "
            "the inputs, or return to an earlier version with device.roll_back()"
        )


def _remedy(shape: tuple[int, ...], input_shape: Sequence[int | None]) -> str:
    """Returns what to do about inputs of another shape; empty if nothing is obvious."""
    known = tuple(size for size in input_shape if size is not None)
    if shape[1:] and len(known) == len(input_shape) and math.prod(shape[1:]) == math.prod(known):
        return shape_advice(shape[1:], known)
    return "; a single sample is a batch of 1" if len(shape) == len(input_shape) else ""


def _is_of_floats(inputs: Any) -> bool:
    dtype = getattr(inputs, "dtype", None)
    return getattr(dtype, "kind", "") == "f" or bool(getattr(dtype, "is_floating_point", False))


def range_of(inputs: Any) -> tuple[float, float] | None:
    """Returns the smallest and the largest value of inputs; None if there is no value."""
    return None if inputs is None or 0 in inputs.shape else (float(inputs.min()), float(inputs.max()))


class RangeCheck:
    """Logs one warning if a batch lies far outside the range of the training data: the logits are meaningless then.

    An app that trains on pixels of 0 to 1 and predicts with 0 to 255 gets confident wrong answers without an error.
    The opposite is not noticed, because a dark image has small values, too.

    Args:
        expected: Range of the first training samples; None if it is unknown.
    """

    def __init__(self, expected: tuple[float, float] | None) -> None:
        self._expected = expected

    def check(self, inputs: Any) -> None:
        """Checks a batch that the model has accepted."""
        expected = self._expected
        if expected is None or (found := range_of(inputs)) is None:
            return
        (low, high), (lowest, highest) = expected, found
        margin = _FAR * (high - low)
        if margin and (lowest < low - margin or highest > high + margin):
            self._expected = None
            logger.warning(
                "the inputs of predict have values in [%g, %g], but the training data in [%g, %g]; scale them like the "
                "training data, else the logits are meaningless. Logged once for each version of the model",
                *found,
                *expected,
            )


def free_size(input_shape: Sequence[int]) -> list[int | None]:
    """Returns the shape of one input with any size in all dimensions but the first, the channels."""
    return [*input_shape[:1], *(None for _ in input_shape[1:])]
