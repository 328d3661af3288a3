"""Exact samples of the discrete Gaussian, from integers alone.

Floating-point noise leaks through its rounding (Mironov, 2012); these samples have no rounding. The random bits come
from the operating system: noise from a seed that the server knows could be subtracted.

References:
    Canonne, Kamath and Steinke, The Discrete Gaussian for Differential Privacy, 2020, algorithms 1 to 3.
"""

from __future__ import annotations

import math
import secrets
from fractions import Fraction
from typing import Protocol


class Random(Protocol):
    """A source of random integers: `random.SystemRandom`, and in tests `random.Random`."""

    def randrange(self, stop: int, /) -> int:
        """Returns an integer in [0, stop), each with the same probability."""
        ...


def discrete_gaussian(variance: Fraction, random: Random | None = None) -> int:
    """Returns an integer x with probability proportional to exp(-x^2 / (2 variance)) (algorithm 3).

    Args:
        variance: Above 0; the parameter sigma^2, which the samples' variance does not exceed.
        random: The operating system's generator by default.
    """
    source = random or secrets.SystemRandom()
    scale = math.isqrt(int(variance)) + 1
    while True:
        sample = _discrete_laplace(scale, source)
        if _bernoulli_exp((abs(sample) - variance / scale) ** 2 / (2 * variance), source):
            return sample


def _discrete_laplace(scale: int, random: Random) -> int:
    """Returns an integer x with probability proportional to exp(-|x| / scale) (algorithm 2)."""
    while True:
        remainder = random.randrange(scale)
        if not _bernoulli_exp_of_fraction(remainder, scale, random):
            continue
        quotient = 0
        while _bernoulli_exp_of_fraction(1, 1, random):
            quotient += 1
        magnitude = remainder + scale * quotient
        negative = random.randrange(2) == 1
        if not (negative and magnitude == 0):  # zero must not count twice
            return -magnitude if negative else magnitude


def _bernoulli_exp(exponent: Fraction, random: Random) -> bool:
    """Returns True with probability exp(-exponent), for an exponent of at least 0 (algorithm 1)."""
    numerator, denominator = exponent.numerator, exponent.denominator
    while numerator > denominator:
        if not _bernoulli_exp_of_fraction(1, 1, random):
            return False
        numerator -= denominator
    return _bernoulli_exp_of_fraction(numerator, denominator, random)


def _bernoulli_exp_of_fraction(numerator: int, denominator: int, random: Random) -> bool:
    """Returns True with probability exp(-numerator / denominator), for a fraction in [0, 1] (algorithm 1)."""
    count = 1
    while random.randrange(denominator * count) < numerator:
        count += 1
    return count % 2 == 1
