"""What attacks are made of: rows to score, the attacker's knowledge, and scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fleetdistill_server.methods.base import ServerMethod

T = TypeVar("T")
Part = tuple[str, str]
"""Name of a part, and of the attack on it."""
Scores = NDArray[np.float64]
"""`[n]`, one for each candidate; higher if the row looks like one that the device trained on."""


@dataclass(frozen=True)
class Rows:
    """Labelled rows.

    Attributes:
        inputs: `[n, *input_shape]` float32.
        labels: `[n]` int64.
    """

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Attacker:
    """What the server knows besides the messages.

    Attributes:
        method: A new server half of the run: architectures and initial weights.
        public: Labelled rows of the same kind as the devices', of which no device has any.
    """

    method: ServerMethod
    public: Rows
    _results: dict[tuple[str, int, int], tuple[Any, object, Rows]] = field(default_factory=dict)

    def once(self, name: str, part: object, rows: Rows, compute: Callable[[], T]) -> T:
        """Returns the result of `compute` for a part and rows, computed once: many devices receive the same part."""
        key = (name, id(part), id(rows))
        if key not in self._results:
            self._results[key] = (compute(), part, rows)  # the references keep the ids valid
        result: T = self._results[key][0]
        return result
