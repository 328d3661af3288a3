"""Loads the labelled image sets that simulations train on, as in-memory tensors."""

from __future__ import annotations

import functools
import lzma
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill.names import unknown_name
from fleetdistill_lab.simulation.data.dealing import largest_remainder

_DIGITS = tuple("0123456789")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_FASHION = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"
_CIFAR10 = "airplane,automobile,bird,cat,deer,dog,frog,horse,ship,truck"
_CIFAR100 = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can "
    "castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin "
    "elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster "
    "man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck "
    "pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk "
    "skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger "
    "tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)

DATASETS: Mapping[str, tuple[str, ...]] = {
    "digits": _DIGITS,
    "fashion-mnist": tuple(_FASHION.split(",")),
    "mnist": _DIGITS,
    "cifar10": tuple(_CIFAR10.split(",")),
    "cifar100": tuple(_CIFAR100.split()),
    "emnist-letters": tuple(_LETTERS),
    "femnist-digits": _DIGITS,
    "femnist": (*_DIGITS, *_LETTERS, *_LETTERS.lower()),
    "svhn": _DIGITS,
    "cinic10": tuple(_CIFAR10.split(",")),
    "five-digits": _DIGITS,
}
"""Maps the name of each data set to its class names, in label order."""

_PARTS: tuple[dict[str, Any], ...] = ({"train": True}, {"train": False})
_TORCHVISION: Mapping[str, tuple[str, tuple[dict[str, Any], ...]]] = {
    "fashion-mnist": ("FashionMNIST", _PARTS),
    "mnist": ("MNIST", _PARTS),
    "cifar10": ("CIFAR10", _PARTS),
    "cifar100": ("CIFAR100", _PARTS),
    "emnist-letters": ("EMNIST", ({"train": True, "split": "letters"}, {"train": False, "split": "letters"})),
    "svhn": ("SVHN", ({"split": "train"}, {"split": "test"})),
}
"""Maps each data set to torchvision's class and its arguments for the training and the test part."""
_FIRST_LABEL = {"emnist-letters": 1}
"""The smallest of torchvision's labels, for data sets where it is not 0."""
_HOW_TO_PROVIDE = "create the file, or set --data-dir or FLEETDISTILL_DATA to its folder"
_KEYS = ("train_images", "train_labels", "test_images", "test_labels")
_CLIENTS = {"train_clients", "test_clients"}
"""Optional keys of an `.npz` file."""
_Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """A labelled image set.

    Attributes:
        name: Name in `DATASETS`, or the name of the user's own data.
        train_images: `[N, channels, height, width]` float32 in [0, 1], not normalised further.
        train_labels: `[N]` int64 in [0, len(classes)).
        test_images: Like `train_images`.
        test_labels: Like `train_labels`.
        classes: Class names, in label order.
        train_clients: `[N]` int64, the client that each training image comes from; None if unknown.
        test_clients: Like `train_clients`.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]
    train_clients: Tensor | None = None
    test_clients: Tensor | None = None

    def without_images(self) -> Dataset:
        """Returns a copy without images, of which only the shape of one is left; labels stay."""
        train, test = (images.new_empty((0, *images.shape[1:])) for images in (self.train_images, self.test_images))
        return replace(self, train_images=train, test_images=test)

    def with_training_rows(self, rows: npt.NDArray[np.int64]) -> Dataset:
        """Returns a copy with only these training images; the test images are unchanged."""
        clients = self.train_clients
        return replace(
            self,
            train_images=self.train_images[rows],
            train_labels=self.train_labels[rows],
            train_clients=None if clients is None else clients[rows],
        )

    def with_test_rows(self, rows: npt.NDArray[np.int64]) -> Dataset:
        """Returns a copy with only these test images, in this order; the training images are unchanged."""
        clients = self.test_clients
        return replace(
            self,
            test_images=self.test_images[rows],
            test_labels=self.test_labels[rows],
            test_clients=None if clients is None else clients[rows],
        )


def load_dataset(
    name: str,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    train_limit: int | None = None,
    image_size: int | None = None,
    seed: int = 0,
) -> Dataset:
    """Loads a built-in data set.

    `digits` is bundled with scikit-learn and split 80/20 by class with a fixed seed. The others are read from
    `<folder>/<name>/<name>.npz` (name with `_`; arrays `train_images`, `train_labels`, `test_images`, `test_labels`;
    images uint8 `[N, H, W]` or `[N, H, W, 3]`). The folder is `data_dir`, else the variable FLEETDISTILL_DATA, else a
    folder in the user's cache. If the file does not exist, torchvision downloads the data set into the folder.
    `femnist-digits`, `femnist` (62 classes), `cinic10` and `five-digits` (digits from several sources) cannot be
    downloaded; their files may also have `train_clients` and `test_clients`, `[N]` integers.

    Args:
        name: A name in `DATASETS`; `-` and `_` are equivalent.
        data_dir: Folder of the data sets.
        train_limit: Largest number of training images, at least 1, chosen as a stratified random subset in the
            original order; None for all. Test images are not limited.
        image_size: Height and width that images are reduced to by averaging; None keeps their size.
        seed: Seed of the subset.

    Raises:
        ConfigurationError: `train_limit` or `image_size` is out of range.
        DataError: The name is unknown, or the data set is missing, damaged or cannot be downloaded.
    """
    name = _known_name(name)
    if train_limit is not None and train_limit < 1:
        raise ConfigurationError(f"train_limit is {train_limit}, must be at least 1; leave it out for all images")
    arrays = _digits() if name == "digits" else _images(name, data_dir)
    rows = np.arange(len(arrays["train_labels"]))
    if train_limit is not None and train_limit < len(rows):
        rows = stratified_rows(arrays["train_labels"], train_limit, seed)
    clients, test_clients = arrays.get("train_clients"), arrays.get("test_clients")
    return Dataset(
        name,
        *(_resize(arrays["train_images"][rows], image_size), _label_tensor(arrays["train_labels"][rows])),
        *(_resize(arrays["test_images"], image_size), _label_tensor(arrays["test_labels"])),
        DATASETS[name],
        None if clients is None else _label_tensor(clients[rows]),
        None if test_clients is None else _label_tensor(test_clients),
    )


def stratified_rows(labels: npt.NDArray[Any], count: int, seed: int) -> npt.NDArray[np.int64]:
    """Draws a stratified random subset of `count` rows; returns their indices in ascending order."""
    rng = np.random.default_rng(seed)
    classes, sizes = np.unique(labels, return_counts=True)
    wanted = largest_remainder(sizes / len(labels), count)
    picked = [
        rng.permutation(np.flatnonzero(labels == label))[:take] for label, take in zip(classes, wanted, strict=True)
    ]
    return np.sort(np.concatenate(picked)).astype(np.int64)


def _known_name(name: str) -> str:
    plain = {known.replace("-", ""): known for known in DATASETS}
    result = plain.get(name.lower().replace("-", "").replace("_", ""))
    if result is None:
        raise DataError(unknown_name("data set", name, DATASETS))
    return result


def _digits() -> _Arrays:
    return {name: array.copy() for name, array in _bundled_digits().items()}


@functools.cache  # parsing the text file takes longer than a round of a small fleet
def _bundled_digits() -> _Arrays:
    """Loads scikit-learn's 1,797 scanned digits of 8x8 pixels and 17 grey levels."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise DataError(
            "the data set digits needs scikit-learn, which is not installed; run pip install 'fleetdistill[sim]'"
        ) from error
    bundled = load_digits()
    images = (bundled.images / 16).astype(np.float32)
    parts = train_test_split(images, bundled.target, test_size=0.2, stratify=bundled.target, random_state=0)
    return dict(zip(("train_images", "test_images", "train_labels", "test_labels"), parts, strict=True))


def _images(name: str, data_dir: str | os.PathLike[str] | None) -> _Arrays:
    given = data_dir or os.environ.get("FLEETDISTILL_DATA")
    folder = Path(given).expanduser() if given else _cache_folder()
    if given and not folder.is_dir():
        remedy = "create it, or set --data-dir or FLEETDISTILL_DATA to another one"
        raise DataError(f"{name}: the folder {folder} does not exist; {remedy}")
    plain = name.replace("-", "_")
    file = folder / plain / f"{plain}.npz"
    arrays = _read(file) if file.is_file() else _download(name, folder, file)
    for part in ("train", "test"):
        _check(arrays[f"{part}_images"], arrays[f"{part}_labels"], len(DATASETS[name]), f"{name}, {part} part")
        if (clients := arrays.get(f"{part}_clients")) is not None:
            _check_clients(clients, len(arrays[f"{part}_labels"]), f"{name}, {part} part")
    return arrays


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fleetdistill"


def _read(file: Path) -> _Arrays:
    try:
        with np.load(file, allow_pickle=False) as stored:
            return {key: stored[key] for key in (*_KEYS, *(_CLIENTS & set(stored.files)))}
    except KeyError as error:
        raise DataError(f"{file} is not a data set: {error.args[0]}; expected arrays {', '.join(_KEYS)}") from error
    except (OSError, ValueError, EOFError, NotImplementedError) as error:
        raise DataError(f"cannot read {file}: {error}; restore it, or delete it to download the set again") from error
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{file} is damaged: {error}; restore it, or delete it to download the set again") from error


def _download(name: str, folder: Path, file: Path) -> _Arrays:
    if name not in _TORCHVISION:
        raise DataError(f"{name}: {file} does not exist, and torchvision does not have it; {_HOW_TO_PROVIDE}")
    try:
        from torchvision import datasets

        kind, options = _TORCHVISION[name]
        train, test = (getattr(datasets, kind)(folder, download=True, **of) for of in options)
    except (ImportError, OSError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise DataError(
            f"{name}: {file} does not exist and the download into {folder} failed ({why}); {_HOW_TO_PROVIDE}"
        ) from error
    if name == "svhn":  # channels first, and another name for the labels
        parts = (train.data.transpose(0, 2, 3, 1), train.labels, test.data.transpose(0, 2, 3, 1), test.labels)
    else:  # CIFAR10: arrays and lists; MNIST: tensors
        parts = (train.data, train.targets, test.data, test.targets)
    arrays = {key: np.asarray(part) for key, part in zip(_KEYS, parts, strict=True)}
    for part in ("train", "test"):
        arrays[f"{part}_labels"] = arrays[f"{part}_labels"] - _FIRST_LABEL.get(name, 0)
    return arrays


def _check(images: npt.NDArray[Any], labels: npt.NDArray[Any], classes: int, where: str) -> None:
    if images.dtype != np.uint8 or not (images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)):
        raise DataError(
            f"{where}: the images are {images.dtype} of shape {list(images.shape)}, "
            "expected uint8 of shape [N, H, W] or [N, H, W, 3]"
        )
    if labels.shape != images.shape[:1] or not np.issubdtype(labels.dtype, np.integer) or len(labels) == 0:
        raise DataError(
            f"{where}: the labels are {labels.dtype} of shape {list(labels.shape)}, "
            f"expected integers, one for each of {len(images)} images, at least 1"
        )
    if labels.min() < 0 or labels.max() >= classes:
        raise DataError(f"{where}: the labels are in [{labels.min()}, {labels.max()}], expected [0, {classes})")


def _check_clients(clients: npt.NDArray[Any], images: int, where: str) -> None:
    if clients.shape != (images,) or not np.issubdtype(clients.dtype, np.integer):
        raise DataError(
            f"{where}: the clients are {clients.dtype} of shape {list(clients.shape)}, "
            f"expected integers, one for each of {images} images"
        )


def _image_tensor(images: npt.NDArray[Any]) -> Tensor:
    scaled = torch.from_numpy(images).float()
    if images.dtype == np.uint8:
        scaled.div_(255)
    return scaled[:, None] if scaled.ndim == 3 else scaled.permute(0, 3, 1, 2).contiguous()


def _resize(images: npt.NDArray[Any], size: int | None) -> Tensor:
    whole = _image_tensor(images)
    if size is None:
        return whole
    if not 1 <= size <= min(whole.shape[2:]):
        raise ConfigurationError(f"image_size is {size}, must be 1 to {min(whole.shape[2:])}, the images' size")
    return torch.nn.functional.adaptive_avg_pool2d(whole, size)


def _label_tensor(labels: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))
