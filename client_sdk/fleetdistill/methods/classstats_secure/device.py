"""Device half of class statistics by secure sums, docs/reference/methods/classstats_secure.md."""

from __future__ import annotations

from fleetdistill.methods.base import Answer, Ask, answers
from fleetdistill.methods.classstats_private.device import ClassStatsPrivateDevice
from fleetdistill.methods.classstats_secure.config import ClassStatsSecureConfig
from fleetdistill.methods.classstats_secure.exchange import STEPS, SecureStatistics


class ClassStatsSecureDevice(ClassStatsPrivateDevice):
    """Device half of classstats_secure. The device itself answers the steps of a sum, from its session."""

    config: ClassStatsSecureConfig
    statistics = SecureStatistics

    @answers(*STEPS)
    def summarise(self, ask: Ask) -> Answer:
        """Returns all rows in the first step, which the device replaces by its keys, and nothing in the others."""
        return self.own.send(ask.step)
