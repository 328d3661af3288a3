"""Partitions a data set's rows over simulated devices.

Every partition is a pure function of the labels, the number of devices, its parameters and the seed. Dirichlet
partitions by class and per device with the same alpha are different problems, so report `Partition.kind` with results.

A partition of one's own is `package.module:function`, a function of (labels, devices, seed) and settings that returns
the rows of each device.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt

from fleetdistill.errors import ConfigurationError, DataError, FleetDistillError
from fleetdistill.methods.base import check_choice
from fleetdistill.models import resolve
from fleetdistill.names import unknown_name
from fleetdistill_lab.simulation.data.dealing import (
    ROUNDINGS,
    counts_from_pools,
    deal_classes,
    deal_to_holders,
    device_sizes,
)
from fleetdistill_lab.simulation.data.split import (
    Partition,
    check_alpha,
    check_classes_per_device,
    check_clients,
    check_no_empty_device,
    no_split,
    sorted_rows,
)


def iid(labels: npt.ArrayLike, devices: int, seed: int) -> Partition:
    """Shuffles all rows and splits them evenly; sizes differ by at most one."""
    y = check_clients(labels, devices)
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
    """Splits each class over the devices in shares drawn from Dir(alpha · 1_devices).

    All rows are used; the sizes are unequal by design. With `balance`, devices that already have their even share get
    no rows of later classes, so that later classes are less skewed than alpha suggests.

    Args:
        labels: `[N]` integers, at least 0.
        devices: Between 1 and N.
        alpha: Concentration, finite and greater than 0; small values are skewed, large values even.
        seed: Seed of the partition.
        min_size: Smallest number of rows per device; splits below it are drawn again.
        balance: Whether devices with their even share get no more rows.
        max_tries: Largest number of draws, at least 1.

    Raises:
        ConfigurationError: An argument is out of range.
        DataError: The labels are not valid, or no draw gave every device `min_size` rows.

    References:
        Wang et al., Federated Learning with Matched Averaging; the code of FedML, MOON, NIID-Bench and FedICT.
    """
    y = check_clients(labels, devices)
    check_alpha(alpha)
    if max_tries < 1 or min_size < 0:
        raise ConfigurationError(f"max_tries is {max_tries} and min_size is {min_size}, must be at least 1 and 0")
    if min_size * devices > len(y):
        raise DataError(no_split(min_size, f"{devices} devices need {min_size * devices} rows, there are {len(y)}"))
    rng = np.random.default_rng(seed)
    pools = [np.flatnonzero(y == label) for label in np.unique(y)]
    for _ in range(max_tries):
        parts = deal_classes(pools, devices, alpha, rng, balance=balance)
        if min(len(rows) for rows in parts) >= min_size:
            settings = {"alpha": alpha, "min_size": min_size, "balance": balance, "max_tries": max_tries}
            return Partition("dirichlet_by_class", sorted_rows(parts), {"devices": devices, "seed": seed, **settings})
    raise DataError(no_split(min_size, f"{max_tries} draws for {devices} devices with alpha {alpha} failed"))


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

    Rows are drawn without replacement, device by device. When a class runs out, its share goes to the device's other
    classes in proportion, or to any remaining rows if all of its classes have run out. Late devices are therefore
    less skewed, or skewed towards the remaining classes. The remainder of N / devices is not used.

    Args:
        labels: `[N]` integers, at least 0.
        devices: Between 1 and N.
        alpha: Concentration, finite and greater than 0.
        seed: Seed of the partition.
        unbalanced: Sigma of lognormal device sizes; 0 gives every device floor(N / devices) rows.
        rounding: Rounding of shares to rows, a name in `ROUNDINGS`. `floor` gives the remainder to the device's
            largest class, which raises the skew, especially with many classes and small devices.

    Raises:
        ConfigurationError: An argument is out of range.
        DataError: The labels are not valid, or a lognormal size is 0.

    References:
        Acar et al., Federated Learning Based on Dynamic Regularization, and its code. The authors' code redraws a
        class until one is left, which may not terminate; this function always does.
    """
    y = check_clients(labels, devices)
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
    """Gives device k the classes (stride · k + j) mod C for j < `classes_per_device`, as in CDKT-FL's code.

    Each class is split over its devices, evenly, or in lognormal shares after ten rows for each of them. Rows of
    classes without a device are not used.

    Args:
        labels: `[N]` integers, at least 0.
        devices: Between 1 and N.
        classes_per_device: Between 1 and C.
        seed: Seed of the partition.
        stride: Distance between consecutive devices' first classes, at least 1; CDKT-FL uses 10 for CIFAR-100's
            windows of 30.
        unbalanced: Sigma of the lognormal shares; 0 splits evenly. CDKT-FL uses 1 for Fashion-MNIST and 2 for CIFAR-10.

    Raises:
        ConfigurationError: An argument is out of range.
        DataError: The labels are not valid, or a device would get no rows.
    """
    y = check_clients(labels, devices)
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
    """Gives device k the class k mod C and further distinct classes at random.

    Each class is split over its devices, evenly, or in lognormal shares after ten rows for each of them. With
    `classes_per_device = 6` on FEMNIST's letters, this is our reading of FedDKD's FEMNIST split; NIID-Bench has the
    same partition.

    Args:
        labels: `[N]` integers, at least 0.
        devices: Between 1 and N.
        classes_per_device: Between 1 and C.
        seed: Seed of the partition.
        unbalanced: Sigma of the lognormal shares; 0 splits evenly.

    Raises:
        ConfigurationError: An argument is out of range.
        DataError: The labels are not valid, or a device would get no rows.
    """
    y = check_clients(labels, devices)
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
    """Cuts each class into s · devices / C shards and gives s random shards to each device.

    A device may get two shards of one class, so it has *at most* s = `classes_per_device` classes.

    Args:
        labels: `[N]` integers, at least 0.
        devices: Between 1 and N; s · devices must be a multiple of C.
        classes_per_device: s, between 1 and C.
        seed: Seed of the partition.

    Raises:
        ConfigurationError: An argument is out of range, or s · devices is not a multiple of C.
        DataError: The labels are not valid, or a shard would be empty.

    References:
        McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data; FedRep, FedNTD.
    """
    y = check_clients(labels, devices)
    present = np.unique(y)
    check_classes_per_device(classes_per_device, len(present))
    if (classes_per_device * devices) % len(present):
        raise ConfigurationError(
            f"{devices} devices with {classes_per_device} shards each need {devices * classes_per_device} shards, "
            f"which is not a multiple of the {len(present)} classes; change devices or classes_per_device"
        )
    rng = np.random.default_rng(seed)
    pieces_each = classes_per_device * devices // len(present)
    pieces = [
        piece for label in present for piece in np.array_split(rng.permutation(np.flatnonzero(y == label)), pieces_each)
    ]
    check_no_empty_device("class_shards", [len(piece) for piece in pieces])
    order = rng.permutation(len(pieces)).reshape(devices, classes_per_device)
    parts = [np.concatenate([pieces[number] for number in mine]) for mine in order.tolist()]
    settings = {"devices": devices, "seed": seed, "classes_per_device": classes_per_device}
    return Partition("class_shards", sorted_rows(parts), settings)


def by_client(labels: npt.ArrayLike, devices: int, clients: npt.ArrayLike | None, seed: int) -> Partition:
    """Gives device k all rows of the data set's k-th client, such as its k-th writer or source; deterministic.

    The rows of further clients are not used.

    Args:
        labels: `[N]` integers, at least 0.
        devices: Between 1 and the number of clients.
        clients: `[N]` integers, the client of each row; None if the data set has no clients.
        seed: Not used; recorded in the partition's parameters.

    Raises:
        ConfigurationError: There are fewer clients than devices.
        DataError: The labels are not valid, or the data set has no clients.
    """
    if clients is None or len(own := np.asarray(clients)) != len(np.asarray(labels)):
        raise DataError("by_client needs a data set with train_clients; use femnist-digits or your own data")
    check_clients(labels, devices)
    present = np.unique(own)
    if devices > len(present):
        text = f"devices is {devices}, but the data set has {len(present)} clients"
        raise ConfigurationError(f"{text}; use at most {len(present)} devices")
    parts = [np.flatnonzero(own == client) for client in present[:devices]]
    left = len(own) - sum(map(len, parts))
    more = {"clients": len(present), "rows_left_out": left} if left else {}
    return Partition("by_client", sorted_rows(parts), {"devices": devices, "seed": seed, **more})


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
    """Returns the names of a partition's required parameters besides labels, devices and seed.

    Raises:
        ConfigurationError: `kind` is unknown, or needs what is no setting of a simulation.
    """
    needed = inspect.signature(_known(kind)).parameters.values()
    named = [item.name for item in needed if item.default is item.empty and item.kind is not item.VAR_KEYWORD]
    result = tuple(name for name in named if name not in ("labels", "devices", "seed"))
    for name in result:
        if name not in _FROM_SIMULATION:
            raise ConfigurationError(
                f"partition {kind!r} needs {name}, which is no setting of [simulation]; give it a default, which "
                f"[partition] {name} replaces"
            )
    return result


_FROM_SIMULATION = ("alpha", "classes_per_device", "clients")
_LOWEST = {"min_size": 0, "max_tries": 1, "stride": 1, "unbalanced": 0}
"""Smallest values of parameters with a default."""


def check_partition_settings(kind: str, settings: Mapping[str, Any]) -> None:
    """Checks the names, types and ranges of a partition's further parameters, those with a default.

    Raises:
        ConfigurationError: `kind` is unknown, has no such parameter, or the value has another type or is out of range.
    """
    deal = _known(kind)
    types = get_type_hints(deal) if kind in PARTITIONS else {}
    known = [item.name for item in inspect.signature(deal).parameters.values() if item.default is not item.empty]
    for name, value in settings.items():
        if name in partition_parameters(kind):
            raise ConfigurationError(
                f"[partition] has {name}, which is a setting of the simulation; set simulation.{name}"
            )
        if not known:
            raise ConfigurationError(
                f"[partition] has {name}, but the partition {kind} has no settings there; remove it"
            )
        if name not in known:
            raise ConfigurationError(f"[partition] {unknown_name('setting', name, known)}")
        if name not in types:
            continue
        accepted = (int, float) if types[name] is float else types[name]
        if not isinstance(value, accepted) or (isinstance(value, bool) and types[name] is not bool):
            raise ConfigurationError(f"[partition] {name} is {value!r}, expected {types[name].__name__}")
        if name in _LOWEST and not _LOWEST[name] <= value < math.inf:
            raise ConfigurationError(f"[partition] {name} is {value}, must be at least {_LOWEST[name]}")
        if name == "rounding":
            check_choice("rounding", value, list(ROUNDINGS))


def partition(kind: str, labels: npt.ArrayLike, devices: int, seed: int, **parameters: Any) -> Partition:
    """Partitions rows with the partition named `kind`, a name in `PARTITIONS` or `package.module:function`.

    Raises:
        ConfigurationError: `kind` or a parameter is unknown, missing or out of range, or the function fails.
        DataError: The labels are not valid, or no valid partition was found.
    """
    deal = _known(kind)
    try:
        inspect.signature(deal).bind(labels, devices, seed=seed, **parameters)
    except TypeError as error:
        text = f"partition {kind!r}: {error}; expected {kind}{inspect.signature(deal)}"
        raise ConfigurationError(text) from error
    if kind in PARTITIONS:
        return PARTITIONS[kind](labels, devices, seed=seed, **parameters)
    y = check_clients(labels, devices)
    try:
        parts = [np.asarray(rows) for rows in deal(y, devices, seed=seed, **parameters)]
    except FleetDistillError:
        raise
    except Exception as error:  # the function may raise anything
        raise ConfigurationError(f"partition {kind!r} raised {type(error).__name__}: {error}") from error
    _check_parts(kind, parts, len(y), devices)
    own = {name: value for name, value in parameters.items() if name != "clients"}
    return Partition(kind, sorted_rows(parts), {"devices": devices, "seed": seed, **own})


def _check_parts(kind: str, parts: Sequence[npt.NDArray[Any]], rows: int, devices: int) -> None:
    """Raises DataError unless there is for each device a vector of rows, of which none is in another one."""
    name = f"partition {kind!r}"
    if len(parts) != devices:
        raise DataError(f"{name} returned {len(parts)} parts for {devices} devices; return the rows of each device")
    for number, part in enumerate(parts):
        if part.ndim != 1 or not np.issubdtype(part.dtype, np.integer) or not len(part):
            text = f"{part.dtype} of shape {list(part.shape)}"
            raise DataError(f"{name} returned {text} for device {number}, expected a vector of at least one row number")
        if len(outside := part[(part < 0) | (part >= rows)]):
            raise DataError(f"{name} gave device {number} row {outside[0]}, but the data have rows 0 to {rows - 1}")
    given = np.concatenate(parts)
    if len(np.unique(given)) < len(given):
        twice = np.flatnonzero(np.bincount(given) > 1)[0]
        raise DataError(f"{name} gave row {twice} more than once; a row belongs to one device")


def _known(kind: str) -> Callable[..., Any]:
    if kind in PARTITIONS:
        return PARTITIONS[kind]
    if ":" not in kind:
        raise ConfigurationError(f"{unknown_name('partition', kind, PARTITIONS)}, or package.module:function")
    return resolve({}, "partition", kind)
