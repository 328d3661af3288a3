"""Converts between (epsilon, delta), a run's guarantee, and the noise of the (discrete) Gaussian mechanism.

A release of L2 sensitivity 1 with noise of standard deviation 1 / mu satisfies mu-Gaussian differential privacy (GDP).
Several releases of the same row compose to the root of the sum of their mu squared.

References:
    Balle and Wang, Improving the Gaussian Mechanism for Differential Privacy, 2018, theorem 8.
    Dong, Roth and Su, Gaussian Differential Privacy, 2022.
    Canonne, Kamath and Steinke, The Discrete Gaussian for Differential Privacy, 2020, corollary 13.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from fleetdistill.errors import ConfigurationError

__all__ = ["Guarantee"]

_MAX_EPSILON = 100.0
"""Guarantees beyond it mean nothing, and `exp` of ten times as much overflows."""
_BISECTIONS = 200


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Returns the smallest delta for which a mu-GDP release is (epsilon, delta)-private (Balle and Wang, theorem 8).

    Args:
        epsilon: In [0, 100].
        mu: Sensitivity divided by the noise's standard deviation, at least 0.
    """
    if mu == 0:
        return 0.0
    return _normal_cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * _normal_cdf(-mu / 2 - epsilon / mu)


def mu_for(epsilon: float, delta: float) -> float:
    """Returns the largest mu whose release is (epsilon, delta)-private, rounded down.

    Args:
        epsilon: Above 0, at most 100.
        delta: In (0, 1).
    """
    _check(epsilon, delta)
    return _largest(lambda mu: gaussian_delta(epsilon, mu) <= delta)


def epsilon_for(mu: float, delta: float) -> float:
    """Returns the smallest epsilon for which a mu-GDP release is (epsilon, delta)-private, rounded up.

    Args:
        mu: At least 0.
        delta: In (0, 1).

    Returns:
        A number in [0, 100], or infinity if 100 is not enough.
    """
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    if gaussian_delta(_MAX_EPSILON, mu) > delta:
        return math.inf
    return _bisect(0.0, _MAX_EPSILON, lambda epsilon: gaussian_delta(epsilon, mu) > delta)[1]


def epsilon_for_zcdp(rho: float, delta: float) -> float:
    """Returns the smallest epsilon for which rho-zCDP implies (epsilon, delta)-privacy, rounded up.

    Args:
        rho: At least 0.
        delta: In (0, 1).

    Returns:
        A number in [0, 100], or infinity if 100 is not enough.
    """
    if zcdp_delta(rho, 0.0) <= delta:
        return 0.0
    if zcdp_delta(rho, _MAX_EPSILON) > delta:
        return math.inf
    return _bisect(0.0, _MAX_EPSILON, lambda epsilon: zcdp_delta(rho, epsilon) > delta)[1]


def compose(mus: Iterable[float]) -> float:
    """Returns the mu of several releases of the same row."""
    return math.sqrt(math.fsum(mu * mu for mu in mus))


def discrete_mu_for(epsilon: float, delta: float) -> float:
    """Returns the mu for noise from the discrete Gaussian: sqrt(2 rho), with the largest rho that zCDP allows.

    Args:
        epsilon: Above 0, at most 100.
        delta: In (0, 1).
    """
    return math.sqrt(2 * rho_for(epsilon, delta))


def rho_for(epsilon: float, delta: float) -> float:
    """Returns the largest rho for which rho-zCDP implies (epsilon, delta)-privacy, rounded down."""
    _check(epsilon, delta)
    return _largest(lambda rho: zcdp_delta(rho, epsilon) <= delta)


def zcdp_delta(rho: float, epsilon: float) -> float:
    """Returns a delta for which rho-zCDP implies (epsilon, delta)-privacy (Canonne et al., corollary 13).

    It is the infimum over orders a > 1 of exp((a - 1)(a rho - epsilon)) / (a - 1) * (1 - 1/a)^a.
    """
    if rho == 0:
        return 0.0

    def falls(order: float) -> bool:
        return (2 * order - 1) * rho - epsilon + math.log1p(-1 / order) < 0

    order = _bisect(1 + 1e-9, (epsilon + 1) / (2 * rho) + 2, falls)[1]
    exponent = (order - 1) * (order * rho - epsilon) + order * math.log1p(-1 / order)
    return min(1.0, math.exp(min(exponent, 700.0)) / (order - 1))  # `exp` of more overflows


def _normal_cdf(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2))


def _check(epsilon: float, delta: float) -> None:
    if not 0 < epsilon <= _MAX_EPSILON:
        raise ValueError(f"epsilon must be in (0, {_MAX_EPSILON:g}], got {epsilon!r}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta!r}")


def _largest(allowed: Callable[[float], bool]) -> float:
    """Returns the largest positive number that is allowed, rounded down; `allowed` holds up to it and not beyond."""
    high = 1.0
    while allowed(high):
        high *= 2
    return _bisect(0.0, high, allowed)[0]


def _bisect(low: float, high: float, holds: Callable[[float], bool]) -> tuple[float, float]:
    """Narrows [low, high] around the point up to which `holds` is true."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


MIN_EPSILON, MAX_EPSILON = 0.1, 20.0


# --- The guarantee of a run with private statistics, as the operator sets it and people read it.

MAX_DELTA = 0.01


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """Differential privacy of each row of each device, against the server and all who see its results.

    Attributes:
        epsilon: In [0.1, 20].
        delta: In (0, 0.01]; it should be below 1 / number of rows of a device.
        exact: Whether the noise is discrete Gaussian.
        against: Against whom, for the sentence.
    """

    epsilon: float
    delta: float = 1e-5
    exact: bool = True
    against: str = "the server"

    def check(self) -> None:
        """Raises ConfigurationError if a value is out of range."""
        if not MIN_EPSILON <= self.epsilon <= MAX_EPSILON:
            raise ConfigurationError(
                f"epsilon must be in [{MIN_EPSILON:g}, {MAX_EPSILON:g}], got {self.epsilon!r}; a smaller one is "
                "more private"
            )
        if not 0 < self.delta <= MAX_DELTA:
            raise ConfigurationError(f"delta must be in (0, {MAX_DELTA:g}], got {self.delta!r}")

    @property
    def mu(self) -> float:
        """Gaussian-DP parameter of one release's noise."""
        return (discrete_mu_for if self.exact else mu_for)(self.epsilon, self.delta)

    def at_most(self, epsilon: float, delta: float) -> Guarantee:
        """Returns the guarantee with its epsilon and delta lowered to these values where they are smaller."""
        return replace(self, epsilon=min(self.epsilon, epsilon), delta=min(self.delta, delta))

    @property
    def sentence(self) -> str:
        """What the guarantee says, for lists and reports."""
        delta = f"{self.delta:g}".replace("e-0", "e-")
        return f"each row of each device is ({self.epsilon:g}, {delta})-private against {self.against}"
