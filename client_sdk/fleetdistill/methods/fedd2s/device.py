"""Device half of FedD2S.

Atapour et al., FedD2S: Personalized Data-Free Federated Knowledge Distillation, 2024. For its own samples a device
sends the labels and the outputs of its first layer and of its distillation layer l. The server returns soft labels for
these samples. They train the device's layers up to l through the global network's layers above it (the head), and the
labels train the whole model. Labels are sent to the server.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.errors import ModelError, WireError
from fleetdistill.knowledge import (
    Array,
    ModelParameters,
    Plan,
    RefinedKnowledge,
    SampleKnowledge,
    check_rows,
    rows_by_id,
)
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, Local, answers
from fleetdistill.methods.fedd2s.config import FedD2SConfig
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.training.local_training import extract
from fleetdistill.training.losses import distillation_loss, feature_distance
from fleetdistill.training.model import SplitModel
from fleetdistill.training.parameters import take_weights

Term = Callable[["Tensor"], "Tensor"]
"""Positions of a mini-batch's rows [b] -> one term of the loss, a scalar."""


def schedule(config: FedD2SConfig, distil: Term | None, label: Term) -> Callable[[int, Tensor], Iterator[Tensor]]:
    """Returns the losses of one phase for `train_steps`: J and then Q for each mini-batch, or their sum.

    Args:
        config: A configuration that `for_classes` returned.
        distil: J of eqs. (9) and (12); None without knowledge to learn from.
        label: Q of eqs. (10) and (13).

    Returns:
        A function from an epoch and a mini-batch's rows to the losses of the optimiser steps. Epochs from
        `distill_epochs` on have no J, epochs from `label_epochs` on have no Q.
    """
    terms = [(distil, config.distill_epochs or 0), (label, config.label_epochs or 0)]

    def losses(epoch: int, rows_b: Tensor) -> Iterator[Tensor]:
        due = [term for term, epochs in terms if term is not None and epoch < epochs]
        if config.steps == "joint" and len(due) == 2:
            yield due[0](rows_b) + due[1](rows_b)
            return
        for term in due:
            yield term(rows_b)

    return losses


def phase_epochs(config: FedD2SConfig) -> int:
    """Returns the number of epochs of one phase: the larger of `distill_epochs` and `label_epochs`."""
    return max(config.distill_epochs or 0, config.label_epochs or 0)


class FedD2SDevice(DeviceMethod):
    """Device half of FedD2S: uploads the outputs of two layers, then learns through the global network's head.

    Raises:
        ModelError: The app's model is not a `SplitModel`.
    """

    config: FedD2SConfig

    def __init__(self, config: FedD2SConfig, local: Local) -> None:
        super().__init__(config, local)
        if not isinstance(local.model, SplitModel):
            raise ModelError(
                f"FedD2S needs a SplitModel, which can be cut after every layer, got {type(local.model).__name__}; "
                "build one from a list of stages, or with split_sequential"
            )
        self.model = local.model
        self._data = local.data.to(local.torch_device)
        self._optimizer = make_local_optimizer(config, self.model.parameters())
        self._sample_ids: Array = local.data.sample_ids
        self._warmed_up = False
        self.participations = 0

    @classmethod
    def metrics_steps(cls, config: FedD2SConfig) -> Sequence[str]:
        return ("learn",)

    def first_ask(self) -> Ask:
        plan = Plan(values={"layer": len(self.model.stages), "participation": self.participations + 1})
        return Ask(round=1, step="extract", seed=0, parts={"plan": plan})

    @answers("extract")
    def extract(self, ask: Ask) -> Answer:
        """Sends the device's triplets, computed in eval mode (Algorithm 1, before the server's phase)."""
        self._warm_up(ask.seed)  # not in the paper
        layer = self._layer(ask)  # message 1: l
        knowledge = SampleKnowledge(  # message 2: H_1, H_l and the labels
            sample_ids=self._sample_ids,
            features=self.columns_of(layer),
            labels=self.local.data.labels.cpu().numpy().astype(np.int32),
        )
        notes = {"participations_differ": int(self._participations_differ(ask))}
        return Answer(parts={"knowledge": knowledge}, samples=len(self.local.data), notes=notes)

    def _warm_up(self, seed: int) -> None:
        """Trains on labels before the device's first upload: the server learns little from an untrained model."""
        if not self._warmed_up and self.config.warmup_epochs:
            self.train_local(
                lambda epoch, rows_b: [self._label_loss(rows_b)],
                self._optimizer,
                seed,
                epochs=self.config.warmup_epochs,
            )
        self._warmed_up = True

    def _participations_differ(self, ask: Ask) -> bool:
        """Returns whether the server's count of this device's rounds differs from the device's own count."""
        return ask.part("plan", Plan).values.get("participation") != self.participations + 1

    def _layer(self, ask: Ask) -> int:
        """Returns l of the round, from 1. Raises WireError if the model does not have that layer."""
        layer, most = ask.setting("layer", int), len(self.model.stages)
        if not 1 <= layer <= most:
            raise WireError(f"step {ask.step!r}: the plan's layer is {layer}, the model has 1 to {most}")
        return layer

    def columns_of(self, layer: int) -> dict[str, Array]:
        """Returns H_1 and H_l `[N, ...]` by the names of their layers; one column if l is 1."""
        model, names = self.model, self.model.stage_names
        first = extract(lambda x: model.features(x, 1), self._data.inputs, model=model)
        at_layer = extract(model.stages[1:layer], first, model=model)
        return {names[0]: first.numpy(), names[layer - 1]: at_layer.numpy()}

    @answers("learn")
    def learn(self, ask: Ask) -> Answer:
        """Trains on the server's soft labels and on the labels (Algorithm 1, after the server's phase)."""
        layer = self._layer(ask)  # message 4: l
        distil, unknown = self.distillation(ask, layer)  # J of eq. (12)
        losses = schedule(self.config, distil, self._label_loss)  # with Q of eq. (13)
        self.train_local(losses, self._optimizer, ask.seed, epochs=phase_epochs(self.config))
        self.participations += 1
        return Answer(parts={}, samples=len(self.local.data), notes={"unknown_ids": unknown})

    def _label_loss(self, rows_b: Tensor) -> Tensor:
        """Returns Q of eq. (13), over the whole model."""
        return functional.cross_entropy(self.model(self._data.draw(rows_b)), self._data.labels[rows_b])

    def distillation(self, ask: Ask, layer: int) -> tuple[Term | None, int]:
        """Builds J of eq. (12) on layers 1 to l.

        Returns:
            The loss, or None if the server withheld its knowledge; and the number of sample ids that the server sent
            and the device does not have.

        Raises:
            WireError: The parts of the ask do not fit the layer or each other.
        """
        if "features" in ask.parts:
            return self._distillation_from_features(ask, layer)
        teacher = ask.part("teacher", RefinedKnowledge)
        if not teacher.valid or teacher.sample_ids is None or teacher.values is None:
            return None, 0
        values, valid, unknown = self.own_rows(teacher.sample_ids, teacher.values, (self.local.classes,))
        sent_head = ask.part("head", ModelParameters) if layer < len(self.model.stages) else None
        return self._through_head(layer, self._head(layer, sent_head), values, valid), unknown

    def _distillation_from_features(self, ask: Ask, layer: int) -> tuple[Term, int]:
        """Builds J for `s2c_mode = "feature_grad"` and for `distance = "mse"`, from values in the features' shape."""
        sent, name = ask.part("features", SampleKnowledge), self.model.stage_names[layer - 1]
        if name not in sent.features:
            raise WireError(f"step {ask.step!r}: the features are {', '.join(sent.features)}, expected {name}")
        shape = self.model.stage_shapes(self._data.inputs.shape[1:])[name]
        values, valid, unknown = self.own_rows(sent.sample_ids, sent.features[name], shape)
        if self.config.distance == "mse":
            return self._towards_features(layer, values, valid), unknown
        return self._along_gradient(layer, values), unknown

    def own_rows(self, sample_ids: Array, sent: Array, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, int]:
        """Maps values by sample id to the device's own rows.

        Args:
            sample_ids: The server's sample ids, `[K]`.
            sent: The server's values, `[K, *shape]`.
            shape: Expected shape of one value.

        Returns:
            Values by own row, `[N, *shape]` float32 with zeros where there is none; whether each row has a value,
            `[N]`; and the number of sample ids that the device does not have.

        Raises:
            WireError: The values do not have one row of `shape` for each sample id.
        """
        check_rows(sample_ids, sent, shape)
        own, rows = rows_by_id(self._sample_ids, sample_ids)
        values = torch.zeros(len(self._sample_ids), *sent.shape[1:])
        valid = torch.zeros(len(values), dtype=torch.bool)
        values[own] = torch.from_numpy(sent[rows].astype(np.float32))
        valid[own] = True
        where = self.local.torch_device
        return values.to(where), valid.to(where), len(sample_ids) - len(rows)

    def _head(self, layer: int, sent: ModelParameters | None) -> nn.Module:
        """Returns the global network's layers l+1 to L, frozen and in eval mode; an identity if l is the last layer."""
        head = copy.deepcopy(self.model.stages[layer:])
        if sent is not None:
            take_weights(head, sent)
        return head.eval().requires_grad_(False)

    def _through_head(self, layer: int, head: nn.Module, probs: Tensor, valid: Tensor) -> Term:
        """Builds tau^2 * KL(t || v): v is the head's output for the device's own layers 1 to l."""

        def term(rows_b: Tensor) -> Tensor:
            logits_bc = head(self.model.features(self._data.draw(rows_b), layer))
            return distillation_loss(logits_bc, probs[rows_b], self.config.temperature, valid_b=valid[rows_b])

        return term

    def _along_gradient(self, layer: int, gradient: Tensor) -> Term:
        """Builds <H_l, G> / batch size, whose gradient is that of J at the uploaded features; rows without G add 0."""

        def term(rows_b: Tensor) -> Tensor:
            features = self.model.features(self._data.draw(rows_b), layer)
            return (features * gradient[rows_b]).sum() / len(rows_b)

        return term

    def _towards_features(self, layer: int, target: Tensor, valid: Tensor) -> Term:
        """Builds the ablation's mean squared distance to the global network's features at layer l."""

        def term(rows_b: Tensor) -> Tensor:
            features = self.model.features(self._data.draw(rows_b), layer)
            return feature_distance(features, target[rows_b], valid_b=valid[rows_b])

        return term

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimiser's state, whether the warm-up is done, and the number of completed rounds."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "warmed_up": self._warmed_up,
            "participations": self.participations,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._warmed_up = bool(state["warmed_up"])
        self.participations = int(state["participations"])
