"""Sums that cannot be those of honest devices are recognised; honest ones pass."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from methods.classstats_secure.session_settings import LIMITED_SUM, PRIVATE_SUM

from fleetdistill.methods.classstats_private.sums import RowSums, unit_rows
from fleetdistill.methods.classstats_secure.encoding import (
    decode,
    exact_numbers,
    limited_numbers,
    rows_on_grid,
    unit_rows_on_grid,
)
from fleetdistill.methods.classstats_secure.noise import local_variances, noise_vector
from fleetdistill_server.methods.classstats_secure.sum_server import why_implausible

SMALL = replace(PRIVATE_SUM, classes=2, dimensions=3)


def limited(seed: int, scale: float = 3.0):
    generator = np.random.default_rng(seed)
    steps = rows_on_grid(generator.normal(size=(40, 3)) * scale, 8, 5)[0]
    labels = generator.integers(0, 2, 40)
    return limited_numbers(steps, labels, 2, 8, min_samples=1, rank=3, rows_per_direction=4)


def private(seed: int, devices: int = 14):
    generator, source = np.random.default_rng(seed), random.Random(seed)
    steps = unit_rows_on_grid(unit_rows(generator.normal(size=(40, 3))), 16)
    parts = [noise_vector(SMALL, source) for _ in range(devices)]
    return exact_numbers(steps, generator.integers(0, 2, 40), 2, 10) + np.sum(parts, axis=0)


@given(seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=5), scale=st.sampled_from([0.01, 1.0, 3.0, 40.0]))
def test_sums_of_limited_parts_are_plausible(seeds, scale):
    """Also where numbers are clipped."""
    total = np.sum([limited(seed, scale) for seed in seeds], axis=0)
    assert why_implausible(decode(total, LIMITED_SUM), LIMITED_SUM) is None


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_private_sums_are_plausible(seed):
    assert why_implausible(decode(private(seed), SMALL), SMALL) is None


def test_a_sum_of_no_rows_is_plausible():
    assert why_implausible(decode(np.zeros(14, np.int64), LIMITED_SUM), LIMITED_SUM) is None


@pytest.mark.parametrize(
    ("place", "change", "text"),
    [
        (0, -1_000, "a class has -9.* rows, of 2\\^20 at most"),
        (1, 2**20 + 1, "a class has 10.* rows, of 2\\^20 at most"),
        (8, -(2**40), "a second moment is negative"),
        (8, 2**40, "the rows have squared lengths of .* together, 40 rows at most 1\\.229e"),
        (9, 2**28, "the covariance has the eigenvalue -.*, which is negative"),
    ],
)
def test_a_limited_sum_out_of_range_is_found(place, change, text):
    total = limited(1)
    total[place] += change
    reason = why_implausible(decode(total, LIMITED_SUM), LIMITED_SUM)
    assert reason is not None
    assert re.match(text, reason), reason


@pytest.mark.parametrize(
    ("place", "change", "text"),
    [(0, -(2**20), "a class has -"), (0, 2**31, "a class has 2"), (8, -(2**45), "negative"), (8, 2**45, "squared")],
)
def test_a_private_sum_out_of_range_is_found(place, change, text):
    total = private(1)
    total[place] += change
    reason = why_implausible(decode(total, SMALL), SMALL)
    assert reason is not None
    assert text in reason


@pytest.mark.parametrize(("kind", "variance"), [("counts", 0), ("second_moment", 2)])
@pytest.mark.parametrize("times", [0.99, 1.01])
def test_private_sums_may_be_as_negative_as_their_noise(kind, variance, times):
    """All 14 numbers stay within sqrt(2 v (ln 28 + 40 ln 2)) with probability 1 - 2^-40; v of all 20 devices."""
    steps = [2.0**10, 0, 2.0**32][variance]
    bound = math.sqrt(2 * 20 * local_variances(SMALL)[variance] * (math.log(28) + 40 * math.log(2))) / steps
    empty = RowSums(counts=np.full(2, 1e4), sums=np.zeros((2, 3)), second_moment=np.zeros((3, 3)))
    sums = replace(empty, **{kind: getattr(empty, kind).copy()})
    getattr(sums, kind).flat[0] = -times * bound
    assert (why_implausible(sums, SMALL) is None) == (times < 1)


@pytest.mark.parametrize("times", [0.99, 1.01])
def test_private_rows_are_no_longer_than_one_but_for_noise(times):
    """The trace less the rows has the noise of 3 entries of the diagonal and of 2 counts."""
    of = local_variances(SMALL)
    variance = 20 * (3 * float(of.diagonal) / 2**64 + 2 * float(of.counts) / 2**20)
    bound = math.sqrt(2 * variance * (math.log(28) + 40 * math.log(2)))
    moment = np.diag([20_000 + times * bound, 0, 0])
    sums = RowSums(counts=np.full(2, 1e4), sums=np.zeros((2, 3)), second_moment=moment)
    assert (why_implausible(sums, SMALL) is None) == (times < 1)
