"""Attack on the gradient sums of a refined head, together with the class means that the device has sent before.

A row x of class y adds e xT to each sum: with e = e_y to the sums of the classes, with e = softmax(W x) - e_y to the
gradient at a head W. All of them stacked are taken as normal, with mean and covariance of public rows of the same
classes; a row's score is the ratio of the likelihoods with and without it. The stack has the differences between steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import solve_triangular

from fleetdistill.knowledge import Array, ClassSums, HeadGradient, LinearHead, SharedStatistics
from fleetdistill.methods.classstats.refined_head import from_wire
from fleetdistill_lab.audit.knowledge import PublicMoments, features_of
from fleetdistill_lab.audit.record import Attacker, Message, Part, Rows, Scores

__all__ = ["Stack", "likelihood_ratios", "stack"]

_WEIGHT = 0.6
"""Weight of the diagonal in the covariance of a row's contribution."""
_MAX_PUBLIC = 4000
_MIN_SQUARE = 1e-6


@dataclass(frozen=True)
class Stack:
    """Factors of what rows add to the stacked sums.

    Attributes:
        e: `[n, C (1 + R)]`: the class, then the probabilities at each of R heads.
        x: `[n, D + 1]`: centred features and a 1.
        labels: Classes of the rows, `[n]`.
    """

    e: Array
    x: Array
    labels: Array


def by_gradient_sums(messages: Sequence[Message], attacker: Attacker, rows: Rows) -> dict[Part, Scores]:
    """Scores by all gradient sums of a device together, and by its class means with them."""
    asked = [
        (name, message.received.get("head"), part)
        for message in messages
        for name, part in message.sent.items()
        if isinstance(part, HeadGradient)
    ]
    steps = [(name, head, from_wire(part, head)) for name, head, part in asked if isinstance(head, LinearHead)]
    known = attacker.method.known_extractor(steps[0][0], messages[0].received) if steps else None
    if known is None:
        return {}
    heads, classes = [head for _, head, _ in steps], attacker.method.context.classes
    own, public = (
        stack(heads, features_of(known, item.inputs), item.labels.numpy(), classes) for item in (rows, attacker.public)
    )
    sums, counts = _class_sums(messages, heads[0], classes)
    gradients = [_of_all_classes(found.gradient, head, classes) + sums for _, head, found in steps]
    return {
        (steps[0][0], "means and gradients"): likelihood_ratios(own, public, np.concatenate([sums, *gradients]), counts)
    }


def stack(heads: Sequence[LinearHead], features_nd: Array, labels_n: Array, classes: int) -> Stack:
    """Returns what rows add to the sums of the classes and to the gradients at heads.

    Args:
        heads: At least one.
        features_nd: `[n, D]`.
        labels_n: `[n]`.
        classes: C.
    """
    x = np.column_stack([features_nd - heads[0].mean.astype(np.float64), np.ones(len(features_nd))])
    parts = [np.eye(classes)[labels_n]]
    for head in heads:
        logits = x @ head.weights.astype(np.float64).T
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        parts.append(np.zeros((len(x), classes)))
        parts[-1][:, list(head.labels)] = p / p.sum(axis=1, keepdims=True)
    return Stack(np.concatenate(parts, axis=1), x, labels_n)


def likelihood_ratios(own: Stack, public: Stack, seen: Array, counts_c: Array) -> Scores:
    """Returns the log-likelihood ratio of each row being among those of the sums, `[n]`.

    The covariance of what a row adds is that of the public rows, shrunk towards a diagonal in which features are
    whitened.

    Args:
        own: The candidates.
        public: Rows that are not in the sums.
        seen: Sums of e xT over the device's rows, `[C (1 + R), D + 1]`.
        counts_c: Its rows of each class, `[C]`.
    """
    classes, total = len(counts_c), float(counts_c.sum())
    of_class = np.bincount(public.labels, minlength=classes)
    used = np.flatnonzero(counts_c[public.labels] > 0)[:_MAX_PUBLIC]
    public = Stack(public.e[used], public.x[used], public.labels[used])
    of_class = np.bincount(public.labels, minlength=classes)
    share = (counts_c / total / np.maximum(of_class, 1))[public.labels]
    whitening = np.eye(public.x.shape[1])
    values, vectors = np.linalg.eigh(PublicMoments(public.x[:, :-1], public.labels).pooled)
    whitening[:-1, :-1] = vectors / np.sqrt(values)
    size = np.sqrt(np.maximum(share @ np.square(public.e), _MIN_SQUARE))
    scaled = [Stack(one.e / size, one.x @ whitening, one.labels) for one in (own, public)]
    usual = _Usual(scaled[1], classes)
    away = (seen / size[:, None]) @ whitening - sum(counts_c[c] * mean for c, mean in usual.means.items())
    gram, beside = usual.products(scaled[1], scaled[1]), usual.products(*scaled)
    inner = np.linalg.cholesky(gram + np.diag(_WEIGHT / (1 - _WEIGHT) / share))
    left = solve_triangular(inner, beside.T, lower=True)
    ratio = usual.product(scaled[0], away)
    ratio -= left.T @ solve_triangular(inner, usual.product(scaled[1], away), lower=True)
    return np.asarray(ratio - (usual.lengths(scaled[0]) - np.square(left).sum(axis=0)) / 2) / total


class _Usual:
    """Inner products of what rows add, each less the mean of its class's public rows."""

    def __init__(self, public: Stack, classes: int) -> None:
        self.means: Mapping[int, Array] = {
            c: public.e[public.labels == c].T @ public.x[public.labels == c] / (public.labels == c).sum()
            for c in range(classes)
            if (public.labels == c).any()
        }

    def product(self, one: Stack, matrix: Array) -> Array:
        """With a matrix like the stacked sums, `[n]`."""
        result = ((one.e @ matrix) * one.x).sum(axis=1)
        for c, mean in self.means.items():
            result[one.labels == c] -= np.vdot(mean, matrix)
        return np.asarray(result)

    def products(self, one: Stack, other: Stack) -> Array:
        """Of each row of one with each of the other, `[n, m]`."""
        result = (one.e @ other.e.T) * (one.x @ other.x.T)
        for c, mean in self.means.items():
            result[:, other.labels == c] -= ((one.e @ mean) * one.x).sum(axis=1)[:, None]
            result[one.labels == c] -= self.product(other, mean)
        return np.asarray(result)

    def lengths(self, one: Stack) -> Array:
        """Squared lengths, `[n]`."""
        result = np.square(one.e).sum(axis=1) * np.square(one.x).sum(axis=1)
        for c, mean in self.means.items():
            at = one.labels == c
            result[at] += np.square(mean).sum() - 2 * ((one.e[at] @ mean) * one.x[at]).sum(axis=1)
        return np.asarray(result)


def _class_sums(messages: Sequence[Message], head: LinearHead, classes: int) -> tuple[Array, Array]:
    """Returns the sums of x over the rows of each class, `[C, D + 1]`, and their number, of a device or a sum."""
    sums, counts, centre = np.zeros((classes, len(head.mean) + 1)), np.zeros(classes), head.mean.astype(np.float64)
    for message in messages:
        for part in message.sent.values():
            if isinstance(part, SharedStatistics) and part.means is not None and part.counts is not None:
                counts[list(part.labels)] = part.counts
                sums[list(part.labels), :-1] = part.means.astype(np.float64) - centre
                sums[list(part.labels), -1] = 1.0
            elif isinstance(part, ClassSums) and part.mu == 0:
                counts = np.rint(part.counts.astype(np.float64))
                sums[counts > 0, :-1] = part.sums[counts > 0] / counts[counts > 0, None] - centre
                sums[counts > 0, -1] = 1.0
    return sums * counts[:, None], counts


def _of_all_classes(gradient_kd: Array, head: LinearHead, classes: int) -> Array:
    result = np.zeros((classes, gradient_kd.shape[1]))
    result[list(head.labels)] = gradient_kd
    return result
