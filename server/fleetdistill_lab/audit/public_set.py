"""The public set of an audit: rows for the devices, rows that nobody trains on, and rows of the attacker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill_lab.audit.record import Rows
from fleetdistill_lab.simulation.data.datasets import DATASETS, Dataset, load_dataset, stratified_rows
from fleetdistill_lab.simulation.data.own import limit_rows, read_dataset
from fleetdistill_server.config.run_config import ContractSection

MAX_DECOYS = 999
"""Decoys of a class, so that a row is linked by chance once in 1,000."""
_MAX_PUBLIC = 4000
_MAX_TEST = 200


@dataclass(frozen=True)
class PublicSet:
    """A public set in three parts without common rows.

    Attributes:
        fleet: Rows that devices train on, as training images, with a few of the attacker's rows as test images.
        decoys: Rows that nobody trains on, at most 999 of each class.
        attacker: Rows that the attacker has.
    """

    fleet: Dataset
    decoys: Rows
    attacker: Rows


def read_public(source: str, contract: ContractSection) -> Dataset:
    """Reads a public set that stands in for the devices' data of a run.

    Images that are larger than the contract's square ones are reduced by averaging.

    Args:
        source: Path of an .npz file, or a name in `DATASETS`.
        contract: The run's classes and input shape.

    Raises:
        DataError: The set cannot be read, or does not fit the contract.
    """
    known = source.lower().replace("_", "-") in DATASETS
    if not known and not source.endswith(".npz"):
        raise DataError(f"--data is {source!r}, expected an .npz file or one of {', '.join(DATASETS)}")
    data = load_dataset(source) if known else read_dataset(Path(source))
    data, wanted = _reduce(data, contract.input_shape), contract.input_shape
    shape = list(data.train_images.shape[1:])
    if shape != wanted:
        raise DataError(f"{source} has inputs of shape {shape}, but [contract] input_shape is {wanted}")
    names, most = contract.class_names(), int(max(data.train_labels.max(), data.test_labels.max())) + 1
    if most > len(names):
        raise DataError(f"{source} has labels up to {most - 1}, but [contract] classes has {len(names)} classes")
    return replace(data, classes=tuple(names))


def kinds_of_images(public: PublicSet, other: str, contract: ContractSection) -> dict[str, Tensor]:
    """Returns public images to train decoders with, by description: the attacker's, and those of another set if named.

    Raises:
        DataError: The other set cannot be read, or does not fit the contract.
    """
    kinds = {"public rows of the same kind": public.attacker.inputs}
    if other:
        data = read_public(other, contract)
        kinds[f"rows of {data.name}"] = data.train_images[:_MAX_PUBLIC]
    return kinds


def _reduce(data: Dataset, wanted: list[int]) -> Dataset:
    shape = list(data.train_images.shape[1:])
    square = len(shape) == len(wanted) == 3 and wanted[1] == wanted[2] and shape[0] == wanted[0]
    return limit_rows(data, None, wanted[1], 0) if square and min(shape[1:]) > wanted[1] else data


def split_public(data: Dataset, rows: int, seed: int) -> PublicSet:
    """Splits a public set.

    Args:
        data: The set; training and test images are used alike.
        rows: Rows for the devices, at most half of the set.
        seed: Seed of the split.

    Raises:
        ConfigurationError: `rows` is below 1.
        DataError: A class has fewer than 4 rows that nobody trains on.
    """
    if rows < 1:
        raise ConfigurationError(f"rows is {rows}, must be at least 1")
    images = torch.cat([data.train_images, data.test_images])
    labels = torch.cat([data.train_labels, data.test_labels])
    trained = stratified_rows(labels.numpy(), min(rows, len(labels) // 2), seed)
    unseen = np.random.default_rng([seed, 1]).permutation(np.setdiff1d(np.arange(len(labels)), trained))
    decoys, public = _decoys_and_public(unseen, labels.numpy()[unseen], data)
    fleet = Dataset(
        data.name,
        *(images[trained], labels[trained]),
        *(images[public[:_MAX_TEST]], labels[public[:_MAX_TEST]]),
        data.classes,
    )
    return PublicSet(fleet, Rows(images[decoys], labels[decoys]), Rows(images[public], labels[public]))


def _decoys_and_public(unseen: np.ndarray, labels: np.ndarray, data: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Returns two thirds of each class's unseen rows as decoys, at most 999, and up to 4,000 of the others."""
    pools = [unseen[labels == label] for label in np.unique(labels)]
    smallest = min(map(len, pools))
    if smallest < 4 or len(pools) < 2:
        raise DataError(
            f"{data.name} leaves {smallest} rows of a class that no device trains on, expected at least 4 of two or "
            "more classes; give a larger public set or fewer --rows"
        )
    most = _MAX_PUBLIC // len(pools)
    counts = [min(MAX_DECOYS, 2 * len(pool) // 3) for pool in pools]
    decoys = np.concatenate([pool[:count] for pool, count in zip(pools, counts, strict=True)])
    public = np.concatenate([pool[count : count + most] for pool, count in zip(pools, counts, strict=True)])
    return decoys, np.random.default_rng(0).permutation(public)
