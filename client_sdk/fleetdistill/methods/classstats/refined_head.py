"""The refined head: a softmax classifier of the fleet's classes, reached by exact sums of the devices' gradients.

A device computes its sums here, and its personal answer; the server half is
`fleetdistill_server.methods.classstats.refinement`. Computes in float64, with NumPy only. Symbols: n rows, D numbers
per row, K classes of the head, C classes of the run; x = (z - m, 1). "Line" refers to the section "The mathematics"
of `docs/reference/methods/classstats.md`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import Array, ClassSpace, HeadGradient, LinearHead
from fleetdistill.methods.classstats.class_space import best_temperature

__all__ = [
    "REFINED_TEMPERATURES",
    "GradientSum",
    "balanced_prior",
    "choose_temperature",
    "from_wire",
    "gradient_sum",
    "left_out_logits",
    "to_wire",
]

REFINED_TEMPERATURES = (0.2, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
"""Temperatures τ from which a device selects the best one for its personal answer (line `personally`)."""
_ROWS_AT_ONCE = 1024
_SMALLEST_REST = 0.05  # lower bound of 1 - h p (1 - p)
_LARGEST = 2.0**14
"""Largest number of a gradient on the wire: float16 then has eleven digits for all but the smallest."""


class GradientSum(NamedTuple):
    """Sums over a device's counted rows (line `gradient`).

    Attributes:
        gradient: G, the gradient of `loss` by the weights, `[K, D + 1]` float64.
        loss: Negative log-likelihood of the labels, in nats, at least 0.
        rows: Number of the rows.
    """

    gradient: Array
    loss: float
    rows: int


def gradient_sum(head: LinearHead, rows_nd: Array, labels_n: Array, counted: Collection[int]) -> GradientSum:
    """Sums gradient and loss of the softmax over the counted rows (line `gradient`).

    Sums of several devices add up to those of all their rows; their distribution over the devices has no effect. Memory
    for the computation does not grow with n.

    Args:
        head: The point of evaluation.
        rows_nd: Projected features of the device's rows, `[n, D]`, finite.
        labels_n: Classes of the rows, `[n]`.
        counted: Classes whose rows of this device are in the merge; rows of other classes are left out.

    Raises:
        KnowledgeError: The rows do not have the head's D numbers.
    """
    _check_rows(head, rows_nd)
    at = np.flatnonzero(_is_counted(head, labels_n, counted))
    place_n = np.searchsorted(head.labels, labels_n)
    gradient, loss = np.zeros(head.weights.shape), 0.0
    for start in range(0, len(at), _ROWS_AT_ONCE):
        chosen = at[start : start + _ROWS_AT_ONCE]
        x = _centred(head, rows_nd[chosen])
        log_p = _log_softmax(x @ head.weights.astype(np.float64).T)
        own = np.arange(len(chosen)), place_n[chosen]
        loss -= float(log_p[own].sum())
        error = np.exp(log_p)
        error[own] -= 1
        gradient += error.T @ x
    return GradientSum(gradient, max(loss, 0.0), len(at))


def to_wire(summed: GradientSum, head: LinearHead, classes: int) -> HeadGradient:
    """Returns the sums as a device sends them, with a row for each of the C classes."""
    largest = float(np.abs(summed.gradient).max(initial=0.0))
    scale = 2.0 ** math.ceil(math.log2(largest / _LARGEST)) if largest else 1.0
    gradient = np.zeros((classes, summed.gradient.shape[1]))
    gradient[head.labels] = summed.gradient / scale
    return HeadGradient(gradient=gradient, scale=scale, loss=summed.loss, rows=summed.rows)


def from_wire(sent: HeadGradient, head: LinearHead) -> GradientSum:
    """Returns the sums that a device has sent, for the head's classes."""
    gradient = sent.gradient.astype(np.float64)[list(head.labels)] * sent.scale
    return GradientSum(gradient, sent.loss, sent.rows)


def left_out_logits(space: ClassSpace, logits_nc: Array, labels_n: Array, counted: Collection[int]) -> Array:
    """Returns approximate logits of the device's rows, each left out of the refined head (line `left_out`).

    Their likelihood suffices to choose a temperature, or between two answers. They are no estimate of the accuracy on
    unseen rows: with many classes the share of rows that they classify correctly is far below it.

    Args:
        space: The space of the refined head.
        logits_nc: L, logits of the rows.
        labels_n: Classes of the rows, `[n]`.
        counted: Classes whose rows of this device are in the head; other rows are not corrected.

    Returns:
        `[n, C]` float64.
    """
    result = logits_nc.copy()
    at, leverage = np.flatnonzero(_is_counted(space, labels_n, counted)), space.leverage
    p = np.exp(_log_softmax(result[at]))
    error = p.copy()
    error[np.arange(len(at)), labels_n[at]] -= 1
    result[at] += leverage * error / np.maximum(1 - leverage * p * (1 - p), _SMALLEST_REST)
    return result


def choose_temperature(space: ClassSpace, left_out_nc: Array, labels_n: Array, prior_c: Array) -> float:
    """Returns the value of `REFINED_TEMPERATURES` that maximises the likelihood of the rows (line `personally`).

    Args:
        space: The space of the refined head. Rows of classes that it does not have say nothing about a temperature, and
            are left out.
        left_out_nc: Logits of the device's rows, from `left_out_logits`.
        labels_n: Classes of the rows, `[n]`.
        prior_c: The device's class shares, from `class_space.class_prior`.
    """
    known = np.isin(labels_n, space.labels)
    balanced = left_out_nc[known] - _log_shares(space, len(prior_c))
    return best_temperature(balanced, labels_n[known], prior_c, REFINED_TEMPERATURES)


def balanced_prior(space: ClassSpace, temperature: float, prior_c: Array) -> Array:
    """Returns π (N / Σ N)^(-1/τ), `[C]`; its logarithm added to L / τ gives the personal answer (line `personally`).

    Args:
        space: The space of the refined head, with N; a class that it does not have keeps its share.
        temperature: τ, above 0.
        prior_c: π, the device's class shares, `[C]`.
    """
    return np.asarray(prior_c * np.exp(-_log_shares(space, len(prior_c)) / temperature))


def _log_shares(space: ClassSpace, classes: int) -> Array:
    """Returns log(N_c / Σ N), `[C]`; 0 for a class that the head does not have."""
    result = np.zeros(classes)
    result[list(space.labels)] = np.log(space.counts / space.counts.sum())
    return result


def _check_rows(head: LinearHead, rows_nd: Array) -> None:
    if rows_nd.shape[1:] != head.mean.shape:
        text = f"rows {list(rows_nd.shape)}, expected [n, {len(head.mean)}]"
        raise KnowledgeError(f"the head and the features do not fit: {text}; use the extractor of the run")


def _is_counted(head: LinearHead | ClassSpace, labels_n: Array, counted: Collection[int]) -> Array:
    return np.isin(labels_n, sorted(set(counted) & set(head.labels)))


def _centred(head: LinearHead, rows_nd: Array) -> Array:
    """Returns x = (z - m, 1), `[n, D + 1]` float64."""
    x = np.ones((len(rows_nd), rows_nd.shape[1] + 1))
    x[:, :-1] = rows_nd.astype(np.float64) - head.mean.astype(np.float64)
    return x


def _log_softmax(logits_nk: Array) -> Array:
    below = logits_nk - logits_nk.max(axis=1, keepdims=True)
    return np.asarray(below - np.log(np.exp(below).sum(axis=1, keepdims=True)))
