"""Settings of CDKT-FL."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from fleetdistill.methods.base import check_choice, check_range
from fleetdistill.methods.local import LocalTraining

if TYPE_CHECKING:
    from fleetdistill.methods.cdkt.transfer import Distance


METRICS = ("kl", "js", "norm2")
CHOICES = {
    "knowledge": ("full", "rep", "repfull"),
    "server_metric": METRICS,
    "device_metric": METRICS,
    "outcome_space": ("probs", "logits"),
    "norm2_reduction": ("mean_l2", "frobenius"),
    "device_knowledge": ("auto", "outcome", "embedding", "both"),
    "aggregation": ("uniform", "samples"),
}


@dataclass(frozen=True, kw_only=True)
class CDKTConfig(LocalTraining):
    """Settings of CDKT-FL in addition to those of local training, with the paper's names and ranges.

    Attributes:
        knowledge: Columns that devices send and the server learns from: `full` (outcomes), `rep` (embeddings) or
            `repfull` (both). Embeddings need models of one embedding size F; outcomes fit any models.
        server_metric: The paper's distance d on the server: `kl`, `js` or `norm2`.
        device_metric: The paper's d on the devices. The paper's KL-N is `kl` on the server and `norm2` on the devices.
        alpha: Weight of the device's regulariser, at least 0. With `kl`, alpha * temperature**2 multiplies the learning
            rate; the norms have no such factor and need an alpha about ten times as large.
        beta: Weight of the server's regulariser, at least 0; with 0 the server learns only from the proxy labels.
        temperature: The paper's tau for `kl`, above 0.
        outcome_space: Space in which outcomes are averaged and compared: `probs` or `logits`.
        norm2_reduction: `mean_l2` takes the mean of the rows' norms, `frobenius` one norm over a mini-batch.
        label_average: Whether outcomes are averaged with the proxy labels, on the server and on the devices.
        device_knowledge: Columns that a device learns from: `outcome`, `embedding`, `both`, or `auto` for the paper's
            choice: outcomes, and embeddings too unless `knowledge` is `full`.
        aggregation: Mean over devices: `uniform`, or weighted by `samples`.
        global_epochs: The paper's R, the server's passes over the proxy set in a round, at least 1.
        min_server_steps: Minimum number of the server's steps in a round, at least 1; adds passes if necessary.
        server_learning_rate: The paper's kappa, above 0. Momentum, weight decay and batch size are the devices'.
        exchange: False runs the method's control without an exchange of knowledge. Devices then train on their own
            samples and on the labels of the proxy set, the server only on these labels.
        control_weight: Weight of the proxy labels in the control, at least 0.
        teacher_guard: Whether the server withholds knowledge that is worse than chance and than the device's own.
        joint_pass: Whether a device's own and its proxy mini-batch are one forward pass, so that batch-norm sees both;
            otherwise there are two passes.
        paper: Use the paper's, or else the authors', values for all other settings: outcomes and embeddings, KL-N with
            its weights and rates, outcomes as logits, norms over the mini-batch, two forward passes and no guard.
    """

    control: ClassVar[Mapping[str, Any]] = MappingProxyType({"exchange": False})

    batch_size: int = 20
    learning_rate: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    knowledge: str = "full"
    server_metric: str = "kl"
    device_metric: str = "kl"
    alpha: float = 0.3
    beta: float = 0.1
    temperature: float = 3.0
    outcome_space: str = "probs"
    norm2_reduction: str = "mean_l2"
    label_average: bool = True
    device_knowledge: str = "auto"
    aggregation: str = "uniform"
    global_epochs: int = 2
    min_server_steps: int = 40
    server_learning_rate: float = 0.1
    exchange: bool = True
    control_weight: float = 1.0
    teacher_guard: bool = True
    joint_pass: bool = True
    paper: bool = False

    def __post_init__(self) -> None:
        LocalTraining.__post_init__(self)
        for name, known in CHOICES.items():
            check_choice(name, getattr(self, name), known)
        for name in ("alpha", "beta", "control_weight"):
            check_range(name, getattr(self, name), 0)
        for name in ("temperature", "server_learning_rate"):
            check_range(name, getattr(self, name), 0, open_low=True)
        for name in ("global_epochs", "min_server_steps"):
            check_range(name, getattr(self, name), 1)

    @classmethod
    def paper_values(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the paper's values; weights and rates are the authors' for Fashion-MNIST with all devices."""
        return {
            "learning_rate": 0.03,
            "knowledge": "repfull",
            "device_metric": "norm2",
            "alpha": 0.02,
            "outcome_space": "logits",
            "norm2_reduction": "frobenius",
            "min_server_steps": 1,
            "server_learning_rate": 0.07,
            "teacher_guard": False,
            "joint_pass": False,
        }

    def server_epochs(self, proxy_samples: int) -> int:
        """Returns the passes over P proxy samples: `global_epochs`, or more to reach `min_server_steps`."""
        steps_of_a_pass = math.ceil(proxy_samples / self.batch_size)
        return max(self.global_epochs, math.ceil(self.min_server_steps / steps_of_a_pass))

    @property
    def up(self) -> tuple[bool, bool]:
        """Whether outcomes are sent to the server, and whether embeddings are."""
        return self.exchange and self.knowledge != "rep", self.exchange and self.knowledge != "full"

    @property
    def down(self) -> tuple[bool, bool]:
        """Whether outcomes are sent to the devices, and whether embeddings are."""
        both = self.knowledge != "full" if self.device_knowledge == "auto" else self.device_knowledge == "both"
        outcomes, embeddings = self.device_knowledge != "embedding", both or self.device_knowledge == "embedding"
        return self.exchange and outcomes, self.exchange and embeddings

    def distance(self, metric: str) -> Distance:
        """Returns the paper's D for `server_metric` or `device_metric`."""
        from fleetdistill.methods.cdkt.transfer import Distance

        return Distance(metric, self.temperature, self.outcome_space, self.norm2_reduction)
