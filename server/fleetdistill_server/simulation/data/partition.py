"""How a data set is dealt out to simulated devices.

Every partition is a pure function of the labels, the number of devices, its parameters and the seed. "By class
over devices" and "per device over classes" with the same alpha are different problems, so print `Partition.kind` with
every result.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill.names import unknown_name

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
        y = _checked_labels(labels)
        if y.max(initial=0) >= classes:
            raise DataError(f"label {y.max()} at row {y.argmax()} is outside [0, {classes})")
        return np.stack([np.bincount(y[rows], minlength=classes) for rows in self.indices]).astype(np.int64)


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
    y = _checked_labels(labels)
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


def iid(labels: npt.ArrayLike, devices: int, seed: int) -> Partition:
    """Shuffles all rows and splits them evenly; sizes differ by one at most and every row is used."""
    y = _checked(labels, devices)
    parts = np.array_split(np.random.default_rng(seed).permutation(len(y)), devices)
    return Partition("iid", _sorted(parts), {"devices": devices, "seed": seed})


def dirichlet_by_class(
    labels: npt.ArrayLike,
    devices: int,
    alpha: float,
    seed: int,
    *,
    min_size: int = 10,
    balance: bool = True,
    max_tries: int = 1000,
) -> Partition:
    """Deals each class out over the devices in shares drawn from Dir(alpha · 1_devices).

    All rows are used and the sizes are unequal by design. With `balance` a device that holds its even share already
    gets nothing of the classes after that, so the skew that results is lower than alpha suggests for late classes.

    Args:
        labels: `[N]` integers, at least 0.
        devices: Between 1 and N.
        alpha: Concentration, finite and greater than 0; small is skewed, large is even.
        min_size: Smallest number of rows of a device; a split below it is drawn again from scratch.
        max_tries: Splits drawn before giving up, at least 1.

    Raises:
        ConfigurationError: An argument is out of range.
        DataError: The labels cannot be used, or no split with the wanted minimum size was found.

    References:
        Wang et al., Federated Learning with Matched Averaging; the code of FedML, MOON, NIID-Bench and FedICT.
    """
    y = _checked(labels, devices)
    _check_alpha(alpha)
    if max_tries < 1 or min_size < 0:
        raise ConfigurationError(f"max_tries is {max_tries} and min_size {min_size}; must be at least 1 and 0")
    if min_size * devices > len(y):
        raise DataError(_no_split(min_size, f"{devices} devices of {min_size} rows need more than {len(y)} rows"))
    rng = np.random.default_rng(seed)
    pools = [np.flatnonzero(y == label) for label in np.unique(y)]
    for _ in range(max_tries):
        parts = _deal_classes(pools, devices, alpha, rng, balance=balance)
        if min(len(rows) for rows in parts) >= min_size:
            settings = {"alpha": alpha, "min_size": min_size, "balance": balance, "max_tries": max_tries}
            return Partition("dirichlet_by_class", _sorted(parts), {"devices": devices, "seed": seed, **settings})
    raise DataError(_no_split(min_size, f"none of {max_tries} draws for {devices} devices, alpha {alpha}, had it"))


def dirichlet_per_device(
    labels: npt.ArrayLike,
    devices: int,
    alpha: float,
    seed: int,
    *,
    unbalanced: float = 0.0,
    rounding: str = "largest_remainder",
) -> Partition:
    """Fills each device to a fixed size with its own class mix, drawn from Dir(alpha · 1_classes).

    Rows are drawn without replacement, device after device; the share of a class that has run out goes to the
    others in proportion, and to whatever is left if the device's mix lies on run-out classes only. So late devices are
    less skewed, or skewed towards what is left. The remainder of N / devices is not used.

    Args:
        labels: `[N]` integers, at least 0.
        devices: Between 1 and N.
        alpha: Concentration, finite and greater than 0.
        unbalanced: Sigma of lognormal device sizes; 0 gives every device floor(N / devices) rows.
        rounding: How shares become whole rows, a name in `ROUNDINGS`. `floor` hands what rounding down leaves to
            the device's largest class, which raises the skew, above all with many classes and small devices.

    Raises:
        ConfigurationError: An argument is out of range.
        DataError: The labels cannot be used, or a lognormal size came out as 0.

    References:
        Acar et al., Federated Learning Based on Dynamic Regularization, and its code. Theirs redraws a class until
        one is left, which need not end; ours does.
    """
    y = _checked(labels, devices)
    _check_alpha(alpha)
    if not (math.isfinite(unbalanced) and unbalanced >= 0):
        raise ConfigurationError(f"unbalanced is {unbalanced}, must be a finite number >= 0")
    if rounding not in ROUNDINGS:
        raise ConfigurationError(f"unknown rounding {rounding!r}; known are {', '.join(ROUNDINGS)}")
    rng = np.random.default_rng(seed)
    pools = [rng.permutation(np.flatnonzero(y == label)) for label in np.unique(y)]
    parts = []
    for size in _device_sizes(len(y), devices, unbalanced, rng):
        prior_c = rng.dirichlet(np.full(len(pools), alpha))
        taken_c = counts_from_pools(prior_c, np.array([len(pool) for pool in pools]), size, rounding)
        parts.append(np.concatenate([pool[:taken] for pool, taken in zip(pools, taken_c, strict=True)]))
        pools = [pool[taken:] for pool, taken in zip(pools, taken_c, strict=True)]
    settings: dict[str, float | str] = {"alpha": alpha, "unbalanced": unbalanced, "rounding": rounding}
    return Partition("dirichlet_per_device", _sorted(parts), {"devices": devices, "seed": seed, **settings})


def classes_window(
    labels: npt.ArrayLike,
    devices: int,
    classes_per_device: int,
    seed: int,
    *,
    stride: int = 1,
    unbalanced: float = 0.0,
) -> Partition:
    """Device k holds the classes stride · k + j mod C, j < `classes_per_device`, as in CDKT-FL's code.

    A class is cut evenly between its holders, or in lognormal shares; no row is left over but those of a class that
    nobody holds.

    Args:
        labels: `[N]` integers, at least 0.
        devices: Between 1 and N.
        classes_per_device: Between 1 and C.
        stride: Distance of two devices' first classes, at least 1; CDKT-FL has 10 for CIFAR-100's windows of 30.
        unbalanced: Sigma of the lognormal shares; 0 cuts evenly. CDKT-FL has 1 for Fashion-MNIST and 2 for CIFAR-10.

    Raises:
        ConfigurationError: An argument is out of range.
        DataError: The labels cannot be used, or a device would get no row.
    """
    y = _checked(labels, devices)
    if stride < 1:
        raise ConfigurationError(f"stride is {stride}, must be at least 1")
    present = np.unique(y)
    _check_classes_per_device(classes_per_device, len(present))
    places = (stride * np.arange(devices)[:, None] + np.arange(classes_per_device)) % len(present)
    settings = {"classes_per_device": classes_per_device, "stride": stride, "unbalanced": unbalanced}
    return _deal_to_holders("classes_window", y, present[places], seed, settings)


def classes_random(
    labels: npt.ArrayLike, devices: int, classes_per_device: int, seed: int, *, unbalanced: float = 0.0
) -> Partition:
    """Each device holds distinct random classes, of which the first is k mod C so that every class has a holder.

    With `classes_per_device = 6` of FEMNIST's letters this is how we read FedDKD's FEMNIST split; NIID-Bench has it
    too. A class is cut evenly between its holders, or in lognormal shares.

    Args:
        labels: `[N]` integers, at least 0.
        devices: Between 1 and N.
        classes_per_device: Between 1 and C.
        unbalanced: Sigma of the lognormal shares; 0 cuts evenly.

    Raises:
        ConfigurationError: An argument is out of range.
        DataError: The labels cannot be used, or a device would get no row.
    """
    y = _checked(labels, devices)
    present = np.unique(y)
    _check_classes_per_device(classes_per_device, len(present))
    rng = np.random.default_rng([seed, devices, classes_per_device])
    held = []
    for number in range(devices):
        first = number % len(present)
        others = rng.permutation(np.delete(np.arange(len(present)), first))[: classes_per_device - 1]
        held.append(present[[first, *others.tolist()]])
    settings = {"classes_per_device": classes_per_device, "unbalanced": unbalanced}
    return _deal_to_holders("classes_random", y, np.stack(held), seed, settings)


def class_shards(labels: npt.ArrayLike, devices: int, classes_per_device: int, seed: int) -> Partition:
    """Cuts each class into s · devices / C pieces and deals s of them to each device, at random.

    A device may get two pieces of one class, so it holds *at most* s = `classes_per_device` classes.

    Args:
        labels: `[N]` integers, at least 0.
        devices: Between 1 and N; s · devices must be a multiple of C.
        classes_per_device: s, at least 1.

    Raises:
        ConfigurationError: An argument is out of range, or the pieces do not come out even.
        DataError: The labels cannot be used, or a piece would be empty.

    References:
        McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data; FedRep, FedNTD.
    """
    y = _checked(labels, devices)
    present = np.unique(y)
    if classes_per_device < 1 or (classes_per_device * devices) % len(present):
        raise ConfigurationError(
            f"{devices} devices of {classes_per_device} shards are {devices * classes_per_device}, which must be a "
            f"multiple of the {len(present)} classes; change devices or classes_per_device"
        )
    rng = np.random.default_rng(seed)
    pieces_each = classes_per_device * devices // len(present)
    pieces = [
        piece for label in present for piece in np.array_split(rng.permutation(np.flatnonzero(y == label)), pieces_each)
    ]
    _check_nobody_empty("class_shards", [len(piece) for piece in pieces])
    order = rng.permutation(len(pieces)).reshape(devices, classes_per_device)
    parts = [np.concatenate([pieces[number] for number in mine]) for mine in order.tolist()]
    settings = {"devices": devices, "seed": seed, "classes_per_device": classes_per_device}
    return Partition("class_shards", _sorted(parts), settings)


def by_client(labels: npt.ArrayLike, devices: int, clients: npt.ArrayLike | None, seed: int) -> Partition:
    """Device k holds what the k-th client of the data set made, such as the k-th writer; nothing is drawn.

    The rows of clients beyond the number of devices are not used.

    Args:
        labels: `[N]` integers, at least 0.
        devices: Between 1 and the number of clients.
        clients: `[N]` integers, whose each row is; None where the data set does not tell.

    Raises:
        ConfigurationError: There are fewer clients than devices.
        DataError: The labels cannot be used, or the data set does not tell.
    """
    y = _checked(labels, devices)
    if clients is None or len(own := np.asarray(clients)) != len(y):
        raise DataError("the data set does not tell whose each row is; by_client needs one that does: femnist-digits")
    present = np.unique(own)
    if devices > len(present):
        raise ConfigurationError(f"{devices} devices, and the data set has {len(present)} clients; take fewer devices")
    parts = [np.flatnonzero(own == client) for client in present[:devices]]
    return Partition("by_client", _sorted(parts), {"devices": devices, "seed": seed})


PARTITIONS: Mapping[str, Callable[..., Partition]] = {
    "iid": iid,
    "dirichlet_by_class": dirichlet_by_class,
    "dirichlet_per_device": dirichlet_per_device,
    "classes_window": classes_window,
    "classes_random": classes_random,
    "class_shards": class_shards,
    "by_client": by_client,
}


def partition_parameters(kind: str) -> tuple[str, ...]:
    """Names of what a partition needs besides labels, devices and seed. Raises ConfigurationError for another kind."""
    needed = inspect.signature(_known(kind)).parameters.values()
    names = (one.name for one in needed if one.default is inspect.Parameter.empty)
    return tuple(name for name in names if name not in ("labels", "devices", "seed"))


def partition(kind: str, labels: npt.ArrayLike, devices: int, seed: int, **parameters: Any) -> Partition:
    """Deals rows out by the partition called `kind`.

    Raises:
        ConfigurationError: `kind` or a parameter is unknown, missing or out of range.
        DataError: The labels cannot be used, or no split was found.
    """
    deal = _known(kind)
    try:
        inspect.signature(deal).bind(labels, devices, seed=seed, **parameters)
    except TypeError as error:
        raise ConfigurationError(f"partition {kind!r}: {error}; it is {kind}{inspect.signature(deal)}") from error
    return deal(labels, devices, seed=seed, **parameters)


def _known(kind: str) -> Callable[..., Partition]:
    if kind not in PARTITIONS:
        raise ConfigurationError(unknown_name("partition", kind, PARTITIONS))
    return PARTITIONS[kind]


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


ROUNDINGS: Mapping[str, Callable[[Floats, int], Ints]] = {
    "largest_remainder": largest_remainder,
    "floor": floor_or_largest,
}


def counts_from_pools(prior_c: Floats, pools_c: Ints, size: int, rounding: str = "largest_remainder") -> Ints:
    """How many rows a device takes from each class pool: `size` in all, after `prior_c` as far as the pools last."""
    counts_c = np.zeros_like(pools_c)
    while (missing := size - int(counts_c.sum())) > 0:  # each turn takes a row at least
        left_c = pools_c - counts_c
        shares_c = np.where(left_c > 0, prior_c, 0.0)
        shares_c = shares_c if shares_c.sum() > 1e-12 else left_c.astype(np.float64)
        counts_c += np.minimum(ROUNDINGS[rounding](shares_c / shares_c.sum(), missing), left_c)
    return counts_c


def _deal_classes(
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


def _deal_to_holders(
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
    _check_nobody_empty(kind, [len(rows) for rows in parts])
    return Partition(kind, _sorted(parts), {"devices": len(held_ks), "seed": seed, **settings})


def _check_classes_per_device(count: int, classes: int) -> None:
    if not 1 <= count <= classes:
        raise ConfigurationError(
            f"classes_per_device is {count}, must be between 1 and the {classes} classes there are"
        )


def _check_nobody_empty(kind: str, sizes: list[int]) -> None:
    if min(sizes) < 1:
        raise DataError(_no_split(1, f"{kind} gives {sizes} rows"))


def _device_sizes(count: int, devices: int, unbalanced: float, rng: np.random.Generator) -> list[int]:
    if unbalanced == 0:
        return [count // devices] * devices
    weights = rng.lognormal(sigma=unbalanced, size=devices)
    sizes: list[int] = np.floor(weights / weights.sum() * count).astype(np.int64).tolist()
    if min(sizes) < 1:
        raise DataError(_no_split(1, f"the lognormal sizes with sigma {unbalanced} are {sizes}"))
    return sizes


def _no_split(min_size: int, reason: str) -> str:
    return (
        f"no split with the wanted minimum size {min_size}: {reason}; "
        "use fewer devices, a larger alpha, a smaller min_size, more data or another seed"
    )


def _sorted(parts: list[npt.NDArray[np.intp]]) -> tuple[Ints, ...]:
    return tuple(np.sort(rows).astype(np.int64) for rows in parts)


def _checked(labels: npt.ArrayLike, devices: int) -> Ints:
    y = _checked_labels(labels)
    if devices < 1:
        raise ConfigurationError(f"devices is {devices}, must be at least 1")
    if devices > len(y):
        raise DataError(f"{devices} devices cannot share {len(y)} rows; use fewer devices or more data")
    return y


def _checked_labels(labels: npt.ArrayLike) -> Ints:
    y = np.asarray(labels)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"the labels are {y.dtype} of shape {list(y.shape)}, expected integers of [rows]")
    if len(y) and y.min() < 0:
        raise DataError(f"label {y.min()} at row {y.argmin()} is negative; labels start at 0")
    return y.astype(np.int64)


def _check_alpha(alpha: float) -> None:
    if not (math.isfinite(alpha) and alpha > 0):
        raise ConfigurationError(f"alpha is {alpha}, must be a finite number > 0")
