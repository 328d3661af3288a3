"""Class statistics with an averaged extractor: rows drawn from the fleet's statistics."""

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
    """What the server's plan says of a round.

    Attributes:
        draw_seed: Of the round's drawn rows.
        nonnegative: Whether features cannot be below 0.
        merge: The server's name of the classes that they are drawn from.
        learning_rate: Of both predictors.
    """

    draw_seed: int
    nonnegative: bool
    merge: int
    learning_rate: float

    @classmethod
    def of(cls, ask: Ask) -> RoundPlan:
        """Raises WireError for a plan that lacks something, or says it in another type."""
        values = ask.part("plan", Plan).values
        expected = {"draw_seed": int, "nonnegative": bool, "merge": int, "learning_rate": float}
        found: dict[str, Any] = {name: values.get(name) for name in expected}
        for name, kind in expected.items():
            if type(found[name]) is not kind:
                text = f"the plan's {name} is {found[name]!r}, expected {kind.__name__}"
                raise WireError(f"step {ask.step!r}: {text}; the server is of another version, or broken")
        check_range("learning_rate", found["learning_rate"], 0, open_low=True)
        return cls(**found)


class DrawnRows:
    """Rows drawn for a round, handed out in shuffled passes.

    Args:
        features: `[R, ...]`.
        labels: `[R]`.
        soft: `[R, C]`, soft predictions for them, the fleet's mean or the server's; None where there are none.
        seed: Of the order.
    """

    def __init__(self, features: Tensor, labels: Tensor, soft: Tensor | None, seed: int) -> None:
        self.features, self.labels, self.soft = features, labels, soft
        self._order = self._rows(torch.Generator().manual_seed(seed))

    def _rows(self, generator: torch.Generator) -> Iterator[int]:
        while True:
            yield from torch.randperm(len(self.labels), generator=generator).tolist()

    def take(self, count: int) -> list[int]:
        """Positions of the next rows."""
        return [next(self._order) for _ in range(count)]
