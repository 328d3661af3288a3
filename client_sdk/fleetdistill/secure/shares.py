"""Shamir's shares of a secret over the integers modulo 2^255 - 19.

A secret is 31 bytes, read as a little-endian integer; a share is a value of a polynomial whose constant term is the
secret. Python's integers do not compute in constant time: nobody else can time them here.
"""

from __future__ import annotations

from collections.abc import Sequence

from fleetdistill.secure.primitives import stream

__all__ = ["threshold"]

PRIME = 2**255 - 19
SHARE_BYTES = 32
SECRET_BYTES = 31
_COEFFICIENT_BYTES = 64  # twice the field's length, so that reduction leaves no bias


def threshold(holders: int) -> int:
    """Returns how many of the holders must answer, floor(2 holders / 3) + 1."""
    return 2 * holders // 3 + 1


def coefficients(key: bytes, threshold: int) -> list[int]:
    """Returns the `threshold - 1` coefficients above the constant term, from a key of 32 bytes."""
    data = stream(key, _COEFFICIENT_BYTES * (threshold - 1))
    starts = range(0, len(data), _COEFFICIENT_BYTES)
    return [int.from_bytes(data[start : start + _COEFFICIENT_BYTES], "little") % PRIME for start in starts]


def share(secret: int, coefficients: Sequence[int], point: int) -> int:
    """Returns the polynomial's value at a point, the holder's index plus 1."""
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * point + coefficient) % PRIME
    return (total * point + secret) % PRIME


def weights_at_zero(points: Sequence[int]) -> list[int]:
    """Returns each share's Lagrange weight for the constant term, modulo PRIME; the points are distinct and not 0."""
    product = 1
    for point in points:
        product = product * point % PRIME
    weights = []
    for point in points:
        below = point
        for other in points:
            if other != point:
                below = below * (other - point) % PRIME
        weights.append(product * pow(below, -1, PRIME) % PRIME)
    return weights


def reconstruct(weights: Sequence[int], shares: Sequence[int]) -> int:
    """Returns the constant term, of shares in the order of `weights_at_zero`."""
    return sum(weight * value for weight, value in zip(weights, shares, strict=True)) % PRIME
