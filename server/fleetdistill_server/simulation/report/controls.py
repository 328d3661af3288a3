"""Results of a simulation's controls: local-only training, and FedAvg with one model on every device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetdistill.training.figures import Counts
from fleetdistill_server.simulation.report.comparison import Cost
from fleetdistill_server.simulation.report.history import FleetHistory


@dataclass(frozen=True)
class FedAvgControl:
    """Results of the FedAvg control.

    Attributes:
        model: Model of every device.
        settings: FedAvg's settings.
        history: History of the run; device models are those after local training, before the next averaging.
        cost: Traffic of the run.
    """

    model: str
    settings: dict[str, Any]
    history: FleetHistory
    cost: Cost


@dataclass(frozen=True)
class Controls:
    """Results of a simulation's controls.

    Attributes:
        alone: For each device id, the figures of local-only training after each round; empty without this control.
        fedavg: Results of FedAvg; None without this control.
    """

    alone: Mapping[str, list[Counts]]
    fedavg: FedAvgControl | None
