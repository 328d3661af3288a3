"""Rows: labelled samples that are read when they are needed, whatever form the app keeps them in."""

from __future__ import annotations

import hashlib
import mmap
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from fleetdistill.errors import DataError

Array = np.ndarray
Pair = tuple[Array, Array]


class Rows(Protocol):
    """Labelled samples that can be read by row."""

    def __len__(self) -> int:
        """Returns the number of samples."""

    def read(self, rows: Sequence[int], *, training: bool = False) -> Pair:
        """Returns inputs `[b, *input_shape]` float32 and labels `[b]` int64 of some rows, in their order.

        Args:
            rows: Row numbers.
            training: Whether random rows give a new draw. Otherwise a row always gives the same values.

        Raises:
            DataError: A row cannot be read, or has the wrong type or shape.
        """

    def ids(self, rows: Sequence[int]) -> list[bytes] | None:
        """Returns the app's ids of some rows; None if the app gives no ids."""

    def fingerprint(self) -> bytes | None:
        """Returns a digest that changes with any row; None if only reading every row can detect a change."""

    @property
    def in_memory(self) -> Pair | None:
        """Inputs and labels as arrays in memory; None for rows on a disk or in an object of the app."""


class ArrayRows:
    """Rows of two arrays; a memory-mapped array stays mapped.

    Args:
        inputs: `[N, *input_shape]`, of any float type.
        labels: `[N]`, of any integer type.

    Raises:
        DataError: A type, a dimension or a length is wrong.
    """

    def __init__(self, inputs: Array, labels: Array) -> None:
        _check_arrays(inputs, labels)
        self._inputs, self._labels = inputs, labels
        self._is_mapped = _is_mapped(inputs)

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, rows: Sequence[int], *, training: bool = False) -> Pair:
        """See `Rows.read`."""
        at = slice(rows.start, rows.stop) if isinstance(rows, range) else rows  # a range has step 1
        return _as_float32(np.array(self._inputs[at])), self._labels[at].astype(np.int64)

    def ids(self, rows: Sequence[int]) -> None:
        """See `Rows.ids`: arrays have none."""

    def fingerprint(self) -> bytes | None:
        """See `Rows.fingerprint`; a mapped array is not read for it."""
        if self._is_mapped:
            return None
        total = hashlib.sha256()
        for array in (self._inputs, self._labels):
            total.update(f"{array.dtype.str} {array.shape};".encode())
            total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return total.digest()

    @property
    def in_memory(self) -> Pair | None:
        """See `Rows.in_memory`."""
        if self._is_mapped or not self._inputs.flags.writeable:  # torch warns about arrays that it must not write
            return None
        return _as_float32(self._inputs), self._labels.astype(np.int64)


class ItemRows:
    """Rows of an object with `len(items)` and `items[row]`, such as a map-style Dataset or a list of pairs.

    Args:
        items: Gives `(input, label)` for each row.
        collate: Joins a list of items into `(inputs, labels)`; by default arrays are stacked.
    """

    def __init__(self, items: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self._items, self._collate, self._count = items, collate or stacked, len(items)
        self._name = type(items).__name__

    def __len__(self) -> int:
        return self._count

    def read(self, rows: Sequence[int], *, training: bool = False) -> Pair:
        """See `Rows.read`."""
        if not len(rows):
            return np.zeros(0, np.float32), np.zeros(0, np.int64)
        with named_errors(f"the items of {self._name}"):
            items = list(self._drawn(rows) if training else self._fixed(rows))
        return batch_of(self._collate, items, self._name)

    def _drawn(self, rows: Sequence[int]) -> Iterator[Any]:
        for row in rows:
            yield self._items[int(row)]

    def _fixed(self, rows: Sequence[int]) -> Iterator[Any]:
        """Yields each item with the same random numbers, so that a random item does not change between reads."""
        torch = sys.modules.get("torch")
        if torch is None:
            yield from self._drawn(rows)
            return
        before = torch.get_rng_state()
        try:
            for row in rows:
                torch.default_generator.manual_seed(0)
                yield self._items[int(row)]
        finally:
            torch.set_rng_state(before)

    def ids(self, rows: Sequence[int]) -> list[bytes] | None:
        """See `Rows.ids`: the results of the method `sample_id(index)` of the items, if they have one."""
        sample_id = getattr(self._items, "sample_id", None)
        if not callable(sample_id):
            return None
        with named_errors(f"sample_id of {self._name}"):
            return [_id_bytes(sample_id(int(row))) for row in rows]

    def fingerprint(self) -> bytes | None:
        """See `Rows.fingerprint`."""
        return None

    @property
    def in_memory(self) -> Pair | None:
        """See `Rows.in_memory`."""
        return None


def stacked(items: list[Any]) -> Pair:
    """Returns a list of `(input, label)` as two arrays. Raises TypeError or ValueError if they cannot be stacked."""
    inputs = [as_array(one) for one, _ in items]
    labels = [operator.index(label) for _, label in items]
    return np.stack(inputs), np.array(labels, dtype=np.int64)


def batch_of(collate: Callable[[list[Any]], Any], items: list[Any], name: str) -> Pair:
    """Returns the checked arrays of a list of items, float32 and int64."""
    try:
        inputs, labels = (as_array(one) for one in collate(items))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the items of {name} cannot be stacked: {error}; each must be (input, label) with inputs that are "
            "tensors or arrays of one shape (for images add a ToTensor transform)"
        ) from error
    _check_arrays(inputs, labels)
    if len(labels) != len(items):
        raise DataError(f"collate_fn of {name} gives {len(labels)} samples for {len(items)} items, expected one each")
    return _as_float32(inputs), labels.astype(np.int64)


def as_array(value: Any) -> Array:
    """Returns a tensor or anything that NumPy accepts as an array, without copying it if possible."""
    torch = sys.modules.get("torch")  # an app that passes a tensor has loaded torch
    if torch is not None and isinstance(value, torch.Tensor):
        on_cpu = value.detach().cpu()
        on_cpu = on_cpu if on_cpu.layout == torch.strided else on_cpu.to_dense()
        return np.asarray((on_cpu.float() if on_cpu.dtype == torch.bfloat16 else on_cpu).numpy())
    return np.asarray(value)


@contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Turns any exception of the app's code into a DataError that names the code."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        detail = str(error).strip().split("\n")[0][:200]
        raise DataError(f"{what} cannot be read: {type(error).__name__}: {detail}; fix or remove the sample") from error


def is_array(value: Any) -> bool:
    """Returns whether a value is a NumPy array or a tensor."""
    torch = sys.modules.get("torch")
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


def _check_arrays(inputs: Array, labels: Array) -> None:
    if inputs.dtype.hasobject or not np.issubdtype(inputs.dtype, np.number):
        raise DataError(f"cannot convert an array of dtype {inputs.dtype} to a tensor; use a numeric dtype")
    if not np.issubdtype(inputs.dtype, np.floating):
        raise DataError(f"the inputs are {inputs.dtype}, expected float32; scale images to [0, 1] and convert them")
    if inputs.ndim == 0:
        raise DataError("the inputs are a single number, expected [samples, ...]")
    if not np.issubdtype(labels.dtype, np.integer) or labels.ndim != 1:
        raise DataError(f"the labels are {labels.dtype} of shape {list(labels.shape)}, expected integers [samples]")
    if len(inputs) != len(labels):
        raise DataError(f"{len(inputs)} inputs but {len(labels)} labels; every sample needs exactly one label")


def _as_float32(inputs: Array) -> Array:
    with np.errstate(over="ignore"):  # too large for float32 becomes infinity, which has its own error
        return np.asarray(inputs).astype(np.float32, copy=False)


def _is_mapped(array: Any) -> bool:
    """Returns whether the memory of an array is a file's, also for a view of a memory-mapped array."""
    while array is not None:
        if isinstance(array, np.memmap | mmap.mmap):
            return True
        array = getattr(array, "base", None)
    return False


def _id_bytes(given: Any) -> bytes:
    if isinstance(given, bytes):
        return b"b" + given
    if isinstance(given, str):
        return b"s" + given.encode()
    return b"i%d" % operator.index(given)
