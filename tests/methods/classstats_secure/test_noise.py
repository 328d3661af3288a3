"""Noise that devices share: its variances, its guarantee, and what the sum carries."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from methods.classstats_secure.session_settings import LIMITED_SUM, PRIVATE_SUM

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.classstats_private.sums import rounded_up
from fleetdistill.methods.classstats_secure.encoding import decode
from fleetdistill.methods.classstats_secure.noise import (
    check_noise,
    correction,
    distance_to_one,
    epsilon_without,
    local_variances,
    noise_vector,
    scale_of_sum,
)
from fleetdistill.privacy.accountant import epsilon_for_zcdp, rho_for
from fleetdistill.secure.primitives import lift, reduce, wrap

LARGE = replace(PRIVATE_SUM, least=67, honest=67, most=100)


def probabilities(variance: float, reach: int) -> np.ndarray:
    """Of one discrete Gaussian, from -reach to reach."""
    weights = np.exp(-np.square(np.arange(-reach, reach + 1)) / (2 * variance))
    return np.asarray(weights / weights.sum())


def summed(one: np.ndarray, parts: int) -> np.ndarray:
    total = one
    for _ in range(parts - 1):
        total = np.convolve(total, one)
    return total


@pytest.mark.parametrize(
    ("variance", "parts", "exact", "bound"),
    [
        (0.25, 2, 0.214194, 0.84805),
        (0.25, 5, 0.220552, 1.66056),
        (0.5, 2, 0.0146951, 0.0719188),
        (0.5, 8, 0.00365318, 0.102198),
        (1.0, 3, 1.15467e-05, 0.000536503),
    ],
)
def test_sa10_a_sum_of_parts_is_nearly_one_gaussian(variance, parts, exact, bound):
    """By convolution, within six standard deviations."""
    total = summed(probabilities(variance, 60), parts)
    one = probabilities(parts * variance, 60 * parts)
    inside = np.abs(np.arange(-60 * parts, 60 * parts + 1)) <= 6 * math.sqrt(parts * variance)
    assert np.abs(np.log(total[inside] / one[inside])).max() == pytest.approx(exact, rel=1e-5)
    assert distance_to_one(variance, parts) == pytest.approx(bound, rel=1e-5)


def test_sa10_distance_at_the_narrowest_noise():
    assert distance_to_one(16, 1000) == pytest.approx(2.62e-68, rel=2e-3)


@pytest.mark.parametrize(
    ("epsilon", "variances"),
    [
        (10, [44948777, 24548025152, 527164826032903079478, 263582413016451539739]),
        (3, [357325682, 195147465515, 4190759911400414493270, 2095379955700207246635]),
        (1, [2622346710, 1432150949537, 30755207455975543878180, 15377603727987771939090]),
        (0.3, [24259858657, 13249117474121, 284522631261055438712422, 142261315630527719356211]),
    ],
)
def test_sa11_variances_of_one_of_67_devices(epsilon, variances):
    """To the last digits of rho, which a bisection finds."""
    found = local_variances(replace(LARGE, epsilon=epsilon))
    assert all((1024 * variance).denominator == 1 for variance in found)
    assert [int(1024 * variance) for variance in found] == pytest.approx(variances, rel=1e-12)


@pytest.mark.parametrize(
    ("epsilon", "counts", "sums", "diagonal"),
    [
        (10, 1.6747362, 0.6115272, 1.3674164),
        (3, 4.7219304, 1.7242052, 3.8554400),
        (1, 12.7918254, 4.6709142, 10.4444817),
        (0.3, 38.9073453, 14.2069538, 31.7677144),
    ],
)
def test_sa11_deviations_of_the_sum(epsilon, counts, sums, diagonal):
    parameters = replace(PRIVATE_SUM, epsilon=epsilon)
    scale = scale_of_sum(parameters, 14)
    assert [scale.counts, scale.sums, scale.second_moment] == pytest.approx([counts, sums, diagonal], abs=5.1e-8)
    local = local_variances(parameters)
    assert math.sqrt(14 * local.counts) / 2**10 == pytest.approx(counts, abs=5.1e-8)
    assert math.sqrt(14 * local.sums) / 2**16 == pytest.approx(sums, abs=5.1e-8)
    assert math.sqrt(14 * local.diagonal) / 2**32 == pytest.approx(diagonal, abs=5.1e-8)
    twice = scale_of_sum(parameters, 56)
    assert twice.sums == pytest.approx(2 * scale.sums)


@given(epsilon=st.floats(0.1, 20), honest=st.integers(1, 14), grid_bits=st.integers(8, 18))
def test_sa11_no_row_changes_more_than_the_guarantee_says(epsilon, honest, grid_bits):
    """Exactly: the squared change over the noise's variance is at most 2 rho, for a row of length 1 on one axis."""
    parameters = replace(PRIVATE_SUM, epsilon=epsilon, honest=honest, grid_bits=grid_bits)
    counts, sums, diagonal, beside = (honest * variance for variance in local_variances(parameters))
    grid = 4**grid_bits
    changed = Fraction(4**10) / counts + Fraction(grid) / sums + Fraction(grid**2) / diagonal
    assert changed <= 2 * Fraction(rho_for(epsilon, 1e-5))
    assert diagonal - 2 * beside + Fraction(2 * honest, 1024) >= 0


def test_sa11_isotropic_noise_of_the_paper():
    """Theorem 1 of Kairouz et al. for 100 numbers of 10 parts."""

    def epsilon(variance):
        tau, change = distance_to_one(variance, 10), 1 / (10 * variance)
        return min(math.sqrt(change + 0.5 * tau * 100), math.sqrt(change) + tau * math.sqrt(100))

    assert epsilon(0.25) == pytest.approx(10.8474082601, abs=5e-11)
    assert epsilon(1.0) == pytest.approx(0.3216630086, abs=5e-11)


@pytest.mark.parametrize(("missing", "epsilon"), [(0, 1.0), (1, 1.0411650), (4, 1.2012671), (13, 4.3242070)])
def test_sa11_epsilon_without_some_shares(missing, epsilon):
    assert epsilon_without(PRIVATE_SUM, missing) == pytest.approx(epsilon, abs=5.1e-8)


def test_sa11_epsilon_of_several_sums():
    rho = rho_for(1, 1e-5)
    assert rho == pytest.approx(0.0305565952, abs=5e-11)
    assert epsilon_for_zcdp(2 * rho, 1e-5) == pytest.approx(1.4600448, abs=5.1e-8)
    assert epsilon_for_zcdp(10 * rho, 1e-5) == pytest.approx(3.5713267, abs=5.1e-8)


def test_sa12_exact_delta_of_one_count():
    """By convolution of 8 parts, with all of rho on one count and 32 steps for a row."""
    variance = float(rounded_up(Fraction(4**5) / (2 * Fraction(rho_for(1, 1e-5)) * 8)))
    total = summed(probabilities(variance, int(12 * math.sqrt(variance)) + 2), 8)
    without, plus = np.pad(total, (0, 32)), np.pad(total, (32, 0))
    delta = max(np.maximum(one - math.e * other, 0).sum() for one, other in ((without, plus), (plus, without)))
    assert delta == pytest.approx(2.3656e-06, abs=5e-11)


@pytest.mark.parametrize("epsilon", [10, 3, 1, 0.3])
@pytest.mark.parametrize("honest", [4, 14, 67])
def test_noise_on_the_usual_grid_is_wide_enough(epsilon, honest):
    parameters = replace(LARGE, epsilon=epsilon, honest=honest)
    check_noise(parameters)
    assert correction(parameters) < 1e-12


def test_the_correction_adds_up_over_all_numbers():
    """Of noise that would be refused: 2 counts, 6 sums, 3 entries on the diagonal and 3 beside it."""
    parameters = replace(LARGE, classes=2, dimensions=3, grid_bits=3, count_bits=3, epsilon=20.0)
    taus = [distance_to_one(float(variance), 67) for variance in local_variances(parameters)]
    assert correction(parameters) == pytest.approx(2 * taus[0] + 6 * taus[1] + 3 * taus[2] + 3 * taus[3], rel=1e-12)
    assert min(taus[:2]) > 1e-9


def test_counts_without_a_grid_have_too_narrow_noise():
    with pytest.raises(ConfigurationError, match=r"noise on the counts .* of 0\.20 steps.*raise count_bits"):
        check_noise(replace(LARGE, epsilon=10.0, count_bits=0))


def test_rows_on_a_coarse_grid_have_too_narrow_noise():
    with pytest.raises(ConfigurationError, match=r"noise on the sums .*raise grid_bits"):
        check_noise(replace(LARGE, epsilon=10.0, grid_bits=2))


def test_a_sum_without_noise_has_none():
    check_noise(LIMITED_SUM)
    assert not any(local_variances(LIMITED_SUM))


def test_noise_of_each_kind_has_its_place():
    """Two standard errors of its size, from one draw of 2,730 numbers; the seed is fixed."""
    noise = noise_vector(PRIVATE_SUM, random.Random(1)).astype(float)
    counts, sums, upper = np.split(noise, [10, 650])
    diagonal = np.equal(*np.triu_indices(64))
    for part, variance in zip((sums, upper[diagonal], upper[~diagonal]), local_variances(PRIVATE_SUM)[1:], strict=True):
        ratio = np.square(part).mean() / float(variance)
        assert abs(ratio - 1) < 2 * math.sqrt(2 / len(part))
    assert np.abs(counts).max() < 5 * math.sqrt(local_variances(PRIVATE_SUM).counts)


def test_two_devices_draw_different_noise():
    assert noise_vector(PRIVATE_SUM).tolist() != noise_vector(PRIVATE_SUM).tolist()


@pytest.mark.long
@pytest.mark.slow
def test_the_sum_of_private_devices_has_the_stated_noise():
    """1,000 sums of four devices where three suffice, each variance within 3 %; the seed is fixed."""
    parameters = replace(PRIVATE_SUM, dimensions=6, least=3, honest=3, most=4)
    source = random.Random(2)
    sums = []
    for _ in range(1_000):
        sent = [wrap(noise_vector(parameters, source), 8) for _ in range(4)]
        sums.append(decode(lift(reduce(np.sum(sent, axis=0, dtype=np.uint64), 8), 8), parameters))
    scale, upper = scale_of_sum(parameters, 4), np.triu_indices(6, 1)
    for values, deviation in (
        ([one.counts for one in sums], scale.counts),
        ([one.sums for one in sums], scale.sums),
        ([np.diagonal(one.second_moment) for one in sums], scale.second_moment),
        ([one.second_moment[upper] for one in sums], scale.second_moment / math.sqrt(2)),
    ):
        assert np.square(values).mean() == pytest.approx(deviation**2, rel=0.03)
