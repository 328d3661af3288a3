"""Settings of private class statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.classstats.config import SpaceConfig
from fleetdistill.privacy.accountant import Guarantee

_MIN_DIMENSIONS, _USUAL_DIMENSIONS = 8, 64
MAX_WHITENED = 192
"""Largest number of whitened features of the scattering."""
MAX_OUTPUTS = 128
"""Largest number of outputs of the run's own extractor: the noise grows with it."""


@dataclass(frozen=True, kw_only=True)
class ClassStatsPrivateConfig(SpaceConfig):
    """Settings of private class statistics, in addition to those of classstats that apply.

    Attributes:
        dimensions: F, numbers of a row with `features = "scattering"`, in [8, 192]. With `model` every output of the
            extractor is used, at most 128.
        epsilon: Epsilon of the guarantee for one row, in [0.1, 20].
        delta: Delta of the guarantee, in (0, 0.01].
        exact: Whether the noise is discrete Gaussian, which has no rounding.
    """

    examples: ClassVar[Mapping[str, Any]] = MappingProxyType({"epsilon": 3.0})

    dimensions: int = _USUAL_DIMENSIONS
    epsilon: float
    delta: float = 1e-5
    exact: bool = True

    def __post_init__(self) -> None:
        SpaceConfig.__post_init__(self)
        if not _MIN_DIMENSIONS <= self.dimensions <= MAX_WHITENED:
            raise ConfigurationError(
                f"dimensions must be in [{_MIN_DIMENSIONS}, {MAX_WHITENED}], got {self.dimensions!r}"
            )
        self.guarantee.check()

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of one release."""
        return Guarantee(epsilon=self.epsilon, delta=self.delta, exact=self.exact)

    def device_mu(self, devices: int) -> float:
        """Returns the Gaussian-DP parameter that one device's statistics have in a merge of so many devices."""
        return self.guarantee.mu

    def dimensions_for(self, input_shape: tuple[int, ...], features: int) -> int:
        """Returns F: all features; `dimensions` has chosen those of the scattering."""
        return features
