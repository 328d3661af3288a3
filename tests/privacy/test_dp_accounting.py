"""The accountant against Google's dp-accounting, which computes the same from privacy loss distributions."""

from __future__ import annotations

import math

import dp_accounting
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss

from fleetdistill.privacy.accountant import (
    compose,
    discrete_mu_for,
    epsilon_for,
    epsilon_for_zcdp,
    gaussian_delta,
    mu_for,
)

EPSILONS = [0.1, 0.3, 1.0, 3.0, 10.0, 20.0]
DELTA = 1e-5


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("mu", [0.05, 0.27, 0.72, 2.0, 4.0])
def test_delta_of_one_release(epsilon, mu):
    assert gaussian_delta(epsilon, mu) == pytest.approx(
        GaussianPrivacyLoss(standard_deviation=1 / mu).get_delta_for_epsilon(epsilon), abs=1e-11
    )


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_the_noise_of_an_epsilon(epsilon, delta):
    sigma = dp_accounting.get_sigma_gaussian(epsilon, delta)
    assert 1 / mu_for(epsilon, delta) == pytest.approx(sigma, rel=1e-6)


@pytest.mark.parametrize("releases", [1, 2, 10])
def test_several_releases(releases):
    mu = mu_for(1, DELTA)
    loss = pld.from_gaussian_mechanism(1 / mu, value_discretization_interval=1e-3).self_compose(releases)
    assert epsilon_for(compose([mu] * releases), DELTA) == pytest.approx(loss.get_epsilon_for_delta(DELTA), abs=0.01)


@pytest.mark.parametrize("epsilon", [0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("releases", [1, 3])
def test_discrete_noise_is_at_least_as_private_as_claimed(epsilon, releases):
    """An integer of sensitivity 1; the claim is that of zCDP, which holds for any number of them."""
    mu = discrete_mu_for(epsilon, DELTA)
    claimed = epsilon_for_zcdp(releases * mu * mu / 2, DELTA)
    loss = pld.from_discrete_gaussian_mechanism(1 / mu, value_discretization_interval=1e-3)
    assert loss.self_compose(releases).get_epsilon_for_delta(DELTA) <= claimed
    assert claimed == pytest.approx(epsilon, rel=1e-9) or releases > 1
    assert math.isfinite(claimed)
