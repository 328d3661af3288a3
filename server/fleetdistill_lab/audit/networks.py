"""Attacks on parts with a network: parameters, distillation gradients and discriminators."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.knowledge import Discriminator, DistillationGradient, ModelParameters
from fleetdistill.models.discriminators import JudgedClassifier, shared_features
from fleetdistill.training.local_training import extract
from fleetdistill.training.model import logits_and_embedding
from fleetdistill.training.parameters import tensors_of
from fleetdistill_lab.audit.record import Attacker, Message, Part, Rows, Scores

_WHOLE = "model"
_LOSS, _STEPS = "loss over all rounds", "last layer, all steps"


def by_parameters(messages: Sequence[Message], attacker: Attacker, rows: Rows) -> dict[Part, Scores]:
    """Scores by the sum over rounds of CE(x; received weights) - CE(x; sent weights), in eval mode.

    Training lowers the loss most on the rows that it sees.
    """
    total: dict[Part, Scores] = {}
    for message in messages:
        for name, before, after in _models(message):
            gain = _losses(attacker, before, rows) - _losses(attacker, after, rows)
            total[name, _LOSS] = total.get((name, _LOSS), np.zeros(len(rows))) + gain
    return total


def _models(message: Message) -> Iterator[tuple[str, ModelParameters, ModelParameters]]:
    """Yields name, received and sent weights of whole models."""
    for name, after in message.sent.items():
        before = message.received.get(name)
        if isinstance(after, ModelParameters) and isinstance(before, ModelParameters) and after.scope == _WHOLE:
            yield name, before, after


def load(model: nn.Module, weights: ModelParameters) -> nn.Module:
    """Loads weights into a model; tensors that devices keep, such as batch-norm, stay initial; returns the model."""
    model.load_state_dict({**tensors_of(weights.parameters), **tensors_of(weights.buffers)}, strict=False)
    return model.eval()


def _losses(attacker: Attacker, weights: ModelParameters, rows: Rows) -> Scores:
    """Returns the cross-entropy of each row in nats."""

    def compute() -> Scores:
        logits_nc = extract(load(attacker.method.context.device_model(), weights), rows.inputs).double()
        return np.asarray(functional.cross_entropy(logits_nc, rows.labels, reduction="none").numpy())

    return attacker.once("losses", weights, rows, compute)


def by_gradients(messages: Sequence[Message], attacker: Attacker, rows: Rows) -> dict[Part, Scores]:
    """Scores by the sum over steps of <g_x, g> / |g_x| in the last layer, g_x the gradient that a row alone would give.

    The student has the weights of the ask, the teacher those that the device sent in its last local training.
    """
    total: dict[Part, Scores] = {}
    for step in steps_of(messages):
        scores = _agreement(attacker, step, rows)
        total[step.name, _STEPS] = total.get((step.name, _STEPS), np.zeros(len(rows))) + scores
    return total


@dataclass(frozen=True)
class Step:
    """One distillation step of a device.

    Attributes:
        name: Name of the part with the gradient.
        gradient: The gradient.
        student: Weights in the ask.
        teacher: Weights that the device sent in its last local training.
        seed: Seed of the ask.
    """

    name: str
    gradient: DistillationGradient
    student: ModelParameters
    teacher: ModelParameters
    seed: int


def steps_of(messages: Sequence[Message]) -> Iterator[Step]:
    """Yields the distillation steps of one device, in order."""
    teacher: ModelParameters | None = None
    for message in messages:
        teacher = next((after for _, _, after in _models(message)), teacher)
        student = next((item for item in message.received.values() if isinstance(item, ModelParameters)), None)
        for name, part in message.sent.items():
            if isinstance(part, DistillationGradient) and student is not None and teacher is not None:
                yield Step(name, part, student, teacher, message.seed)


def _agreement(attacker: Attacker, step: Step, rows: Rows) -> Scores:
    last = next((item for item in reversed([*step.gradient.gradients.values()]) if item.ndim == 2), None)
    if last is None:
        return np.zeros(len(rows))
    student_nc, embedding_nf = _outputs(attacker, step.student, rows)
    teacher_nc, _ = _outputs(attacker, step.teacher, rows)
    difference_nc = student_nc.softmax(1) - teacher_nc.softmax(1)  # its outer product with the embedding is g_x
    inner = ((difference_nc @ torch.from_numpy(last).double()) * embedding_nf).sum(1)
    length = difference_nc.norm(dim=1) * embedding_nf.norm(dim=1)
    return np.asarray((inner / length.clamp_min(1e-12)).numpy())


def _outputs(attacker: Attacker, weights: ModelParameters, rows: Rows) -> tuple[Tensor, Tensor]:
    """Returns logits `[n, C]` and embedding `[n, F]` in float64."""

    def compute() -> tuple[Tensor, Tensor]:
        model = load(attacker.method.context.device_model(), weights)
        with torch.no_grad():
            logits, embedding = logits_and_embedding(model, rows.inputs)
        return logits.double(), embedding.flatten(1).double()

    return attacker.once("outputs", weights, rows, compute)


def by_discriminator(messages: Sequence[Message], attacker: Attacker, rows: Rows) -> dict[Part, Scores]:
    """Scores by the logit of the last discriminator, which was trained to tell own rows from generated ones."""
    last: Mapping[str, tuple[Discriminator, Message]] = {
        name: (part, message)
        for message in messages
        for name, part in message.sent.items()
        if isinstance(part, Discriminator)
    }
    return {(name, "its logit"): _realness(attacker, *found, rows) for name, found in last.items()}


def _realness(attacker: Attacker, sent: Discriminator, message: Message, rows: Rows) -> Scores:
    classifier = attacker.method.context.device_model()
    weights = next((item for item in message.sent.values() if isinstance(item, ModelParameters)), None)
    if weights is not None:
        load(classifier, weights)
    first = extract(lambda x: shared_features(classifier, x), rows.inputs[:1], model=classifier)
    judged = JudgedClassifier(
        classifier, tuple(first.shape[1:]), sharing=sent.shares_extractor, feature_level=False
    ).eval()
    load(judged.discriminator, sent.parameters)
    return np.asarray(extract(judged.realness, rows.inputs).flatten().double().numpy())


def last_bias(weights: ModelParameters, classes: int) -> Scores | None:
    """Returns the bias of the last layer `[C]`, or None if the model has none."""
    result = [parameter for parameter in weights.parameters.values() if parameter.shape == (classes,)]
    return result[-1].astype(np.float64) if result else None


def first_step(messages: Sequence[Message], classes: int) -> Scores | None:
    """Returns by how much the device's first local training moved the last layer's bias, `[C]`; None without one."""
    pairs = itertools.chain.from_iterable(map(_models, messages))
    for _, before, after in pairs:
        start, end = last_bias(before, classes), last_bias(after, classes)
        return None if start is None or end is None else end - start
    return None
