"""Private class statistics against numbers that were computed independently, and their laws."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetdistill.methods.classstats_private import sums as private_sums
from fleetdistill.methods.classstats_private.merge import merge_private
from fleetdistill.methods.classstats_private.sums import (
    SHARES,
    NoiseScale,
    RowSums,
    class_sums,
    on_grid,
    release_exact,
    release_rounded,
    unit_rows,
)
from fleetdistill.privacy.accountant import discrete_mu_for, mu_for

ROWS = np.array([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0], [-1.0, 1.0]])
LABELS = np.array([0, 0, 1, 1])
TWO_DEVICES = [
    RowSums(
        counts=np.array([50.0, 10.0]),
        sums=np.array([[20.0, 5.0], [2.0, 4.0]]),
        second_moment=np.array([[34.0, 6.0], [6.0, 26.0]]),
    ),
    RowSums(
        counts=np.array([-3.0, 40.0]),
        sums=np.array([[1.0, -1.0], [-12.0, 16.0]]),
        second_moment=np.array([[22.0, -9.0], [-9.0, 16.0]]),
    ),
]


def near(numbers):
    return pytest.approx(np.array(numbers), abs=5.1e-8)


def test_pri_4_noise():
    scale = NoiseScale.of(mu_for(1, 1e-5))
    assert scale.counts == pytest.approx(11.7972931, abs=5e-8)
    assert scale.sums == pytest.approx(4.3077624, abs=5e-8)
    assert scale.second_moment == pytest.approx(9.6324495, abs=5e-8)
    assert scale.second_moment / 2**0.5 == pytest.approx(6.8111703, abs=5e-8)


def test_pri_5_sums_of_unit_rows():
    sums = class_sums(unit_rows(ROWS), LABELS, 2)
    assert sums.counts == near([2, 2])
    assert sums.sums == near([[0.6, 1.8], [0.2928932, 0.7071068]])
    assert sums.second_moment == near([[1.86, -0.02], [-0.02, 2.14]])


def test_pri_7_merge():
    merged = merge_private(TWO_DEVICES, [NoiseScale(2.0, 1.5, 1.2)] * 2)
    assert merged is not None
    assert merged.counts == near([49.682035, 48.2246501])
    assert merged.noise_variances == near([0.0009, 0.0016674])
    assert merged.floor == pytest.approx(0.0170234, abs=5.1e-8)
    assert merged.means == near([[0.395179, 0.1023686], [-0.2019496, 0.3957405]])
    assert merged.covariance == near([[0.4639884, 0.0174432], [0.0174432, 0.3615171]])


def test_pri_8_noise_of_second_moment_bounds_eigenvalues():
    merged = merge_private(TWO_DEVICES, [NoiseScale(2.0, 1.5, 30.0)] * 2)
    assert merged is not None
    assert merged.floor == pytest.approx(0.4255854, abs=5.1e-8)
    assert merged.covariance == near([[0.4657747, 0.0066537], [0.0066537, 0.426687]])


def test_pri_9_without_noise():
    merged = merge_private(TWO_DEVICES, [NoiseScale(1e-9, 1e-9, 1e-9)] * 2)
    assert merged is not None
    assert merged.means == near([[0.4, 0.1], [-0.2, 0.4]])
    assert merged.covariance == near([[0.4645925, 0.0156651], [0.0156651, 0.3602958]])


def test_counts_below_the_noise_give_no_moments():
    noise_alone = RowSums(counts=np.array([3.0, -2.0]), sums=np.ones((2, 2)), second_moment=np.eye(2))
    assert merge_private([noise_alone], [NoiseScale(10.0, 1.0, 1.0)]) is None


rows = st.lists(st.lists(st.floats(-1e200, 1e200), min_size=3, max_size=3), min_size=1, max_size=12)


@given(rows=rows)
def test_every_row_changes_the_release_by_at_most_one(rows):
    """The joint sensitivity of the numbers that exact noise is added to: with their shares, at most 1."""
    units = np.trunc(unit_rows(np.array(rows)) * 2**16) / 2**16
    for row in units:
        one = class_sums(row[None], np.array([0]), 1)
        change = 0.10 * one.counts[0] ** 2 + 0.75 * (one.sums**2).sum() + 0.15 * (one.second_moment**2).sum()
        assert change <= 1 + 1e-12


@given(rows=rows)
def test_no_row_on_the_grid_is_longer_than_one(rows):
    """Exactly, in integers: the sensitivity holds for the numbers that noise is added to, after their rounding."""
    for row in on_grid(unit_rows(np.array(rows))):
        steps = [Fraction(float(number)) * 2**16 for number in row]
        assert all(step.denominator == 1 for step in steps)
        assert sum(step**2 for step in steps) <= 2**32


@given(rows=rows, mu=st.floats(0.01, 4))
def test_exact_noise_on_grid_rows_has_at_least_its_variance(rows, mu):
    """Exactly, in fractions: mu^2 share variance is at least 1 for each number, in grid steps of its own."""
    variances: list[Fraction] = []

    def no_noise(variance, random):
        variances.append(variance)
        return 0

    rows, labels = np.array(rows), np.zeros(len(rows), int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_sums, "discrete_gaussian", no_noise)
        released = release_exact(unit_rows(rows), labels, 1, mu)
    assert np.array_equal(released.sums, class_sums(on_grid(unit_rows(rows)), labels, 1).sums)
    diagonal, beside, counts, sums = variances[:3], variances[3:6], variances[6:7], variances[7:]
    assert len(sums) == 3
    of_counts, of_sums, of_moment = (1 / (Fraction(mu) ** 2 * share) for share in SHARES)
    for result, needed in ((counts, of_counts), (sums, of_sums * 2**32), (diagonal, of_moment * 2**64)):
        assert all(needed <= item < needed + Fraction(1, 1024) for item in result)
    assert all(of_moment * 2**63 <= item < of_moment * 2**63 + Fraction(1, 1024) for item in beside)


@given(rows=rows)
def test_the_trace_of_the_second_moment_counts_the_rows(rows):
    units = unit_rows(np.array(rows))
    zero = sum(not any(row) for row in rows)
    assert np.trace(class_sums(units, np.zeros(len(rows), int), 1).second_moment) == pytest.approx(len(rows) - zero)


@given(order=st.permutations(range(4)), seed=st.integers(0, 1000))
def test_the_order_of_the_devices_does_not_matter(order, seed):
    generator = np.random.default_rng(seed)
    parts = [class_sums(unit_rows(generator.normal(size=(40, 3))), generator.integers(0, 2, 40), 2) for _ in range(4)]
    scales = [NoiseScale(1.0 + k, 1.0, 1.0) for k in range(4)]
    first, second = merge_private(parts, scales), merge_private([parts[k] for k in order], [scales[k] for k in order])
    assert first is not None
    assert second is not None
    assert second.means == pytest.approx(first.means)
    assert second.covariance == pytest.approx(first.covariance)


@pytest.mark.long
@pytest.mark.parametrize("exact", [True, False])
def test_the_noise_has_the_wanted_size(exact):
    """One device's releases, pooled over their entries; seeds are fixed, so the tolerance is not a matter of luck."""
    units, mu = unit_rows(ROWS), discrete_mu_for(1, 1e-5)
    clean, scale = class_sums(units, LABELS, 2), NoiseScale.of(mu)
    source, generator = random.Random(5), np.random.default_rng(5)
    releases = [
        release_exact(units, LABELS, 2, mu, source) if exact else release_rounded(clean, mu, generator)
        for _ in range(1500 if exact else 10_000)
    ]

    def deviation(noise):
        return float(np.sqrt(np.mean(np.square(noise))))

    noise = [
        (release.counts - clean.counts, release.sums - clean.sums, release.second_moment - clean.second_moment)
        for release in releases
    ]
    assert deviation([n for n, _, _ in noise]) == pytest.approx(scale.counts, rel=0.03)
    assert deviation([s for _, s, _ in noise]) == pytest.approx(scale.sums, rel=0.03)
    assert deviation([np.diag(m) for _, _, m in noise]) == pytest.approx(scale.second_moment, rel=0.03)
    assert deviation([m[0, 1] for _, _, m in noise]) == pytest.approx(scale.second_moment / 2**0.5, rel=0.05)
    assert all(m[0, 1] == m[1, 0] for _, _, m in noise)
