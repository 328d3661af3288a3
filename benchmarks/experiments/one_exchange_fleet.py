"""Fleets of devices on fixed features: data sets, features that are computed once, and accuracy of devices' answers.

For `one_exchange.py`, `refined_head.py`, `membership.py`, `class_means.py` and `own_network.py`. n rows, D numbers a
row, C classes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats.class_space import projection, usual_dimensions
from fleetdistill.models.scattering import scattering
from fleetdistill_lab.simulation.data.datasets import DATASETS, Dataset, load_dataset, stratified_rows
from fleetdistill_lab.simulation.data.partition import partition

BATCH = 250
"""Images that go through the extractor at a time."""
_IN_THE_FOLDER_ONLY = {"cifar100": 100, "usps": 10}
"""Sets that `load_dataset` does not know, and their classes."""


@dataclass(frozen=True)
class Setting:
    """What is dealt out to whom.

    Attributes:
        dataset: Name of a set.
        image_size: Pixels a side that images are averaged down to; None leaves them as they are.
        train_limit: At most this many training images, another part for each seed; None for all.
        test_limit: As `train_limit`.
        devices: How many.
        alpha: Of the Dirichlet partition by class; None deals by the set's clients.
        dimensions: D; None for the usual one.
        classes: Only this many classes, others for each seed; None for all.
        held_out: Whether the test rows are other rows of the training part, for choosing settings.
    """

    dataset: str = "digits"
    image_size: int | None = None
    train_limit: int | None = None
    test_limit: int | None = None
    devices: int = 5
    alpha: float | None = 0.5
    dimensions: int | None = None
    classes: int | None = None
    held_out: bool = False

    @property
    def name(self) -> str:
        """What results are kept under."""
        size = f" {self.image_size}x{self.image_size}" if self.image_size else ""
        rows = f" {self.train_limit}/{self.test_limit}" if self.train_limit or self.test_limit else ""
        width = f" D {self.dimensions}" if self.dimensions else ""
        some = f" {self.classes} classes" if self.classes else ""
        held = " held out" if self.held_out else ""
        dealt = "by client" if self.alpha is None else f"alpha {self.alpha}"
        return f"{self.dataset}{size}{rows}{some}{held}{width} {self.devices} devices {dealt}"


@dataclass(frozen=True)
class Part:
    """One device's rows: images `[n, ch, h, w]`, features `[n, D]` float64, labels `[n]`."""

    images: Tensor
    features: Array
    labels: Array

    def shares(self, classes: int) -> Array:
        """`[C]`, how its rows are spread over the classes."""
        counts = np.bincount(self.labels, minlength=classes)
        return np.asarray(counts / counts.sum())


@dataclass(frozen=True)
class Fleet:
    """All devices of one (setting, seed), and the test part that nobody trains on."""

    parts: tuple[Part, ...]
    test: Part
    classes: int
    seed: int

    @property
    def dimensions(self) -> int:
        return int(self.test.features.shape[1])


class Features:
    """Features of a data set's rows, each computed when it is first asked for."""

    def __init__(self, images: Tensor, dimensions: int | None) -> None:
        shape = tuple(images.shape[1:])
        self._images = images
        self._extractor = scattering(shape)
        self._dimensions = dimensions or usual_dimensions(shape)
        self._rows: dict[int, Array] = {}

    def of(self, rows: Array) -> Array:
        """`[n, D]` float64 of these rows."""
        missing = [int(row) for row in rows if int(row) not in self._rows]
        for start in range(0, len(missing), BATCH):
            at = missing[start : start + BATCH]
            with torch.no_grad():
                maps = self._extractor(self._images[at]).flatten(1).double().numpy()
            if maps.shape[1] > self._dimensions:
                maps = maps @ projection(maps.shape[1], self._dimensions)
            self._rows.update(zip(at, maps, strict=True))
        return np.stack([self._rows[int(row)] for row in rows])


@lru_cache(maxsize=1)
def _set(name: str, size: int | None, dimensions: int | None, folder: str | None) -> tuple[Dataset, Features, Features]:
    if name in _IN_THE_FOLDER_ONLY:
        data = _from_folder(name, size, folder)
    else:
        data = load_dataset(name, folder, image_size=size)
    return data, Features(data.train_images, dimensions), Features(data.test_images, dimensions)


def _from_folder(name: str, size: int | None, folder: str | None) -> Dataset:
    root = Path(folder or os.environ["FLEETDISTILL_DATA"]).expanduser()
    with np.load(root / name / f"{name}.npz", allow_pickle=False) as stored:
        parts = [stored[f"{part}_{what}"] for part in ("train", "test") for what in ("images", "labels")]
    images = [torch.from_numpy(part if part.ndim == 4 else part[..., None]) for part in parts[::2]]
    images = [image.float().div(255).permute(0, 3, 1, 2).contiguous() for image in images]
    labels = [torch.from_numpy(part.astype(np.int64)) for part in parts[1::2]]
    if size is not None:
        images = [adaptive_avg_pool2d(image, size) for image in images]
    names = tuple(str(number) for number in range(_IN_THE_FOLDER_ONLY[name]))
    return Dataset(name, images[0], labels[0], images[1], labels[1], names)


def known_sets() -> list[str]:
    return [*DATASETS, *_IN_THE_FOLDER_ONLY]


def make_fleet(setting: Setting, seed: int, data_dir: str | None = None) -> Fleet:
    """The fleet of one seed: the same rows on the same devices as `fleetdistill simulate` deals them."""
    data, train, test = _set(setting.dataset, setting.image_size, setting.dimensions, data_dir)
    if setting.classes or setting.held_out:
        return _fleet_of_some_classes(setting, data, train, test, seed)
    rows = _some(data.train_labels, setting.train_limit, seed)
    labels = data.train_labels.numpy()[rows]
    if setting.alpha is None:
        assert data.train_clients is not None
        settings = {"clients": data.train_clients.numpy()[rows]}
        dealt = partition("by_client", labels, setting.devices, seed, **settings)
    else:
        dealt = partition("dirichlet_by_class", labels, setting.devices, seed, alpha=setting.alpha)
    parts = tuple(Part(data.train_images[rows[mine]], train.of(rows[mine]), labels[mine]) for mine in dealt.indices)
    tested = _some(data.test_labels, setting.test_limit, seed)
    unseen = Part(data.test_images[tested], test.of(tested), data.test_labels.numpy()[tested])
    return Fleet(parts, unseen, len(data.classes), seed)


def _fleet_of_some_classes(setting: Setting, data: Dataset, train: Features, test: Features, seed: int) -> Fleet:
    """Returns a fleet of some classes, numbered anew."""
    assert setting.alpha is not None
    count = setting.classes or len(data.classes)
    chosen = np.sort(np.random.default_rng([seed, 5]).permutation(len(data.classes))[:count])
    known, labels = _of_classes(data.train_labels, chosen)
    rows = known[_some(torch.from_numpy(labels[known]), setting.train_limit, seed)]
    dealt = partition("dirichlet_by_class", labels[rows], setting.devices, seed, alpha=setting.alpha).indices
    parts = [Part(data.train_images[at], train.of(at), labels[at]) for at in (rows[mine] for mine in dealt)]
    if setting.held_out:
        images, features, rest = data.train_images, train, np.setdiff1d(known, rows)
    else:
        images, features = data.test_images, test
        rest, labels = _of_classes(data.test_labels, chosen)
    tested = rest[_some(torch.from_numpy(labels[rest]), setting.test_limit, seed)]
    return Fleet(tuple(parts), Part(images[tested], features.of(tested), labels[tested]), count, seed)


def _of_classes(labels: Tensor, chosen: Array) -> tuple[Array, Array]:
    """Returns the rows of the chosen classes, and every row's number of its class, which is valid for these."""
    every = labels.numpy()
    return np.flatnonzero(np.isin(every, chosen)), np.searchsorted(chosen, every)


def _some(labels: Tensor, limit: int | None, seed: int) -> Array:
    count = len(labels)
    return np.arange(count) if limit is None or limit >= count else stratified_rows(labels.numpy(), limit, seed)


def recalls(predicted_n: Array, labels_n: Array, classes: int) -> Array:
    """`[C]`, share of each class's rows that are told; 0 of a class without rows."""
    sizes = np.bincount(labels_n, minlength=classes)
    right = np.bincount(labels_n[predicted_n == labels_n], minlength=classes)
    return np.asarray(right / np.maximum(sizes, 1))


def accuracies(fleet: Fleet, logits: Sequence[Array]) -> tuple[float, float]:
    """Of one answer a device: accuracy on the test part, and in the device's class mix, means over devices."""
    on_all = [float((result.argmax(axis=1) == fleet.test.labels).mean()) for result in logits]
    own = [own_accuracy(fleet, part, result) for part, result in zip(fleet.parts, logits, strict=True)]
    return float(np.mean(on_all)), float(np.mean(own))


def own_accuracy(fleet: Fleet, part: Part, logits_nc: Array) -> float:
    """Accuracy of an answer to the test part, in the class mix of one device."""
    labels = fleet.test.labels
    tested = np.bincount(labels, minlength=fleet.classes) > 0
    shares = part.shares(fleet.classes) * tested
    return float(recalls(logits_nc.argmax(axis=1), labels, fleet.classes) @ shares / shares.sum())
