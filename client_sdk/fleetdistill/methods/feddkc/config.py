"""FedDKC: its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from fleetdistill.methods.base import check_choice, check_range
from fleetdistill.methods.feddkc.ranges import (
    check_epsilon,
    check_kernel_name,
    check_target_entropy,
    check_target_peak,
)
from fleetdistill.methods.local import LocalTraining

REFINEMENTS = ("none", "kkr", "kkr_kernel", "skr")
SERVER_ORDERS = ("mixed", "sequential")


@dataclass(frozen=True, kw_only=True)
class FedDKCConfig(LocalTraining):
    """Settings of FedDKC beside those of local training. Names and ranges are those of the paper where it has them.

    Attributes:
        refinement: How the server makes the devices' knowledge congruent; `none` is FedGKT.
        target_peak: KKR's T in (1/C, 1); None means (1 + 1/C) / 2.
        target_entropy: SKR's E in bits, in (0, log2 C); None means half of log2 C.
        epsilon: Congruence tolerance; searches stop at half of it.
        kernel: KKR's kernel for `kkr_kernel`.
        refine_temperature: Divides the logits before KKR's softmax.
        temperature: The softmax temperature of both distillation losses.
        beta: Weight of the device's distillation loss. `beta * temperature**2` multiplies the learning rate.
        server_beta: Weight of the server's distillation loss; 0 ignores the devices' logits.
        server_order: `mixed` trains on one shuffled pool, `sequential` device after device as in the paper.
        server_epochs: Passes over all uploads. Momentum, weight decay and batch size are the devices'.
        server_learning_rate: Of the server's SGD.
        initial_zero_knowledge: In a device's first round distil from a uniform teacher, as the paper's Algorithm 1
            does. Where a guard holds knowledge back later, the device trains on its labels alone.
        shared_initial: All devices start from one extractor; without it the server learns little from their features.
        teacher_guard: Do not send a device knowledge that is worse than chance and than its own.
        paper: The paper's values of all settings that are not given: `beta` on both sides, temperature 1, one device
            after the other on the server, a uniform teacher in round 1, an extractor of its own for every device, no
            guard, and the paper's plain SGD with rates of 0.03, weight decay 0.0005 and batches of 1024. Refinement,
            T, E and epochs stay: the paper leaves them open.
    """

    keeps_optimizer: ClassVar[bool] = True

    refinement: str = "skr"
    target_peak: float | None = None
    target_entropy: float | None = None
    epsilon: float = 1e-3
    kernel: str = "exp"
    refine_temperature: float = 1.0
    temperature: float = 3.0
    beta: float = 1.5
    server_beta: float = 0.1
    server_order: str = "mixed"
    server_epochs: int = 2
    server_learning_rate: float = 0.01
    initial_zero_knowledge: bool = False
    shared_initial: bool = True
    teacher_guard: bool = True
    paper: bool = False

    def __post_init__(self) -> None:
        LocalTraining.__post_init__(self)
        check_choice("refinement", self.refinement, REFINEMENTS)
        check_choice("server_order", self.server_order, SERVER_ORDERS)
        check_kernel_name(self.kernel)
        check_epsilon(self.epsilon)
        for name in ("refine_temperature", "temperature", "server_learning_rate"):
            check_range(name, getattr(self, name), 0, open_low=True)
        for name in ("beta", "server_beta"):
            check_range(name, getattr(self, name), 0)
        check_range("server_epochs", self.server_epochs, 1)

    def for_classes(self, classes: int) -> FedDKCConfig:
        """The same settings with T and E filled in and checked for a number of classes C.

        Raises:
            ConfigurationError: T or E is out of its range for C.
        """
        peak = (1 + 1 / classes) / 2 if self.target_peak is None else self.target_peak
        entropy = 0.5 * float(np.log2(classes)) if self.target_entropy is None else self.target_entropy
        check_target_peak(peak, classes)
        check_target_entropy(entropy, classes)
        check_epsilon(self.epsilon, target_entropy=entropy, classes=classes)
        return replace(self, target_peak=peak, target_entropy=entropy)

    @classmethod
    def paper_values(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The paper's; it has one weight for both distillation losses."""
        return {
            "batch_size": 1024,
            "learning_rate": 0.03,
            "momentum": 0.0,
            "temperature": 1.0,
            "server_beta": given.get("beta", cls.beta),
            "server_order": "sequential",
            "server_learning_rate": 0.03,
            "initial_zero_knowledge": True,
            "shared_initial": False,
            "teacher_guard": False,
        }
