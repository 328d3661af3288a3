"""The accountant against numbers that were computed independently (PRI-1 to PRI-3, PRI-6), and its laws."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetdistill.privacy.accountant import (
    Guarantee,
    compose,
    discrete_mu_for,
    epsilon_for,
    epsilon_for_zcdp,
    gaussian_delta,
    mu_for,
    rho_for,
    zcdp_delta,
)

DELTA = 1e-5


@pytest.mark.parametrize(
    ("epsilon", "mu", "sigma"),
    [
        (0.3, 0.0889834529, 11.2380444645),
        (1, 0.2680511232, 3.7306316348),
        (3, 0.7191174352, 1.3905934567),
        (10, 2.0004456204, 0.4998886197),
    ],
)
def test_pri_1_largest_mu(epsilon, mu, sigma):
    assert mu_for(epsilon, DELTA) == pytest.approx(mu, abs=5e-11)
    assert 1 / mu_for(epsilon, DELTA) == pytest.approx(sigma, abs=5e-10)


def test_pri_2_delta():
    assert gaussian_delta(1, 1) == pytest.approx(0.1269367375, abs=5e-11)
    assert gaussian_delta(0.5, 0.25) == pytest.approx(0.0027088802, abs=5e-11)
    assert gaussian_delta(3, 0.6) == pytest.approx(1.378279e-07, rel=5e-7)


def test_pri_3_several_releases():
    one = mu_for(1, DELTA)
    assert epsilon_for(compose([0.3, 0.4]), DELTA) == pytest.approx(1.9930914044, abs=5e-11)
    assert epsilon_for(compose([one] * 2), DELTA) == pytest.approx(1.4651699604, abs=5e-10)
    assert epsilon_for(compose([one] * 10), DELTA) == pytest.approx(3.6185915743, abs=5e-10)


def test_pri_6_discrete_gaussian():
    assert rho_for(1, DELTA) == pytest.approx(0.0305565952, abs=5e-11)
    assert 1 / discrete_mu_for(1, DELTA) == pytest.approx(4.0451303583, abs=5e-10)


@given(epsilon=st.floats(0.01, 50), exponent=st.floats(-12, -1))
def test_a_mu_never_spends_more_than_its_epsilon(epsilon, exponent):
    delta = 10**exponent
    mu = mu_for(epsilon, delta)
    assert gaussian_delta(epsilon, mu) <= delta
    assert epsilon_for(mu, delta) == pytest.approx(epsilon, rel=1e-6)


@given(mu=st.floats(0.001, 4), exponent=st.floats(-12, -1))
def test_an_epsilon_is_never_less_than_what_is_spent(mu, exponent):
    """Rounded up: the delta of the epsilon itself, not of one nearby, is within the limit."""
    delta = 10**exponent
    assert gaussian_delta(epsilon_for(mu, delta), mu) <= delta
    assert zcdp_delta(mu * mu / 2, epsilon_for_zcdp(mu * mu / 2, delta)) <= delta


@given(epsilon=st.floats(0.01, 50), exponent=st.floats(-12, -1))
def test_exact_noise_is_never_smaller_than_continuous_noise(epsilon, exponent):
    delta = 10**exponent
    assert zcdp_delta(rho_for(epsilon, delta), epsilon) <= delta
    assert discrete_mu_for(epsilon, delta) <= mu_for(epsilon, delta)


def test_no_release_costs_nothing_and_no_noise_costs_everything():
    assert epsilon_for(compose([]), DELTA) == 0
    assert epsilon_for(60.0, DELTA) == math.inf


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0, DELTA), (-1, DELTA), (101, DELTA), (1, 0), (1, 1), (math.nan, DELTA)]
)
def test_impossible_guarantees_are_refused(epsilon, delta):
    with pytest.raises(ValueError, match="must be in"):
        mu_for(epsilon, delta)


def test_a_guarantee_is_lowered_and_never_raised():
    given = Guarantee(epsilon=2.0, delta=1e-6)
    assert given.at_most(1.0, 1e-5) == Guarantee(epsilon=1.0, delta=1e-6)
    assert given.at_most(4.0, 1e-7) == Guarantee(epsilon=2.0, delta=1e-7)
