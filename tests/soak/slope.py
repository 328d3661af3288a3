"""How fast something grows, without being misled by single jumps."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

Point = tuple[float, float]
_MOST_POINTS = 300


def theil_sen(points: Sequence[Point]) -> float:
    """The median of the slopes between all pairs of points, per unit of the first coordinate.

    Of many points every n-th is taken, which changes the slope little and spares a quadratic number of pairs.
    """
    thinned = points[:: max(1, len(points) // _MOST_POINTS)]
    pairs = itertools.combinations(thinned, 2)
    return statistics.median([(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs if x2 != x1])
