"""From shares to whole rows: the arithmetic that partitions have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill_server.simulation.data.split import Floats, Ints, Partition, check_nobody_empty, no_split, sorted_rows


def mask_full_devices(shares_k: Floats, loads_k: Ints, even_share: float) -> Floats:
    """Takes the share of devices that hold `even_share` rows or more and renormalises; all 0 if nothing is left."""
    open_k = np.where(loads_k < even_share, shares_k, 0.0)
    total = open_k.sum()
    return open_k / total if total > 0 else open_k


def cut_sizes(shares_k: Floats, count: int) -> Ints:
    """Sizes of the pieces when `count` rows are cut at floor(cumsum(shares) · count); they sum to `count`."""
    # Without 1e-9 a sum such as 0.9999999 leaves a row for the last device even when its share is 0.
    cuts = np.minimum(np.floor(np.cumsum(shares_k) * count + 1e-9), count).astype(np.int64)
    cuts[-1] = count
    return np.diff(cuts, prepend=0)


def largest_remainder(shares: Floats, total: int) -> Ints:
    """Whole numbers closest to `shares · total` that sum to `total`; of equal remainders the first wins."""
    wanted = shares * total
    counts = np.floor(wanted + 1e-9).astype(np.int64)
    order = np.argsort(counts - wanted, kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


def floor_or_largest(shares: Floats, total: int) -> Ints:
    """`shares · total` rounded down, or 1 for the largest share if that is 0 everywhere; may sum to less."""
    counts = np.floor(shares * total).astype(np.int64)
    if not counts.any():
        counts[shares.argmax()] = 1
    return counts


def counts_from_pools(prior_c: Floats, pools_c: Ints, size: int, rounding: str = "largest_remainder") -> Ints:
    """How many rows a device takes from each class pool: `size` in all, after `prior_c` as far as the pools last."""
    counts_c = np.zeros_like(pools_c)
    while (missing := size - int(counts_c.sum())) > 0:  # each turn takes a row at least
        left_c = pools_c - counts_c
        shares_c = np.where(left_c > 0, prior_c, 0.0)
        shares_c = shares_c if shares_c.sum() > 1e-12 else left_c.astype(np.float64)
        counts_c += np.minimum(ROUNDINGS[rounding](shares_c / shares_c.sum(), missing), left_c)
    return counts_c


def deal_classes(
    pools: list[Ints], devices: int, alpha: float, rng: np.random.Generator, *, balance: bool
) -> list[Ints]:
    even_share = sum(len(pool) for pool in pools) / devices
    pieces: list[list[Ints]] = [[] for _ in range(devices)]
    loads_k = np.zeros(devices, dtype=np.int64)
    for pool in pools:
        rows = rng.permutation(pool)
        shares_k = rng.dirichlet(np.full(devices, alpha))
        if balance:
            shares_k = _balanced(shares_k, loads_k, even_share, alpha, rng)
        sizes_k = cut_sizes(shares_k, len(pool))
        loads_k += sizes_k
        for mine, piece in zip(pieces, np.split(rows, np.cumsum(sizes_k)[:-1]), strict=True):
            mine.append(piece)
    return [np.concatenate(mine) for mine in pieces]


def _balanced(shares_k: Floats, loads_k: Ints, even_share: float, alpha: float, rng: np.random.Generator) -> Floats:
    masked_k = mask_full_devices(shares_k, loads_k, even_share)
    if masked_k.any():
        return masked_k
    # A tiny alpha can put all mass on full devices. Dir(alpha) restricted to some devices and renormalised
    # is Dir(alpha) over those devices, so this draw has the law that the paper's code means.
    open_k = np.flatnonzero(loads_k < even_share)
    masked_k[open_k] = rng.dirichlet(np.full(len(open_k), alpha))
    return masked_k


def deal_to_holders(
    kind: str, labels: Ints, held_ks: Ints, seed: int, settings: Mapping[str, float | str]
) -> Partition:
    """Cuts each class between the devices that hold it; `held_ks[k]` are device k's classes."""
    unbalanced = float(settings["unbalanced"])
    if not (math.isfinite(unbalanced) and unbalanced >= 0):
        raise ConfigurationError(f"unbalanced is {unbalanced}, must be a finite number >= 0")
    rng = np.random.default_rng(seed)
    pieces: list[list[Ints]] = [[] for _ in held_ks]
    for label in np.unique(held_ks):
        holders = np.flatnonzero((held_ks == label).any(axis=1))
        weights = rng.lognormal(sigma=unbalanced, size=len(holders))
        rows = rng.permutation(np.flatnonzero(labels == label))
        sizes = largest_remainder(weights / weights.sum(), len(rows))
        for holder, piece in zip(holders, np.split(rows, np.cumsum(sizes)[:-1]), strict=True):
            pieces[holder].append(piece)
    parts = [np.concatenate(mine) for mine in pieces]
    check_nobody_empty(kind, [len(rows) for rows in parts])
    return Partition(kind, sorted_rows(parts), {"devices": len(held_ks), "seed": seed, **settings})


def device_sizes(count: int, devices: int, unbalanced: float, rng: np.random.Generator) -> list[int]:
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
