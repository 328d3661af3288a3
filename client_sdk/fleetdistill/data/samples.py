"""`read_samples`: reads an app's data once, checks every sample, and detects what has changed since the last time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice, permutations
from typing import Any

import numpy as np

from fleetdistill.data.rows import (
    Array,
    ArrayRows,
    ItemRows,
    Pair,
    Rows,
    as_array,
    batch_of,
    is_array,
    named_errors,
    stack,
)
from fleetdistill.data.splits import Augmented, Splits
from fleetdistill.errors import DataError
from fleetdistill.interruption import check_may_continue
from fleetdistill.lazy import get_loaded

__all__ = ["Samples", "read_samples"]

_FORMS = (
    "pass a tuple (inputs, labels) of tensors or NumPy arrays, a map-style or iterable Dataset of (input, label), a "
    "DataLoader, a list of pairs, or a function that returns one of these or yields pairs"
)
_AT_ONCE = 1024
_CHUNK_BYTES = 8 << 20
_FIRST_CHUNK = 64
DIGEST_BYTES = 16


def opened(data: Any) -> tuple[Rows, Callable[[Any], Any] | None]:
    """Returns the rows of data, as `open_rows`, and the transform for training if they are `Augmented`."""
    inner, transform = unwrap(_call(data))
    return open_rows(inner, from_function=is_function(data)), transform


def unwrap(data: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """Returns the data inside `Augmented`, and its transform; the data itself and None without `Augmented`."""
    return (data.data, data.transform) if isinstance(data, Augmented) else (data, None)


def is_function(data: Any) -> bool:
    """Returns whether data are given as a function that must be called to read them."""
    return isinstance(data, type) or (callable(data) and not _is_map_style(data) and not hasattr(data, "__iter__"))


def is_iterable_only(data: Any) -> bool:
    """Returns whether data can only be read from the first sample to the last, and not by row."""
    utils = _torch_data()
    of_torch = (utils.IterableDataset, utils.DataLoader) if utils is not None else ()
    if isinstance(data, of_torch):
        return isinstance(getattr(data, "dataset", data), utils.IterableDataset)
    is_known = _is_map_style(data) or isinstance(data, str | bytes | dict) or hasattr(data, "__next__")
    return hasattr(data, "__iter__") and not is_known


def open_rows(data: Any, *, from_function: bool = False) -> Rows:
    """Returns the rows of an app's data, not yet read except iterable data, which are read into memory.

    Args:
        data: Data in any form of `Device(data=...)`; a function is called.
        from_function: Whether the data are what a function has returned, which makes them anew at each read.

    Raises:
        DataError: The form is unknown, or types, dimensions or lengths are wrong.
    """
    from_function = from_function or is_function(data)
    data, _ = unwrap(_call(data))
    utils = _torch_data()
    if utils is not None and isinstance(data, utils.TensorDataset):
        data = data.tensors
    if isinstance(data, tuple) and len(data) == 2 and any(is_array(item) for item in data):
        return _of_pair(*data)
    _check_form(data)
    if utils is not None and isinstance(data, utils.DataLoader):
        return _of_loader(data, utils)
    if _is_map_style(data) and not is_iterable_only(data):
        return ItemRows(list(data) if isinstance(data, list) else data)  # the app may change its list during training
    return _of_iterable(data, type(data).__name__, from_function=from_function)


def _check_form(data: Any) -> None:
    """Raises DataError for inputs without labels, and for a tuple that contains neither arrays nor pairs."""
    if is_array(data) and not getattr(data.dtype, "hasobject", False):
        raise DataError(f"the data is one array of shape {list(data.shape)}; pass a tuple (inputs, labels)")
    if isinstance(data, tuple) and not all(isinstance(item, tuple | list) and len(item) == 2 for item in data):
        kinds = ", ".join(type(item).__name__ for item in data[:4])
        raise DataError(
            f"the data is a tuple of {len(data)} items ({kinds}), expected (inputs, labels): two tensors or NumPy "
            "arrays; convert lists with numpy.asarray"
        )


def _torch_data() -> Any:
    return get_loaded("torch.utils.data")  # an app that passes a Dataset has loaded it


def _call(data: Any) -> Any:
    if not is_function(data):
        return data
    name = getattr(data, "__name__", type(data).__name__)
    with named_errors(f"the function {name}", "fix it; while it cannot read it may raise OSError or return no samples"):
        return data()


def _of_pair(inputs: Any, labels: Any) -> Rows:
    try:
        return ArrayRows(as_array(inputs), as_array(labels))
    except ValueError as error:
        raise DataError(f"the data cannot be made an array: {error}; all inputs need one shape") from error


def _is_map_style(data: Any) -> bool:
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, str | bytes | dict)


def _of_loader(loader: Any, utils: Any) -> Rows:
    """Returns the rows of a DataLoader's data; batch size, order and workers are not used, because the run has its own.

    Raises:
        DataError: The sampler selects samples.
    """
    collate = None if loader.collate_fn in (utils.default_collate, utils.default_convert) else loader.collate_fn
    if isinstance(loader.dataset, utils.IterableDataset):
        return _of_iterable(loader.dataset, type(loader.dataset).__name__, collate)
    in_order = isinstance(loader.sampler, utils.SequentialSampler)
    shuffled = isinstance(loader.sampler, utils.RandomSampler) and not loader.sampler.replacement
    if not in_order and not (shuffled and len(loader.sampler) == len(loader.dataset)):
        kind = type(loader.sampler).__name__
        raise DataError(
            f"the DataLoader's {kind} selects samples, but the run draws its own batches; pass "
            "torch.utils.data.Subset(dataset, indices) for a part of a Dataset"
        )
    return ItemRows(loader.dataset, collate) if collate else open_rows(loader.dataset)


def _of_iterable(
    data: Any, name: str, collate: Callable[[list[Any]], Any] | None = None, *, from_function: bool = False
) -> Rows:
    """Returns the rows of one pass over iterable data, in memory."""
    if hasattr(data, "__next__") and not from_function:
        raise DataError(f"the data is of type {name}, which can be read only once; pass a function that returns it")
    if not isinstance(data, Iterable) or isinstance(data, str | bytes | dict):
        what = "the function returned an object" if from_function else "the data is"
        raise DataError(f"{what} of type {name}; {_FORMS}")
    batches: list[Pair] = []
    numbered = enumerate(_items_of(data, name))
    while True:
        rows_and_items = list(islice(numbered, _AT_ONCE))
        if not rows_and_items:
            return _join(batches, name)
        rows, items = zip(*rows_and_items, strict=True)
        batches.append(batch_of(collate or stack, list(items), name, rows))


def _items_of(data: Iterable[Any], name: str) -> Iterator[Any]:
    """Yields the items; an exception of the app's code becomes a DataError with the row."""
    with named_errors(f"the iterator of {name}", "fix the iterator"):
        remaining = iter(data)
    for row in count():
        with named_errors(f"row {row} of {name}", "fix or remove the sample"):
            try:
                item = next(remaining)
            except StopIteration:
                return
        yield item


def _join(batches: list[Pair], name: str) -> ArrayRows:
    if not batches:
        return ArrayRows(np.zeros((0,), np.float32), np.zeros(0, np.int64))
    try:
        return ArrayRows(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))
    except ValueError as error:
        raise DataError(f"the items of {name} cannot be stacked: {error}; all inputs need one shape") from error


@dataclass(eq=False)
class Samples:
    """An app's labelled samples, as they were when they were read.

    Attributes:
        rows: The rows, for reading inputs again.
        labels: `[N]` int64, at least 0.
        first: Inputs of the first samples, `[min(N, 64), *input_shape]` float32.
        digests: `[N, 16]` uint8: digest of each sample, or of its id if the app gives ids.
        fingerprint: See `Rows.fingerprint`.
        transform: Transform for training, from `Augmented`.
    """

    rows: Rows
    labels: Array
    first: Array
    digests: Array
    fingerprint: bytes | None
    transform: Any

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input; `()` if there are no samples to take it from."""
        return self.first.shape[1:]

    def part(self, rows: slice) -> Samples:
        """Returns some samples, which are not read again; for samples of arrays in memory.

        Args:
            rows: Their positions, with step 1.
        """
        assert self.rows.in_memory is not None
        inputs, labels = (array[rows] for array in self.rows.in_memory)
        return Samples(
            rows=ArrayRows(inputs, labels),
            labels=labels,
            first=inputs[:_FIRST_CHUNK],
            digests=self.digests[rows],
            fingerprint=None,
            transform=self.transform,
        )

    @property
    def digest(self) -> bytes:
        """SHA-256 of all samples with their labels, in order. It never leaves the device."""
        return _digest_of(self.digests, self.labels)

    def check_run(self, run: str, input_shape: tuple[int, ...], classes: int) -> None:
        """Checks the samples against a run.

        Raises:
            DataError: The inputs have another shape, or a label is outside `[0, classes)`.
        """
        if len(self):
            _check_shape(run, self.input_shape, input_shape)
            check_labels(self.labels, classes)


def _check_shape(run: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        advice = shape_advice(shape, expected)
        raise DataError(f"the inputs have shape {list(shape)}, but run {run!r} expects {list(expected)}{advice}")


def shape_advice(shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Returns what to do about inputs of another shape; a reshape in place of a transposition would mix the pixels."""
    if len(shape) == len(expected) > 1 and sorted(shape) == sorted(expected):
        axes = next(
            permutation
            for permutation in permutations(range(len(shape)))
            if tuple(shape[at] for at in permutation) == expected
        )
        order = ", ".join(str(at + 1) for at in axes)
        return f"; reorder the axes with inputs.transpose(0, {order}), or permute of a tensor, and do not reshape"
    if math.prod(shape) != math.prod(expected):
        return "; pass inputs of that shape"
    return f"; reshape them with inputs.reshape(-1, {', '.join(map(str, expected))})"


def check_labels(labels: Array, classes: int) -> None:
    """Raises DataError for a label outside `[0, classes)`."""
    outside = np.flatnonzero(labels >= classes)
    if len(outside):
        row = int(outside[0])
        raise DataError(
            f"label {int(labels[row])} at row {row} is outside [0, {classes}); "
            "the labels must follow the class list of the run"
        )


def read_samples(data: Any, known: Samples | None = None) -> Samples:
    """Reads and checks an app's data, in chunks.

    Args:
        data: Data in any form of `Device(data=...)`, or the result of an earlier call.
        known: Result of the previous call; returned again if neither a sample nor the transform has changed.

    Raises:
        DataError: The data cannot be read, or a sample is invalid.
    """
    if isinstance(data, Samples):
        return data
    rows, transform = opened(data)
    fingerprint = rows.fingerprint()
    same = known if known is not None and known.transform is transform else None
    if same is not None and fingerprint is not None and fingerprint == same.fingerprint:
        return same
    read = _scan(rows, fingerprint, transform)
    if same is not None and same.digest == read.digest:
        same.rows, same.fingerprint = rows, fingerprint  # the same samples, perhaps in new files
        return same
    return read


def check_data(data: Any, name: str) -> None:
    """Checks data as far as that is quick, when a device is constructed.

    Arrays in memory are read completely; of memory-mapped arrays and Datasets, all labels in arrays and the first
    inputs. Functions and iterable data are read before the first check-in.

    Args:
        data: Data in any form of `Device(data=...)`.
        name: Name of the argument, for the message.

    Raises:
        DataError: The data cannot be used.
    """
    inner, _ = unwrap(data)
    with named(name):
        if is_function(inner) or is_iterable_only(inner):
            return
        rows = open_rows(inner)
        if rows.in_memory is not None:
            _scan(rows, None, None)
        else:
            _check_first(rows)


def check_fits_run(data: Any, run: str, input_shape: tuple[int, ...], classes: int) -> None:
    """Checks data against a run as far as that is quick: the first inputs, and labels in memory.

    Raises:
        DataError: As `Samples.check_run`, with the argument's name.
    """
    with named("data"):
        first = first_inputs(data)
        if first is None or not len(first):
            return
        _check_shape(run, first.shape[1:], input_shape)
        if (pair := open_rows(unwrap(data)[0]).in_memory) is not None:
            check_labels(pair[1], classes)


def first_inputs(data: Any) -> Array | None:
    """Returns the inputs of the first samples; None for a function or iterable data, which take a pass to read.

    Raises:
        DataError: The data cannot be read.
    """
    inner, _ = unwrap(data)
    if inner is None or is_function(inner) or is_iterable_only(inner):
        return None
    rows = open_rows(inner)
    return rows.read(range(min(len(rows), _FIRST_CHUNK)))[0]


def check_splits(splits: Splits) -> None:
    """Checks data as far as that is quick. Raises DataError with the argument's name."""
    for name in ("data", "test_data", "validation_data"):
        data = getattr(splits, name)
        if data is not None:
            check_data(data, name)


def digest_of_arrays(data: Any) -> bytes | None:
    """Returns the digest of data that are a pair of arrays in memory, as in `Samples.digest`; None for other data.

    Does not call functions or read Datasets, which may load torch and delay each start of an idle device.
    """
    inner, transform = unwrap(data)
    if not (isinstance(inner, tuple) and len(inner) == 2):
        return None
    rows = open_rows(inner)
    return _scan(rows, None, transform).digest if isinstance(rows, ArrayRows) else None


@contextmanager
def named(name: str) -> Iterator[None]:
    """Puts the name of an argument before the text of a DataError."""
    try:
        yield
    except DataError as error:
        raise type(error)(f"{name}: {error}") from error


def _scan(rows: Rows, fingerprint: bytes | None, transform: Any) -> Samples:
    """Reads every row once, checks it, and computes its digest."""
    first = _check_first(rows)
    labels = []
    digests = []
    shape = first.shape[1:]
    for chunk in _chunks(len(rows), first):
        check_may_continue()
        inputs, labels_b = rows.read(chunk)
        _check_chunk(inputs, labels_b, shape, chunk.start)
        labels.append(labels_b)
        digests.append(_digests(inputs, labels_b, rows.ids(chunk)))
    _check_ids(rows, digests)
    return Samples(
        rows=rows,
        labels=np.concatenate(labels) if labels else np.zeros(0, np.int64),
        first=first,
        digests=np.concatenate(digests) if digests else np.zeros((0, DIGEST_BYTES), np.uint8),
        fingerprint=fingerprint,
        transform=transform,
    )


def _check_first(rows: Rows) -> Array:
    """Returns the inputs of the first rows, after checking that they can be read twice with the same result."""
    chunk = range(min(len(rows), _FIRST_CHUNK))
    inputs, labels = rows.read(chunk)
    _check_chunk(inputs, labels, inputs.shape[1:], 0)
    if rows.in_memory is None and rows.ids(chunk) is None and not np.array_equal(rows.read(chunk)[0], inputs):
        raise DataError(
            "a sample changes each time it is read, also with a fixed torch seed; draw random changes from torch, pass "
            "them as Augmented(data, transform), or give the Dataset a method sample_id(index)"
        )
    return inputs


def _chunks(count: int, first: Array) -> Iterator[range]:
    size = max(_CHUNK_BYTES // max(first[:1].nbytes, 1), 1)
    return (range(start, min(start + size, count)) for start in range(0, count, size))


def _check_chunk(inputs: Array, labels: Array, shape: tuple[int, ...], start: int) -> None:
    if inputs.shape[1:] != shape:
        text = f"expected {list(shape)} like the first; all inputs need one shape"
        raise DataError(f"the inputs from row {start} have shape {list(inputs.shape[1:])}, {text}")
    bad = ~np.isfinite(inputs).all(axis=tuple(range(1, inputs.ndim)))
    if bad.any():
        row = start + int(bad.argmax())
        raise DataError(f"the inputs contain NaN or infinity, first at row {row}; clean or remove such samples")
    if (labels < 0).any():
        row = int((labels < 0).argmax())
        raise DataError(f"label {int(labels[row])} at row {start + row} is negative; labels start at 0")


def _digests(inputs: Array, labels: Array, ids: list[bytes] | None) -> Array:
    """Returns the digest of each sample, `[b, 16]`: of its id if it has one, otherwise of input and label."""
    if ids is None:
        width = inputs[:1].nbytes
        data = np.ascontiguousarray(inputs).reshape(-1).view(np.uint8).data
        ends = labels.astype("<i8")
        contents = (data[at * width : (at + 1) * width] for at in range(len(labels)))
        result = [
            hashlib.blake2b(one, digest_size=DIGEST_BYTES, key=end.tobytes()).digest()
            for one, end in zip(contents, ends, strict=True)
        ]
    else:
        result = [hashlib.blake2b(item, digest_size=DIGEST_BYTES).digest() for item in ids]
    return np.frombuffer(b"".join(result), np.uint8).reshape(-1, DIGEST_BYTES)


def _check_ids(rows: Rows, digests: list[Array]) -> None:
    """Raises DataError if two samples have the same id from the app."""
    if not digests or rows.ids(range(1)) is None:
        return
    _, first, counts = np.unique(np.concatenate(digests), axis=0, return_index=True, return_counts=True)
    if (counts > 1).any():
        row = int(first[counts.argmax()])
        raise DataError(f"sample_id gives the id of row {row} for {int(counts.max())} samples, expected unique ids")


def _digest_of(digests: Array, labels: Array) -> bytes:
    total = hashlib.sha256(f"{digests.shape};".encode())
    total.update(np.ascontiguousarray(digests).data)
    total.update(labels.astype("<i8").tobytes())
    return total.digest()
