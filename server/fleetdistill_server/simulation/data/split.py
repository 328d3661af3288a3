"""A split of rows over devices, and what makes one valid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fleetdistill.errors import ConfigurationError, DataError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Which rows each device gets.

    Attributes:
        kind: Name of the partition in `PARTITIONS`.
        indices: For each device its rows, int64, ascending; no row belongs to two devices.
        parameters: Everything else that the lists follow from: devices, seed and the kind's own settings.
    """

    kind: str
    indices: tuple[Ints, ...]
    parameters: Mapping[str, float | str]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each device."""
        return tuple(len(rows) for rows in self.indices)

    def class_counts(self, labels: npt.ArrayLike, classes: int) -> Ints:
        """Counts `[devices, classes]` int64: how many rows of each class a device has.

        Raises:
            DataError: A label is outside [0, classes).
        """
        y = checked_labels(labels)
        if y.max(initial=0) >= classes:
            raise DataError(f"label {y.max()} at row {y.argmax()} is outside [0, {classes})")
        return np.stack([np.bincount(y[rows], minlength=classes) for rows in self.indices]).astype(np.int64)


def check_classes_per_device(count: int, classes: int) -> None:
    if not 1 <= count <= classes:
        raise ConfigurationError(
            f"classes_per_device is {count}, must be between 1 and the {classes} classes there are"
        )


def check_nobody_empty(kind: str, sizes: list[int]) -> None:
    if min(sizes) < 1:
        raise DataError(no_split(1, f"{kind} gives {sizes} rows"))


def no_split(min_size: int, reason: str) -> str:
    return (
        f"no split with the wanted minimum size {min_size}: {reason}; "
        "use fewer devices, a larger alpha, a smaller min_size, more data or another seed"
    )


def sorted_rows(parts: list[npt.NDArray[np.intp]]) -> tuple[Ints, ...]:
    return tuple(np.sort(rows).astype(np.int64) for rows in parts)


def checked_for(labels: npt.ArrayLike, devices: int) -> Ints:
    y = checked_labels(labels)
    if devices < 1:
        raise ConfigurationError(f"devices is {devices}, must be at least 1")
    if devices > len(y):
        raise DataError(f"{devices} devices cannot share {len(y)} rows; use fewer devices or more data")
    return y


def checked_labels(labels: npt.ArrayLike) -> Ints:
    y = np.asarray(labels)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"the labels are {y.dtype} of shape {list(y.shape)}, expected integers of [rows]")
    if len(y) and y.min() < 0:
        raise DataError(f"label {y.min()} at row {y.argmin()} is negative; labels start at 0")
    return y.astype(np.int64)


def check_alpha(alpha: float) -> None:
    if not (math.isfinite(alpha) and alpha > 0):
        raise ConfigurationError(f"alpha is {alpha}, must be a finite number > 0")
