"""The guarantee of a run with private statistics, as the operator sets it and people read it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleetdistill.errors import ConfigurationError
from fleetdistill.privacy.accountant import discrete_mu_for, mu_for

__all__ = ["Guarantee"]

MIN_EPSILON, MAX_EPSILON = 0.1, 20.0
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
