"""The check of a batch of inputs that an app passes to a delivered model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetdistill.errors import DataError


def shape_message(found: Sequence[int], input_shape: Sequence[int | str]) -> str:
    """Returns the message for inputs that do not have the shape `[samples, *input_shape]`."""
    expected = ", ".join(["samples", *map(str, input_shape)])
    return f"the inputs have shape {list(found)}, expected [{expected}]"


def check_batch(inputs: Any, input_shape: Sequence[int], *, dynamic_size: bool = False) -> None:
    """Checks inputs of a delivered model.

    Args:
        inputs: NumPy array or torch tensor.
        input_shape: Shape of one input of the run.
        dynamic_size: Whether the model accepts other sizes than the run's in all dimensions of an input but the first.

    Raises:
        DataError: The inputs are not floats, or have another shape than `[samples, *input_shape]`.
    """
    if not hasattr(inputs, "dtype") or "float" not in str(inputs.dtype):
        found = getattr(inputs, "dtype", type(inputs).__name__)
        raise DataError(f"the inputs are {found}, expected an array of floats; scale images as the training data")
    expected: list[int | str] = list(input_shape)
    if dynamic_size:
        expected[1:] = ["any"] * (len(expected) - 1)
    found = list(inputs.shape[1:])
    fits = len(found) == len(expected) and all(one in ("any", size) for size, one in zip(found, expected, strict=True))
    if not inputs.ndim or not fits:
        raise DataError(f"{shape_message(inputs.shape, expected)}; a single sample is a batch of 1")
