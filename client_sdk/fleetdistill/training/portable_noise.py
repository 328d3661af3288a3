"""Noise that is the same everywhere: on CPU and GPU, in every version of every framework, in any language.

A server and its devices draw the same generated samples from one 64-bit seed. The random generators of frameworks
differ between devices and versions, so this one is written out: SplitMix64 in counter form, then Box and Muller.
"""

from __future__ import annotations

import numpy as np

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import Array

_STEP = np.uint64(0x9E3779B97F4A7C15)
MOST_NUMBERS = 1 << 24
"""Most that are drawn at once, which takes some 0.7 GB: a server's settings must not fill a device's memory."""
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def splitmix64(seed: int, count: int) -> Array:
    """The first numbers of SplitMix64, number i without those before it.

    Args:
        seed: In [0, 2**64).
        count: How many, at least 0.

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
    """Standard normal noise, the same wherever it is drawn.

    Two uniform numbers in (0, 1) make two normal ones (Box and Muller), computed in float64, filled in row by row.

    Args:
        seed: In [0, 2**64).
        rows: The papers' M, at least 0.
        size: The papers' d, numbers in a row, at least 0.

    Returns:
        `[rows, size]` float32, finite.

    Raises:
        ConfigurationError: A number is out of range, or they are more than `MOST_NUMBERS` together.
    """
    if rows * size > MOST_NUMBERS:
        raise ConfigurationError(
            f"{rows} rows of {size} numbers are to be drawn at once, at most {MOST_NUMBERS} numbers can be; ask for "
            "fewer rows"
        )
    pairs = (rows * size + 1) // 2
    uniform = ((splitmix64(seed, 2 * pairs) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    first, second = uniform[0::2], uniform[1::2]
    radius, angle = np.sqrt(-2.0 * np.log(first)), 2.0 * np.pi * second
    normal = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)
    return np.asarray(normal[: rows * size].reshape(rows, size).astype(np.float32))
