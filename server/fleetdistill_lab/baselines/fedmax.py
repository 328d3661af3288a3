"""FedMAX: FedAvg whose local loss keeps the activations of the last layer's input spread.

Chen, Bhardwaj and Marculescu, FedMAX: Mitigating Activation Divergence for Accurate and Communication-Efficient
Federated Learning, ECML-PKDD 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from fleetdistill.methods.base import Local, check_choice, check_range
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.fedavg.device import FedAvgDevice
from fleetdistill.training.losses import activation_divergence
from fleetdistill.training.model import check_embedding, logits_and_embedding
from fleetdistill_lab.baselines.shared import register
from fleetdistill_server.methods.fedavg import FedAvgServer

__all__ = ["FedMAXConfig", "FedMAXDevice", "FedMAXServer"]

FORMS = ("a_to_u", "u_to_a_elementwise")


@dataclass(frozen=True, kw_only=True)
class FedMAXConfig(FedAvgConfig):
    """Settings of FedMAX in addition to those of FedAvg.

    Attributes:
        beta: Weight of the term on activations, at least 0; its scale depends on `form`. With 0 it is FedAvg.
        form: `a_to_u` is KL(softmax(a) || U) averaged over rows, as FedDKD's paper prints it; `u_to_a_elementwise` is
            the term of FedMAX's code, KL(U || softmax(a)) averaged over all numbers, with beta from 1000 to 10000.
    """

    beta: float = 0.02
    form: str = "a_to_u"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta", self.beta, 0)
        check_choice("form", self.form, FORMS)


class FedMAXDevice(FedAvgDevice):
    """Device half of FedMAX: adds the divergence of the last layer's input from the uniform distribution.

    Raises:
        ModelError: The app's model has no `embedding` method.
    """

    config: FedMAXConfig

    def __init__(self, config: FedMAXConfig, local: Local) -> None:
        check_embedding(local.model, "FedMAX")
        super().__init__(config, local)

    def loss(self, inputs_b: Tensor, labels_b: Tensor) -> Tensor:
        logits_bc, activations_bf = logits_and_embedding(self.local.model, inputs_b)
        term = activation_divergence(activations_bf, reverse_elementwise=self.config.form == "u_to_a_elementwise")
        return functional.cross_entropy(logits_bc, labels_b) + self.config.beta * term


class FedMAXServer(FedAvgServer):
    """Server half of FedMAX: FedAvg's."""

    summary = "FedAvg; local training spreads the last activations"


register("fedmax", FedMAXConfig, FedMAXDevice, FedMAXServer)
