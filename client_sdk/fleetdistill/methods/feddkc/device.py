"""FedDKC: what both halves agree on, and what the device does.

Wu et al., Exploring the Distributed Knowledge Congruence in Proxy-data-free Federated Distillation, 2022. A device
trains its own model towards its labels and towards the server's logits for its own samples, then sends features,
logits and labels of these samples. Labels leave the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from fleetdistill.knowledge import CUT, Array, RefinedKnowledge, SampleKnowledge, check_rows, rows_by_id
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, Local, answers, check_choice, check_range
from fleetdistill.methods.feddkc.ranges import (
    check_epsilon,
    check_kernel_name,
    check_target_entropy,
    check_target_peak,
)
from fleetdistill.methods.local import LocalTraining, make_local_optimizer

if TYPE_CHECKING:
    from torch import Tensor

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


class FedDKCDevice(DeviceMethod):
    """Device half: trains towards labels and the server's logits, answers with its own knowledge."""

    config: FedDKCConfig
    metrics_steps = ("train",)

    def __init__(self, config: FedDKCConfig, local: Local) -> None:
        super().__init__(config, local)
        self._optimizer = make_local_optimizer(config, local.model.parameters())
        self._sample_ids: Array = np.arange(len(local.data))
        self._has_answered = False

    @answers("train")
    def train(self, ask: Ask) -> Answer:
        """Eq. (1) over the local epochs, then one pass in eval mode for features and logits."""
        teacher = self._teacher(ask.part("knowledge", RefinedKnowledge))
        self._train(teacher, ask.seed)
        self._has_answered = True
        knowledge = self._knowledge()
        return Answer(
            parts={"knowledge": knowledge}, samples=len(self.local.data), notes={"unknown_ids": teacher.unknown}
        )

    def _teacher(self, knowledge: RefinedKnowledge) -> _Teacher:
        import torch

        from fleetdistill.training.losses import soft_targets

        shape = (len(self.local.data), self.local.classes)
        if not knowledge.valid or knowledge.sample_ids is None or knowledge.values is None:
            everywhere = self.config.initial_zero_knowledge and not self._has_answered  # later a guard held it back
            return _Teacher(torch.full(shape, 1 / shape[1]), torch.full(shape[:1], everywhere), everywhere, 0)
        check_rows(knowledge.sample_ids, knowledge.values, shape[1:])
        own_rows, rows = rows_by_id(self._sample_ids, knowledge.sample_ids)
        probs, valid = torch.zeros(shape), torch.zeros(shape[0], dtype=torch.bool)
        values = torch.from_numpy(knowledge.values[rows].astype(np.float32))
        probs[own_rows] = soft_targets(values, self.config.temperature)
        valid[own_rows] = True
        return _Teacher(probs, valid, True, len(knowledge.sample_ids) - len(rows))

    def _train(self, teacher: _Teacher, seed: int) -> None:
        import torch
        from torch.nn import functional

        from fleetdistill.training.local_training import train_epochs
        from fleetdistill.training.losses import distillation_loss

        probs, valid = teacher.probs.to(self.local.torch_device), teacher.valid.to(self.local.torch_device)

        def loss(logits_bc: Tensor, labels_b: Tensor, rows_b: Tensor) -> Tensor:
            own = functional.cross_entropy(logits_bc, labels_b)
            if not teacher.known:  # round 1: plain cross-entropy
                return own
            theirs = distillation_loss(logits_bc, probs[rows_b], self.config.temperature, valid_b=valid[rows_b])
            return own + self.config.beta * theirs

        self.trained = train_epochs(
            self.local.model,
            self.local.data,
            epochs=self.config.local_epochs,
            batch_size=self.config.batch_size,
            optimizer=self._optimizer,
            loss=loss,
            generator=torch.Generator().manual_seed(seed),
            device=self.local.torch_device,
        )

    def _knowledge(self) -> SampleKnowledge:
        from fleetdistill.training.local_training import extract

        features = extract(self.local.taps.features, self.local.data.inputs, model=self.local.model)
        logits = extract(self.local.model, self.local.data.inputs)
        return SampleKnowledge(
            sample_ids=self._sample_ids,
            features={CUT: features.numpy()},
            logits=logits.numpy(),
            labels=self.local.data.labels.cpu().numpy().astype(np.int32),
        )

    def state_dict(self) -> dict[str, Any]:
        """The optimiser's momentum, and whether there has been an answer."""
        return {"optimizer": self._optimizer.state_dict(), "has_answered": self._has_answered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._has_answered = bool(state.get("has_answered", True))  # SDK 0.1 does not save it


@dataclass(frozen=True)
class _Teacher:
    """The server's soft targets for own rows: `[N, C]`, which rows have one `[N]`, whether any, ids not known here."""

    probs: Tensor
    valid: Tensor
    known: bool
    unknown: int
