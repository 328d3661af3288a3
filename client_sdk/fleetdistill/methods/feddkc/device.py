"""Device half of FedDKC.

Wu et al., Exploring the Distributed Knowledge Congruence in Proxy-data-free Federated Distillation, 2022. A device
trains its model on its labels and on the server's logits for its samples, then sends features, logits and labels of
these samples. With `labels = false` the labels stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from fleetdistill.training.local_training import extract
from fleetdistill.training.losses import distillation_loss, soft_targets

__all__ = ["FedDKCDevice"]


class FedDKCDevice(DeviceMethod):
    """Device half of FedDKC: trains on labels and on the server's logits, and sends its own knowledge."""

    config: FedDKCConfig

    def __init__(self, config: FedDKCConfig, local: Local) -> None:
        super().__init__(config, local)
        self._optimizer = make_local_optimizer(config, local.model.parameters())
        self._sample_ids: Array = local.data.sample_ids
        self._has_answered = False

    @classmethod
    def metrics_steps(cls, config: FedDKCConfig) -> Sequence[str]:
        return ("train",)

    def first_ask(self) -> Ask:
        return Ask(round=1, step="train", seed=0, parts={"knowledge": RefinedKnowledge(valid=False)})

    @answers("train")
    def train(self, ask: Ask) -> Answer:
        """Runs the device's part of a round (Algorithm 1)."""
        received = ask.part("knowledge", RefinedKnowledge)  # message 1: z^S
        teacher = self.teacher(received) or self._initial_teacher()
        self._train(teacher, ask.seed)  # eq. (1)
        sent = self.knowledge()  # message 2: H, z and y
        self._has_answered = True
        notes = {"unknown_ids": teacher.unknown if teacher else 0}
        return Answer(parts={"knowledge": sent}, samples=len(self.local.data), notes=notes)

    def teacher(self, knowledge: RefinedKnowledge) -> _Teacher | None:
        """Returns softmax(z^S / tau) by own row, or None if the server sent no logits.

        Raises:
            WireError: The logits do not have one row of C numbers for each sample id.
        """
        if not knowledge.valid or knowledge.sample_ids is None or knowledge.values is None:
            return None
        shape = (len(self.local.data), self.local.classes)
        check_rows(knowledge.sample_ids, knowledge.values, shape[1:])
        own_rows, rows = rows_by_id(self._sample_ids, knowledge.sample_ids)
        probs, valid = torch.zeros(shape), torch.zeros(shape[0], dtype=torch.bool)
        values = torch.from_numpy(knowledge.values[rows].astype(np.float32))
        probs[own_rows] = soft_targets(values, self.config.temperature)
        valid[own_rows] = self._is_trusted(values, own_rows)
        return _Teacher(probs, valid, len(knowledge.sample_ids) - len(rows))

    def _is_trusted(self, values: Tensor, own_rows: Array) -> Tensor:
        """Guard: without labels the server cannot check its logits, so the device uses those with the right class.

        Returns:
            `[K]`, whether each row of logits is used.
        """
        if self.config.labels or not self.config.teacher_guard:
            return torch.ones(len(values), dtype=torch.bool)
        return values.argmax(dim=1) == self.local.data.labels.cpu()[own_rows]

    def _initial_teacher(self) -> _Teacher | None:
        """Returns the uniform teacher of the paper's first round; None later, if a guard withheld the logits."""
        if not self.config.initial_zero_knowledge or self._has_answered:
            return None
        rows, classes = len(self.local.data), self.local.classes
        return _Teacher(torch.full((rows, classes), 1 / classes), torch.ones(rows, dtype=torch.bool), 0)

    def _train(self, teacher: _Teacher | None, seed: int) -> None:
        """Trains on eq. (1): cross-entropy plus beta times the distillation loss."""
        model, data = self.local.model, self.local.data.to(self.local.torch_device)
        distillation = None if teacher is None else self._distillation(teacher)

        def losses(epoch: int, rows_b: Tensor) -> list[Tensor]:
            logits_bc = model(data.draw(rows_b))
            own = self.config.label_weights[0] * functional.cross_entropy(logits_bc, data.labels[rows_b])
            return [own if distillation is None else own + self.config.beta * distillation(logits_bc, rows_b)]

        self.train_local(losses, self._optimizer, seed)

    def _distillation(self, teacher: _Teacher) -> Callable[[Tensor, Tensor], Tensor]:
        """Returns the distillation loss on the rows that have a target, as a function of logits `[b, C]` and rows."""
        probs, valid = teacher.probs.to(self.local.torch_device), teacher.valid.to(self.local.torch_device)
        weights_c = self.class_weights()

        def distillation(logits_bc: Tensor, rows_b: Tensor) -> Tensor:
            return distillation_loss(
                logits_bc, probs[rows_b], self.config.temperature, valid_b=valid[rows_b], class_weights=weights_c
            )

        return distillation

    def class_weights(self) -> Tensor | None:
        """Returns factors `[C]` of the classes' terms of the distillation loss; None, the default, for 1."""
        return None

    def knowledge(self) -> SampleKnowledge:
        """Returns features at the cut, logits and, unless they stay, labels of all own rows, computed in eval mode."""
        features = extract(self.local.taps.features, self.local.data.inputs, model=self.local.model)
        logits = extract(self.local.taps.predict, features, model=self.local.model)
        return SampleKnowledge(
            sample_ids=self._sample_ids,
            features={CUT: features.numpy()},
            logits=logits.numpy(),
            labels=self.local.data.labels.cpu().numpy().astype(np.int32) if self.config.labels else None,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimiser's state, and whether the device has answered a round."""
        return {"optimizer": self._optimizer.state_dict(), "has_answered": self._has_answered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._has_answered = bool(state["has_answered"])


@dataclass(frozen=True)
class _Teacher:
    """Soft targets for the device's own rows.

    Attributes:
        probs: `[N, C]` float32; zeros for a row without a target.
        valid: `[N]`, whether the row has a target.
        unknown: Number of sample ids that the server sent and the device does not have.
    """

    probs: Tensor
    valid: Tensor
    unknown: int
