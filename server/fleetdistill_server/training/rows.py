"""Rows of devices' answers as training data: kept on the torch device, or read from their files batch by batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fleetdistill.knowledge import Array
from fleetdistill_server.training.hardware import Hardware

T = TypeVar("T")
_AHEAD = 2
"""Number of mini-batches that are read before they are used."""


def mapped_tensor(array: Array) -> Tensor:
    """Returns an array as a tensor on the CPU without copying it. The tensor must not be written to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch has no read-only tensors
        return torch.from_numpy(array)


class Pool:
    """The rows of several tensors as one sequence.

    Data that fit on the device (`Hardware.keeps`) are copied there once. Larger data stay where they are, usually in
    mapped files. For a GPU, a thread reads the next mini-batches into pinned memory and copies them on a stream of its
    own, so that neither delays a step. For a CPU they are read when they are needed: a thread would compete with the
    training for the same cores.

    Args:
        parts: Tensors `[N, ...]` on the CPU with the same type and shape except for N; at least one.
        hardware: Device that mini-batches are for.
        reads_ahead: Whether a thread reads ahead; None for the default above.
    """

    def __init__(self, parts: Sequence[Tensor], hardware: Hardware, reads_ahead: bool | None = None) -> None:
        self._device = hardware.device
        on_gpu = self._device.type == "cuda"
        self._resident = _resident(parts, hardware)
        self._like = parts[0]
        self._arrays = [part.numpy() for part in parts]
        self._stops = np.cumsum([len(part) for part in parts])
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None
        self._reads_ahead = on_gpu if reads_ahead is None else reads_ahead

    def __len__(self) -> int:
        return int(self._stops[-1])

    def batches(self, rows: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yields the rows of each mini-batch, `[b, ...]` on the device.

        Args:
            rows: Row numbers of each mini-batch, `[b]` int64, on the CPU.
        """
        if self._resident is not None:
            yield from (self._resident.index_select(0, rows_b) for rows_b in on_device(list(rows), self._device))
            return
        for moved, copied in ahead(self._copied, rows) if self._reads_ahead else map(self._copied, rows):
            if copied is not None:
                used_on = torch.cuda.current_stream(self._device)
                used_on.wait_event(copied)
                moved.record_stream(used_on)
            yield moved

    def _copied(self, rows_b: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Returns a mini-batch on the device, and the event after which a GPU has it."""
        gathered = self._gather(rows_b)
        if self._stream is None:
            return gathered.to(self._device), None
        with torch.cuda.stream(self._stream):
            moved = gathered.to(self._device, non_blocking=True)
            return moved, self._stream.record_event()

    def _gather(self, rows_b: Tensor) -> Tensor:
        """Copies rows one by one, which takes a tenth of the time of indexing each part."""
        like = self._like
        taken = torch.empty((len(rows_b), *like.shape[1:]), dtype=like.dtype, pin_memory=self._stream is not None)
        target, rows = taken.numpy(), rows_b.numpy()
        numbers = np.searchsorted(self._stops, rows, side="right")
        for at, (number, row) in enumerate(zip(numbers.tolist(), (rows - self._stops[numbers]).tolist(), strict=True)):
            target[at] = self._arrays[number][row]  # rows count from the end of their part, so they are negative
        return taken


def _resident(parts: Sequence[Tensor], hardware: Hardware) -> Tensor | None:
    """Returns all rows on the device, or None if they are not kept there.

    On a CPU they are float32, so that no mini-batch has to be converted. A GPU receives part after part, so that the
    host needs no memory for the whole; if its memory does not suffice, the rows are streamed.
    """
    on_gpu = hardware.device.type == "cuda"
    dtype = parts[0].dtype if on_gpu or not parts[0].is_floating_point() else torch.float32
    rows = sum(len(part) for part in parts)
    if not hardware.keeps(dtype.itemsize * sum(part.numel() for part in parts)):
        return None
    try:
        kept = torch.empty((rows, *parts[0].shape[1:]), dtype=dtype, device=hardware.device)
    except torch.OutOfMemoryError:
        return None
    for part, target in zip(parts, kept.split([len(part) for part in parts]), strict=True):
        target.copy_(part)
    return kept


def on_device(rows: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Returns row numbers on the device. They are copied together, because each copy waits for the device's steps."""
    if device.type == "cpu" or not rows:
        return rows
    moved: Sequence[Tensor] = torch.cat(list(rows)).to(device).split([len(rows_b) for rows_b in rows])
    return moved


def ahead(make: Callable[[Tensor], T], items: Iterable[Tensor]) -> Iterator[T]:
    """Yields `make(item)` for each item in order; a thread computes up to `_AHEAD` results before they are needed."""
    with ThreadPoolExecutor(1, thread_name_prefix="rows") as thread:
        waiting: list[Future[T]] = []
        try:
            for item in items:
                waiting.append(thread.submit(make, item))
                if len(waiting) > _AHEAD:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            for one in waiting:
                one.cancel()
