"""Means over devices in which no single one decides: named operations, in float64.

`docs/reference/robust.md` says what they bound. With fewer than four devices there is no telling who is far off, so
only weights are bounded then.
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

OFF = "off"
_MOST_WEIGHT = 3.0  # times the median weight
_FEWEST_DEVICES = 4
_CLIPPED_FROM = 2.0  # times the median distance from the devices' median
_LEFT_OUT_FROM = 4.0
BLOCK_NUMBERS = 1 << 22  # of all devices together that are in memory at a time, as float64
_TRIMMED_SHARE = 5  # one device in so many is left out at either end


def capped(weights: Sequence[float]) -> list[float]:
    """Weights of which none is more than three times their median. At least one; all at least 0."""
    most = _MOST_WEIGHT * median(weights)
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
    """The weighted mean of models or gradients, clipped about the devices' median unless `robust` is off.

    With the weights w of the devices, and for each tensor the coordinate-wise median v over the devices, distances
    r_k = |x_k - v| and their median m: a device with r_k > 4m is left out of this tensor, and every other one counts
    as v + (x_k - v) min(1, 2m / r_k). One that is left out of more than half of the tensors is left out of all. No
    device moves a tensor by more than 2m w_k / sum(w); where all are within 2m the result is the plain mean, to the
    bit. Of integer buffers, such as batch-norm's counters, it takes the median, or where nothing is clipped the
    largest.

    Args:
        robust: The setting of that name; `gross` and `strict` are the same here.

    Attributes:
        left_out: Devices that `result` left out of all tensors.
    """

    def __init__(self, robust: str) -> None:
        self._robust = robust != OFF
        self._updates: list[_Update] = []
        self.left_out: list[str] = []

    def add(self, device: str, sent: ModelParameters, weight: float) -> None:
        """Adds one device's model, which is kept until the result is made: best arrays that are mapped from a file.

        Args:
            device: Its id.
            sent: All of them must have the same names and shapes, and be finite.
            weight: Above 0.
        """
        self._updates.append(_Update(device, sent, weight))

    def result(self, notes: Notes) -> ModelParameters:
        """The mean, in the types that were sent. Raises ValueError if nothing was added.

        Args:
            notes: Takes an event about every device that is left out, and about one that has most of the weight.
        """
        if not self._updates:
            raise ValueError("nothing was averaged")
        weights = [one.weight for one in self._updates]
        weights = capped(weights) if self._robust else weights
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
        arrays = [one.array(name) for one in self._updates]
        if arrays[0].dtype.kind != "f":
            largest: Array = np.maximum.reduce(arrays)
            return largest
        return _weighted(zip(arrays, weights, strict=True), arrays[0].dtype)

    def _clipped(self, names: Sequence[str], weights: Sequence[float], notes: Notes) -> dict[str, Array]:
        arrays = {name: [one.array(name) for one in self._updates] for name in names}
        floats = [name for name in names if arrays[name][0].dtype.kind == "f"]
        spreads = {name: _Spread.of(arrays[name]) for name in floats}
        left_out = self._outliers(spreads, notes)
        found = {name: _median_integers(arrays[name]) for name in names if name not in spreads}
        for name, spread in spreads.items():
            found[name] = spread.mean(arrays[name], weights, without=left_out)
        return found

    def _outliers(self, spreads: Mapping[str, _Spread], notes: Notes) -> set[int]:
        """Numbers of the devices that are left out of more than half of the tensors, each with an event."""
        found = set()
        for number, one in enumerate(self._updates):
            far = [name for name, spread in spreads.items() if spread.is_outlier(number)]
            if len(far) * 2 <= len(spreads):
                continue
            found.add(number)
            worst = max(far, key=lambda name: spreads[name].distances[number])
            text = f"{len(far)} of its {len(spreads)} tensors are over {_LEFT_OUT_FROM:g} times as far from the"
            text += f" devices' median as usual, {worst} {spreads[worst].distances[number]:.3g} where"
            text += f" {spreads[worst].usual:.3g} is usual; it is left out of the mean"
            notes.event("update-left-out", f"{one.device}: {text}", one.device)
        self.left_out = [self._updates[number].device for number in sorted(found)]
        return found


@dataclass(frozen=True)
class _Spread:
    """How far the devices' arrays of one tensor lie from their median.

    Attributes:
        centre: The coordinate-wise median over the devices, flat.
        distances: `[K]`, Euclidean.
        usual: The median of the distances.
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
            squares += np.square(block_kn - centre[rows]).sum(axis=1)  # not BLAS, which sums by its number of threads
        distances = np.sqrt(squares)
        return cls(centre, distances, float(np.median(distances)))

    def is_outlier(self, number: int) -> bool:
        return bool(self.distances[number] > _LEFT_OUT_FROM * self.usual)

    def mean(self, arrays: Sequence[Array], weights: Sequence[float], without: set[int]) -> Array:
        counted = [number for number in range(len(arrays)) if not self.is_outlier(number) and number not in without]
        if not counted:  # each device is left out, of this tensor or of all
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
    """The devices' numbers side by side, `[K, n]` in float64, a part of the tensor at a time."""
    flat = [array.reshape(-1) for array in arrays]
    size = max(BLOCK_NUMBERS // len(flat), 1)
    for first in range(0, flat[0].size, size):
        rows = slice(first, first + size)
        yield rows, np.stack([one[rows] for one in flat]).astype(np.float64)


def _weighted(arrays: Iterator[tuple[Array, float]], dtype: np.dtype) -> Array:
    total: Array | float = 0.0
    weight = 0.0
    for array, one in arrays:
        total = total + one * array.astype(np.float64)
        weight += one
    return np.asarray(total / weight).astype(dtype)


def _median_integers(arrays: Sequence[Array]) -> Array:
    """The median of integers, of an even number the lower one in the middle."""
    found: Array = np.sort(np.stack(arrays), axis=0)[(len(arrays) - 1) // 2]
    return found


def _note_dominant_weight(weights: Mapping[str, float], notes: Notes) -> None:
    """One event a run about a device that has most of the weight; of two devices one nearly always has more."""
    most, total = 0.75 if len(weights) == 2 else 0.5, sum(weights.values())
    for device, weight in weights.items():
        share = weight / total
        if len(weights) > 1 and share > most:
            text = f"{device} has {100 * share:.0f} % of the weight of the mean of {len(weights)} devices"
            notes.event(MOST_OF_THE_WEIGHT, f"{text}; more devices, or more alike, would bound it", device, once=True)


class TensorMean:
    """The weighted mean of tensors of one shape over devices, trimmed entry by entry unless `robust` is off.

    Of K devices floor(K / 5) at each end of every entry do not count, so up to four nothing is trimmed.

    Args:
        robust: The setting of that name; `gross` and `strict` are the same here.
        probabilities: Whether the rows of the last axis sum to 1; then they do so after trimming too.
    """

    def __init__(self, robust: str, *, probabilities: bool = False) -> None:
        self._robust = robust != OFF
        self._probabilities = probabilities
        self._values: list[torch.Tensor] = []
        self._weights: list[float] = []

    def add(self, values: torch.Tensor, weight: float = 1.0) -> None:
        """Adds one device's tensor, with a weight above 0. Only devices that answered are added, so only they count."""
        self._values.append(values)
        self._weights.append(weight)

    def result(self) -> torch.Tensor | None:
        """The mean in float64; None if nothing was added."""
        if not self._values:
            return None
        weights = capped(self._weights) if self._robust else self._weights
        trimmed = len(weights) // _TRIMMED_SHARE if self._robust else 0
        if trimmed:
            return self._trimmed(weights, trimmed)
        total = weights[0] * self._values[0].double()
        for values, weight in zip(self._values[1:], weights[1:], strict=True):
            total = total + weight * values.double()
        return total / sum(weights)

    def _trimmed(self, weights: Sequence[float], trimmed: int) -> torch.Tensor:
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
        sums = mean.sum(dim=-1, keepdim=True)  # 0 where no two devices agree on anything
        return torch.where(sums > 0, mean / sums, 1 / mean.shape[-1])
