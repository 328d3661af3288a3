"""Represents a partition of rows over devices and checks the arguments of the partition functions."""

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
    """Assignment of a data set's rows to devices.

    Attributes:
        kind: Name of the partition in `PARTITIONS`.
        indices: Each device's rows, int64, ascending; no row belongs to two devices.
        parameters: Arguments of the partition: devices, seed and the kind's own settings.
    """

    kind: str
    indices: tuple[Ints, ...]
    parameters: Mapping[str, float | str]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows of each device."""
        return tuple(len(rows) for rows in self.indices)

    def class_counts(self, labels: npt.ArrayLike, classes: int) -> Ints:
        """Returns the number of rows of each device and class, `[devices, classes]` int64.

        Raises:
            DataError: A label is outside [0, classes).
        """
        y = check_labels(labels)
        if y.max(initial=0) >= classes:
            raise DataError(f"label {y.max()} at row {y.argmax()} is outside [0, {classes})")
        return np.stack([np.bincount(y[rows], minlength=classes) for rows in self.indices]).astype(np.int64)


def check_classes_per_device(count: int, classes: int) -> None:
    """Raises ConfigurationError unless `count` is between 1 and the number of classes."""
    if not 1 <= count <= classes:
        raise ConfigurationError(
            f"classes_per_device is {count}, must be between 1 and {classes}, the number of classes"
        )


def check_no_empty_device(kind: str, sizes: list[int]) -> None:
    """Raises DataError if a device or a shard has no rows."""
    if min(sizes) < 1:
        raise DataError(no_split(1, f"{kind} results in sizes {sizes}"))


def no_split(min_size: int, reason: str) -> str:
    """Returns the error message for a partition that cannot give every device `min_size` rows."""
    return (
        f"cannot give every device {min_size} or more rows: {reason}; "
        "use fewer devices, more data, a larger alpha, another seed, or partition iid"
    )


def sorted_rows(parts: list[npt.NDArray[np.intp]]) -> tuple[Ints, ...]:
    """Returns each device's rows in ascending order as int64."""
    return tuple(np.sort(rows).astype(np.int64) for rows in parts)


def check_clients(labels: npt.ArrayLike, devices: int) -> Ints:
    """Returns the labels as int64, after checking them and the number of devices.

    Raises:
        ConfigurationError: `devices` is below 1.
        DataError: The labels are not valid, or there are fewer rows than devices.
    """
    y = check_labels(labels)
    if devices < 1:
        raise ConfigurationError(f"devices is {devices}, must be at least 1")
    if devices > len(y):
        raise DataError(f"{devices} devices cannot share {len(y)} rows; use fewer devices or more data")
    return y


def check_labels(labels: npt.ArrayLike) -> Ints:
    """Returns the labels as int64 `[rows]`.

    Raises:
        DataError: The labels are not a vector of integers of at least 0.
    """
    y = np.asarray(labels)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"the labels are {y.dtype} of shape {list(y.shape)}, expected integers of shape [rows]")
    if len(y) and y.min() < 0:
        raise DataError(f"label {y.min()} at row {y.argmin()} is negative; labels start at 0")
    return y.astype(np.int64)


def check_alpha(alpha: float) -> None:
    """Raises ConfigurationError unless `alpha` is finite and above 0."""
    if not (math.isfinite(alpha) and alpha > 0):
        raise ConfigurationError(f"alpha is {alpha}, must be a finite number > 0")
