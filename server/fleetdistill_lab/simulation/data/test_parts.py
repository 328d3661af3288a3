"""Rows that are not trained on: the proxy set, each device's validation data, and test rows of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill_lab.simulation.data.datasets import Dataset
from fleetdistill_lab.simulation.data.dealing import cut_sizes, largest_remainder
from fleetdistill_lab.simulation.data.split import Ints, Partition, check_labels

GLOBAL = "global"
"""The test part of a fleet whose devices have no test rows of their own."""
LOCAL_SPLIT = "local_split"
LOCAL_CLIENT = "local_client"
TEST_SHARE = 0.2
"""Share of a device's rows that `local_split` holds out, as in CDKT-FL and FedD2S."""


@dataclass(frozen=True, slots=True, eq=False)
class Dealt:
    """A data set whose training and test rows are dealt to devices.

    Attributes:
        data: The data set. With test rows of the devices' own, its test set is their union, in the order of the
            devices.
        split: Partition of the training rows.
        own_tests: Number of test rows of each device's own, in the same order; empty if they have none.
    """

    data: Dataset
    split: Partition
    own_tests: tuple[int, ...] = ()


def deal_tests(kind: str, data: Dataset, split: Partition, seed: int) -> Dealt:
    """Gives each device test rows of its own; no row belongs to two devices.

    Args:
        kind: `global`, or a name in `LOCAL_TESTS`.
        data: The data set.
        split: Partition of its training rows.
        seed: Seed of the draws.

    Raises:
        DataError: No device would have a test row, or the data set has no `test_clients` for `local_client`.
    """
    if kind == GLOBAL:
        return Dealt(data, split)
    if kind == LOCAL_SPLIT:
        return _split_off(data, split, seed)
    parts = LOCAL_TESTS[kind](data, split, seed)
    if not any(map(len, parts)):
        raise DataError(
            f"no device would have a test row of its own with test_part {kind}; use fewer devices, or local_split"
        )
    return Dealt(data.with_test_rows(np.concatenate(parts)), split, tuple(map(len, parts)))


def hold_out_test(labels: Ints, rows: Ints, seed: int) -> tuple[Ints, Ints]:
    """Selects a fifth of one device's rows as its test rows: stratified if each of its classes has at least two rows.

    Args:
        labels: `[N]`, the whole data set's labels.
        rows: `[n]`, ascending; the device's rows.
        seed: Seed of the selection.

    Returns:
        The training rows and the test rows, both ascending. A fifth is rounded to the nearest number of rows, so that
        a device with one or two rows has no test row.
    """
    if np.unique(labels[rows], return_counts=True)[1].min(initial=2) >= 2:
        return hold_out_validation(labels, rows, TEST_SHARE, seed)
    drawn = np.random.default_rng(seed).permutation(rows)[: round(TEST_SHARE * len(rows))]
    return np.setdiff1d(rows, drawn), np.sort(drawn)


def _split_off(data: Dataset, split: Partition, seed: int) -> Dealt:
    """Holds out a fifth of each device's rows; the data set's test rows are not used."""
    labels, clients = data.train_labels.numpy(), data.train_clients
    halves = [hold_out_test(labels, rows, seed) for rows in split.indices]
    rows = np.concatenate([test for _, test in halves])
    if not len(rows):
        raise DataError("no device has the three rows that test_part local_split needs; use fewer devices or more data")
    tested = replace(
        data,
        test_images=data.train_images[rows],
        test_labels=data.train_labels[rows],
        test_clients=None if clients is None else clients[rows],
    )
    trained = replace(split, indices=tuple(train for train, _ in halves))
    return Dealt(tested, trained, tuple(len(test) for _, test in halves))


def _like_training_rows(data: Dataset, split: Partition, seed: int) -> list[Ints]:
    """Cuts each class of the test set in the devices' shares of its training rows, as FedICT's code does."""
    counts_kc = split.class_counts(data.train_labels.numpy(), len(data.classes))
    parts: list[list[Ints]] = [[] for _ in split.indices]
    for label, rows in enumerate(_test_rows_by_class(data, seed)):
        total = counts_kc[:, label].sum()
        if not total:
            continue  # a class of which no device has a training row
        sizes_k = cut_sizes(counts_kc[:, label] / total, len(rows))
        for mine, piece in zip(parts, np.split(rows, np.cumsum(sizes_k)[:-1]), strict=True):
            mine.append(piece)
    return [_joined(mine) for mine in parts]


def _of_held_classes(data: Dataset, split: Partition, seed: int) -> list[Ints]:
    """Gives each device 1 / devices of the test rows of every class that it holds, rounded down, as FedGEN's code."""
    held_kc = split.class_counts(data.train_labels.numpy(), len(data.classes)) > 0
    parts: list[list[Ints]] = [[] for _ in split.indices]
    for label, rows in enumerate(_test_rows_by_class(data, seed)):
        each = len(rows) // len(parts)
        for place, device in enumerate(np.flatnonzero(held_kc[:, label])):
            parts[device].append(rows[place * each : (place + 1) * each])
    return [_joined(mine) for mine in parts]


def _of_clients(data: Dataset, split: Partition, seed: int) -> list[Ints]:
    """Gives each device the test rows of the client whose training rows it has."""
    if data.train_clients is None or data.test_clients is None:
        raise DataError(f"test_part {LOCAL_CLIENT} needs a data set with train_clients and test_clients")
    clients = [int(data.train_clients[rows[0]]) for rows in split.indices]
    return [np.flatnonzero(data.test_clients.numpy() == client).astype(np.int64) for client in clients]


LOCAL_TESTS: Mapping[str, Callable[[Dataset, Partition, int], list[Ints]]] = {
    "local_like": _like_training_rows,
    "local_labels": _of_held_classes,
    LOCAL_CLIENT: _of_clients,
}
"""Ways to give the data set's test rows to devices; `local_split` gives training rows."""
TEST_PARTS = (GLOBAL, LOCAL_SPLIT, *LOCAL_TESTS)


def _test_rows_by_class(data: Dataset, seed: int) -> list[Ints]:
    """Returns the shuffled test rows of each class."""
    labels, rng = data.test_labels.numpy(), np.random.default_rng(seed)
    return [rng.permutation(np.flatnonzero(labels == label)).astype(np.int64) for label in range(len(data.classes))]


def _joined(pieces: list[Ints]) -> Ints:
    return np.sort(np.concatenate([*pieces, np.zeros(0, np.int64)]))


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
