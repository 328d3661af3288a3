"""Device half of FedDKD.

Li, Chen and Lu, FedDKD: Federated Learning with Decentralized Knowledge Distillation, 2022. A device trains the global
model on its own data and keeps the result as its teacher for the round. In each distillation step it receives the
server's model, the student, and returns the gradient of the distillation loss on a mini-batch of its own samples. The
device's own model does not change in these steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fleetdistill.errors import CannotAnswer
from fleetdistill.knowledge import DELIVER, DistillationGradient, ModelParameters, Plan
from fleetdistill.methods.base import (
    Answer,
    Ask,
    DeviceMethod,
    Local,
    answers,
    with_parameters,
)
from fleetdistill.methods.feddkd.config import FedDKDConfig
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.training.local_training import extract, smallest_batch
from fleetdistill.training.losses import activation_divergence, soft_cross_entropy, soft_targets
from fleetdistill.training.model import check_embedding, frozen_batch_norm, in_mode, logits_and_embedding
from fleetdistill.training.parameters import batch_norm_names, model_parameters, take_weights, tensors_of

__all__ = ["mini_batch"]

_NO_ROUND = 0
_COMPARED_ROWS = 64
"""Minimum number of own rows whose loss is compared between the steps of a round; all rows if a device has fewer."""


class FedDKDDevice(DeviceMethod):
    """Device half of FedDKD: trains the global model, then returns distillation gradients with the result as teacher.

    The local model does not change between two rounds' local training, so it is the teacher w_k. Its logits for the
    device's samples are computed once a round.

    Raises:
        ModelError: `variant` is `max`, and the app's model has no `embedding` method.
    """

    config: FedDKDConfig

    def __init__(self, config: FedDKDConfig, local: Local) -> None:
        super().__init__(config, local)
        if config.variant == "max":
            check_embedding(local.model, "variant 'max' of FedDKD")
        self._own_tensors = batch_norm_names(local.model) if config.variant == "bn" else frozenset[str]()
        self._round, self._step = _NO_ROUND, 0
        self._teacher_logits: Tensor | None = None

    @classmethod
    def metrics_steps(cls, config: FedDKDConfig) -> Sequence[str]:
        return ("train",)

    def first_ask(self) -> Ask:
        parameters = model_parameters(self.local.model, without=self._own_tensors)
        plan = Plan(values={"learning_rate": self.config.learning_rate})
        return Ask(round=1, step="train", seed=0, parts={"parameters": parameters, "plan": plan})

    @answers("train")
    def train(self, ask: Ask) -> Answer:
        """Trains locally from the global model (Algorithm 1, line 5); the result is the round's teacher."""
        take_weights(self.local.model, ask.part("parameters", ModelParameters), without=self._own_tensors)  # w_k <- w
        self._train(ask.setting("learning_rate", float), ask.seed)  # E local epochs with rate eta_t
        self._set_teacher_round(ask.round)
        sent = model_parameters(self.local.model, without=self._own_tensors)  # message 2: w_k
        return Answer(parts={"parameters": sent}, samples=len(self.local.data))

    def _train(self, rate: float, seed: int) -> None:
        data = self.local.data.to(self.local.torch_device)
        optimizer = make_local_optimizer(replace(self.config, learning_rate=rate), self.local.model.parameters())
        self.train_local(lambda epoch, rows_b: [self.loss(data.draw(rows_b), data.labels[rows_b])], optimizer, seed)

    def _set_teacher_round(self, number: int) -> None:
        """Records that the local model is the teacher of a round, or with `_NO_ROUND` that it is not a teacher."""
        self._round, self._step, self._teacher_logits = number, 0, None

    def loss(self, inputs_b: Tensor, labels_b: Tensor) -> Tensor:
        """Returns the mean cross-entropy; FedDKD_MAX (Alg. 3) adds the entropy term on the last layer's input."""
        if self.config.variant != "max":
            return functional.cross_entropy(self.local.model(inputs_b), labels_b)
        logits_bc, activations_bf = logits_and_embedding(self.local.model, inputs_b)
        elementwise = self.config.fedmax_form == "u_to_a_elementwise"
        term = activation_divergence(activations_bf, reverse_elementwise=elementwise)
        return functional.cross_entropy(logits_bc, labels_b) + self.config.fedmax_beta * term

    @answers("distil")
    def distil(self, ask: Ask) -> Answer:
        """Returns the gradient of the distillation loss at the server's model, on a new mini-batch (Algorithm 2).

        Raises:
            CannotAnswer: The device has no teacher of the round, or the step is stale.
        """
        self._check_step(ask)  # guard
        student = ask.part("parameters", ModelParameters)  # message 3: w
        rows_b = mini_batch(len(self.local.data), self.config.dkd_batch_size, ask.seed)
        gradients, loss = self._gradient(student, rows_b)
        loss = self._comparable_loss(student, loss, rows_b)  # for the server's divergence guard
        arrays = {name: gradient.cpu().numpy() for name, gradient in gradients.items()}
        sent = DistillationGradient(gradients=arrays, batch_size=len(rows_b), loss=loss)  # message 4
        return Answer(parts={"gradient": sent}, samples=len(self.local.data), notes=self._clipping_note(len(rows_b)))

    def _gradient(self, student: ModelParameters, rows_b: Tensor) -> tuple[dict[str, Tensor], float]:
        local, config = self.local, self.config
        return distillation_gradient(
            local.model,
            student,
            local.data.inputs[rows_b].to(local.torch_device),
            soft_targets(self.teacher_logits()[rows_b], config.temperature).to(local.torch_device),
            config.temperature,
            training=config.dkd_student_mode == "train",
        )

    def _comparable_loss(self, student: ModelParameters, loss: float, rows_b: Tensor) -> float:
        """Returns the student's loss on rows that are the same in all steps of a round, in eval mode, in nats.

        The server compares this loss between steps; losses of different mini-batches would add noise. A mini-batch of
        all rows, or an infinite loss, needs no second forward pass.
        """
        local, temperature = self.local, self.config.temperature
        if len(rows_b) == len(local.data) or not math.isfinite(loss):
            return loss
        order = torch.randperm(len(local.data), generator=torch.Generator().manual_seed(self._round))
        same_b = order[: max(self.config.dkd_batch_size, _COMPARED_ROWS)]
        targets_bc = soft_targets(self.teacher_logits()[same_b], temperature).to(local.torch_device)
        with torch.no_grad():
            logits_bc = _student_logits(local.model, student, local.data.inputs[same_b].to(local.torch_device))
            loss = float(soft_cross_entropy(logits_bc, targets_bc, temperature))
        return loss if math.isfinite(loss) else math.inf

    def _clipping_note(self, size: int) -> Mapping[str, int]:
        """Returns a note of the mini-batch's size if it is below `dkd_batch_size`, in a round's first step only."""
        clipped = self._step == 1 and size < self.config.dkd_batch_size
        return {"dkd_batch_clipped_to": size} if clipped else {}

    def _check_step(self, ask: Ask) -> None:
        """Checks a step. Raises CannotAnswer if the device lacks the round's teacher or the step is stale."""
        step = ask.setting("dkd_step", int)
        if ask.round != self._round:
            mine = f"its last local training was in round {self._round}" if self._round else "it has not trained yet"
            raise CannotAnswer(
                f"distillation step {step} of round {ask.round} needs a teacher of that round, but {mine}; "
                "the device can participate again in the next round"
            )
        if step <= self._step:
            raise CannotAnswer(
                f"distillation step {step} of round {ask.round} is stale, step {self._step} was answered"
            )
        self._step = step

    def teacher_logits(self) -> Tensor:
        """Returns the teacher's logits for all own samples, `[N, C]` on the CPU, computed in eval mode."""
        if self._teacher_logits is None:
            self._teacher_logits = extract(self.local.model, self.local.data.inputs)
        return self._teacher_logits

    @answers("deliver")
    def deliver(self, ask: Ask) -> Answer:
        """Loads the final global model into the device's model; FedDKD_BN keeps the device's batch-norm."""
        take_weights(self.local.model, ask.part("parameters", ModelParameters), without=self._own_tensors)
        self._set_teacher_round(_NO_ROUND)
        return Answer(parts={}, samples=len(self.local.data))

    def fleet_model(self, ask: Ask) -> nn.Module | None:
        """Returns the global model, with FedDKD_BN with the device's batch-norm; None in distillation steps."""
        if ask.step not in ("train", DELIVER):
            return None
        return with_parameters(self.local.model, ask, without=self._own_tensors)

    def state_dict(self) -> dict[str, Any]:
        """Returns the round whose teacher the model is, the last step answered, and the teacher's logits."""
        logits, samples = self._teacher_logits, self.local.data.digest.hex()
        return {"round": self._round, "step": self._step, "teacher_logits": logits, "samples": samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned."""
        self._round, self._step = int(state["round"]), int(state["step"])
        same = state["samples"] == self.local.data.digest.hex()
        self._teacher_logits = state["teacher_logits"] if same else None  # logits of other samples are computed again


def mini_batch(rows: int, size: int, seed: int) -> Tensor:
    """Returns the positions of B~ of a device's rows, drawn without replacement, or of all rows if it has fewer."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[:size]


def distillation_gradient(
    model: nn.Module,
    student: ModelParameters,
    inputs_b: Tensor,
    teacher_probs_bc: Tensor,
    temperature: float,
    *,
    training: bool = False,
) -> tuple[dict[str, Tensor], float]:
    """Returns the gradient of tau^2 times the mean soft cross-entropy in the student's parameters, Alg. 2.

    The student has the model's architecture with the parameters and buffers in `student`; other tensors, with FedDKD_BN
    the batch-norm, are the model's. The model does not change, not even in train mode.

    Args:
        model: A model on the device of `inputs_b`.
        student: The server's model; floating-point parameters in the model's dtype.
        inputs_b: `[batch, *input_shape]`.
        teacher_probs_bc: The teacher's softened probabilities, `[batch, classes]`, constants.
        temperature: tau, above 0.
        training: Whether the student is in train mode, with dropout from torch's global generator and batch statistics.

    Returns:
        Gradients by the names of `student.parameters`, and the loss in nats. If a number is not finite, the student has
        diverged: the gradients are zeros and the loss is infinite, and the server ignores them.
    """
    where = inputs_b.device
    parameters = {name: one.to(where).requires_grad_() for name, one in tensors_of(student.parameters).items()}
    logits_bc = _student_logits(model, student, inputs_b, parameters, training=training)
    loss = soft_cross_entropy(logits_bc, teacher_probs_bc, temperature)
    result = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    if not all(bool(item.isfinite().all()) for item in (loss.detach(), *result)):
        return {name: torch.zeros_like(one.detach()) for name, one in parameters.items()}, math.inf
    return dict(zip(parameters, result, strict=True)), float(loss.detach())


def _student_logits(
    model: nn.Module,
    student: ModelParameters,
    inputs_b: Tensor,
    parameters: Mapping[str, Tensor] | None = None,
    *,
    training: bool = False,
) -> Tensor:
    """Returns the student's logits `[batch, classes]`; the model keeps its weights, buffers and mode.

    Args:
        model: Architecture of the student, and the tensors that `student` lacks.
        student: Parameters and buffers that the server sent.
        inputs_b: `[batch, *input_shape]`, on the model's device.
        parameters: The student's parameters as tensors, for a gradient; by default those of `student`.
        training: Whether the forward pass is in train mode.
    """
    where = inputs_b.device
    sent = tensors_of(student.parameters) if parameters is None else parameters
    buffers = {name: one.detach().clone() for name, one in model.named_buffers()}  # train mode would change them
    buffers |= tensors_of(student.buffers)
    with in_mode(model, training=training), frozen_batch_norm(model, len(inputs_b) < smallest_batch(model)):
        both = {name: one.to(where) for name, one in {**sent, **buffers}.items()}
        return functional_call(model, both, (inputs_b,))  # type: ignore[no-any-return]  # a module's call
