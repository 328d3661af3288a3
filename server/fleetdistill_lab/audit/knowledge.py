"""Attacks on parts about samples and classes: features, class statistics, and a device's class shares."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fleetdistill.knowledge import (
    Array,
    ClassSums,
    Kind,
    NamedTensors,
    ProxyKnowledge,
    SampleKnowledge,
    SharedStatistics,
)
from fleetdistill.methods.classstats.shared_statistics import Moments, from_wire
from fleetdistill.methods.classstats_private.sums import NoiseScale, unit_rows
from fleetdistill.methods.classstats_private.sums import from_wire as sums_from_wire
from fleetdistill.methods.classstats_secure.encoding import moments_of_sums
from fleetdistill.training.local_training import extract
from fleetdistill_lab.audit.networks import first_step
from fleetdistill_lab.audit.record import Attacker, Message, Part, Rows, Scores

_SHRINKAGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Weights of the diagonal that the attacker chooses from for its covariance."""
_RIDGE = 1e-6
"""Part of the mean variance that is added to every variance, so that covariances are invertible."""
_MIN_DEVIATION = 1e-3
_TINY = 1e-12


def by_features(messages: Sequence[Message], attacker: Attacker, rows: Rows) -> dict[Part, Scores]:
    """Scores by the largest cosine of a row's features with a sent row, both centred.

    The rows are centred by the mean of public rows with the device's class shares, the sent ones by their own mean. The
    devices have trained the extractor since the server knew it. The second attack therefore fits it to public rows:
    batch-norm gets their statistics, and each feature the same deviation as the sent one.

    Returns:
        Scores for the first and the last message that contains a column.
    """
    scores: dict[Part, Scores] = {}
    weights_m = _weights(messages, attacker)
    for message, name, column, sent in _first_and_last(messages):
        known = attacker.method.known_extractor(column, message.received)
        if known is None:
            continue
        what = f"{column}, round {message.round}"
        for attack, extractor in ((what, known), (f"{what}, fitted", fit(known, attacker.public.inputs))):
            own, public = features_of(extractor, rows.inputs), features_of(extractor, attacker.public.inputs)
            mean = weights_m @ public
            centred, others = own - mean, sent - sent.mean(axis=0)
            if extractor is not known:
                centred = _scale(centred, np.sqrt(weights_m @ np.square(public - mean)))
                others = _scale(others, sent.std(axis=0))
            scores[name, attack] = np.asarray((_unit(centred) @ _unit(others).T).max(axis=1))
    return scores


def _weights(messages: Sequence[Message], attacker: Attacker) -> Array:
    """Returns weights of the public rows `[m]` that give them the class shares that the device seems to have."""
    labels, classes = attacker.public.labels.numpy(), attacker.method.context.classes
    shares = class_shares(messages, classes)
    if shares is None:
        return np.full(len(labels), 1 / len(labels))
    weights = shares[labels] / np.bincount(labels, minlength=classes)[labels]
    total = weights.sum()
    return np.asarray(weights / total if total > 0 else np.full(len(labels), 1 / len(labels)))


def features_of(extractor: Callable[[Tensor], Tensor], inputs: Tensor) -> Array:
    """Returns an extractor's features `[n, F]` float64, in eval mode."""
    return np.asarray(extract(extractor, inputs).flatten(1).double().numpy())


def fit(extractor: nn.Module, inputs: Tensor) -> nn.Module:
    """Returns a copy whose batch-norm has the statistics of inputs."""
    copied = copy.deepcopy(extractor).train()
    for part in copied.modules():
        if isinstance(part, _BatchNorm):
            part.reset_running_stats()
            part.momentum = None
    with torch.no_grad():
        copied(inputs)
    return copied.eval()


def _scale(rows_nf: Array, deviations: Array) -> Array:
    return np.asarray(rows_nf / (deviations + _MIN_DEVIATION * deviations.mean() + _TINY))


def _first_and_last(messages: Sequence[Message]) -> Iterator[tuple[Message, str, str, Array]]:
    """Yields message, part, column and sent rows `[m, F]`."""
    result = [
        (message, name, column, sent.reshape(len(sent), -1).astype(np.float64))
        for message in messages
        for name, part in message.sent.items()
        if isinstance(part, SampleKnowledge)
        for column, sent in part.features.items()
    ]
    for column in dict.fromkeys(item[2] for item in result):
        of_column = [item for item in result if item[2] == column]
        yield of_column[0]
        if len(of_column) > 1:
            yield of_column[-1]


def _unit(rows_nf: Array) -> Array:
    lengths = np.linalg.norm(rows_nf, axis=1, keepdims=True)
    return np.asarray(rows_nf / np.maximum(lengths, _TINY), dtype=np.float64)


def by_statistics(messages: Sequence[Message], attacker: Attacker, rows: Rows) -> dict[Part, Scores]:
    """Scores by class statistics, by their means, their covariance, both, and the directions of the covariance.

    Rows lie in the span of the directions. A mean is likelier if the row is among those behind it, and the covariance
    has more of the row's products. The score of both is their sum, each in its standard deviations over the class.
    """
    scores: dict[Part, Scores] = {}
    for message in messages:
        for name, part in message.sent.items():
            if isinstance(part, SharedStatistics) and part.means is not None:
                known = attacker.method.known_extractor(name, message.received)
                if known is not None:
                    own, public = (features_of(known, item.inputs) for item in (rows, attacker.public))
                    moments = PublicMoments(public, attacker.public.labels.numpy())
                    found = statistics_scores(from_wire(part), _directions(part), own, rows.labels.numpy(), moments)
                    scores |= {(name, attack): one for attack, one in found.items()}
    return scores


def statistics_scores(
    sent: Moments, basis_qf: Array, own_nf: Array, labels_n: Array, public: PublicMoments
) -> dict[str, Scores]:
    attacks = ("means", "covariance", "means and covariance", "directions")
    scores = {attack: np.zeros(len(own_nf)) for attack in attacks}
    for label, mean_f, count in zip(sent.labels, sent.means, sent.counts.tolist(), strict=True):
        of_class = labels_n == label
        if of_class.any() and label in public.means:
            by_mean = public.leaning(own_nf[of_class], mean_f, label, count)
            scores["means"][of_class] = by_mean
            if sent.covariance.any():
                by_covariance = public.alignment(own_nf[of_class], mean_f, sent.covariance)
                both = _in_deviations(by_mean) + _in_deviations(by_covariance)
                scores["covariance"][of_class], scores["means and covariance"][of_class] = by_covariance, both
            if len(basis_qf):
                scores["directions"][of_class] = public.nearness(own_nf[of_class], mean_f, basis_qf, label)
    return {attack: found for attack, found in scores.items() if found.any()}


def _in_deviations(scores: Scores) -> Scores:
    return np.asarray(scores / (scores.std() + _TINY))


def by_sums(messages: Sequence[Message], attacker: Attacker, rows: Rows) -> dict[Part, Scores]:
    """Scores by class sums of one device, or of several by a secure sum; see `sums_scores`."""
    scores: dict[Part, Scores] = {}
    for message in messages:
        for name, part in message.sent.items():
            known = attacker.method.known_extractor(name, message.received) if isinstance(part, ClassSums) else None
            if isinstance(part, ClassSums) and known is not None:
                own, public = (features_of(known, item.inputs) for item in (rows, attacker.public))
                found = sums_scores(part, own, rows.labels.numpy(), public, attacker.public.labels.numpy())
                scores |= {(name, attack): one for attack, one in found.items()}
    return scores


def sums_scores(
    part: ClassSums, own_nf: Array, labels_n: Array, public_mf: Array, public_labels_m: Array
) -> dict[str, Scores]:
    """Scores rows by class sums.

    Noisy sums are attacked by the means that they give, of rows of length 1. Sums without noise give class statistics,
    which are attacked as those of `by_statistics`, but for directions, which a sum of several devices does not have.

    Args:
        part: The sums; `mu` is 0 if they have no noise.
        own_nf: Features of the candidates, `[n, F]`.
        labels_n: Their classes, `[n]`.
        public_mf: Features of the attacker's rows, `[m, F]`.
        public_labels_m: Their classes, `[m]`.

    Returns:
        Scores by the name of the attack.
    """
    if part.mu == 0:
        moments = moments_of_sums(sums_from_wire(part))
        public = PublicMoments(public_mf, public_labels_m)
        return statistics_scores(moments, np.zeros((0, 0)), own_nf, labels_n, public)
    public, own_nf = PublicMoments(unit_rows(public_mf), public_labels_m), unit_rows(own_nf)
    scores, variance = np.zeros(len(own_nf)), NoiseScale.of(float(part.mu)).sums ** 2
    for label in public.means:
        of_class, count = labels_n == label, max(float(part.counts[label]), 1.0)
        mean = part.sums[label].astype(np.float64) / count
        scores[of_class] = public.leaning(own_nf[of_class], mean, label, count, variance / count)
    return {"sums": scores}


class PublicMoments:
    """Moments of the attacker's rows.

    Attributes:
        means: Mean of each class, `[F]` float64.
        pooled: Covariance within all classes, `[F, F]`, shrunk towards its diagonal as much as makes one half of the
            rows likeliest by the other half.
    """

    def __init__(self, features_mf: Array, labels_m: Array) -> None:
        """Computes the moments of at least two rows."""
        self.means = {int(item): features_mf[labels_m == item].mean(axis=0) for item in np.unique(labels_m)}
        self._within = {label: features_mf[labels_m == label] - mean for label, mean in self.means.items()}
        within = np.concatenate([*self._within.values()])
        covariance = within.T @ within / max(len(within) - len(self.means), 1)
        self.pooled = _shrunk(covariance, _best_shrinkage(within))
        self._axes = np.linalg.svd(within, full_matrices=False)[2]
        variances, vectors = np.linalg.eigh(self.pooled)
        self._whitening = vectors / np.sqrt(variances)

    def leaning(self, rows_nf: Array, mean_f: Array, label: int, count: float, noise: float = 0.0) -> Scores:
        """Returns the log-likelihood ratio of a sent class mean with and without each row among those behind it.

        The mean of n rows is normal around the public mean m with variance (C + noise I) / n; with a row x among them,
        around m + (x - m) / n. The ratio is <x - m, sent - m> - |x - m|² / 2n, both in the inverse of C + noise I.

        Args:
            rows_nf: Candidates, `[n, F]`.
            mean_f: The sent mean, `[F]`.
            label: Its class.
            count: Number of rows behind it, at least 1.
            noise: Variance of the noise in each number of the mean, times `count`.
        """
        away_nf = rows_nf - self.means[label]
        white_nf = np.linalg.solve(self.covariance(label) + noise * np.eye(len(mean_f)), away_nf.T).T
        return np.asarray(white_nf @ (mean_f - self.means[label]) - (white_nf * away_nf).sum(axis=1) / (2 * count))

    def alignment(self, rows_nf: Array, mean_f: Array, covariance_ff: Array) -> Scores:
        """Returns how far a sent covariance is aligned with each row, in coordinates z in which public rows are white.

        A row among the n behind it adds z z' / n to it. The score is z' S z / |z|² without the diagonal of S, because
        the variances depend more on how the covariance was limited than on any row.

        Args:
            rows_nf: Candidates of a class, `[n, F]`.
            mean_f: The class's sent mean, `[F]`.
            covariance_ff: The sent covariance within classes, `[F, F]`.
        """
        white_nf = (rows_nf - mean_f) @ self._whitening
        white_ff = self._whitening.T @ covariance_ff @ self._whitening
        np.fill_diagonal(white_ff, 0)
        squares_n = np.square(white_nf).sum(axis=1)
        return np.asarray(((white_nf @ white_ff) * white_nf).sum(axis=1) / np.maximum(squares_n, _TINY))

    def covariance(self, label: int) -> Array:
        """Returns the covariance of a class, `[F, F]`, with `pooled` counted as F rows of the class."""
        within = self._within[label]
        size = within.shape[1]
        return np.asarray((within.T @ within + size * self.pooled) / (len(within) - 1 + size))

    def nearness(self, rows_nf: Array, mean_f: Array, basis_qf: Array, label: int) -> Scores:
        """Returns minus the distance to the span of sent directions, relative to that of as many public ones."""
        axes = self._axes[: len(basis_qf)]
        outside, usually = _outside(rows_nf - mean_f, basis_qf), _outside(rows_nf - self.means[label], axes)
        return np.asarray(-outside / np.maximum(usually, _TINY))


def _best_shrinkage(within_mf: Array) -> float:
    """Returns the weight of the diagonal with which each half of the rows makes the other half likeliest."""
    first, second = (half.T @ half / len(half) for half in (within_mf[::2], within_mf[1::2]))

    def loss(share: float) -> float:
        return _loss(_shrunk(first, share), second) + _loss(_shrunk(second, share), first)

    return min(_SHRINKAGES, key=loss)


def _loss(covariance: Array, observed: Array) -> float:
    """Returns -2 / n times the log-likelihood of n centred rows by their covariance, without its constant."""
    return float(np.linalg.slogdet(covariance)[1] + np.trace(np.linalg.solve(covariance, observed)))


def _shrunk(covariance: Array, share: float) -> Array:
    """Returns a covariance shrunk towards its diagonal, invertible."""
    variances = np.diag(covariance)
    return np.asarray((1 - share) * covariance + np.diag(share * variances + _RIDGE * variances.mean() + _TINY))


def _directions(part: SharedStatistics) -> Array:
    """Returns an orthonormal basis of the sent directions, `[q, F]`."""
    if part.directions is None:
        return np.zeros((0, 0))
    assert part.steps is not None
    rows = part.directions.astype(np.float64) * part.steps.astype(np.float64)[:, None]
    rows = rows[np.linalg.norm(rows, axis=1) > 0]
    return np.linalg.qr(rows.T)[0].T if len(rows) else rows


def _outside(rows_nf: Array, basis_qf: Array) -> Array:
    """Returns the squared length of what lies outside the span of an orthonormal basis."""
    return np.asarray(np.square(rows_nf).sum(axis=1) - np.square(rows_nf @ basis_qf.T).sum(axis=1))


def class_shares(messages: Sequence[Message], classes: int) -> Array | None:
    """Estimates a device's class shares `[C]` from its messages; None if nothing in them depends on the shares.

    From the labels or counts that it sent; else from the classes that it last predicted for its own samples, its mean
    prediction for the proxy set in the first message with one, or how far its first local training raised each class's
    bias.
    """
    parts = [part for message in messages for part in message.sent.values()]
    for estimate, ordered in ((_sent, parts), (_predict, parts[::-1]), (_mean_prediction, parts)):
        result = next((one for part in ordered if (one := estimate(part, classes)) is not None), None)
        if result is not None:
            return result
    step = first_step(messages, classes)
    return None if step is None else _normalize(np.maximum(step - np.sort(step)[:3].mean(), 0))


def _sent(part: Kind, classes: int) -> Array | None:
    if isinstance(part, SampleKnowledge) and part.labels is not None:
        return _normalize(np.bincount(part.labels, minlength=classes).astype(np.float64))
    if isinstance(part, ClassSums):
        return _normalize(np.maximum(part.counts.astype(np.float64), 0))
    if isinstance(part, NamedTensors) and "counts" in part.columns():
        counts = part.tensors.get("counts", np.zeros(0))
        return _normalize(np.maximum(counts.astype(np.float64), 0)) if counts.shape == (classes,) else None
    if isinstance(part, SharedStatistics) and part.counts is not None:
        counts = np.zeros(classes)
        counts[part.labels] = part.counts
        return _normalize(counts)
    return None


def _predict(part: Kind, classes: int) -> Array | None:
    if isinstance(part, SampleKnowledge) and part.logits is not None:
        return _normalize(np.bincount(part.logits.argmax(axis=1), minlength=classes).astype(np.float64))
    return None


def _mean_prediction(part: Kind, classes: int) -> Array | None:
    if isinstance(part, ProxyKnowledge) and part.logits is not None:
        odds = np.exp(part.logits.astype(np.float64) - part.logits.max(axis=1, keepdims=True))
        return np.asarray((odds / odds.sum(axis=1, keepdims=True)).mean(axis=0))
    return None


def _normalize(shares_c: Array) -> Array:
    total = shares_c.sum()
    return np.asarray(shares_c / total if total > 0 else np.full(len(shares_c), 1 / len(shares_c)))
