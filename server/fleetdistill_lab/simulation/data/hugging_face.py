"""Reads labelled image sets with Hugging Face's package `datasets`, which downloads and caches them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fleetdistill.errors import ConfigurationError, DataError, in_words
from fleetdistill_lab.simulation.data.datasets import Dataset
from fleetdistill_lab.simulation.data.own import own_dataset

PREFIX = "hf:"
"""Beginning of the name of a data set that is read with `datasets`."""
_TEST_SPLITS = ("test", "validation", "valid")


def is_hugging_face(dataset: object) -> bool:
    """Returns whether `Simulation.dataset` is the name of a data set that is read with `datasets`."""
    return isinstance(dataset, str) and dataset.startswith(PREFIX)


def read_hugging_face(dataset: str, client_column: str = "", data_dir: Path | None = None) -> Dataset:
    """Reads a data set of the Hugging Face Hub, or of a local folder.

    The first column of type `Image` has the images, and the first of type `ClassLabel` the labels and the classes'
    names. The split `train` is the training set. The test set is the split `test`, else `validation` or `valid`, else a
    fifth of each class of `train`.

    Args:
        dataset: `hf:NAME` or `hf:NAME:CONFIG`, with the arguments of `datasets.load_dataset`.
        client_column: Column with the client of each row, any whole numbers or texts; empty for no clients. They are
            numbered in ascending order.
        data_dir: Folder of the downloads; None for that of `datasets`.

    Raises:
        ConfigurationError: The name is empty, or the package is not installed.
        DataError: The data set cannot be loaded, or its columns, splits or images cannot be used.
    """
    name, _, config = dataset.removeprefix(PREFIX).partition(":")
    if not name:
        raise ConfigurationError(f"dataset is {dataset!r}, expected {PREFIX}NAME or {PREFIX}NAME:CONFIG")
    splits = _load(dataset, name, config, data_dir)
    if "train" not in splits:
        raise DataError(f"{dataset} has the splits {', '.join(splits)}, but no train; choose another data set")
    image, label, classes = _columns(dataset, splits["train"].features)
    tested = next((split for split in _TEST_SPLITS if split in splits), None)
    parts = {"train": splits["train"]} | ({} if tested is None else {"test": splits[tested]})
    arrays: dict[str, Any] = {"classes": classes}
    for part, rows in parts.items():
        arrays[f"{part}_inputs"] = channels_first(as_pixels(rows[image], f"{dataset}, split {part}"))
        arrays[f"{part}_labels"] = np.asarray(rows[label], np.int64)
    if tested is None:
        arrays["inputs"], arrays["labels"] = arrays.pop("train_inputs"), arrays.pop("train_labels")
    if client_column:
        arrays |= _clients(dataset, parts, client_column)
    try:
        return own_dataset(arrays, dataset)
    except DataError as error:
        raise DataError(f"{dataset}: {error}") from error


def _load(dataset: str, name: str, config: str, data_dir: Path | None) -> Any:
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ConfigurationError(
            f"the data set {dataset} needs the package datasets, which is not installed: pip install 'fleetdistill[hf]'"
        ) from error
    try:
        return load_dataset(name, config or None, cache_dir=None if data_dir is None else str(data_dir))
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        why = " ".join(in_words(error).split())
        raise DataError(f"cannot load {dataset}: {why}; check the name, and that it can be reached") from error


def _columns(dataset: str, features: Any) -> tuple[str, str, list[str]]:
    """Returns the names of the columns with the images and the labels, and the classes' names."""
    from datasets import ClassLabel, Image

    image = next((name for name, kind in features.items() if isinstance(kind, Image)), None)
    label = next((name for name, kind in features.items() if isinstance(kind, ClassLabel)), None)
    if image is None or label is None:
        found = ", ".join(f"{name} ({type(kind).__name__})" for name, kind in features.items())
        raise DataError(f"{dataset} has the columns {found}; expected one of type Image and one of type ClassLabel")
    return image, label, list(features[label].names)


def as_pixels(images: Iterable[Any], where: str) -> npt.NDArray[np.uint8]:
    """Converts Pillow images to one array: `[N, H, W]` if all are grey, and else `[N, H, W, 3]`.

    Raises:
        DataError: There are no images, or they have different sizes.
    """
    arrays = [np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB")) for image in images]
    sizes = sorted({array.shape[:2] for array in arrays})
    if len(sizes) != 1:
        text = ", ".join(f"{height}x{width}" for height, width in sizes[:4])
        raise DataError(f"{where}: images of {len(sizes)} sizes ({text}), expected one; choose another data set")
    if len({array.ndim for array in arrays}) > 1:
        arrays = [array if array.ndim == 3 else np.stack([array] * 3, axis=-1) for array in arrays]
    return np.stack(arrays)


def channels_first(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Returns images `[N, H, W]` or `[N, H, W, 3]` as `[N, channels, H, W]`."""
    return images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)


def _clients(dataset: str, parts: dict[str, Any], column: str) -> dict[str, npt.NDArray[np.int64]]:
    for rows in parts.values():
        if column not in rows.features:
            raise DataError(f"{dataset} has no column {column}, but {', '.join(rows.features)}; set client_column")
    values = {part: np.asarray(rows[column]) for part, rows in parts.items()}
    numbers = np.unique(np.concatenate(list(values.values())), return_inverse=True)[1].astype(np.int64)
    stops = np.cumsum([len(of) for of in values.values()])[:-1]
    return {f"{part}_clients": of for part, of in zip(values, np.split(numbers, stops), strict=True)}
