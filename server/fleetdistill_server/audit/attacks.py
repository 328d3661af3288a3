"""Scores of candidate rows, from the messages of one device: higher if the row looks like one it trained on.

Every attack knows the labels of the candidates, the architecture of the models, and rows of the same kind that no
device has (the attacker's public rows).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fleetdistill.knowledge import (
    Array,
    ClassStatistics,
    Discriminator,
    DistillationGradient,
    ModelParameters,
    SampleKnowledge,
    SharedStatistics,
)
from fleetdistill.training.local_training import extract
from fleetdistill.training.model import logits_and_embedding
from fleetdistill.training.parameters import tensors_of
from fleetdistill_server.audit.record import Message

Scores = NDArray[np.float64]
"""`[n]`, one for each candidate."""
Extractor = Callable[[Tensor], Array]
"""Features `[n, F]` of inputs, as the server can compute them."""


@dataclass(frozen=True)
class Candidates:
    """Rows to score.

    Attributes:
        inputs: `[n, *input_shape]`.
        labels: `[n]` int64.
    """

    inputs: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Attacker:
    """What the server knows besides the messages.

    Attributes:
        public: Labelled rows of the same kind that no device has.
        model: The device's architecture, for methods that send parameters.
        extractors: For each column or statistic, how the server computes the same features.
        discriminator: Logit of the device's discriminator for inputs, given what was sent.
    """

    public: Candidates
    model: nn.Module | None = None
    extractors: Mapping[str, Extractor] = field(default_factory=dict)
    discriminator: Callable[[Discriminator, Tensor], Tensor] | None = None


def attack(messages: Sequence[Message], attacker: Attacker, candidates: Candidates) -> dict[str, Scores]:
    """Scores the candidates by every part that says something about single rows.

    Args:
        messages: All messages of one device, in order.
        attacker: The attacker's knowledge.
        candidates: Rows to score.

    Returns:
        Scores by attacked part. Proxy predictions and predictions on generated samples have none: no question about a
        row can be asked of them.
    """
    scores: dict[str, Scores] = {}
    if attacker.model is not None:
        scores |= _by_parameters(messages, attacker.model, candidates)
        scores |= _by_gradients(messages, attacker.model, candidates)
    scores |= _by_features(messages, attacker, candidates)
    scores |= _by_statistics(messages, attacker, candidates)
    scores |= _by_discriminator(messages, attacker, candidates)
    return scores


# --- parameters and gradients


def _by_parameters(messages: Sequence[Message], model: nn.Module, candidates: Candidates) -> dict[str, Scores]:
    """Sum over rounds of CE(x; received weights) - CE(x; sent weights), because training lowers its own rows' loss most."""
    total: Scores | None = None
    for message in messages:
        before, after = message.received.get("parameters"), message.sent.get("parameters")
        if isinstance(before, ModelParameters) and isinstance(after, ModelParameters):
            gain = _losses(model, before, candidates) - _losses(model, after, candidates)
            total = gain if total is None else total + gain
    return {} if total is None else {"parameters": total}


def _losses(model: nn.Module, weights: ModelParameters, candidates: Candidates) -> Scores:
    """Returns the cross-entropy of each candidate in nats, in eval mode."""
    with torch.no_grad():
        logits_nc = functional_call(copy.deepcopy(model).eval(), _state(weights), (candidates.inputs,))
        losses = functional.cross_entropy(logits_nc.double(), candidates.labels, reduction="none")
    return np.asarray(losses.numpy())


def _state(weights: ModelParameters) -> dict[str, Tensor]:
    return {**tensors_of(weights.parameters), **tensors_of(weights.buffers)}


def _by_gradients(messages: Sequence[Message], model: nn.Module, candidates: Candidates) -> dict[str, Scores]:
    """Sum over steps of <g_x, g> / |g_x| in the last layer, g_x the gradient that the candidate alone would give.

    The teacher is what the device sent in this round's local training.
    """
    total, teachers = np.zeros(len(candidates.labels)), _teachers(messages)
    found = False
    for message in messages:
        gradient, student = message.sent.get("gradient"), message.received.get("parameters")
        teacher = teachers.get(message.round)
        if not (isinstance(gradient, DistillationGradient) and isinstance(student, ModelParameters) and teacher):
            continue
        found = True
        total += _last_layer_agreement(model, student, teacher, gradient, candidates)
    return {"gradient": total} if found else {}


def _teachers(messages: Sequence[Message]) -> dict[int, ModelParameters]:
    return {
        message.round: part
        for message in messages
        if isinstance(part := message.sent.get("parameters"), ModelParameters)
    }


def _last_layer_agreement(
    model: nn.Module,
    student: ModelParameters,
    teacher: ModelParameters,
    gradient: DistillationGradient,
    candidates: Candidates,
) -> Scores:
    student_nc, embedding_nf = _logits_and_embedding(model, student, candidates.inputs)
    teacher_nc, _ = _logits_and_embedding(model, teacher, candidates.inputs)
    difference_nc = student_nc.softmax(1) - teacher_nc.softmax(1)
    own_ncf = difference_nc[:, :, None] * embedding_nf[:, None, :]  # gradient of the last weight, of each candidate
    last = next(torch.from_numpy(g).double() for g in reversed([*gradient.gradients.values()]) if g.ndim == 2)
    agreement = (own_ncf * last).sum((1, 2)) / own_ncf.flatten(1).norm(dim=1).clamp_min(1e-12)
    return np.asarray(agreement.numpy())


def _logits_and_embedding(model: nn.Module, weights: ModelParameters, inputs: Tensor) -> tuple[Tensor, Tensor]:
    loaded = copy.deepcopy(model).eval()
    loaded.load_state_dict(_state(weights), strict=False)
    with torch.no_grad():
        logits, embedding = logits_and_embedding(loaded, inputs)
    return logits.double(), embedding.flatten(1).double()


# --- features


def _by_features(messages: Sequence[Message], attacker: Attacker, candidates: Candidates) -> dict[str, Scores]:
    """Largest cosine of the candidate's features with a sent row, both centred; by column, the last message's."""
    scores: dict[str, Scores] = {}
    for message in messages:
        for part in message.sent.values():
            if not isinstance(part, SampleKnowledge):
                continue
            for column, sent in part.features.items():
                if column in attacker.extractors:
                    name = f"features/{column}, round {message.round}"
                    known = attacker.extractors[column](candidates.inputs)
                    scores[name] = _largest_cosine(known, sent.reshape(len(sent), -1))
    return scores


def _largest_cosine(candidates_nf: Array, sent_mf: Array) -> Scores:
    first = _unit(candidates_nf - candidates_nf.mean(axis=0))
    second = _unit(sent_mf.astype(np.float64) - sent_mf.astype(np.float64).mean(axis=0))
    return np.asarray((first @ second.T).max(axis=1))


def _unit(rows_nf: Array) -> Array:
    lengths = np.linalg.norm(rows_nf, axis=1, keepdims=True)
    return np.asarray(rows_nf / np.maximum(lengths, 1e-12), dtype=np.float64)


# --- class statistics


def _by_statistics(messages: Sequence[Message], attacker: Attacker, candidates: Candidates) -> dict[str, Scores]:
    """How much more of the candidate lies in the span of the sent directions than in that of public ones."""
    scores: dict[str, Scores] = {}
    for message in messages:
        for name, part in message.sent.items():
            extractor = attacker.extractors.get(name)
            if extractor is None or not isinstance(part, ClassStatistics | SharedStatistics):
                continue
            known = extractor(candidates.inputs)
            public = extractor(attacker.public.inputs), attacker.public.labels.numpy()
            scores[f"{name}, round {message.round}"] = _statistics_scores(part, known, candidates.labels, *public)
    return scores


def _statistics_scores(
    part: ClassStatistics | SharedStatistics, known_nf: Array, labels_n: Tensor, public_mf: Array, public_m: Array
) -> Scores:
    scores, numbers = np.zeros(len(known_nf)), labels_n.numpy()
    for place, label in enumerate(part.labels):
        rows, others = numbers == label, public_mf[public_m == label]
        if not rows.any() or len(others) < 2 or part.means is None:
            continue
        mean, public_mean = part.means[place].astype(np.float64), others.mean(axis=0)
        directions = _directions(part, place)
        if len(directions):
            _, _, principal = np.linalg.svd(others - public_mean, full_matrices=False)
            inside = _residual(known_nf[rows] - mean, directions)
            outside = _residual(known_nf[rows] - public_mean, principal[: len(directions)])
            scores[rows] = -inside / np.maximum(outside, 1e-12)
        else:
            weight = (mean - public_mean) / np.maximum(others.var(axis=0), 1e-12)
            scores[rows] = (known_nf[rows] - public_mean) @ weight
    return scores


def _directions(part: ClassStatistics | SharedStatistics, place: int) -> Array:
    """Returns an orthonormal basis of the directions sent for a class, `[q, F]`."""
    if part.directions is None:
        return np.zeros((0, 0))
    sent = part.directions if isinstance(part, SharedStatistics) else part.directions[place]
    rows = sent.astype(np.float64)
    rows = rows[np.linalg.norm(rows, axis=1) > 0]
    return np.linalg.qr(rows.T)[0].T if len(rows) else rows


def _residual(rows_nf: Array, basis_qf: Array) -> Array:
    """Returns the squared length of what lies outside the basis's span."""
    inside = rows_nf @ basis_qf.T
    return np.asarray(np.square(rows_nf).sum(axis=1) - np.square(inside).sum(axis=1))


# --- discriminator


def _by_discriminator(messages: Sequence[Message], attacker: Attacker, candidates: Candidates) -> dict[str, Scores]:
    """The last discriminator's logit: it was trained to tell the device's rows from generated ones."""
    sent = [part for message in messages for part in message.sent.values() if isinstance(part, Discriminator)]
    if not sent or attacker.discriminator is None:
        return {}
    with torch.no_grad():
        logits = attacker.discriminator(sent[-1], candidates.inputs).flatten().double()
    return {"discriminator": np.asarray(logits.numpy())}


def features_by(module: Callable[[Tensor], Tensor]) -> Extractor:
    """Returns a function that computes a module's features in batches, as float64 rows."""

    def features(inputs: Tensor) -> Array:
        return np.asarray(extract(module, inputs).flatten(1).double().numpy())

    return features
