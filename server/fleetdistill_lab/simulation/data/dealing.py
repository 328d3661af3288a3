"""Converts fractional shares into whole numbers of rows; shared by the partitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill_lab.simulation.data.split import (
    Floats,
    Ints,
    Partition,
    check_no_empty_device,
    no_split,
    sorted_rows,
)

FIRST_ROWS = 10
"""Rows of each of its classes that a device gets before the rest of the class is split in lognormal shares."""


def mask_full_devices(shares_k: Floats, loads_k: Ints, even_share: float) -> Floats:
    """Sets the shares of devices with at least `even_share` rows to 0 and renormalises; all 0 if none remain.

    Args:
        shares_k: `[devices]` shares of a class.
        loads_k: `[devices]` rows that each device has so far.
        even_share: Rows per device in an even split.
    """
    open_k = np.where(loads_k < even_share, shares_k, 0.0)
    total = open_k.sum()
    return open_k / total if total > 0 else open_k


def cut_sizes(shares_k: Floats, count: int) -> Ints:
    """Returns the sizes of the pieces of `count` rows cut at floor(cumsum(shares) · count); they sum to `count`."""
    # Without 1e-9, a sum of 0.9999999 would give the last device a row even if its share is 0.
    cuts = np.minimum(np.floor(np.cumsum(shares_k) * count + 1e-9), count).astype(np.int64)
    cuts[-1] = count
    return np.diff(cuts, prepend=0)


def largest_remainder(shares: Floats, total: int) -> Ints:
    """Rounds `shares · total` to integers that sum to `total`, by largest remainder; ties go to the first."""
    wanted = shares * total
    counts = np.floor(wanted + 1e-9).astype(np.int64)
    order = np.argsort(counts - wanted, kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


def floor_or_largest(shares: Floats, total: int) -> Ints:
    """Rounds `shares · total` down; if all are 0, gives 1 to the largest share. The sum may be below `total`."""
    counts = np.floor(shares * total).astype(np.int64)
    if not counts.any():
        counts[shares.argmax()] = 1
    return counts


def counts_from_pools(prior_c: Floats, pools_c: Ints, size: int, rounding: str = "largest_remainder") -> Ints:
    """Returns how many rows a device takes from each class: `size` in total, by `prior_c` until a pool is empty.

    Args:
        prior_c: `[classes]` probabilities.
        pools_c: `[classes]` rows left of each class.
        size: Rows to take, at most the sum of `pools_c`.
        rounding: A name in `ROUNDINGS`.
    """
    counts_c = np.zeros_like(pools_c)
    while (missing := size - int(counts_c.sum())) > 0:  # each iteration takes at least one row
        left_c = pools_c - counts_c
        shares_c = np.where(left_c > 0, prior_c, 0.0)
        shares_c = shares_c if shares_c.sum() > 1e-12 else left_c.astype(np.float64)
        counts_c += np.minimum(ROUNDINGS[rounding](shares_c / shares_c.sum(), missing), left_c)
    return counts_c


def deal_classes(
    pools: list[Ints], devices: int, alpha: float, rng: np.random.Generator, *, balance: bool
) -> list[Ints]:
    """Splits each class over all devices in shares drawn from Dir(alpha); returns each device's rows.

    With `balance`, devices that already have their even share get no further rows.
    """
    even_share = sum(len(pool) for pool in pools) / devices
    pieces: list[list[Ints]] = [[] for _ in range(devices)]
    loads_k = np.zeros(devices, dtype=np.int64)
    for pool in pools:
        rows = rng.permutation(pool)
        shares_k = rng.dirichlet(np.full(devices, alpha))
        if balance:
            shares_k = _balance(shares_k, loads_k, even_share, alpha, rng)
        sizes_k = cut_sizes(shares_k, len(pool))
        loads_k += sizes_k
        for mine, piece in zip(pieces, np.split(rows, np.cumsum(sizes_k)[:-1]), strict=True):
            mine.append(piece)
    return [np.concatenate(mine) for mine in pieces]


def _balance(shares_k: Floats, loads_k: Ints, even_share: float, alpha: float, rng: np.random.Generator) -> Floats:
    masked_k = mask_full_devices(shares_k, loads_k, even_share)
    if masked_k.any():
        return masked_k
    # A tiny alpha can put all mass on full devices. Dir(alpha) restricted to some devices and renormalised
    # is Dir(alpha) over those devices, so this draw has the distribution of the paper's code.
    open_k = np.flatnonzero(loads_k < even_share)
    masked_k[open_k] = rng.dirichlet(np.full(len(open_k), alpha))
    return masked_k


def deal_to_holders(
    kind: str, labels: Ints, held_ks: Ints, seed: int, settings: Mapping[str, float | str]
) -> Partition:
    """Splits each class over the devices that hold it, evenly or in lognormal shares.

    As in CDKT-FL's code, every holder first gets `FIRST_ROWS` rows of the class, or an even share if there are fewer;
    the shares are those of the rest.

    Args:
        kind: Name of the partition.
        labels: `[N]` labels.
        held_ks: `[devices, classes_per_device]`; row k has device k's classes.
        seed: Seed of the split.
        settings: The partition's parameters; `unbalanced` is the lognormal sigma.
    """
    unbalanced = float(settings["unbalanced"])
    if not (math.isfinite(unbalanced) and unbalanced >= 0):
        raise ConfigurationError(f"unbalanced is {unbalanced}, must be a finite number >= 0")
    rng = np.random.default_rng(seed)
    pieces: list[list[Ints]] = [[] for _ in held_ks]
    for label in np.unique(held_ks):
        holders = np.flatnonzero((held_ks == label).any(axis=1))
        weights = rng.lognormal(sigma=unbalanced, size=len(holders))
        rows = rng.permutation(np.flatnonzero(labels == label))
        first = min(FIRST_ROWS, len(rows) // len(holders))
        sizes = first + largest_remainder(weights / weights.sum(), len(rows) - first * len(holders))
        for holder, piece in zip(holders, np.split(rows, np.cumsum(sizes)[:-1]), strict=True):
            pieces[holder].append(piece)
    parts = [np.concatenate(mine) for mine in pieces]
    check_no_empty_device(kind, [len(rows) for rows in parts])
    return Partition(kind, sorted_rows(parts), {"devices": len(held_ks), "seed": seed, **settings})


def device_sizes(count: int, devices: int, unbalanced: float, rng: np.random.Generator) -> list[int]:
    """Returns the number of rows of each device: equal, or lognormal with sigma `unbalanced`."""
    if unbalanced == 0:
        return [count // devices] * devices
    weights = rng.lognormal(sigma=unbalanced, size=devices)
    sizes: list[int] = np.floor(weights / weights.sum() * count).astype(np.int64).tolist()
    if min(sizes) < 1:
        raise DataError(no_split(1, f"the lognormal sizes with sigma {unbalanced} are {sizes}"))
    return sizes


ROUNDINGS: Mapping[str, Callable[[Floats, int], Ints]] = {
    "largest_remainder": largest_remainder,
    "floor": floor_or_largest,
}
