"""Settings of FedDKC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, Self

import numpy as np

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods.base import check_choice, check_range
from fleetdistill.methods.feddkc.ranges import (
    check_epsilon,
    check_kernel_name,
    check_target_entropy,
    check_target_peak,
)
from fleetdistill.methods.local import LocalTraining

__all__ = ["FedDKCConfig"]

REFINEMENTS = ("none", "kkr", "kkr_kernel", "skr")
SERVER_ORDERS = ("mixed", "sequential")


@dataclass(frozen=True, kw_only=True)
class FedDKCConfig(LocalTraining):
    """Settings of FedDKC in addition to those of local training, with the paper's names and ranges.

    Attributes:
        refinement: How the server makes the devices' knowledge congruent: `skr`, `kkr`, `kkr_kernel`, or `none`.
        target_peak: KKR's T, in (1/C, 1); None means (1 + 1/C) / 2.
        target_entropy: SKR's E in bits, in (0, log2 C); None means half of log2 C.
        epsilon: Congruence tolerance, above 0; searches stop at half of it.
        kernel: Kernel of `kkr_kernel`, one of `ranges.KERNELS`.
        refine_temperature: Divisor of the logits before KKR's softmax, above 0.
        temperature: Softmax temperature of both distillation losses, above 0.
        beta: Weight of the device's distillation loss, at least 0; beta * temperature**2 multiplies the learning rate.
        server_beta: Weight of the server's distillation loss, at least 0; with 0 the devices' logits are not used.
        server_order: `mixed` trains on one shuffled pool, `sequential` on one device after the other, as in the paper.
        server_epochs: The server's passes over all uploads, at least 1. Momentum, weight decay and batch size are the
            devices'.
        server_learning_rate: Learning rate of the server's SGD, above 0.
        initial_zero_knowledge: Whether a device's first round distils from a uniform teacher, as in the paper's
            Algorithm 1. If a guard withholds knowledge later, the device trains only on its labels.
        shared_initial: Whether all devices start from one extractor; otherwise the server learns little from their
            features.
        labels: Whether devices send the labels of their samples. If not, the server trains only on refined logits.
        teacher_guard: Whether the server withholds knowledge that is worse than chance and than the device's own.
        paper: Use the paper's values for all other settings: `beta` on both sides, temperature 1, one device after the
            other on the server, a uniform teacher in round 1, a separate extractor for every device, no guard, and
            plain SGD with learning rate 0.03, weight decay 0.0005 and batches of 1,024. The paper leaves refinement, T,
            E and epochs open; their defaults stay.
    """

    control: ClassVar[Mapping[str, Any]] = MappingProxyType({"server_beta": 0.0})
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
    labels: bool = True
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
        if not self.labels and not self.server_beta:
            raise ConfigurationError(
                "labels is false and server_beta is 0, so the server would learn nothing; set server_beta above 0"
            )

    def for_classes(self, classes: int) -> Self:
        """Returns this configuration with the defaults of T and E for C classes filled in.

        Raises:
            ConfigurationError: T, E or epsilon is out of its range for C classes.
        """
        peak = (1 + 1 / classes) / 2 if self.target_peak is None else self.target_peak
        entropy = 0.5 * float(np.log2(classes)) if self.target_entropy is None else self.target_entropy
        check_target_peak(peak, classes)
        check_target_entropy(entropy, classes)
        check_epsilon(self.epsilon, target_entropy=entropy, classes=classes)
        return replace(self, target_peak=peak, target_entropy=entropy)

    @property
    def label_weights(self) -> tuple[float, float]:
        """Weights of the cross-entropy in the device's and in the server's loss: 1 for FedDKC."""
        return 1.0, 1.0

    def reveals(self) -> str:
        """See `LocalTraining.reveals`."""
        labels = "its label" if self.labels else "logits that give its label"
        return f"features of every sample leave, from which the server can reconstruct most inputs, and {labels}"

    @classmethod
    def paper_values(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the paper's values; it has one weight for both distillation losses."""
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
