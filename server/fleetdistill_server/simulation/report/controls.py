"""What a simulated fleet is held against: every device alone, and FedAvg with one model on every device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetdistill.training.figures import Counts
from fleetdistill_server.simulation.report.comparison import Cost
from fleetdistill_server.simulation.report.history import FleetHistory


@dataclass(frozen=True)
class FedAvgControl:
    """How FedAvg did.

    Attributes:
        model: The device model on every device.
        settings: FedAvg's settings.
        history: Of a device it has the model after local training, before the device takes the next mean.
        cost: Its traffic.
    """

    model: str
    settings: dict[str, Any]
    history: FleetHistory
    cost: Cost


@dataclass(frozen=True)
class Controls:
    """The controls of one simulation; what was not wanted is empty or None."""

    alone: Mapping[str, list[Counts]]
    fedavg: FedAvgControl | None
