"""Device half of class statistics with noise, docs/reference/methods/classstats_private.md."""

from __future__ import annotations

import torch

from fleetdistill.methods.classstats.device import ClassStatsDevice
from fleetdistill.methods.classstats_private.config import ClassStatsPrivateConfig
from fleetdistill.methods.classstats_private.exchange import PrivateStatistics
from fleetdistill.methods.classstats_private.public_features import private_extractor


class ClassStatsPrivateDevice(ClassStatsDevice):
    """Device half of classstats_private; after the release it is that of classstats."""

    config: ClassStatsPrivateConfig
    statistics = PrivateStatistics

    def make_extractor(self, given: torch.nn.Module | None, input_shape: tuple[int, ...]) -> torch.nn.Module:
        """Returns the public extractor; `given` is the run's own, None with scattering."""
        return private_extractor(self.config.features, given, input_shape, self.config.dimensions)
