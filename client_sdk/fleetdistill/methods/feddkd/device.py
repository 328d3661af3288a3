"""FedDKD: what both halves agree on, and what the device does.

Li, Chen and Lu, FedDKD: Federated Learning with Decentralized Knowledge Distillation, 2022. A device trains the global
model on its own data and keeps the result as its teacher for the round. In each distillation step that follows it
gets the server's model, answers with the gradient that pulls this model towards the teacher on a mini-batch of its own
samples, and changes nothing of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fleetdistill.errors import CannotAnswer, ModelError
from fleetdistill.knowledge import DELIVER, DistillationGradient, ModelParameters
from fleetdistill.methods.base import (
    Answer,
    Ask,
    DeviceMethod,
    Local,
    answers,
    check_choice,
    check_range,
    check_share,
    with_parameters,
)
from fleetdistill.methods.local import LocalTraining, make_local_optimizer

if TYPE_CHECKING:
    from torch import Tensor, nn

CHOICES = {
    "dkd_weighting": ("uniform", "samples"),
    "dkd_student_mode": ("eval", "train"),
    "variant": ("plain", "max", "bn"),
    "fedmax_form": ("a_to_u", "u_to_a_elementwise"),
}
_DKD_LR, _DKD_LR_WITH_BATCH_NORM = 0.1, 0.01
_NO_ROUND = 0
_JUDGING_ROWS = 64
"""At least so many own rows, of those that a device has, tell in each step of a round how far the model is."""


@dataclass(frozen=True, kw_only=True)
class FedDKDConfig(LocalTraining):
    """Settings of FedDKD beside those of local training. Rounds are counted from 1; short ones do not count.

    Attributes:
        learning_rate_round_decay: Factor of the local learning rate from round to round, in (0, 1]. The paper has 0.98
            and 0.99; with 1 and no distillation steps the method is FedAvg.
        dkd_steps: The paper's J, distillation steps of a round, at least 0.
        dkd_lr: The paper's gamma of round 1 and step 1, above 0. None means 0.1, or 0.01 for a model with batch-norm,
            where steps in eval mode diverge more easily.
        dkd_lr_round_decay, dkd_lr_step_decay: Factors of gamma from round to round and from step to step, in (0, 1].
        dkd_batch_size: The paper's B~, samples behind a device's gradient, at least 1; clipped to what it has.
        dkd_start_round: First round with distillation, at least 1; the rounds before it are FedAvg's.
        dkd_weighting: q_k of a distillation step: `uniform` over the devices that answered, or by their `samples`.
        dkd_max_norm: Longest mean gradient, above 0; a longer one is scaled down to it. None for no limit.
        dkd_student_mode: Mode of the student in a distillation step: `eval`, or `train` with dropout and the statistics
            of the mini-batch, which change nothing either.
        temperature: Softmax temperature of the distillation, above 0.
        variant: `plain`; `max` adds an entropy term on activations to local training (FedDKD_MAX); `bn` keeps
            batch-norm on the devices (FedDKD_BN).
        fedmax_beta: Weight of that term, at least 0; its meaning depends on `fedmax_form`.
        fedmax_form: `a_to_u` is the paper's KL(softmax(a) || U) of each sample; `u_to_a_elementwise` is that of
            FedMAX's code, KL(U || softmax(a)) over the number of activations.
        divergence_guard: Undo a distillation step after which the devices' mean loss, each on the same rows as in the
            step before, has risen by more than `divergence_factor`, and end the round's steps.
        divergence_factor: See there; above 1.
        paper: The paper's values of all settings that are not given: no guard, gamma 0.1 with batch-norm too, plain
            momentum, a local learning rate that decays. What it sets by data set (E, J, rates) stays as it is.
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

    def for_classes(self, classes: int) -> FedDKDConfig:
        """The same settings; none depends on the number of classes."""
        return self

    @classmethod
    def paper_values(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The paper's; the decay is that of its CIFAR runs, gamma is by data set from 0.01 to 0.4."""
        return {
            "nesterov": False,
            "learning_rate_round_decay": 0.99,
            "dkd_lr": _DKD_LR,
            "divergence_guard": False,
        }

    def for_batch_norm(self, present: bool) -> FedDKDConfig:
        """The same settings with gamma filled in for a model with or without batch-norm."""
        usual = _DKD_LR_WITH_BATCH_NORM if present else _DKD_LR
        return replace(self, dkd_lr=usual if self.dkd_lr is None else self.dkd_lr)

    def steps_in(self, number: int) -> int:
        """Distillation steps of a round, numbered from 1."""
        return self.dkd_steps if number >= self.dkd_start_round else 0

    def local_rate(self, number: int) -> float:
        """eta_t, the local learning rate of a round, numbered from 1."""
        return self.learning_rate * self.learning_rate_round_decay ** (number - 1)

    def dkd_rate(self, number: int, step: int) -> float:
        """gamma_{t,j}, the distillation rate of a round and step, both numbered from 1, once gamma is filled in."""
        assert self.dkd_lr is not None
        return self.dkd_lr * self.dkd_lr_round_decay ** (number - 1) * self.dkd_lr_step_decay ** (step - 1)


class FedDKDDevice(DeviceMethod):
    """Device half: trains the global model, and then lets its own model teach the global one.

    The local model stays what local training made of it until the next round's, so it is the teacher, w_k. What it says
    about the device's samples is computed once a round.

    Raises:
        ModelError: FedDKD_MAX needs the activations before the last layer, and the app's model does not offer them.
    """

    config: FedDKDConfig
    metrics_steps = ("train",)

    def __init__(self, config: FedDKDConfig, local: Local) -> None:
        from fleetdistill.training.model import embedding_tap
        from fleetdistill.training.parameters import batch_norm_names

        super().__init__(config, local)
        if config.variant == "max" and embedding_tap(local.model) is None:
            raise ModelError(
                f"variant 'max' of FedDKD needs what the last layer reads, and {type(local.model).__name__} has no "
                "embedding(x) that gives it; add this method"
            )
        self._stays_here = batch_norm_names(local.model) if config.variant == "bn" else frozenset[str]()
        self._round, self._step = _NO_ROUND, 0
        self._teacher_logits: Tensor | None = None

    @answers("train")
    def train(self, ask: Ask) -> Answer:
        """Alg. 1, line 5: local training from the global model; the result is this round's teacher."""
        import torch

        from fleetdistill.training.local_training import train_steps
        from fleetdistill.training.parameters import model_parameters, take_weights

        local, config = self.local, self.config
        take_weights(local.model, ask.part("parameters", ModelParameters), without=self._stays_here)
        rate = ask.setting("learning_rate", float)
        optimizer = make_local_optimizer(replace(config, learning_rate=rate), local.model.parameters())
        inputs, labels = local.data.inputs.to(local.torch_device), local.data.labels.to(local.torch_device)
        self.trained = train_steps(
            local.model,
            len(local.data),
            epochs=config.local_epochs,
            batch_size=config.batch_size,
            optimizer=optimizer,
            losses=lambda epoch, rows_b: [self._loss(inputs[rows_b], labels[rows_b])],
            generator=torch.Generator().manual_seed(ask.seed),
            device=local.torch_device,
        )
        self._round, self._step, self._teacher_logits = ask.round, 0, None
        sent = model_parameters(local.model, without=self._stays_here)
        return Answer(parts={"parameters": sent}, samples=len(local.data))

    def _loss(self, inputs_b: Tensor, labels_b: Tensor) -> Tensor:
        """Cross-entropy; for FedDKD_MAX (Alg. 3) with the entropy term on the last layer's input."""
        from torch.nn import functional

        from fleetdistill.training.losses import activation_divergence
        from fleetdistill.training.model import logits_and_embedding

        if self.config.variant != "max":
            return functional.cross_entropy(self.local.model(inputs_b), labels_b)
        logits_bc, activations_bf = logits_and_embedding(self.local.model, inputs_b)
        elementwise = self.config.fedmax_form == "u_to_a_elementwise"
        term = activation_divergence(activations_bf, reverse_elementwise=elementwise)
        return functional.cross_entropy(logits_bc, labels_b) + self.config.fedmax_beta * term

    @answers("distil")
    def distil(self, ask: Ask) -> Answer:
        """Alg. 2: the gradient of the distillation loss at the server's model, on a fresh mini-batch.

        The loss beside it is of the same rows in each step of a round, so that the server sees what a step did and not
        which rows were drawn.

        Raises:
            CannotAnswer: The step is of a round that this device has no teacher of, or it is stale.
        """
        import torch

        from fleetdistill.training.losses import soft_targets

        self._take_step(ask)
        local, config = self.local, self.config
        size = min(config.dkd_batch_size, len(local.data))
        rows_b = torch.randperm(len(local.data), generator=torch.Generator().manual_seed(ask.seed))[:size]
        student = ask.part("parameters", ModelParameters)
        gradients, loss = distillation_gradient(
            local.model,
            student,
            local.data.inputs[rows_b].to(local.torch_device),
            soft_targets(self._teacher()[rows_b], config.temperature).to(local.torch_device),
            config.temperature,
            training=config.dkd_student_mode == "train",
        )
        if size < len(local.data) and math.isfinite(loss):
            loss = self._judging_loss(student)
        arrays = {name: gradient.cpu().numpy() for name, gradient in gradients.items()}
        clipped = {"dkd_batch_clipped_to": size} if self._step == 1 and size < config.dkd_batch_size else {}
        sent = DistillationGradient(gradients=arrays, batch_size=size, loss=loss)
        return Answer(parts={"gradient": sent}, samples=len(local.data), notes=clipped)

    def _judging_loss(self, student: ModelParameters) -> float:
        """The student's loss on this round's judging rows, in eval mode, in nats; infinite where it has diverged."""
        import torch

        from fleetdistill.training.losses import soft_cross_entropy, soft_targets

        local, temperature = self.local, self.config.temperature
        order = torch.randperm(len(local.data), generator=torch.Generator().manual_seed(self._round))
        rows_b = order[: max(self.config.dkd_batch_size, _JUDGING_ROWS)]
        targets_bc = soft_targets(self._teacher()[rows_b], temperature).to(local.torch_device)
        with torch.no_grad():
            logits_bc = _student_logits(local.model, student, local.data.inputs[rows_b].to(local.torch_device))
            loss = float(soft_cross_entropy(logits_bc, targets_bc, temperature))
        return loss if math.isfinite(loss) else math.inf

    def _take_step(self, ask: Ask) -> None:
        step = ask.setting("dkd_step", int)
        if ask.round != self._round:
            mine = f"its last local training was in round {self._round}" if self._round else "it has not trained yet"
            raise CannotAnswer(
                f"distillation step {step} of round {ask.round} needs a teacher of that round, but {mine}; "
                "the device can take part again from the next round on"
            )
        if step <= self._step:
            raise CannotAnswer(
                f"distillation step {step} of round {ask.round} is stale, step {self._step} was answered"
            )
        self._step = step

    def _teacher(self) -> Tensor:
        """The teacher's logits for all own samples `[N, C]`, in eval mode, on the CPU."""
        from fleetdistill.training.local_training import extract

        if self._teacher_logits is None:
            self._teacher_logits = extract(self.local.model, self.local.data.inputs)
        return self._teacher_logits

    @answers("deliver")
    def deliver(self, ask: Ask) -> Answer:
        """The end result: the global model becomes the device's; for FedDKD_BN with the batch-norm of its own."""
        from fleetdistill.training.parameters import take_weights

        take_weights(self.local.model, ask.part("parameters", ModelParameters), without=self._stays_here)
        self._round, self._step, self._teacher_logits = _NO_ROUND, 0, None  # the model is no teacher any more
        return Answer(parts={}, samples=len(self.local.data))

    def brought(self, ask: Ask) -> nn.Module | None:
        """The global model, for FedDKD_BN with the batch-norm of this device; None in the steps of a round."""
        if ask.step not in ("train", DELIVER):
            return None
        return with_parameters(self.local.model, ask, without=self._stays_here)

    def state_dict(self) -> dict[str, Any]:
        """Which round the model is the teacher of, the last step it was asked for, and what it says."""
        return {"round": self._round, "step": self._step, "teacher_logits": self._teacher_logits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self._round, self._step = int(state["round"]), int(state["step"])
        self._teacher_logits = state["teacher_logits"]


def distillation_gradient(
    model: nn.Module,
    student: ModelParameters,
    inputs_b: Tensor,
    teacher_probs_bc: Tensor,
    temperature: float,
    *,
    training: bool = False,
) -> tuple[dict[str, Tensor], float]:
    """Gradient of tau^2 times the mean soft cross-entropy with respect to the student's parameters, Alg. 2.

    The student is the model's architecture with the parameters and buffers that were sent; what was not sent is the
    model's own, for FedDKD_BN its batch-norm. The model itself does not change, in train mode neither.

    Args:
        model: On the device of `inputs_b`.
        student: The server's model; floating-point parameters in the model's own type.
        inputs_b: `[batch, *input_shape]`.
        teacher_probs_bc: `[batch, classes]`, the teacher's softened probabilities, a constant.
        temperature: tau, above 0.
        training: Train mode, with dropout from torch's global generator and batch-norm by the mini-batch.

    Returns:
        Gradients by the names of `student.parameters`, and the loss in nats. Where one of them is not finite the
        student has diverged: zeros and an infinite loss, which the server takes no step from.
    """
    import torch

    from fleetdistill.training.losses import soft_cross_entropy
    from fleetdistill.training.parameters import tensors_of

    where = inputs_b.device
    parameters = {name: one.to(where).requires_grad_() for name, one in tensors_of(student.parameters).items()}
    logits_bc = _student_logits(model, student, inputs_b, parameters, training=training)
    loss = soft_cross_entropy(logits_bc, teacher_probs_bc, temperature)
    found = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
    if not all(bool(one.isfinite().all()) for one in (loss.detach(), *found)):
        return {name: torch.zeros_like(one.detach()) for name, one in parameters.items()}, math.inf
    return dict(zip(parameters, found, strict=True)), float(loss.detach())


def _student_logits(
    model: nn.Module,
    student: ModelParameters,
    inputs_b: Tensor,
    parameters: Mapping[str, Tensor] | None = None,
    *,
    training: bool = False,
) -> Tensor:
    """What the student says `[batch, classes]`; the model keeps its own weights, buffers and mode.

    Args:
        model: Whose architecture the student has, and what of it was not sent.
        student: Parameters and buffers that were sent.
        inputs_b: `[batch, *input_shape]`, on the model's device.
        parameters: The student's as tensors, for a gradient; by default made of `student`.
        training: Mode of the pass.
    """
    from torch.func import functional_call

    from fleetdistill.training.model import in_mode
    from fleetdistill.training.parameters import tensors_of

    where = inputs_b.device
    sent = tensors_of(student.parameters) if parameters is None else parameters
    buffers = {name: one.detach().clone() for name, one in model.named_buffers()}  # train mode would change them
    buffers |= tensors_of(student.buffers)
    with in_mode(model, training=training):
        both = {name: one.to(where) for name, one in {**sent, **buffers}.items()}
        return functional_call(model, both, (inputs_b,))  # type: ignore[no-any-return]  # a module's call
