"""Rows: labelled samples that are read when they are needed, whatever form the app keeps them in."""

from __future__ import annotations

import hashlib
import mmap
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from fleetdistill.control_flow import CONTROL_FLOW
from fleetdistill.errors import DataError, NoSamplesError
from fleetdistill.lazy import get_loaded

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
        return _as_float32(self._inputs), self._labels.astype(np.int64, copy=False)


class ItemRows:
    """Rows of an object with `len(items)` and `items[row]`, such as a map-style Dataset or a list of pairs.

    Args:
        items: Gives `(input, label)` for each row.
        collate: Joins a list of items into `(inputs, labels)`; by default arrays are stacked.
    """

    def __init__(self, items: Any, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self._items = items
        self._collate = collate or stack
        self._count = len(items)
        self._name = type(items).__name__

    def __len__(self) -> int:
        return self._count

    def read(self, rows: Sequence[int], *, training: bool = False) -> Pair:
        """See `Rows.read`."""
        if not len(rows):
            return np.zeros(0, np.float32), np.zeros(0, np.int64)
        items = list(self._drawn(rows) if training else self._fixed(rows))
        return batch_of(self._collate, items, self._name, rows)

    def _drawn(self, rows: Sequence[int]) -> Iterator[Any]:
        for row in rows:
            yield self._item(row)

    def _item(self, row: int) -> Any:
        with named_errors(f"row {row} of {self._name}", "fix or remove the sample"):
            return self._items[int(row)]

    def _fixed(self, rows: Sequence[int]) -> Iterator[Any]:
        """Yields each item with the same random numbers, so that a random item does not change between reads."""
        torch = get_loaded("torch")
        if torch is None:
            yield from self._drawn(rows)
            return
        before = torch.get_rng_state()
        try:
            for row in rows:
                torch.default_generator.manual_seed(0)
                yield self._item(row)
        finally:
            torch.set_rng_state(before)

    def ids(self, rows: Sequence[int]) -> list[bytes] | None:
        """See `Rows.ids`: the results of the method `sample_id(index)` of the items, if they have one."""
        sample_id = getattr(self._items, "sample_id", None)
        if not callable(sample_id):
            return None
        with named_errors(f"sample_id of {self._name}", "it must return an id for every row"):
            return [_id_bytes(sample_id(int(row))) for row in rows]

    def fingerprint(self) -> bytes | None:
        """See `Rows.fingerprint`."""
        return None

    @property
    def in_memory(self) -> Pair | None:
        """See `Rows.in_memory`."""
        return None


def stack(items: list[Any]) -> Pair:
    """Returns a list of `(input, label)` as two arrays. Raises TypeError or ValueError if they cannot be stacked."""
    inputs = [as_array(one) for one, _ in items]
    labels = [operator.index(label) for _, label in items]
    return np.stack(inputs), np.array(labels, dtype=np.int64)


def batch_of(collate: Callable[[list[Any]], Any], items: list[Any], name: str, rows: Sequence[int]) -> Pair:
    """Returns the checked arrays of the items of some rows, float32 and int64."""
    try:
        inputs, labels = (as_array(item) for item in collate(items))
        _check_arrays(inputs, labels)
    except (TypeError, ValueError, RuntimeError, DataError) as error:
        if collate is stack:
            _check_items(items, name, rows)
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"the items of {name} cannot be stacked: {error}; each must be (input, label) with inputs that are "
            "tensors or arrays of one shape (for images add a ToTensor transform)"
        ) from error
    if len(labels) != len(items):
        raise DataError(f"collate_fn of {name} gives {len(labels)} samples for {len(items)} items, expected one each")
    return _as_float32(inputs), labels.astype(np.int64)


def _check_items(items: list[Any], name: str, rows: Sequence[int]) -> None:
    """Raises DataError for the first row that is not a pair of numbers and an integer, or has another shape."""
    shape: tuple[int, ...] | None = None
    for row, item in zip(rows, items, strict=True):
        where = f"row {row} of {name}"
        if isinstance(item, dict | str) or not hasattr(item, "__getitem__") or len(item) != 2:
            raise DataError(f"{where} is {_kind(item)}, expected (input, label)")
        try:
            result = as_array(item[0])
        except ValueError as error:
            raise DataError(f"the input in {where} cannot be made an array: {error}") from error
        if result.dtype.hasobject or not np.issubdtype(result.dtype, np.number):
            raise DataError(f"the input in {where} is {_kind(item[0])}, expected a tensor or an array of floats")
        if not _is_integer(item[1]):
            raise DataError(f"the label in {where} is {_kind(item[1])}, expected an integer")
        shape = result.shape if shape is None else shape
        if result.shape != shape:
            text = f"has shape {list(result.shape)}, expected {list(shape)} as in row {rows[0]}"
            raise DataError(f"the input in {where} {text}; all inputs need one shape")


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several elements
        return False
    return True


def _kind(value: Any) -> str:
    """Returns the type of a value for a message, with the length of a tuple or list."""
    length = f" of {len(value)} items" if isinstance(value, tuple | list) else ""
    return f"of type {type(value).__name__}{length}"


def as_array(value: Any) -> Array:
    """Returns a tensor or anything that NumPy accepts as an array, without copying it if possible."""
    torch = get_loaded("torch")  # an app that passes a tensor has loaded torch
    if torch is not None and isinstance(value, torch.Tensor):
        on_cpu = value.detach().cpu()
        on_cpu = on_cpu if on_cpu.layout == torch.strided else on_cpu.to_dense()
        return np.asarray((on_cpu.float() if on_cpu.dtype == torch.bfloat16 else on_cpu).numpy())
    return np.asarray(value)


@contextmanager
def named_errors(what: str, advice: str) -> Iterator[None]:
    """Turns any exception of the app's code into a DataError that names the code, and says what to do.

    An OSError, as of a camera or a disk, becomes a NoSamplesError: the data may be readable later.
    """
    try:
        yield
    except DataError:
        raise
    except (Exception, *CONTROL_FLOW) as error:
        detail = str(error).strip().split("\n")[0][:200]
        kind = NoSamplesError if isinstance(error, OSError) else DataError
        raise kind(f"{what} raised {type(error).__name__}: {detail}; {advice}") from error


def is_array(value: Any) -> bool:
    """Returns whether a value is a NumPy array or a tensor."""
    torch = get_loaded("torch")
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


def _check_arrays(inputs: Array, labels: Array) -> None:
    if inputs.dtype.hasobject or not np.issubdtype(inputs.dtype, np.number):
        raise DataError(f"cannot convert an array of dtype {inputs.dtype} to a tensor; use a numeric dtype")
    if not np.issubdtype(inputs.dtype, np.floating):
        if inputs.ndim == 1 and np.issubdtype(labels.dtype, np.floating):
            raise DataError("inputs and labels are swapped; pass (inputs, labels)")
        raise DataError(f"the inputs are {inputs.dtype}, expected floats; scale images to [0, 1] and convert them")
    if inputs.ndim == 0:
        raise DataError("the inputs are a single number, expected [samples, ...]")
    if not np.issubdtype(labels.dtype, np.integer) or labels.ndim != 1:
        remedy = "labels.argmax(axis=1) makes them of one-hot rows" if labels.ndim == 2 else "number the classes from 0"
        result = f"the labels are {labels.dtype} of shape {list(labels.shape)}, expected integers [samples]"
        raise DataError(f"{result}; {remedy}")
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


def _id_bytes(sample_id: Any) -> bytes:
    if isinstance(sample_id, bytes):
        return b"b" + sample_id
    if isinstance(sample_id, str):
        return b"s" + sample_id.encode()
    return b"i%d" % operator.index(sample_id)
