"""Rows that are held out before or after the partition: a proxy set, and validation data of each device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill_server.simulation.data.dealing import largest_remainder
from fleetdistill_server.simulation.data.split import Ints, checked_labels


def proxy_rows(labels: npt.ArrayLike, per_class: int) -> tuple[Ints, Ints]:
    """Takes a class-balanced proxy set off a data set, before anything else is dealt out.

    Args:
        labels: `[N]` integers, at least 0.
        per_class: Rows of each class, at least 0: its last ones.

    Returns:
        The proxy set's rows and all others, both int64 and ascending.

    Raises:
        DataError: The labels cannot be used, or a class would have no row left.
    """
    y = checked_labels(labels)
    if per_class < 0:
        raise ConfigurationError(f"proxy_per_class is {per_class}, must be at least 0")
    pools = [np.flatnonzero(y == label) for label in np.unique(y)]
    smallest = min(map(len, pools), default=0)
    if per_class >= smallest:
        raise DataError(f"a proxy set of {per_class} rows a class leaves nothing of a class of {smallest}; take fewer")
    taken = np.sort(np.concatenate([pool[len(pool) - per_class :] for pool in pools])).astype(np.int64)
    return taken, np.setdiff1d(np.arange(len(y)), taken).astype(np.int64)


def hold_out_validation(labels: npt.ArrayLike, rows: Ints, share: float, seed: int) -> tuple[Ints, Ints]:
    """Holds a share of one device's rows out, class by class as the device has them.

    Args:
        labels: `[N]` integers, of the whole data set.
        rows: `[n]` int64 ascending, the device's.
        share: In [0, 1); of n rows the nearest whole number is wanted.
        seed: Decides which.

    Returns:
        The rows to train on and those held out, both ascending. Every class keeps a row to train on, so a device with
        one row of each class holds none out.
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
