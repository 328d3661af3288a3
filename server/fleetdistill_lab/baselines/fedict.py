"""FedICT: FedGKT whose distillation losses know the label shares of a device and of all devices.

Wu et al., FedICT: Federated Multi-task Distillation for Multi-access Edge Computing, IEEE TPDS 2024; the weights are
those of the authors' code. A device's distillation loss stresses the classes that it has (FPKD), the server's devices
whose labels resemble those of all, or classes that a device lacks (LKA).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.base import check_choice, check_range
from fleetdistill.methods.feddkc.device import FedDKCDevice
from fleetdistill_lab.baselines.fedgkt import FedGKTConfig, FedGKTServer
from fleetdistill_lab.baselines.shared import register
from fleetdistill_server.methods.base import MethodContext
from fleetdistill_server.methods.cohort import Notes
from fleetdistill_server.methods.feddkc.server import Upload

__all__ = ["FedICTConfig", "FedICTDevice", "FedICTServer"]

ALIGNMENTS = ("similarity", "class_balance")


@dataclass(frozen=True, kw_only=True)
class FedICTConfig(FedGKTConfig):
    """Settings of FedICT in addition to those of FedGKT.

    Attributes:
        prior_divisor: The authors' T of FPKD, above 0: the device's terms have the factors 1 + d_k / T.
        alignment: The server's factors: 1 + cos(d_S, d_k) for all classes, or 1 + (d_S - d_k) / U.
        balance_divisor: The authors' U of `class_balance`, above 0.
    """

    prior_divisor: float = 3.0
    alignment: str = "similarity"
    balance_divisor: float = 7.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("alignment", self.alignment, ALIGNMENTS)
        for name in ("prior_divisor", "balance_divisor"):
            check_range(name, getattr(self, name), 0, open_low=True)
        if not self.labels:
            raise ConfigurationError(
                "labels is false, but the server computes each device's label shares from its labels; leave it out"
            )


class FedICTDevice(FedDKCDevice):
    """Device half of FedICT: FedDKC's, with factors 1 + d_k / T of the classes' terms."""

    config: FedICTConfig

    def class_weights(self) -> Tensor:
        shares_c = _counts(self.local.data.labels, self.local.classes)
        shares_c = shares_c / shares_c.sum()
        return (1 + shares_c / self.config.prior_divisor).float().to(self.local.torch_device)


class FedICTServer(FedGKTServer):
    """Server half of FedICT: FedGKT's; keeps how often each device has each class."""

    summary = "FedGKT; label shares weight both distillations"
    config: FedICTConfig

    def __init__(self, config: Any, context: MethodContext) -> None:
        super().__init__(config, context)
        self._counts: dict[str, Tensor] = {}

    def class_weights(self, uploads: Sequence[Upload]) -> Mapping[str, Tensor]:
        """Returns the factors for each device; d_S is of all devices so far, each with the rows last trained on."""
        self._counts |= {one.device: _counts(one.labels, self.context.classes) for one in uploads}
        every_c = torch.stack([self._counts[device] for device in sorted(self._counts)]).sum(0)
        global_c = every_c / every_c.sum()
        result = {}
        for one in uploads:
            own_c = self._counts[one.device] / self._counts[one.device].sum()
            if self.config.alignment == "similarity":
                factor_c = 1 + functional.cosine_similarity(global_c, own_c, dim=0).expand(len(own_c))
            else:
                factor_c = 1 + (global_c - own_c) / self.config.balance_divisor
            result[one.device] = factor_c.float().to(self.context.torch_device)
        return result

    def forget(self, device: str, notes: Notes) -> None:
        super().forget(device, notes)
        self._counts.pop(device, None)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._counts = dict(state["counts"])


def _counts(labels_n: Tensor, classes: int) -> Tensor:
    """Returns how often each class occurs, `[C]` float64, on the CPU."""
    return torch.bincount(labels_n.cpu(), minlength=classes).double()


register("fedict", FedICTConfig, FedICTDevice, FedICTServer)
