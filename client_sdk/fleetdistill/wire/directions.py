"""How many directions class statistics may be sent with: devices keep to it, and the front checks it."""

from __future__ import annotations

ROWS_PER_DIRECTION = 10
"""Samples of a class for each direction, unless the method's configuration says otherwise."""
LEAST_ROWS_PER_DIRECTION = 2
"""The least that a configuration may say."""


def most_directions(rank: int, count: int, rows_per_direction: int = ROWS_PER_DIRECTION) -> int:
    """Directions that a class of so many rows is sent with.

    The more rows for each direction, the less does the span of the directions say about single rows. Never more than
    `(n - 1) // 2`, because n - 1 directions of n rows span the very rows.
    """
    return min(rank, count // rows_per_direction, (count - 1) // 2)
