"""The noise of a private secure sum: each device draws its part, and the sum carries the whole.

The parts are discrete Gaussians; a sum of m of them is, for all that anybody can tell, one discrete Gaussian of m times
the variance. Standard library and NumPy.

References:
    Kairouz, Liu and Steinke, The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure
    Aggregation, 2021.
    Canonne, Kamath and Steinke, The Discrete Gaussian for Differential Privacy, 2020.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats_private.sums import SHARES, NoiseScale, rounded_up
from fleetdistill.privacy.accountant import discrete_mu_for, epsilon_for_zcdp, rho_for
from fleetdistill.privacy.discrete_gaussian import Random, discrete_gaussian
from fleetdistill.secure.session import PRIVATE, Parameters

__all__ = ["LocalVariances", "check_noise", "local_variances", "noise_vector", "scale_of_sum"]

MIN_VARIANCE = 16
"""Smallest variance of a device's noise, in squared steps."""
MAX_CORRECTION = 1e-12
"""Largest T: the release is (epsilon + 2 T, e^T delta)-private."""
_NEVER = 40 * math.log(2)
"""Noise stays within its bounds except with probability 2^-40."""


class LocalVariances(NamedTuple):
    """Variances of one device's noise in squared steps, multiples of 2^-10; all 0 in a sum without noise.

    Attributes:
        counts: Of each count.
        sums: Of each number of a sum.
        diagonal: Of the second moment's diagonal.
        beside: Of the second moment's entries beside the diagonal.
    """

    counts: Fraction
    sums: Fraction
    diagonal: Fraction
    beside: Fraction


@lru_cache(maxsize=8)  # rho is found by bisection
def local_variances(parameters: Parameters) -> LocalVariances:
    """Returns the smallest variances with which the noise of `parameters.honest` devices gives the guarantee.

    With them, half the sum of squared change / variance over all numbers is at most rho for every row: a row changes
    one count by 2^count_bits, one sum by a vector of length 2^grid_bits at most and the second moment by 4^grid_bits.
    """
    if parameters.mode != PRIVATE:
        return LocalVariances(*[Fraction(0)] * 4)
    rho = Fraction(rho_for(parameters.epsilon, parameters.delta))
    squares = (4**parameters.count_bits, 4**parameters.grid_bits, 16**parameters.grid_bits)
    whole = [square / (2 * rho * share) for square, share in zip(squares, SHARES, strict=True)]
    return LocalVariances(*(rounded_up(variance / parameters.honest) for variance in (*whole, whole[2] / 2)))


def distance_to_one(variance: float, parts: int) -> float:
    """Returns tau, a bound of |ln(P[Z = z] / P[W = z])| over all z (Kairouz et al.).

    Z is a sum of discrete Gaussians, W one discrete Gaussian of the same variance.

    Args:
        variance: Of one part in squared steps, at least 1/4.
        parts: m, at least 1.
    """
    return 10 * sum(math.exp(-2 * math.pi**2 * variance * k / (k + 1)) for k in range(1, parts))


def correction(parameters: Parameters) -> float:
    """Returns T, the sum of `distance_to_one` over all numbers."""
    classes, dimensions = parameters.classes, parameters.dimensions
    numbers = (classes, classes * dimensions, dimensions, dimensions * (dimensions - 1) // 2)
    variances = local_variances(parameters)
    return sum(
        count * distance_to_one(float(variance), parameters.honest)
        for count, variance in zip(numbers, variances, strict=True)
    )


def check_noise(parameters: Parameters) -> None:
    """Checks that a private sum's guarantee holds with noise on this grid.

    Raises:
        ConfigurationError: A device's noise is narrower than four steps, or T is above 1e-12.
    """
    if parameters.mode != PRIVATE:
        return
    for name, variance in local_variances(parameters)._asdict().items():
        if variance < MIN_VARIANCE:
            setting = "count_bits" if name == "counts" else "grid_bits"
            raise ConfigurationError(
                f"one device's noise on the {name} has a standard deviation of {math.sqrt(variance):.2f} steps, at "
                f"least {math.sqrt(MIN_VARIANCE):g} are needed with {parameters.honest} noise shares at epsilon "
                f"{parameters.epsilon:g}; raise {setting}, or lower epsilon or the number of devices"
            )
    if (found := correction(parameters)) > MAX_CORRECTION:
        raise ConfigurationError(
            f"the noise of {parameters.honest} devices together would weaken the guarantee by {found:.2g}, at most "
            f"{MAX_CORRECTION:g} is allowed; raise grid_bits and count_bits"
        )


def noise_bound(variance: float, parameters: Parameters) -> float:
    """Returns a bound that noise of a variance exceeds in one of the sum's numbers with probability 2^-40 at most."""
    return math.sqrt(2 * variance * (math.log(2 * parameters.numbers) + _NEVER))


def noise_vector(parameters: Parameters, random: Random | None = None) -> Array:
    """Returns one device's noise, `[numbers]` int64 in steps, in the order of `encoding.exact_numbers`.

    Args:
        parameters: Of a private sum.
        random: The operating system's generator by default; tests give another.
    """
    of = local_variances(parameters)
    rows, columns = np.triu_indices(parameters.dimensions)
    variances = [
        *[of.counts] * parameters.classes,
        *[of.sums] * (parameters.classes * parameters.dimensions),
        *(of.diagonal if row == column else of.beside for row, column in zip(rows, columns, strict=True)),
    ]
    return np.array([discrete_gaussian(variance, random) for variance in variances], dtype=np.int64)


def scale_of_sum(parameters: Parameters, parts: int) -> NoiseScale:
    """Returns the standard deviations of the noise in a private sum of `parts` devices, after decoding."""
    mu = discrete_mu_for(parameters.epsilon, parameters.delta)
    return NoiseScale.of(mu * math.sqrt(parameters.honest / parts))


def epsilon_without(parameters: Parameters, missing: int) -> float:
    """Returns the epsilon that still holds if `missing` of the honest devices added no noise; infinite beyond 100."""
    rho = rho_for(parameters.epsilon, parameters.delta)
    return epsilon_for_zcdp(rho * parameters.honest / (parameters.honest - missing), parameters.delta)
