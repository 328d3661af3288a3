"""Maximum number of directions in class statistics; devices apply the limit and the front checks it."""

from __future__ import annotations

ROWS_PER_DIRECTION = 10
"""Default number of samples of a class per direction."""
LEAST_ROWS_PER_DIRECTION = 2
"""Smallest number of samples per direction that a configuration can set."""


def most_directions(rank: int, count: int, rows_per_direction: int = ROWS_PER_DIRECTION) -> int:
    """Returns the number of directions for a class of `count` rows.

    More rows per direction reveal less about single rows. The number is at most `(count - 1) // 2`, because
    `count - 1` directions would span all rows.
    """
    return min(rank, count // rows_per_direction, (count - 1) // 2)
