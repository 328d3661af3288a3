"""Shares of a secret: numbers worked by hand, and that any threshold of them gives it back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetdistill.secure.primitives import PRIME, coefficients, reconstruct, share, threshold, weights_at_zero


def test_sa05_shares_of_a_polynomial():
    assert [share(1234, [166, 94], point) for point in range(1, 6)] == [1494, 1942, 2578, 3402, 4414]


def test_sa05_weights_at_zero():
    weights = weights_at_zero([2, 4, 5])
    assert weights == [10 * pow(3, -1, PRIME) % PRIME, -5 % PRIME, 8 * pow(3, -1, PRIME) % PRIME]
    assert reconstruct(weights, [1942, 3402, 4414]) == 1234


@pytest.mark.parametrize(
    ("holders", "needed"), [(2, 2), (3, 3), (4, 3), (5, 4), (10, 7), (21, 15), (100, 67), (1000, 667)]
)
def test_sa05_thresholds(holders, needed):
    assert threshold(holders) == needed


@given(secret=st.integers(0, 2**248 - 1), key=st.binary(min_size=32, max_size=32), data=st.data())
def test_any_threshold_of_shares_gives_the_secret(secret, key, data):
    holders = data.draw(st.integers(2, 9))
    needed = threshold(holders)
    polynomial = coefficients(key, needed)
    points = data.draw(st.permutations(range(1, holders + 1)))[:needed]
    shares = [share(secret, polynomial, point) for point in points]
    assert reconstruct(weights_at_zero(points), shares) == secret
    assert reconstruct(weights_at_zero(points[1:]), shares[1:]) != secret
