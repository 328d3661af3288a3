"""How a data set is dealt out to simulated devices.

Every partition is a pure function of the labels, the number of devices, its parameters and the seed. "By class
over devices" and "per device over classes" with the same alpha are different problems, so print `Partition.kind` with
every result.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill.names import unknown_name
from fleetdistill_server.simulation.data.dealing import (
    ROUNDINGS,
    counts_from_pools,
    deal_classes,
    deal_to_holders,
    device_sizes,
)
from fleetdistill_server.simulation.data.split import (
    Partition,
    check_alpha,
    check_classes_per_device,
    check_nobody_empty,
    checked_for,
    no_split,
    sorted_rows,
)


def iid(labels: npt.ArrayLike, devices: int, seed: int) -> Partition:
    """Shuffles all rows and splits them evenly; sizes differ by one at most and every row is used."""
    y = checked_for(labels, devices)
    parts = np.array_split(np.random.default_rng(seed).permutation(len(y)), devices)
    return Partition("iid", sorted_rows(parts), {"devices": devices, "seed": seed})


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
    y = checked_for(labels, devices)
    check_alpha(alpha)
    if max_tries < 1 or min_size < 0:
        raise ConfigurationError(f"max_tries is {max_tries} and min_size {min_size}; must be at least 1 and 0")
    if min_size * devices > len(y):
        raise DataError(no_split(min_size, f"{devices} devices of {min_size} rows need more than {len(y)} rows"))
    rng = np.random.default_rng(seed)
    pools = [np.flatnonzero(y == label) for label in np.unique(y)]
    for _ in range(max_tries):
        parts = deal_classes(pools, devices, alpha, rng, balance=balance)
        if min(len(rows) for rows in parts) >= min_size:
            settings = {"alpha": alpha, "min_size": min_size, "balance": balance, "max_tries": max_tries}
            return Partition("dirichlet_by_class", sorted_rows(parts), {"devices": devices, "seed": seed, **settings})
    raise DataError(no_split(min_size, f"none of {max_tries} draws for {devices} devices, alpha {alpha}, had it"))


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
    y = checked_for(labels, devices)
    check_alpha(alpha)
    if not (math.isfinite(unbalanced) and unbalanced >= 0):
        raise ConfigurationError(f"unbalanced is {unbalanced}, must be a finite number >= 0")
    if rounding not in ROUNDINGS:
        raise ConfigurationError(f"unknown rounding {rounding!r}; known are {', '.join(ROUNDINGS)}")
    rng = np.random.default_rng(seed)
    pools = [rng.permutation(np.flatnonzero(y == label)) for label in np.unique(y)]
    parts = []
    for size in device_sizes(len(y), devices, unbalanced, rng):
        prior_c = rng.dirichlet(np.full(len(pools), alpha))
        taken_c = counts_from_pools(prior_c, np.array([len(pool) for pool in pools]), size, rounding)
        parts.append(np.concatenate([pool[:taken] for pool, taken in zip(pools, taken_c, strict=True)]))
        pools = [pool[taken:] for pool, taken in zip(pools, taken_c, strict=True)]
    settings: dict[str, float | str] = {"alpha": alpha, "unbalanced": unbalanced, "rounding": rounding}
    return Partition("dirichlet_per_device", sorted_rows(parts), {"devices": devices, "seed": seed, **settings})


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
    y = checked_for(labels, devices)
    if stride < 1:
        raise ConfigurationError(f"stride is {stride}, must be at least 1")
    present = np.unique(y)
    check_classes_per_device(classes_per_device, len(present))
    places = (stride * np.arange(devices)[:, None] + np.arange(classes_per_device)) % len(present)
    settings = {"classes_per_device": classes_per_device, "stride": stride, "unbalanced": unbalanced}
    return deal_to_holders("classes_window", y, present[places], seed, settings)


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
    y = checked_for(labels, devices)
    present = np.unique(y)
    check_classes_per_device(classes_per_device, len(present))
    rng = np.random.default_rng([seed, devices, classes_per_device])
    held = []
    for number in range(devices):
        first = number % len(present)
        others = rng.permutation(np.delete(np.arange(len(present)), first))[: classes_per_device - 1]
        held.append(present[[first, *others.tolist()]])
    settings = {"classes_per_device": classes_per_device, "unbalanced": unbalanced}
    return deal_to_holders("classes_random", y, np.stack(held), seed, settings)


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
    y = checked_for(labels, devices)
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
    check_nobody_empty("class_shards", [len(piece) for piece in pieces])
    order = rng.permutation(len(pieces)).reshape(devices, classes_per_device)
    parts = [np.concatenate([pieces[number] for number in mine]) for mine in order.tolist()]
    settings = {"devices": devices, "seed": seed, "classes_per_device": classes_per_device}
    return Partition("class_shards", sorted_rows(parts), settings)


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
    y = checked_for(labels, devices)
    if clients is None or len(own := np.asarray(clients)) != len(y):
        raise DataError("the data set does not tell whose each row is; by_client needs one that does: femnist-digits")
    present = np.unique(own)
    if devices > len(present):
        raise ConfigurationError(f"{devices} devices, and the data set has {len(present)} clients; take fewer devices")
    parts = [np.flatnonzero(own == client) for client in present[:devices]]
    return Partition("by_client", sorted_rows(parts), {"devices": devices, "seed": seed})


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
