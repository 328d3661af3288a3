"""Device half of class statistics by secure sums, docs/reference/methods/classstats_secure.md."""

from __future__ import annotations

from fleetdistill.methods.base import Answer, Ask, answers
from fleetdistill.methods.classstats.device import ClassStatsDevice, RefiningDevice
from fleetdistill.methods.classstats_private.device import ClassStatsPrivateDevice
from fleetdistill.methods.classstats_secure.config import ClassStatsSecureConfig, ClassStatsSummedConfig
from fleetdistill.methods.classstats_secure.exchange import STEPS, SecureStatistics, SummedStatistics


class SumDevice(ClassStatsDevice):
    """Device half of a method with secure sums. The device itself answers the steps of a sum, from its session."""

    @answers(*STEPS)
    def summarise(self, ask: Ask) -> Answer:
        """Returns all rows in the first step, which the device replaces by its keys, and nothing in the others."""
        return self.own.send(ask.step)


class ClassStatsSecureDevice(SumDevice, ClassStatsPrivateDevice):
    """Device half of classstats_secure: the sum has noise."""

    config: ClassStatsSecureConfig
    statistics = SecureStatistics


class ClassStatsSummedDevice(SumDevice, RefiningDevice):
    """Device half of classstats_summed: the sum has no noise. The device itself masks the sums of gradients, too."""

    config: ClassStatsSummedConfig
    own: SummedStatistics
    statistics = SummedStatistics
