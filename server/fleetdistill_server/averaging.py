"""Averages over devices: named operations, in float64, one device at a time."""

from __future__ import annotations

import numpy as np
import torch

from fleetdistill.knowledge import Array, ModelParameters


class WeightedMean:
    """The weighted mean of models, which are added one by one and not kept.

    Floating-point tensors are averaged; integer buffers, such as batch-norm's counters, take the largest value.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Array] = {}
        self._types: dict[str, np.dtype] = {}
        self._weight = 0.0
        self._last: ModelParameters | None = None

    def add(self, sent: ModelParameters, weight: float) -> None:
        """Adds one device's model.

        Args:
            sent: All of them must have the same names and shapes.
            weight: At least 0; all weights together must be above 0.
        """
        for name, array in {**sent.parameters, **sent.buffers}.items():
            self._types[name] = array.dtype
            if array.dtype.kind == "f":
                self._sums[name] = self._sums.get(name, 0.0) + weight * array.astype(np.float64)
            else:
                self._sums[name] = np.maximum(self._sums.get(name, array), array)
        self._weight += weight
        self._last = sent

    def result(self) -> ModelParameters:
        """The mean, in the types that were sent. Raises ValueError if nothing was added."""
        if self._last is None or self._weight <= 0:
            raise ValueError("nothing was averaged")
        arrays = {
            name: (total / self._weight if self._types[name].kind == "f" else total).astype(self._types[name])
            for name, total in self._sums.items()
        }
        return ModelParameters(
            parameters={name: arrays[name] for name in self._last.parameters},
            buffers={name: arrays[name] for name in self._last.buffers},
            scope=self._last.scope,
        )


class TensorMean:
    """The weighted mean of tensors of one shape, which are added one by one and not kept."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._weight = 0.0

    def add(self, values: torch.Tensor, weight: float = 1.0) -> None:
        """Adds one device's tensor. Only devices that answered are added, so only they count."""
        weighted = weight * values.double()
        self._sum = weighted if self._sum is None else self._sum + weighted
        self._weight += weight

    def result(self) -> torch.Tensor | None:
        """The mean in float64; None if nothing was added."""
        return None if self._sum is None else self._sum / self._weight
