"""Makes data sets from the user's own arrays or .npz files."""

from __future__ import annotations

import hashlib
import lzma
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fleetdistill.errors import ConfigurationError, DataError, in_words
from fleetdistill_lab.simulation.data.datasets import Dataset, stratified_rows

Arrays = Mapping[str, npt.ArrayLike]
_TEST_SHARE = 0.2
_SPLIT = ("train_inputs", "train_labels", "test_inputs", "test_labels")
_WHOLE = ("inputs", "labels")
_CLIENTS = ("train_clients", "test_clients")
_OPTIONAL = ("classes", *_CLIENTS, "name")
_EXPECTED = f"give {' and '.join(_WHOLE)}, or {', '.join(_SPLIT)}; classes and {', '.join(_CLIENTS)} are optional"


def own_dataset(data: Arrays | tuple[npt.ArrayLike, npt.ArrayLike], name: str = "own-data") -> Dataset:
    """Makes a data set from arrays.

    Args:
        data: A pair of inputs `[N, ...]` and labels `[N]`, or a mapping with the keys below. Inputs are floats, which
            are used unchanged, or uint8, which are divided by 255; images are `[N, channels, height, width]`. Labels
            are integers in [0, number of classes).

            * `inputs` and `labels`: a fixed fifth of each class becomes the test set; or
            * `train_inputs`, `train_labels`, `test_inputs` and `test_labels`;
            * `classes`, optional: class names in label order; by default the numbers up to the largest label;
            * `train_clients`, optional, with `train_inputs` only: `[N]` integers, the client of each training row, such
              as its writer or its source;
            * `test_clients`, optional, with `train_clients` only: the client of each test row;
            * `name`, optional: overrides the argument `name`.
        name: Name of the data set in reports.

    Raises:
        DataError: An array is missing, or has the wrong shape, type or range.
    """
    arrays = {key: np.asarray(value) for key, value in _by_name(data).items()}
    _check_keys(arrays)
    if "inputs" in arrays:
        arrays |= _split(arrays.pop("inputs"), arrays.pop("labels"), arrays.get("train_clients"))
    parts = {key: arrays[key] for key in _SPLIT}
    for part in ("train", "test"):
        _check_part(part, parts[f"{part}_inputs"], parts[f"{part}_labels"])
    if parts["train_inputs"].shape[1:] != parts["test_inputs"].shape[1:]:
        shapes = [list(parts[f"{part}_inputs"].shape[1:]) for part in ("train", "test")]
        raise DataError(f"training samples have shape {shapes[0]}, but test samples {shapes[1]}; they must agree")
    classes = _classes(arrays.get("classes"), max(int(parts[f"{part}_labels"].max()) for part in ("train", "test")) + 1)
    return Dataset(
        str(arrays.get("name", name)),
        _inputs(parts["train_inputs"]),
        _labels(parts["train_labels"]),
        _inputs(parts["test_inputs"]),
        _labels(parts["test_labels"]),
        classes,
        *(_clients(arrays, part, len(parts[f"{part}_labels"])) for part in ("train", "test")),
    )


def read_dataset(file: Path) -> Dataset:
    """Reads a data set from an .npz file with the arrays of `own_dataset`; the name defaults to the file's name.

    Raises:
        DataError: The file is missing or damaged, or its arrays do not form a data set.
    """
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {key: stored[key] for key in stored.files}
    except FileNotFoundError as error:
        raise DataError(f"there is no file {file}; create it with numpy.savez: {_EXPECTED}") from error
    except (OSError, ValueError, EOFError, NotImplementedError, AttributeError) as error:
        raise DataError(f"cannot read {file}: {in_words(error)}; create it with numpy.savez: {_EXPECTED}") from error
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{file} is damaged: {error}; create it again with numpy.savez") from error
    try:
        return own_dataset(arrays, file.stem)
    except DataError as error:
        raise DataError(f"{file}: {error}") from error


def save_dataset(data: Dataset, file: Path) -> None:
    """Writes a data set to an .npz file that `read_dataset` reads."""
    arrays = _as_arrays(data) | _clients_of(data)
    np.savez(file, **arrays, classes=np.array(data.classes), name=np.array(data.name))  # type: ignore[arg-type]


def digest_of(data: Dataset) -> str:
    """Returns the SHA-256 of a data set's name, classes and arrays, as hexadecimal digits."""
    digest = hashlib.sha256(repr((data.name, data.classes)).encode())
    for array in (*_as_arrays(data).values(), *_clients_of(data).values()):
        digest.update(repr((array.dtype.str, array.shape)).encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def limit_rows(data: Dataset, train_limit: int | None, image_size: int | None, seed: int) -> Dataset:
    """Limits the training images and reduces the image size, as `load_dataset` does.

    Raises:
        ConfigurationError: `image_size` is given, but the data are not images or the images are smaller.
    """
    if train_limit is not None and train_limit < len(data.train_labels):
        data = data.with_training_rows(stratified_rows(data.train_labels.numpy(), train_limit, seed))
    if image_size is None:
        return data
    shape = list(data.train_images.shape[1:])
    if len(shape) != 3 or not 1 <= image_size <= min(shape[1:]):
        raise ConfigurationError(
            f"image_size is {image_size}, but samples of {data.name} have shape {shape}; image_size needs images "
            "[channels, height, width] of at least that size"
        )
    pool = torch.nn.functional.adaptive_avg_pool2d
    return replace(
        data, train_images=pool(data.train_images, image_size), test_images=pool(data.test_images, image_size)
    )


def _as_arrays(data: Dataset) -> dict[str, npt.NDArray[Any]]:
    tensors = (data.train_images, data.train_labels, data.test_images, data.test_labels)
    return {key: tensor.numpy() for key, tensor in zip(_SPLIT, tensors, strict=True)}


def _clients_of(data: Dataset) -> dict[str, npt.NDArray[Any]]:
    known = zip(_CLIENTS, (data.train_clients, data.test_clients), strict=True)
    return {key: clients.numpy() for key, clients in known if clients is not None}


def _by_name(data: Arrays | tuple[npt.ArrayLike, npt.ArrayLike]) -> Arrays:
    if isinstance(data, Mapping):
        return data
    if isinstance(data, tuple) and len(data) == 2:
        return dict(zip(_WHOLE, data, strict=True))
    raise DataError(f"the data set is {type(data).__name__}, expected a name, arrays or a Dataset; {_EXPECTED}")


def _check_keys(arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    needed = _WHOLE if "inputs" in arrays else _SPLIT
    missing = [key for key in needed if key not in arrays]
    unknown = sorted(arrays.keys() - {*needed, *_OPTIONAL})
    if missing:
        raise DataError(f"the data set has no {', '.join(missing)}; {_EXPECTED}")
    if "test_clients" in arrays and "train_clients" not in arrays:
        raise DataError("the data set has test_clients but no train_clients; give both, or train_clients alone")
    if unknown:
        raise DataError(f"the data set has unknown arrays {', '.join(unknown)}; {_EXPECTED}")


def _split(
    inputs: npt.NDArray[Any], labels: npt.NDArray[Any], clients: npt.NDArray[Any] | None
) -> dict[str, npt.NDArray[Any]]:
    """Splits off a fifth of each class as the test set, with a fixed seed."""
    _check_part("whole", inputs, labels)
    if clients is not None:
        raise DataError("train_clients needs separate training and test arrays; give train_inputs and test_inputs")
    count = int(len(labels) * _TEST_SHARE)
    if count < len(np.unique(labels)):
        raise DataError(
            f"{len(labels)} rows are too few to split off a fifth of each class as test set; give at least 5 per class"
        )
    test = stratified_rows(labels, count, seed=0)
    train = np.setdiff1d(np.arange(len(labels)), test)
    return dict(zip(_SPLIT, (inputs[train], labels[train], inputs[test], labels[test]), strict=True))


def _check_part(part: str, inputs: npt.NDArray[Any], labels: npt.NDArray[Any]) -> None:
    where = {"train": "the training set", "test": "the test set", "whole": "the data set"}[part]
    if inputs.ndim < 2 or not (inputs.dtype == np.uint8 or np.issubdtype(inputs.dtype, np.floating)):
        raise DataError(
            f"{where} has inputs of dtype {inputs.dtype} and shape {list(inputs.shape)}, expected floating-point or "
            "uint8 inputs of shape [N, ...]"
        )
    if labels.shape != inputs.shape[:1] or not np.issubdtype(labels.dtype, np.integer) or len(labels) == 0:
        raise DataError(
            f"{where} has labels of dtype {labels.dtype} and shape {list(labels.shape)}, expected one integer for each "
            f"of {len(inputs)} inputs, and at least one input"
        )
    if labels.min() < 0:
        raise DataError(f"{where} has label {labels.min()}, expected integers of at least 0")
    if not np.isfinite(inputs).all():
        raise DataError(f"{where} has non-finite inputs; remove or replace them")


def _classes(names: npt.NDArray[Any] | None, count: int) -> tuple[str, ...]:
    result = (
        tuple(str(label) for label in range(count)) if names is None else tuple(str(name) for name in names.ravel())
    )
    if len(result) < max(count, 2) or len(set(result)) != len(result):
        raise DataError(
            f"classes has {len(result)} names, {len(set(result))} of them unique, and the largest label is "
            f"{count - 1}; give a unique name for each label, and at least 2"
        )
    return result


def _clients(arrays: Mapping[str, npt.NDArray[Any]], part: str, rows: int) -> Tensor | None:
    clients = arrays.get(f"{part}_clients")
    if clients is None:
        return None
    if clients.shape != (rows,) or not np.issubdtype(clients.dtype, np.integer):
        raise DataError(
            f"{part}_clients is {clients.dtype} of shape {list(clients.shape)}, expected an integer for each of {rows} "
            f"{'training' if part == 'train' else 'test'} rows"
        )
    return _labels(clients)


def _inputs(array: npt.NDArray[Any]) -> Tensor:
    scaled = torch.from_numpy(np.array(array, np.float32))
    return scaled.div_(255) if array.dtype == np.uint8 else scaled


def _labels(array: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))
