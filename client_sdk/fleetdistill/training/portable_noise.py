"""Portable random noise: bit-equal on CPU and GPU and in every version of every framework.

A server and its devices draw the same samples from one 64-bit seed. The random generators of frameworks differ between
devices and versions, so this module implements its own: SplitMix64 in counter form, then Box-Muller.
"""

from __future__ import annotations

import numpy as np

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import Array

_STEP = np.uint64(0x9E3779B97F4A7C15)
MAX_NUMBERS = 1 << 24
"""Largest number of elements in one draw, about 0.7 GB; protects a device's memory from a server's settings."""
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def splitmix64(seed: int, count: int) -> Array:
    """Returns the first `count` numbers of SplitMix64; each is computed independently of the others.

    Args:
        seed: Seed in [0, 2**64).
        count: Number of values, at least 0.

    Returns:
        `[count]` uint64.

    Raises:
        ConfigurationError: `seed` or `count` is out of range.

    References:
        Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014.
    """
    if not 0 <= seed < 1 << 64 or count < 0:
        raise ConfigurationError(f"seed is {seed}, must be in [0, 2**64), and count is {count}, must be at least 0")
    with np.errstate(over="ignore"):  # all arithmetic is modulo 2**64
        state = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * _STEP
        state = (state ^ (state >> np.uint64(30))) * _FIRST
        state = (state ^ (state >> np.uint64(27))) * _SECOND
    return np.asarray(state ^ (state >> np.uint64(31)))


def portable_noise(seed: int, rows: int, size: int) -> Array:
    """Returns standard normal noise that depends on the seed only.

    Pairs of uniform numbers in (0, 1) become pairs of normal numbers (Box-Muller) in float64, row by row.

    Args:
        seed: Seed in [0, 2**64).
        rows: The papers' M, at least 0.
        size: The papers' d, elements per row, at least 0.

    Returns:
        `[rows, size]` float32, finite.

    Raises:
        ConfigurationError: An argument is out of range, or `rows * size` is above `MAX_NUMBERS`.
    """
    if rows * size > MAX_NUMBERS:
        raise ConfigurationError(
            f"cannot draw {rows} rows of {size} numbers: one draw has at most {MAX_NUMBERS} numbers; reduce the rows"
        )
    pairs = (rows * size + 1) // 2
    uniform = ((splitmix64(seed, 2 * pairs) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    first, second = uniform[0::2], uniform[1::2]
    radius = np.sqrt(-2.0 * np.log(first))
    angle = 2.0 * np.pi * second
    normal = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)
    return np.asarray(normal[: rows * size].reshape(rows, size).astype(np.float32))
