"""Settings of FedDKD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fleetdistill.methods.base import (
    check_choice,
    check_range,
    check_share,
)
from fleetdistill.methods.local import LocalTraining

__all__ = ["MIN_BATCH", "FedDKDConfig"]

CHOICES = {
    "dkd_weighting": ("uniform", "samples"),
    "dkd_student_mode": ("eval", "train"),
    "variant": ("plain", "max", "bn"),
    "fedmax_form": ("a_to_u", "u_to_a_elementwise"),
}
_DKD_LR, _DKD_LR_WITH_BATCH_NORM = 0.1, 0.01
MIN_BATCH = 32
"""Fewest rows of a gradient that is not called invertible."""


@dataclass(frozen=True, kw_only=True)
class FedDKDConfig(LocalTraining):
    """Settings of FedDKD in addition to those of local training. Round numbers count completed rounds from 1.

    Attributes:
        learning_rate_round_decay: Factor of the local learning rate from round to round, in (0, 1]. The paper has 0.98
            and 0.99. With 1 and without distillation steps the method is FedAvg.
        dkd_steps: The paper's J, distillation steps of a round, at least 0.
        dkd_lr: The paper's gamma of round 1 and step 1, above 0. None means 0.1, or 0.01 for a model with batch-norm,
            where steps in eval mode diverge more easily.
        dkd_lr_round_decay: Factor of gamma from round to round, in (0, 1].
        dkd_lr_step_decay: Factor of gamma from step to step of a round, in (0, 1].
        dkd_batch_size: The paper's B~, samples of a device's gradient, at least 1; at most all of its samples.
        dkd_start_round: First round with distillation, at least 1; earlier rounds are those of FedAvg.
        dkd_weighting: q_k of a distillation step: `uniform` over the devices that answered, or their share of
            `samples`.
        dkd_max_norm: Largest norm of the mean gradient, above 0; a larger one is scaled down. None for no limit.
        dkd_student_mode: Mode of the student in a distillation step: `eval`, or `train` with dropout and batch
            statistics. Neither mode changes the model's buffers.
        temperature: Softmax temperature of the distillation, above 0.
        variant: `plain`; `max` adds an entropy term on activations to local training (FedDKD_MAX); `bn` keeps
            batch-norm on the devices (FedDKD_BN).
        fedmax_beta: Weight of the entropy term, at least 0; its scale depends on `fedmax_form`.
        fedmax_form: `a_to_u` is the paper's KL(softmax(a) || U) of each sample; `u_to_a_elementwise` is the term of
            FedMAX's code, KL(U || softmax(a)) divided by the number of activations.
        divergence_guard: Whether the server reverts a distillation step and ends the round's steps if the devices' mean
            loss has risen by more than `divergence_factor`. Each device uses the same rows in all steps of a round.
        divergence_factor: Largest accepted ratio of the mean losses after and before a step, above 1.
        paper: Use the paper's values for all other settings: no guard, gamma 0.1 with batch-norm too, plain momentum, a
            local learning rate that decays. E, J and rates, which the paper sets by data set, keep their defaults.
    """

    local_epochs: int = 5
    learning_rate: float = 0.02
    weight_decay: float = 0.0
    learning_rate_round_decay: float = 1.0
    dkd_steps: int = 3
    dkd_lr: float | None = None
    dkd_lr_round_decay: float = 0.99
    dkd_lr_step_decay: float = 1.0
    dkd_batch_size: int = 64
    dkd_start_round: int = 1
    dkd_weighting: str = "uniform"
    dkd_max_norm: float | None = None
    dkd_student_mode: str = "eval"
    temperature: float = 1.0
    variant: str = "plain"
    fedmax_beta: float = 0.02
    fedmax_form: str = "a_to_u"
    divergence_guard: bool = True
    divergence_factor: float = 1.5
    paper: bool = False

    def __post_init__(self) -> None:
        LocalTraining.__post_init__(self)
        for name, known in CHOICES.items():
            check_choice(name, getattr(self, name), known)
        for name in ("learning_rate_round_decay", "dkd_lr_round_decay", "dkd_lr_step_decay"):
            check_share(name, getattr(self, name))
        for name in ("dkd_lr", "dkd_max_norm", "temperature"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0, open_low=True)
        for name, low in (("dkd_steps", 0), ("fedmax_beta", 0), ("dkd_batch_size", 1), ("dkd_start_round", 1)):
            check_range(name, getattr(self, name), low)
        check_range("divergence_factor", self.divergence_factor, 1, open_low=True)

    def reveals(self) -> str:
        """See `LocalTraining.reveals`."""
        if not self.dkd_steps or self.dkd_batch_size >= MIN_BATCH:
            return ""
        rows = "one sample" if self.dkd_batch_size == 1 else f"{self.dkd_batch_size} samples"
        return f"gradients of {rows} leave, fewer than {MIN_BATCH}; the server can invert them to the inputs"

    @classmethod
    def paper_values(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the paper's settings, with the decay of its CIFAR runs; its gamma is 0.01 to 0.4, by data set."""
        return {
            "nesterov": False,
            "learning_rate_round_decay": 0.99,
            "dkd_lr": _DKD_LR,
            "divergence_guard": False,
        }

    def for_batch_norm(self, present: bool) -> FedDKDConfig:
        """Returns this configuration with the default of gamma for a model with or without batch-norm filled in."""
        usual = _DKD_LR_WITH_BATCH_NORM if present else _DKD_LR
        return replace(self, dkd_lr=usual if self.dkd_lr is None else self.dkd_lr)

    def steps_in(self, number: int) -> int:
        """Returns the number of distillation steps in a round; rounds are counted from 1."""
        return self.dkd_steps if number >= self.dkd_start_round else 0

    def local_rate(self, number: int) -> float:
        """Returns eta_t, the local learning rate in a round, counted from 1."""
        return self.learning_rate * self.learning_rate_round_decay ** (number - 1)

    def dkd_rate(self, number: int, step: int) -> float:
        """Returns gamma_{t,j}, the rate of a distillation step; rounds and steps are counted from 1."""
        assert self.dkd_lr is not None
        return self.dkd_lr * self.dkd_lr_round_decay ** (number - 1) * self.dkd_lr_step_decay ** (step - 1)
