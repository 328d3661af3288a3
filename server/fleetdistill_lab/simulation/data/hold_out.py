"""Selects held-out rows: a proxy set before the partition, and each device's validation data after it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill_lab.simulation.data.dealing import largest_remainder
from fleetdistill_lab.simulation.data.split import Ints, check_labels


def proxy_rows(labels: npt.ArrayLike, per_class: int) -> tuple[Ints, Ints]:
    """Selects the last rows of each class as a class-balanced proxy set.

    Args:
        labels: `[N]` integers, at least 0.
        per_class: Number of rows per class, at least 0.

    Returns:
        The indices of the proxy set's rows and of all other rows, both int64 and ascending.

    Raises:
        ConfigurationError: `per_class` is negative.
        DataError: The labels are not valid, or a class would have no rows left.
    """
    y = check_labels(labels)
    if per_class < 0:
        raise ConfigurationError(f"proxy_per_class is {per_class}, must be at least 0")
    pools = [np.flatnonzero(y == label) for label in np.unique(y)]
    smallest = min(map(len, pools), default=0)
    if per_class >= smallest:
        text = f"proxy_per_class is {per_class}, but the smallest class has {smallest} rows"
        raise DataError(f"{text}; set proxy_per_class to at most {max(smallest - 1, 0)}")
    taken = np.sort(np.concatenate([pool[len(pool) - per_class :] for pool in pools])).astype(np.int64)
    return taken, np.setdiff1d(np.arange(len(y)), taken).astype(np.int64)


def hold_out_validation(labels: npt.ArrayLike, rows: Ints, share: float, seed: int) -> tuple[Ints, Ints]:
    """Selects a stratified share of one device's rows as validation data.

    Args:
        labels: `[N]` integers, the whole data set's labels.
        rows: `[n]` int64, ascending; the device's rows.
        share: Fraction to hold out, in [0, 1), rounded to the nearest number of rows.
        seed: Seed of the selection.

    Returns:
        The training rows and the held-out rows, both ascending. Every class keeps at least one training row, so fewer
        rows than `share` may be held out.
    """
    classes_n = np.asarray(labels)[rows]
    count = round(share * len(rows))
    if not count:
        return rows, rows[:0]
    _, first, sizes = np.unique(classes_n, return_index=True, return_counts=True)
    wanted = np.minimum(largest_remainder(sizes / len(rows), count), sizes - 1)
    rng = np.random.default_rng(seed)
    pools = [rng.permutation(rows[classes_n == classes_n[at]]) for at in first]
    held_out = np.sort(np.concatenate([pool[:take] for pool, take in zip(pools, wanted, strict=True)]))
    return np.setdiff1d(rows, held_out), held_out
