"""The plan of a round and the rows drawn from the fleet's statistics, for the averaged form of class statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fleetdistill.errors import WireError
from fleetdistill.knowledge import Plan
from fleetdistill.methods.base import Ask, check_range


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """The server's plan for a round.

    Attributes:
        draw_seed: Seed of the round's drawn rows.
        nonnegative: Whether features are at least 0.
        merge: The server's number of the merge from which rows are drawn.
        learning_rate: Learning rate of both predictors, above 0.
    """

    draw_seed: int
    nonnegative: bool
    merge: int
    learning_rate: float

    @classmethod
    def of(cls, ask: Ask) -> RoundPlan:
        """Returns the plan of an ask. Raises WireError if a value is missing or of another type."""
        values = ask.part("plan", Plan).values
        expected = {"draw_seed": int, "nonnegative": bool, "merge": int, "learning_rate": float}
        found: dict[str, Any] = {name: values.get(name) for name in expected}
        for name, kind in expected.items():
            if type(found[name]) is not kind:
                text = f"the plan's {name} is {found[name]!r}, expected {kind.__name__}"
                raise WireError(f"step {ask.step!r}: {text}; update whichever of the device and the server is older")
        check_range("learning_rate", found["learning_rate"], 0, open_low=True)
        return cls(**found)


class DrawnRows:
    """A round's drawn rows, taken in shuffled passes.

    Args:
        features: Features of the rows, `[R, ...]`.
        labels: Classes of the rows, `[R]`.
        soft: Soft predictions for the rows, the devices' mean or the server's, `[R, C]`; None for a round without them.
        seed: Seed of the order.
    """

    def __init__(self, features: Tensor, labels: Tensor, soft: Tensor | None, seed: int) -> None:
        self.features, self.labels, self.soft = features, labels, soft
        self._order = self._rows(torch.Generator().manual_seed(seed))

    def _rows(self, generator: torch.Generator) -> Iterator[int]:
        while True:
            yield from torch.randperm(len(self.labels), generator=generator).tolist()

    def take(self, count: int) -> list[int]:
        """Returns the positions of the next `count` rows."""
        return [next(self._order) for _ in range(count)]
