"""Robust means over devices: the influence of each single device is bounded. All sums are in float64.

`docs/reference/robust.md` states the bounds. Outliers cannot be identified among fewer than four devices, so only
weights are bounded then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from fleetdistill.knowledge import Array, ModelParameters
from fleetdistill_server.event_kinds import MOST_OF_THE_WEIGHT
from fleetdistill_server.methods.cohort import Notes
from fleetdistill_server.phases import phase

__all__ = ["OFF", "TensorMean", "WeightedMean", "cap"]

OFF = "off"
_MAX_WEIGHT = 3.0  # times the median weight
_FEWEST_DEVICES = 4
_CLIPPED_FROM = 2.0  # times the median distance from the devices' median
_LEFT_OUT_FROM = 4.0
BLOCK_NUMBERS = 1 << 22  # float64 elements of all devices together that are in memory at a time
_TRIMMED_SHARE = 5  # one device in five is left out at each end


def cap(weights: Sequence[float]) -> list[float]:
    """Caps weights at three times their median. Requires at least one weight; all must be at least 0."""
    most = _MAX_WEIGHT * median(weights)
    return [min(weight, most) for weight in weights]


@dataclass(frozen=True)
class _Update:
    device: str
    model: ModelParameters
    weight: float

    def array(self, name: str) -> Array:
        parameters = self.model.parameters
        return parameters[name] if name in parameters else self.model.buffers[name]


class WeightedMean:
    """The weighted mean of models or gradients, clipped around the devices' median unless `robust` is `off`.

    For each tensor let v be the coordinate-wise median over the devices, r_k = |x_k - v| the distances and m their
    median. A device with r_k > 4m is left out of this tensor; any other contributes v + (x_k - v) min(1, 2m / r_k).
    A device that is left out of more than half of the tensors is left out of all tensors. No device moves a tensor by
    more than 2m w_k / sum(w). If all devices are within 2m, the result is bit-equal to the plain weighted mean. For
    integer buffers, such as batch-norm's counters, the result is the median, or without clipping the maximum.

    Args:
        robust: The setting `robust`; `gross` and `strict` have the same effect here.

    Attributes:
        left_out: Ids of the devices that `result` left out of all tensors.
    """

    def __init__(self, robust: str) -> None:
        self._robust = robust != OFF
        self._updates: list[_Update] = []
        self.left_out: list[str] = []

    def add(self, device: str, sent: ModelParameters, weight: float) -> None:
        """Adds one device's model. It is stored until `result`, so its arrays should be mapped from a file.

        Args:
            device: Id of the device.
            sent: The model or gradient; finite, with the same names and shapes for all devices.
            weight: Weight in the mean, above 0.
        """
        self._updates.append(_Update(device, sent, weight))

    @phase("averaging")
    def result(self, notes: Notes) -> ModelParameters:
        """Returns the mean, in the element types of the models.

        Args:
            notes: Receives an event for each device that is left out, and for a device with most of the weight.

        Raises:
            ValueError: No model was added.
        """
        if not self._updates:
            raise ValueError("no model was added; call `add` before `result`")
        weights = [update.weight for update in self._updates]
        weights = cap(weights) if self._robust else weights
        _note_dominant_weight({one.device: weight for one, weight in zip(self._updates, weights, strict=True)}, notes)
        last = self._updates[-1].model
        names = [*last.parameters, *last.buffers]
        clips = self._robust and len(self._updates) >= _FEWEST_DEVICES
        arrays = self._clipped(names, weights, notes) if clips else {name: self._plain(name, weights) for name in names}
        return ModelParameters(
            parameters={name: arrays[name] for name in last.parameters},
            buffers={name: arrays[name] for name in last.buffers},
            scope=last.scope,
        )

    def _plain(self, name: str, weights: Sequence[float]) -> Array:
        arrays = [update.array(name) for update in self._updates]
        if arrays[0].dtype.kind != "f":
            largest: Array = np.maximum.reduce(arrays)
            return largest
        return _weighted(zip(arrays, weights, strict=True), arrays[0].dtype)

    def _clipped(self, names: Sequence[str], weights: Sequence[float], notes: Notes) -> dict[str, Array]:
        arrays = {name: [update.array(name) for update in self._updates] for name in names}
        floats = [name for name in names if arrays[name][0].dtype.kind == "f"]
        spreads = {name: _Spread.of(arrays[name]) for name in floats}
        left_out = self._outliers(spreads, notes)
        result = {name: _median_integers(arrays[name]) for name in names if name not in spreads}
        for name, spread in spreads.items():
            result[name] = spread.mean(arrays[name], weights, without=left_out)
        return result

    def _outliers(self, spreads: Mapping[str, _Spread], notes: Notes) -> set[int]:
        """Returns the indices of devices that are left out of more than half of the tensors, with an event for each."""
        result = set()
        for number, one in enumerate(self._updates):
            far = [name for name, spread in spreads.items() if spread.is_outlier(number)]
            if len(far) * 2 <= len(spreads):
                continue
            result.add(number)
            worst = max(far, key=lambda name: spreads[name].distances[number])
            text = (
                f"{one.device} is left out of the mean: {len(far)} of its {len(spreads)} tensors are farther from the"
            )
            text += f" devices' median than {_LEFT_OUT_FROM:g} times the median distance"
            text += f" ({worst}: {spreads[worst].distances[number]:.3g}, median {spreads[worst].usual:.3g})"
            notes.event("update-left-out", text, one.device)
        self.left_out = [self._updates[number].device for number in sorted(result)]
        return result


@dataclass(frozen=True)
class _Spread:
    """Distances of the devices' arrays of one tensor from their median.

    Attributes:
        centre: Coordinate-wise median over the devices, flat.
        distances: Euclidean distances `[K]`.
        usual: Median of the distances.
    """

    centre: Array
    distances: Array
    usual: float

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> _Spread:
        centre = np.empty(arrays[0].size)
        squares = np.zeros(len(arrays))
        for rows, block_kn in _blocks(arrays):
            centre[rows] = np.median(block_kn, axis=0)
            squares += np.square(block_kn - centre[rows]).sum(
                axis=1
            )  # without BLAS, whose sums depend on its number of threads
        distances = np.sqrt(squares)
        return cls(centre, distances, float(np.median(distances)))

    def is_outlier(self, number: int) -> bool:
        return bool(self.distances[number] > _LEFT_OUT_FROM * self.usual)

    def mean(self, arrays: Sequence[Array], weights: Sequence[float], without: set[int]) -> Array:
        counted = [number for number in range(len(arrays)) if not self.is_outlier(number) and number not in without]
        if not counted:  # every device is left out of this tensor or of all
            return self.centre.reshape(arrays[0].shape).astype(arrays[0].dtype)
        taken = ((self._clip(arrays[number], number), weights[number]) for number in counted)
        return _weighted(taken, arrays[0].dtype)

    def _clip(self, array: Array, number: int) -> Array:
        most = _CLIPPED_FROM * self.usual
        if self.distances[number] <= most:
            return array
        centre = self.centre.reshape(array.shape)
        clipped: Array = centre + (array - centre) * (most / self.distances[number])
        return clipped


def _blocks(arrays: Sequence[Array]) -> Iterator[tuple[slice, Array]]:
    """Yields the devices' values `[K, n]` in float64, one block of the flat tensor at a time."""
    flat = [array.reshape(-1) for array in arrays]
    size = max(BLOCK_NUMBERS // len(flat), 1)
    for first in range(0, flat[0].size, size):
        rows = slice(first, first + size)
        yield rows, np.stack([item[rows] for item in flat]).astype(np.float64)


def _weighted(arrays: Iterator[tuple[Array, float]], dtype: np.dtype) -> Array:
    total: Array | float = 0.0
    weight = 0.0
    for array, one in arrays:
        total = total + one * array.astype(np.float64)
        weight += one
    return np.asarray(total / weight).astype(dtype)


def _median_integers(arrays: Sequence[Array]) -> Array:
    """Returns the median of integers; of an even number of devices the lower middle value."""
    result: Array = np.sort(np.stack(arrays), axis=0)[(len(arrays) - 1) // 2]
    return result


def _note_dominant_weight(weights: Mapping[str, float], notes: Notes) -> None:
    """Adds one event per run for a device with most of the weight: over 50 %, or over 75 % of two devices."""
    most, total = 0.75 if len(weights) == 2 else 0.5, sum(weights.values())
    for device, weight in weights.items():
        share = weight / total
        if len(weights) > 1 and share > most:
            text = f"{device} has {100 * share:.0f} % of the weight of the mean of {len(weights)} devices"
            notes.event(MOST_OF_THE_WEIGHT, f"{text}; add devices, or balance their sample counts", device, once=True)


class TensorMean:
    """The weighted mean of tensors of one shape over devices, trimmed element by element unless `robust` is `off`.

    For K devices, the floor(K / 5) largest and smallest values of each element are left out; up to four devices nothing
    is trimmed.

    Args:
        robust: The setting `robust`; `gross` and `strict` have the same effect here.
        probabilities: Whether the last axis sums to 1; the trimmed mean is then normalised again.
    """

    def __init__(self, robust: str, *, probabilities: bool = False) -> None:
        self._robust = robust != OFF
        self._probabilities = probabilities
        self._values: list[torch.Tensor] = []
        self._weights: list[float] = []

    def add(self, values: torch.Tensor, weight: float = 1.0) -> None:
        """Adds one device's tensor with a weight above 0."""
        self._values.append(values)
        self._weights.append(weight)

    def result(self) -> torch.Tensor | None:
        """Returns the mean in float64, or None if no tensor was added."""
        if not self._values:
            return None
        weights = cap(self._weights) if self._robust else self._weights
        trimmed = len(weights) // _TRIMMED_SHARE if self._robust else 0
        if trimmed:
            return self._trim(weights, trimmed)
        total = weights[0] * self._values[0].double()
        for values, weight in zip(self._values[1:], weights[1:], strict=True):
            total = total + weight * values.double()
        return total / sum(weights)

    def _trim(self, weights: Sequence[float], trimmed: int) -> torch.Tensor:
        kept, weight_of = slice(trimmed, len(weights) - trimmed), torch.tensor(weights, dtype=torch.float64)
        means = []
        size = max(BLOCK_NUMBERS // len(weights), 1)
        for blocks in zip(*(values.reshape(-1).split(size) for values in self._values), strict=True):
            sorted_k, order_k = torch.stack([block.double() for block in blocks]).sort(dim=0, stable=True)
            weight_k = weight_of[order_k[kept]]
            means.append((sorted_k[kept] * weight_k).sum(dim=0) / weight_k.sum(dim=0))
        mean = torch.cat(means).reshape(self._values[0].shape)
        if not self._probabilities:
            return mean
        sums = mean.sum(dim=-1, keepdim=True)  # 0 if trimming leaves only zeros
        return torch.where(sums > 0, mean / sums, 1 / mean.shape[-1])
