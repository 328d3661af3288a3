"""How fast a figure grows, robust against single jumps."""

from __future__ import annotations

from collections.abc import Sequence

from scipy.stats import theilslopes

Point = tuple[float, float]
_MAX_POINTS = 300


def theil_sen(points: Sequence[Point]) -> float:
    """Returns the Theil-Sen slope of the points, per unit of the first coordinate.

    Of many points every n-th is taken, because the estimate compares all pairs.
    """
    x, y = zip(*points[:: max(1, len(points) // _MAX_POINTS)], strict=True)
    return float(theilslopes(y, x).slope)
