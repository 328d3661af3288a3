"""The refined head: a softmax classifier of the fleet's classes, reached by exact sums of the devices' gradients.

A device computes its sums and its two answers here; the server half is
`fleetdistill_server.methods.classstats.refinement`. Computes in float64, with NumPy only. Symbols: n rows, D numbers
per row, K classes of the head, C classes of the run; x = (z - m, 1). "Line" refers to the section "The mathematics"
of `docs/reference/methods/classstats.md`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats.class_space import best_temperature

__all__ = [
    "REFINED_TEMPERATURES",
    "WITHOUT_STATISTICS",
    "GradientSum",
    "RefinedHead",
    "choose_temperature",
    "gradient_sum",
    "head_logits",
    "leave_one_out_logits",
    "log_shares",
    "personal_logits",
]

REFINED_TEMPERATURES = (0.2, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
"""Temperatures τ from which a device selects the best one for its personal answer (line `personally`)."""
WITHOUT_STATISTICS = -1000.0
"""Logit of a class of the run that the head does not have."""
_ROWS_AT_ONCE = 1024
_SMALLEST_REST = 0.05  # lower bound of 1 - h p (1 - p)


@dataclass(frozen=True, kw_only=True, eq=False)
class RefinedHead:
    """A softmax classifier of centred rows.

    Attributes:
        labels: The K classes, ascending.
        counts: N, the fleet's rows of each class, `[K]`, at least 1.
        mean: m, the mean of the fleet's rows, `[D]`; it centres the rows.
        weights: W, `[K, D + 1]`; the last column has the biases.
    """

    labels: tuple[int, ...]
    counts: Array
    mean: Array
    weights: Array


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


def gradient_sum(head: RefinedHead, rows_nd: Array, labels_n: Array, counted: Collection[int]) -> GradientSum:
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


def head_logits(head: RefinedHead, rows_nd: Array, classes: int) -> Array:
    """Returns the general answer's logits, W x (line `refined`).

    Args:
        head: The head.
        rows_nd: Projected features, `[n, D]`.
        classes: C.

    Returns:
        `[n, C]` float64; `WITHOUT_STATISTICS` for a class that the head does not have.

    Raises:
        KnowledgeError: The rows do not have the head's D numbers.
    """
    _check_rows(head, rows_nd)
    result = np.full((len(rows_nd), classes), WITHOUT_STATISTICS)
    result[:, head.labels] = _centred(head, rows_nd) @ head.weights.astype(np.float64).T
    return result


def leave_one_out_logits(
    head: RefinedHead, rows_nd: Array, labels_n: Array, counted: Collection[int], leverage: float, classes: int
) -> Array:
    """Returns approximate logits of the device's rows, each left out of the head (line `left_out`).

    They suffice to choose a temperature. They are no estimate of the accuracy on unseen rows: with many classes the
    share of rows that they classify correctly is far below it.

    Args:
        head: The head.
        rows_nd: Projected features of the device's rows, `[n, D]`.
        labels_n: Classes of the rows, `[n]`.
        counted: Classes whose rows of this device are in the head; other rows are not corrected.
        leverage: h, a row's mean share in its own logits, at least 0; from the server.
        classes: C.

    Returns:
        `[n, C]` float64.

    Raises:
        KnowledgeError: The rows do not have the head's D numbers.
    """
    result = head_logits(head, rows_nd, classes)
    at = np.flatnonzero(_is_counted(head, labels_n, counted))
    p = np.exp(_log_softmax(result[at]))
    error = p.copy()
    error[np.arange(len(at)), labels_n[at]] -= 1
    result[at] += leverage * error / np.maximum(1 - leverage * p * (1 - p), _SMALLEST_REST)
    return result


def log_shares(head: RefinedHead, classes: int) -> Array:
    """Returns log(N_c / Σ N), `[C]`; 0 for a class that the head does not have."""
    result = np.zeros(classes)
    result[list(head.labels)] = np.log(head.counts / head.counts.sum())
    return result


def choose_temperature(head: RefinedHead, left_out_nc: Array, labels_n: Array, prior_c: Array) -> float:
    """Returns the value of `REFINED_TEMPERATURES` that maximises the likelihood of the rows (line `personally`).

    Args:
        head: The head. Rows of classes that it does not have say nothing about a temperature, and are left out.
        left_out_nc: Logits of the device's rows, from `leave_one_out_logits`.
        labels_n: Classes of the rows, `[n]`.
        prior_c: The device's class shares, from `class_space.class_prior`.
    """
    known = np.isin(labels_n, head.labels)
    balanced = left_out_nc[known] - log_shares(head, len(prior_c))
    return best_temperature(balanced, labels_n[known], prior_c, REFINED_TEMPERATURES)


def personal_logits(head: RefinedHead, logits_nc: Array, temperature: float, prior_c: Array) -> Array:
    """Returns the personal answer's logits, (L - log(N / Σ N)) / τ + log π (line `personally`).

    Args:
        head: The head.
        logits_nc: L, from `head_logits` or `leave_one_out_logits`.
        temperature: τ, above 0.
        prior_c: π, the device's class shares, `[C]`.

    Returns:
        `[n, C]` float64.
    """
    return np.asarray((logits_nc - log_shares(head, len(prior_c))) / temperature + np.log(prior_c))


def _check_rows(head: RefinedHead, rows_nd: Array) -> None:
    if rows_nd.shape[1:] != head.mean.shape:
        text = f"rows {list(rows_nd.shape)}, expected [n, {len(head.mean)}]"
        raise KnowledgeError(f"the head and the features do not fit: {text}; use the extractor of the run")


def _is_counted(head: RefinedHead, labels_n: Array, counted: Collection[int]) -> Array:
    return np.isin(labels_n, sorted(set(counted) & set(head.labels)))


def _centred(head: RefinedHead, rows_nd: Array) -> Array:
    """Returns x = (z - m, 1), `[n, D + 1]` float64."""
    x = np.ones((len(rows_nd), rows_nd.shape[1] + 1))
    x[:, :-1] = rows_nd.astype(np.float64) - head.mean.astype(np.float64)
    return x


def _log_softmax(logits_nk: Array) -> Array:
    below = logits_nk - logits_nk.max(axis=1, keepdims=True)
    return np.asarray(below - np.log(np.exp(below).sum(axis=1, keepdims=True)))
