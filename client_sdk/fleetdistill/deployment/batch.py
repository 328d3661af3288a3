"""The check of a batch of inputs that an app passes to a delivered model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fleetdistill.errors import DataError


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
        remedy = "; a single sample is a batch of 1" if inputs.ndim == len(input_shape) else ""
        raise DataError(f"{shape_message(inputs.shape, input_shape)}{remedy}")
    finite = inputs.isfinite() if hasattr(inputs, "isfinite") else np.isfinite(inputs)
    if not bool(finite.all()):
        row = [bool(item.all()) for item in finite].index(False)
        raise DataError(f"the inputs contain NaN or infinite values, first in row {row}")


def _is_of_floats(inputs: Any) -> bool:
    dtype = getattr(inputs, "dtype", None)
    return getattr(dtype, "kind", "") == "f" or bool(getattr(dtype, "is_floating_point", False))


def free_size(input_shape: Sequence[int]) -> list[int | None]:
    """Returns the shape of one input with any size in all dimensions but the first, the channels."""
    return [*input_shape[:1], *(None for _ in input_shape[1:])]
