"""CDKT-FL: its settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
    """Settings of CDKT-FL beside those of local training. Names and ranges are those of the paper where it has them.

    Attributes:
        knowledge: What devices send and the server learns from: `full` outcomes, `rep` embeddings, `repfull` both.
            Embeddings need models with one embedding size F; outcomes fit any models.
        server_metric, device_metric: The paper's d of each side: `kl`, `js` or `norm2`. Its KL-N is kl and norm2.
        alpha: Weight of the device's regulariser, at least 0. With KL, alpha * temperature**2 multiplies the rate; the
            two norms have no such factor and need an alpha some ten times as large.
        beta: Weight of the server's regulariser, at least 0; 0 trains the server on the proxy labels alone.
        temperature: The paper's tau of KL, above 0.
        outcome_space: What is averaged and compared as outcome: `probs` or `logits`.
        norm2_reduction: `mean_l2` is the mean of the rows' norms, `frobenius` one norm over a mini-batch.
        label_average: Average collective outcomes, and the server's on the device, with the proxy labels.
        device_knowledge: What a device learns from: `auto` is the paper's (outcomes, and embeddings beside them unless
            `knowledge` is full), or `outcome`, `embedding`, `both`.
        aggregation: Average over devices alike (`uniform`) or by their samples (`samples`).
        global_epochs: The server's passes over the proxy set in a round, the paper's R, at least 1.
        min_server_steps: More passes where these would be fewer steps than this, at least 1.
        server_learning_rate: The paper's kappa. Momentum, weight decay and batch size are the devices'.
        exchange: False is the method's control: nothing is exchanged, and devices train on their own samples and on
            the labels of the proxy set, the server on these labels alone.
        control_weight: Weight of the proxy labels in that control, at least 0.
        teacher_guard: Do not send a device knowledge that is worse than chance and than its own.
        joint_pass: A device's own and its proxy mini-batch go through the model together, so that batch-norm trains on
            what it is later asked about; otherwise one after the other.
        paper: The paper's values of all settings that are not given, and where it has none the authors': outcomes and
            embeddings, KL-N with its weights and rates, outcomes as logits, norms over the mini-batch, two passes,
            `global_epochs` as they are, no guard.
    """

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

    def for_classes(self, classes: int) -> CDKTConfig:
        """The same settings; none depends on the number of classes."""
        return self

    @classmethod
    def paper_values(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The paper's; weights and rates are those of the authors' notes for Fashion-MNIST with all devices."""
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
        """Passes over P proxy samples: `global_epochs`, or as many as make `min_server_steps` steps of ceil(P / B)."""
        steps_of_a_pass = math.ceil(proxy_samples / self.batch_size)
        return max(self.global_epochs, math.ceil(self.min_server_steps / steps_of_a_pass))

    @property
    def up(self) -> tuple[bool, bool]:
        """Whether outcomes and whether embeddings travel to the server, and are its terms."""
        return self.exchange and self.knowledge != "rep", self.exchange and self.knowledge != "full"

    @property
    def down(self) -> tuple[bool, bool]:
        """Whether outcomes and whether embeddings travel to the devices, and are their terms."""
        both = self.knowledge != "full" if self.device_knowledge == "auto" else self.device_knowledge == "both"
        outcomes, embeddings = self.device_knowledge != "embedding", both or self.device_knowledge == "embedding"
        return self.exchange and outcomes, self.exchange and embeddings

    def distance(self, metric: str) -> Distance:
        """The paper's D with this metric: `server_metric` or `device_metric`."""
        from fleetdistill.methods.cdkt.transfer import Distance

        return Distance(metric, self.temperature, self.outcome_space, self.norm2_reduction)
