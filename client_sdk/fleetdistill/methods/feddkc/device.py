"""FedDKC: what both halves agree on, and what the device does.

Wu et al., Exploring the Distributed Knowledge Congruence in Proxy-data-free Federated Distillation, 2022. A device
trains its own model towards its labels and towards the server's logits for its own samples, then sends features,
logits and labels of these samples. Labels leave the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fleetdistill.knowledge import CUT, Array, RefinedKnowledge, SampleKnowledge, check_rows, rows_by_id
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, Local, answers
from fleetdistill.methods.feddkc.config import FedDKCConfig
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.training.local_training import extract, train_epochs
from fleetdistill.training.losses import distillation_loss, soft_targets


class FedDKCDevice(DeviceMethod):
    """Device half: trains towards labels and the server's logits, answers with its own knowledge."""

    config: FedDKCConfig

    def __init__(self, config: FedDKCConfig, local: Local) -> None:
        super().__init__(config, local)
        self._optimizer = make_local_optimizer(config, local.model.parameters())
        self._sample_ids: Array = np.arange(len(local.data))
        self._has_answered = False

    @classmethod
    def metrics_steps(cls, config: FedDKCConfig) -> Sequence[str]:
        return ("train",)

    @answers("train")
    def train(self, ask: Ask) -> Answer:
        """Eq. (1) over the local epochs, then one pass in eval mode for features and logits."""
        teacher = self.teacher(ask.part("knowledge", RefinedKnowledge))
        self._train(teacher, ask.seed)
        self._has_answered = True
        knowledge = self.knowledge()
        return Answer(
            parts={"knowledge": knowledge}, samples=len(self.local.data), notes={"unknown_ids": teacher.unknown}
        )

    def teacher(self, knowledge: RefinedKnowledge) -> _Teacher:
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

    def knowledge(self) -> SampleKnowledge:
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
