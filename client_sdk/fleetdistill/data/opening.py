"""`open_rows`: turns every form of data that an app may pass into rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np

from fleetdistill.data.augmented import Augmented
from fleetdistill.data.rows import ArrayRows, ItemRows, Pair, Rows, as_array, batch_of, is_array, named_errors, stack
from fleetdistill.errors import DataError
from fleetdistill.lazy import get_loaded

_FORMS = (
    "pass a tuple (inputs, labels) of tensors or NumPy arrays, a map-style or iterable Dataset of (input, label), a "
    "DataLoader, a list of pairs, or a function that returns one of these"
)
_AT_ONCE = 1024


def opened(data: Any) -> tuple[Rows, Callable[[Any], Any] | None]:
    """Returns the rows of data, as `open_rows`, and the transform for training if they are `Augmented`."""
    inner, transform = unwrap(_call(data))
    return open_rows(inner), transform


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


def open_rows(data: Any) -> Rows:
    """Returns the rows of an app's data, not yet read except iterable data, which are read into memory.

    Args:
        data: Data in any form of `Device(data=...)`; a function is called.

    Raises:
        DataError: The form is unknown, or types, dimensions or lengths are wrong.
    """
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
    return _of_iterable(data, type(data).__name__)


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
    with named_errors(f"the function {getattr(data, '__name__', type(data).__name__)}", "fix the function"):
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


def _of_iterable(data: Any, name: str, collate: Callable[[list[Any]], Any] | None = None) -> Rows:
    """Returns the rows of one pass over iterable data, in memory."""
    if hasattr(data, "__next__"):
        raise DataError(f"the data is of type {name}, which can be read only once; pass a function that returns it")
    if not isinstance(data, Iterable) or isinstance(data, str | bytes | dict):
        raise DataError(f"the data is of type {name}; {_FORMS}")
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
