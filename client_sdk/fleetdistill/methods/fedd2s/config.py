"""FedD2S: its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.base import check_choice, check_range
from fleetdistill.methods.local import LocalTraining

STEPS = ("joint", "alternating")
DISTANCES = ("head", "mse")
AVERAGES = ("uniform", "samples")
S2C_MODES = ("head", "feature_grad")


@dataclass(frozen=True, kw_only=True)
class FedD2SConfig(LocalTraining):
    """Settings of FedD2S beside those of local training; the server trains its copies with these too.

    Attributes:
        local_epochs: The paper's E, epochs of each of the two phases (server, device), half of them distillation and
            half labels. `distill_epochs` and `label_epochs` set the halves apart.
        distill_epochs: Epochs towards soft labels in each phase, at least 0; None means half of E, rounded up, or 1
            for `s2c_mode = "feature_grad"`, which allows no other.
        label_epochs: Epochs towards labels in each phase, at least 0; None means half of E, rounded up.
        drop_every: The paper's Z_0, rounds that a layer serves as distillation layer before the one below it does.
            Larger than the run: no dropping.
        l_min: Shallowest distillation layer, from 1; None means that `dropping_set` says it.
        dropping_set: Names of the stages that are dropped one after the other, the last ones of the model, with commas
            between them; empty for those from the first fully connected one on.
        temperature: Softmax temperature of the distillation; not used where labels are learned.
        steps: `joint` takes one optimiser step on the sum of both losses of a mini-batch, `alternating` one on each.
        s2c_mode: How the device learns of the head below the last layer: `head` sends its layers, `feature_grad`
            only the gradient of the distillation loss for every sample's features, which serves for one epoch.
        distance: `head` reads features with the global network's upper layers; `mse` brings the features of both
            networks together instead, which is the paper's ablation (Table 3).
        average: `uniform` averages the copies of the global network alike, `samples` weighs them by their rows.
        participation_ratio: The paper's rho.
        warmup_epochs: Epochs towards labels before a device's first upload, at least 0.
        shared_initial: All devices start from one model; only then are their first layers' features comparable.
        teacher_guard: Do not send a device knowledge that is worse than chance and than its own.
        paper: The paper's values of all settings that are not given: alternating steps, no warm-up, a model of its own
            for every device, no teacher guard.
    """

    keeps_optimizer: ClassVar[bool] = True

    local_epochs: int = 4
    batch_size: int = 128
    optimizer: str = "adam"
    learning_rate: float = 0.01
    weight_decay: float = 0.0
    distill_epochs: int | None = None
    label_epochs: int | None = None
    drop_every: int = 3
    l_min: int | None = None
    dropping_set: str = ""
    temperature: float = 1.0
    steps: str = "joint"
    s2c_mode: str = "head"
    distance: str = "head"
    average: str = "uniform"
    warmup_epochs: int = 1
    shared_initial: bool = True
    teacher_guard: bool = True
    paper: bool = False

    def __post_init__(self) -> None:
        LocalTraining.__post_init__(self)
        for name, known in (("steps", STEPS), ("s2c_mode", S2C_MODES), ("distance", DISTANCES), ("average", AVERAGES)):
            check_choice(name, getattr(self, name), known)
        check_range("drop_every", self.drop_every, 1)
        check_range("temperature", self.temperature, 0, open_low=True)
        check_range("warmup_epochs", self.warmup_epochs, 0)
        if self.l_min is not None and self.dropping_set:
            raise ConfigurationError("l_min and dropping_set say the same; set one of them")
        self._check_epochs()

    def _check_epochs(self) -> None:
        for name in ("distill_epochs", "label_epochs"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0)
        if self.distill_epochs == self.label_epochs == 0:
            raise ConfigurationError("distill_epochs and label_epochs are both 0; nothing would be trained")
        if self.s2c_mode == "feature_grad" and self.distill_epochs not in (None, 1):
            raise ConfigurationError("feature_grad allows distill_epochs = 1 only: the gradient is of the first step")
        if self.s2c_mode == "feature_grad" and self.distance == "mse":
            raise ConfigurationError("feature_grad is the gradient through the head, which distance = 'mse' has not")

    def for_classes(self, classes: int) -> FedD2SConfig:
        """The same settings with the epochs of both kinds filled in."""
        half = (self.local_epochs + 1) // 2
        distill = 1 if self.s2c_mode == "feature_grad" else half
        return replace(
            self,
            distill_epochs=distill if self.distill_epochs is None else self.distill_epochs,
            label_epochs=half if self.label_epochs is None else self.label_epochs,
        )

    @classmethod
    def paper_values(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The paper's; its epochs, optimiser and rate are our defaults."""
        return {"steps": "alternating", "warmup_epochs": 0, "shared_initial": False, "teacher_guard": False}

    def cross_entropy_epochs(self, participation: int) -> int:
        """`label_epochs`, and the warm-up in the first round."""
        labels = (self.local_epochs + 1) // 2 if self.label_epochs is None else self.label_epochs
        return labels + (self.warmup_epochs if participation == 1 else 0)
