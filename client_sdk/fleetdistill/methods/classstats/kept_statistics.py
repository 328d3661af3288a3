"""Checks of the fleet's class statistics, and their conversion to and from saved state."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetdistill.errors import WireError
from fleetdistill.knowledge import Array, ClassStatistics
from fleetdistill.methods.classstats.averaged_config import MOST_RANK


def check_statistics(sent: ClassStatistics, size: int, classes: int) -> None:
    """Checks statistics from the server.

    Args:
        sent: The statistics.
        size: F, numbers of the device's features.
        classes: C, classes of the contract.

    Raises:
        WireError: A class or a shape does not fit the run, or a number is not finite.
    """
    known = len(sent.labels)
    if len(set(sent.labels)) != known or any(not 0 <= label < classes for label in sent.labels):
        raise WireError(f"the fleet's classes are {sent.labels[:20]}, expected distinct ones in [0, {classes})")
    if not known:
        return
    rank = 0 if sent.directions is None or sent.directions.ndim != 3 else sent.directions.shape[1]
    wanted = {"counts": (known,), "means": (known, size), "directions": (known, rank, size), "variances": (known, size)}
    for name, shape in wanted.items():
        array = getattr(sent, name)
        if array is None and name in ("directions", "variances"):
            continue
        found = None if array is None else array.shape
        if found != shape or rank > MOST_RANK or not np.isfinite(array).all():
            text = f"expected finite numbers of {list(shape)}, at most {MOST_RANK} directions"
            raise WireError(f"the {name} of the fleet's classes have shape {found and list(found)}, {text}")


def packed(sent: ClassStatistics) -> list[Any]:
    """Returns class statistics in the form that `fleetdistill.state.state_file` stores, with wire dtypes."""

    def tensor(array: Array | None) -> Tensor | None:
        if array is None:
            return None
        # The wire has at most float32. The copy is needed because received arrays are mapped from a file.
        return torch.from_numpy(np.array(array, dtype=np.float32 if array.dtype == np.float64 else None))

    return [list(sent.labels), *map(tensor, (sent.counts, sent.means, sent.directions, sent.variances))]


def unpacked(state: list[Any]) -> ClassStatistics:
    """Returns the statistics in a value of `packed`."""
    labels, *tensors = state
    counts, means, directions, variances = (None if one is None else one.numpy() for one in tensors)
    return ClassStatistics(labels=labels, counts=counts, means=means, directions=directions, variances=variances)
