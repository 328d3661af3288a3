"""Settings of FedD2S."""

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
    """Settings of FedD2S in addition to those of local training; the server trains its copies with them too.

    Attributes:
        local_epochs: The paper's E, epochs of each of the two phases (server, device): half of them on soft labels,
            half on labels, unless `distill_epochs` and `label_epochs` are set.
        distill_epochs: Epochs on soft labels in each phase, at least 0. None means half of E, rounded up, or 1 for
            `s2c_mode = "feature_grad"`, which allows no other value.
        label_epochs: Epochs on labels in each phase, at least 0; None means half of E, rounded up.
        drop_every: The paper's Z_0, number of rounds with the same distillation layer, at least 1; then the layer below
            it is used. A value above the number of rounds keeps the last layer.
        l_min: Shallowest distillation layer, from 1; None means that `dropping_set` sets it.
        dropping_set: Comma-separated names of the stages to drop, the model's last ones; empty for those from the
            first fully connected stage on.
        temperature: Softmax temperature of the distillation, above 0; not used for labels.
        steps: `joint` takes one optimiser step on the sum of both losses of a mini-batch, `alternating` one on each.
        s2c_mode: What the server sends of the layers above the distillation layer: `head` sends them,
            `feature_grad` sends the gradient of the distillation loss for each sample's features, valid for one epoch.
        distance: `head` compares outputs of the global network's upper layers; `mse` compares the features of both
            networks, the paper's ablation (Table 3).
        average: Mean of the copies of the global network: `uniform`, or weighted by `samples`.
        participation_ratio: The paper's rho.
        warmup_epochs: Epochs on labels before a device's first upload, at least 0.
        shared_initial: Whether all devices start from one model, which makes their first layers' features comparable.
        teacher_guard: Whether the server withholds knowledge that is worse than chance and than the device's own.
        paper: Use the paper's values for all other settings: alternating steps, no warm-up, a separate initial model
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
            raise ConfigurationError(
                "l_min and dropping_set both set the shallowest distillation layer; set one of them"
            )
        self._check_epochs()

    def _check_epochs(self) -> None:
        for name in ("distill_epochs", "label_epochs"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0)
        if self.distill_epochs == self.label_epochs == 0:
            raise ConfigurationError(
                "distill_epochs and label_epochs are both 0, so nothing would be trained; set one of them to at least 1"
            )
        if self.s2c_mode == "feature_grad" and self.distill_epochs not in (None, 1):
            raise ConfigurationError(
                f"distill_epochs is {self.distill_epochs}, must be 1 with s2c_mode = 'feature_grad': the gradient is "
                "valid for one step only"
            )
        if self.s2c_mode == "feature_grad" and self.distance == "mse":
            raise ConfigurationError(
                "s2c_mode = 'feature_grad' cannot be combined with distance = 'mse', which does not use the head; set "
                "s2c_mode = 'head' or another distance"
            )

    def for_classes(self, classes: int) -> FedD2SConfig:
        """Returns this configuration with the defaults of `distill_epochs` and `label_epochs` filled in."""
        half = (self.local_epochs + 1) // 2
        distill = 1 if self.s2c_mode == "feature_grad" else half
        return replace(
            self,
            distill_epochs=distill if self.distill_epochs is None else self.distill_epochs,
            label_epochs=half if self.label_epochs is None else self.label_epochs,
        )

    def reveals(self) -> str:
        """See `LocalTraining.reveals`."""
        return (
            "the first layer's output of every sample leaves, from which the server can reconstruct most inputs, "
            "and its label"
        )

    @classmethod
    def paper_values(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the paper's values; its epochs, optimiser and learning rate are our defaults."""
        return {"steps": "alternating", "warmup_epochs": 0, "shared_initial": False, "teacher_guard": False}

    def cross_entropy_epochs(self, participation: int) -> int:
        """Returns `label_epochs`, plus `warmup_epochs` in a device's first round."""
        labels = (self.local_epochs + 1) // 2 if self.label_epochs is None else self.label_epochs
        return labels + (self.warmup_epochs if participation == 1 else 0)
