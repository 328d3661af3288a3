"""Settings of private class statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.classstats.config import ClassStatsConfig, SpaceConfig
from fleetdistill.methods.local import LocalTraining
from fleetdistill.privacy.guarantee import Guarantee

_MIN_DIMENSIONS = 8
MAX_WHITENED = 64
"""Largest number of whitened features of the scattering."""
MAX_OUTPUTS = 128
"""Largest number of outputs of the run's own extractor: the noise grows with it."""


@dataclass(frozen=True, kw_only=True)
class PrivateConfig(SpaceConfig):
    """Settings of private class statistics, in addition to those of the form without noise that apply.

    Attributes:
        dimensions: F, numbers of a row with `features = "scattering"`, in [8, 64]. With `model` every output of the
            extractor is used, at most 128.
        epsilon: From [privacy]: epsilon of the guarantee for one row, in [0.1, 20].
        delta: From [privacy]: delta of the guarantee, in (0, 0.01].
        exact: From [privacy]: whether the noise is discrete Gaussian, which has no rounding.
    """

    is_private: ClassVar[bool] = True
    min_samples: ClassVar[int] = 1
    """Every class is sent, whether the device has rows of it or not."""
    rows_per_direction: ClassVar[int] = 1

    dimensions: int = MAX_WHITENED
    epsilon: float
    delta: float = 1e-5
    exact: bool = True

    def __post_init__(self) -> None:
        SpaceConfig.__post_init__(self)
        if not _MIN_DIMENSIONS <= self.dimensions <= MAX_WHITENED:
            raise ConfigurationError(
                f"dimensions must be in [{_MIN_DIMENSIONS}, {MAX_WHITENED}] with [privacy], got {self.dimensions!r}"
            )
        self.guarantee.check()

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of one release."""
        return Guarantee(epsilon=self.epsilon, delta=self.delta, exact=self.exact)

    @classmethod
    def other_forms(cls) -> Mapping[str, type[LocalTraining]]:
        """Returns the configuration of the form without noise."""
        return {"a run without [privacy]": ClassStatsConfig}

    def dimensions_for(self, input_shape: tuple[int, ...], features: int) -> int:
        """Returns F: all features, which are at most 128; `dimensions` has chosen those of the scattering."""
        return min(MAX_OUTPUTS, features)


Settings = ClassStatsConfig | PrivateConfig
"""Settings of either form."""
