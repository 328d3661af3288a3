"""`read_samples`: reads an app's data once, checks every sample, and detects what has changed since the last time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np

from fleetdistill.data.opening import is_function, is_iterable_only, open_rows, opened, unwrap
from fleetdistill.data.rows import Array, ArrayRows, Rows
from fleetdistill.data.splits import Splits
from fleetdistill.errors import DataError
from fleetdistill.interruption import check_may_continue

__all__ = ["Samples", "read_samples"]

_CHUNK_BYTES = 8 << 20
_FIRST_CHUNK = 64
DIGEST_BYTES = 16


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

    @property
    def digest(self) -> bytes:
        """SHA-256 of all samples with their labels, in order. It never leaves the device."""
        return _digest_of(self.digests, self.labels)

    def check_run(self, run: str, input_shape: tuple[int, ...], classes: int) -> None:
        """Checks the samples against a run.

        Raises:
            DataError: The inputs have another shape, or a label is outside `[0, classes)`.
        """
        if not len(self):
            return
        if self.input_shape != input_shape:
            raise DataError(
                f"the inputs have shape {list(self.input_shape)}, but run {run!r} expects {list(input_shape)}"
                f"{_advice(self.input_shape, input_shape)}"
            )
        check_labels(self.labels, classes)


def _advice(shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Returns what to do about inputs of another shape; a reshape in place of a transposition would mix the pixels."""
    if len(shape) == len(expected) > 1 and sorted(shape) == sorted(expected):
        axes = next(
            permutation
            for permutation in permutations(range(len(shape)))
            if tuple(shape[at] for at in permutation) == expected
        )
        order = ", ".join(str(at + 1) for at in axes)
        return f"; reorder the axes with inputs.transpose(0, {order}), or permute of a tensor, and do not reshape"
    return "; reshape the inputs" if math.prod(shape) == math.prod(expected) else "; pass inputs of that shape"


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
        raise DataError(f"{name}: {error}") from error


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
