"""Labelled samples as tensors: in memory, or read for each batch from data that are larger than memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fleetdistill.data.samples import Samples, check_labels, read_samples
from fleetdistill.errors import CannotAnswer, ConfigurationError, DataError

__all__ = ["LazyData", "LazyInputs", "TensorData", "as_tensor_data", "parts_of", "tensor_data_of"]

_PART_ROWS = 256


MakeIds = Callable[[], np.ndarray]
"""Returns the ids of samples, `[N]` int64, unique."""


class LazyInputs:
    """Inputs `[N, *input_shape]` that are read when they are indexed, as float32 on a torch device.

    Args:
        samples: Checked samples, at least one.
        device: Torch device of the results.
    """

    def __init__(self, samples: Samples, device: torch.device | str = "cpu") -> None:
        self._samples = samples
        self.device = torch.device(device)
        self.shape = torch.Size((len(samples), *samples.input_shape))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Returns the inputs of some rows; the same at each call."""
        return self._read(self._numbers(rows), training=False).to(self.device)

    def draw(self, rows: Tensor) -> Tensor:
        """Returns the inputs of some rows with new random changes.

        Raises:
            CannotAnswer: The app's transform fails, or changes the shape.
        """
        inputs = self._read(self._numbers(rows), training=True)
        transform = self._samples.transform
        return (inputs if transform is None else _transform(inputs, transform)).to(self.device)

    def to(self, device: torch.device | str) -> LazyInputs:
        """Returns inputs that are copied to a device batch by batch."""
        return LazyInputs(self._samples, device)

    def _numbers(self, rows: slice | Tensor) -> range | list[int]:
        return range(*rows.indices(len(self))) if isinstance(rows, slice) else rows.tolist()

    def _read(self, numbers: range | list[int], *, training: bool) -> Tensor:
        if not len(numbers):
            return torch.empty(0, *self.shape[1:])
        inputs, _ = self._samples.rows.read(numbers, training=training)
        if inputs.shape[1:] != self.shape[1:]:
            raise DataError(f"a sample has shape {list(inputs.shape[1:])}, expected {list(self.shape[1:])}")
        return torch.from_numpy(np.ascontiguousarray(inputs))


def _transform(inputs: Tensor, transform: Callable[[Any], Any]) -> Tensor:
    try:
        changed = torch.stack([torch.as_tensor(transform(input_)) for input_ in inputs])
    except Exception as error:  # the app's code can raise any exception
        raise CannotAnswer(f"the transform of Augmented fails with {type(error).__name__}: {error}") from error
    if changed.shape != inputs.shape or changed.dtype != torch.float32:
        result = f"{changed.dtype} {list(changed.shape[1:])}"
        raise CannotAnswer(f"the transform of Augmented returns {result}, expected float32 {list(inputs.shape[1:])}")
    return changed


@dataclass(frozen=True, slots=True, eq=False)
class TensorData:
    """Labelled samples in memory. Build it with `as_tensor_data`, which also checks the labels' range.

    Attributes:
        inputs: `[N, ...]` float32, finite.
        labels: `[N]` int64, at least 0. N may be 0: a device can have an empty test part.
        make_ids: Returns the ids of the samples; None to number them.
        digest: Digest of the samples, which changes with any of them; empty if it is not known.
        checked: Whether the values are known to be valid.
    """

    inputs: Tensor
    labels: Tensor
    make_ids: MakeIds | None = None
    digest: bytes = b""
    checked: InitVar[bool] = False

    def __post_init__(self, checked: bool) -> None:
        if checked:
            return
        _check_inputs(self.inputs)
        _check_labels(self.labels)
        if len(self.inputs) != len(self.labels):
            raise DataError(
                f"{len(self.inputs)} inputs but {len(self.labels)} labels; every sample needs exactly one label"
            )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def sample_ids(self) -> np.ndarray:
        """Ids of the samples, `[N]` int64, unique; a sample keeps its id when others are added or removed."""
        return np.arange(len(self)) if self.make_ids is None else self.make_ids()

    @property
    def first(self) -> Tensor:
        """One input, `[1, ...]`: that of the first sample, or zeros without samples."""
        return self.inputs[:1] if len(self) else torch.zeros(1, *self.inputs.shape[1:])

    def draw(self, rows_b: Tensor) -> Tensor:
        """Returns the inputs of a mini-batch to train on, `[b, ...]`.

        Args:
            rows_b: Row numbers, on the device of the data.
        """
        return self.inputs[rows_b]

    def to(self, device: torch.device | str) -> TensorData:
        """Returns the data on a device."""
        if self.inputs.device == self.labels.device == torch.device(device):
            return self
        return TensorData(self.inputs.to(device), self.labels.to(device), self.make_ids, self.digest, checked=True)


@dataclass(frozen=True, slots=True, eq=False)
class LazyData:
    """Labelled samples whose inputs are read for each batch; the interface is that of `TensorData`.

    Attributes:
        inputs: `[N, ...]`, at least one; indexing gives float32 tensors.
        labels: `[N]` int64.
        make_ids: Returns the ids of the samples; None to number them.
        digest: Digest of the samples, which changes with any of them; empty if it is not known.
    """

    inputs: LazyInputs
    labels: Tensor
    make_ids: MakeIds | None = None
    digest: bytes = b""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def sample_ids(self) -> np.ndarray:
        """See `TensorData.sample_ids`."""
        return np.arange(len(self)) if self.make_ids is None else self.make_ids()

    @property
    def first(self) -> Tensor:
        """See `TensorData.first`."""
        return self.inputs[:1]

    def draw(self, rows_b: Tensor) -> Tensor:
        """Returns the inputs of a mini-batch to train on, `[b, ...]`, with new random changes if the data have any."""
        return self.inputs.draw(rows_b)

    def to(self, device: torch.device | str) -> LazyData:
        """Returns the data on a device; inputs are copied batch by batch."""
        return LazyData(self.inputs.to(device), self.labels.to(device), self.make_ids, self.digest)


def as_tensor_data(data: object, classes: int) -> TensorData:
    """Reads data into memory and checks them.

    Args:
        data: Data in any form of `Device(data=...)`. Inputs of any float dtype become float32; labels of any integer
            dtype become int64. Float32 arrays are not copied and must not be changed afterwards.
        classes: Number of classes of the run's contract, at least 2.

    Raises:
        ConfigurationError: `classes` is less than 2.
        DataError: The type is unsupported, lengths differ, an input is not finite, or a label is outside [0, classes).
    """
    if classes < 2:
        raise ConfigurationError(f"classes is {classes}, must be at least 2")
    if isinstance(data, TensorData):
        check_labels(data.labels.cpu().numpy(), classes)
        return data
    samples = read_samples(data)
    check_labels(samples.labels, classes)
    read = tensor_data_of(samples)
    return read if isinstance(read, TensorData) else TensorData(read.inputs[:], read.labels)


def tensor_data_of(
    samples: Samples, input_shape: Sequence[int] | None = None, make_ids: MakeIds | None = None
) -> TensorData | LazyData:
    """Returns checked samples as tensors: in memory if the app has them in memory, otherwise read for each batch.

    Args:
        samples: The samples.
        input_shape: Shape of one input if there are no samples; by default that of the samples.
        make_ids: Returns the ids of the samples, as in `TensorData`.
    """
    labels = _tensor_of(samples.labels)
    pair = samples.rows.in_memory
    if not len(samples):
        shape = samples.input_shape if input_shape is None else input_shape
        return TensorData(torch.zeros(0, *shape), labels, make_ids)
    if pair is not None and samples.transform is None:
        return TensorData(_tensor_of(pair[0]), labels, make_ids, samples.digest, checked=True)
    return LazyData(LazyInputs(samples), labels, make_ids, samples.digest)


def _tensor_of(array: np.ndarray) -> Tensor:
    """Returns an array as a tensor; only one with negative strides, such as mirrored images, is copied."""
    return torch.from_numpy(array.copy() if min(array.strides, default=0) < 0 else array)


def parts_of(inputs: Tensor | LazyInputs) -> Iterator[Tensor]:
    """Yields all inputs in order, in parts of at most 256 rows."""
    return (inputs[at : at + _PART_ROWS] for at in range(0, len(inputs), _PART_ROWS))


def _check_inputs(inputs: Tensor) -> None:
    if inputs.dtype != torch.float32:
        raise DataError(f"the inputs are {inputs.dtype}, expected float32; scale images to [0, 1] and convert them")
    if inputs.ndim == 0:
        raise DataError("the inputs are a single number, expected [samples, ...]")
    if not bool(inputs.isfinite().all()):
        row = int((~inputs.isfinite()).nonzero()[0, 0])
        raise DataError(f"the inputs contain NaN or infinity, first at row {row}; clean or remove such samples")


def _check_labels(labels: Tensor) -> None:
    if labels.dtype != torch.int64 or labels.ndim != 1:
        raise DataError(f"the labels are {labels.dtype} of shape {list(labels.shape)}, expected int64 of [samples]")
    if len(labels) and int(labels.min()) < 0:
        row = int(labels.argmin())
        raise DataError(f"label {int(labels[row])} at row {row} is negative; labels start at 0")
