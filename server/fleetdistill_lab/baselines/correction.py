"""Server half of methods that correct FedAvg with a tensor accumulated for each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fleetdistill_server.methods.base import MethodContext
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer, Notes
from fleetdistill_server.methods.fedavg import FedAvgServer

__all__ = ["CorrectedServer"]


class CorrectedServer(FedAvgServer):
    """Stores the global model, an accumulated tensor for each of its parameters, and which devices there are.

    Attributes:
        accumulated: SCAFFOLD's c or FedDyn's h by parameter name, float64, at first 0.
    """

    def __init__(self, config: Any, context: MethodContext) -> None:
        super().__init__(config, context)
        self.accumulated = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in self.model.named_parameters()}
        self._devices: set[str] = set()

    def share(self, cohort: Cohort, received: Sequence[DeviceAnswer]) -> float:
        """Returns |S| / N: the devices that answered, of all that a round has had."""
        self._devices |= set(cohort.devices)
        return len(received) / len(self._devices)

    def forget(self, device: str, notes: Notes) -> None:
        self._devices.discard(device)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "accumulated": self.accumulated, "devices": sorted(self._devices)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.accumulated = {name: one.to(self.context.torch_device) for name, one in state["accumulated"].items()}
        self._devices = set(state["devices"])
