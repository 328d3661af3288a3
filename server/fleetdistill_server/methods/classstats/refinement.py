"""Refines the head of class statistics: a convex objective from the merge, and steps from sums of gradients.

The server half of `fleetdistill.methods.classstats.refined_head`. Computes in float64, with NumPy. Symbols: n
rows, D numbers per row, K classes, x = (z - m, 1), df degrees of freedom. "Line" refers to the section "The
mathematics" of `docs/reference/methods/classstats.md`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import Array, ClassSpace
from fleetdistill.methods.classstats.class_space import shrunk
from fleetdistill.methods.classstats.refined_head import GradientSum
from fleetdistill.methods.classstats.shared_statistics import Moments

_BIAS_PRIOR = 1e-3
_SMALLEST_DIRECTION = 1e-12  # of the largest; smaller ones are rounding
_HALVINGS = 40
_SLACK = 1.1
_ROUNDING = 2.0**-8
"""Share of the products in a tangent that float16 may have rounded away, of means and gradients."""
_MIN_CURVATURE = 1e-10  # of a pair of differences; pairs below would make the inverse Hessian indefinite


@dataclass(frozen=True, kw_only=True, eq=False)
class Objective:
    """J(W) = Σ -log softmax(W x)_y + λ/2 tr(W T₃ Wᵀ) over the fleet's counted rows (line `objective`).

    Attributes:
        labels: The K classes, ascending.
        counts: N, rows of each class, `[K]` int64.
        means: M, mean of each class, `[K, D]` float64.
        mean: m, `[D]` float64; the devices centre their rows with it.
        metric: T, the shrunk covariance within classes, `[D, D]` float64.
        scatter: K, scatter of all rows about m, `[D, D]` float64.
        strength: λ, above 0.
    """

    labels: tuple[int, ...]
    counts: Array
    means: Array
    mean: Array
    metric: Array
    scatter: Array
    strength: float

    @property
    def rows(self) -> int:
        """n, counted rows of all devices."""
        return int(self.counts.sum())

    @property
    def curvature(self) -> float:
        """a, the mean of p (1 - p) at p = 1 / K."""
        return (1 - 1 / len(self.labels)) / len(self.labels)

    def prior_metric(self) -> Array:
        """Returns T₃, `[D + 1, D + 1]`: T, and 1e-3 for the bias."""
        return _with_last(self.metric, _BIAS_PRIOR)

    def hessian(self) -> Array:
        """Returns H = a K₃ + λ T₃, `[D + 1, D + 1]`: one class's block of the Hessian at W = 0 (line `objective`)."""
        return self.curvature * _with_last(self.scatter, self.rows) + self.strength * self.prior_metric()

    def start(self) -> Array:
        """Returns W₀, `[K, D + 1]`: Newton's step from W = 0 (line `start`)."""
        sums = self.counts[:, None] * (self.means - self.mean)
        extra = self.counts - self.rows / len(self.labels)
        return np.linalg.solve(self.hessian(), np.column_stack([sums, extra]).T).T

    def value_and_gradient(self, weights_kd: Array, summed: GradientSum) -> tuple[float, Array]:
        """Returns J in nats, and its gradient `[K, D + 1]`, at the weights (line `objective`).

        Args:
            weights_kd: W, `[K, D + 1]`, exactly as the devices had it.
            summed: Sum over the devices at W.
        """
        leaning = weights_kd @ self.prior_metric() * self.strength
        return summed.loss + float(np.vdot(leaning, weights_kd)) / 2, summed.gradient + leaning

    def leverage(self) -> float:
        """Returns h, a row's mean share in its own logits, for leave-one-out (line `left_out`)."""
        twice = 2 * self.curvature
        inner = np.linalg.solve(twice * self.scatter + self.strength * self.metric, self.scatter)
        return float((np.trace(inner) + self.rows / (twice * self.rows + self.strength)) / self.rows)


def mean_of_rows(moments: Moments) -> Array:
    """Returns m, the mean of the merge's rows, `[D]` float64 (line `objective`)."""
    return np.asarray(moments.counts @ moments.means / moments.counts.sum())


def strength_rule(rows: int, classes: int, dimensions: int) -> float:
    """Returns λ = min(n / K, D) (line `objective`)."""
    return float(min(rows / classes, dimensions))


def bounded_strength(objective: Objective, max_leverage: float = 1.0) -> float:
    """Returns the smallest λ, at least the objective's, with which the leverage h is at most a bound (line `bounded`).

    With few rows of a class, λ = n / K is so weak that the head fits single rows.

    Args:
        objective: The objective; its λ is the lower bound.
        max_leverage: Bound of h, above 0.
    """
    root = np.linalg.inv(np.linalg.cholesky(objective.metric))
    ratios = np.append(np.linalg.eigvalsh(root @ objective.scatter @ root.T), objective.rows)
    low, high = objective.strength, objective.strength
    while _leverage(ratios, objective, high) > max_leverage:
        low, high = high, 2 * high
    for _ in range(_HALVINGS if high > low else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if _leverage(ratios, objective, middle) > max_leverage else (low, middle)
    return high


def _leverage(ratios: Array, objective: Objective, strength: float) -> float:
    """Returns h with another λ; the ratios are the eigenvalues of T⁻¹ K, and n for the bias."""
    return float((ratios / (2 * objective.curvature * ratios + strength)).sum() / objective.rows)


def make_objective(moments: Moments, mean_d: Array, shrinkage: float, strength: float) -> Objective:
    """Makes the objective of a merge (line `objective`).

    Args:
        moments: The merge, with at least two classes.
        mean_d: m, `[D]`, as the devices get it: `mean_of_rows`, rounded to float16.
        shrinkage: s, in [0, 1).
        strength: λ, above 0; usually `strength_rule`.

    Raises:
        KnowledgeError: The merge has fewer than two classes, or no feature varies within a class.
    """
    if len(moments.labels) < 2:
        raise KnowledgeError(f"a refined head needs at least two classes, but the merge has {len(moments.labels)}")
    if not np.diag(moments.covariance).any():
        raise KnowledgeError("no feature varies within a class; check the extractor and its inputs")
    mean = mean_d.astype(np.float64)
    metric, away = shrunk(moments.covariance, shrinkage), moments.means - mean
    return Objective(
        labels=moments.labels,
        counts=moments.counts,
        means=moments.means,
        mean=mean,
        metric=metric,
        scatter=moments.df * metric + (moments.counts[:, None] * away).T @ away,
        strength=strength,
    )


def usual_objective(moments: Moments, mean_d: Array, shrinkage: float) -> Objective:
    """Makes the objective with λ by the rules `strength_rule` and `bounded_strength`; see `make_objective`."""
    rule = strength_rule(int(moments.counts.sum()), len(moments.labels), moments.dimensions)
    objective = make_objective(moments, mean_d, shrinkage, rule)
    return replace(objective, strength=bounded_strength(objective))


class Refinement:
    """Steps of L-BFGS towards the objective's minimum, preconditioned with the Hessian at W = 0 (line `step`).

    Each step uses sums of the devices at the weights as they were sent, so rounding of the weights does no harm.

    Attributes:
        objective: What is minimised.
        weights: The next weights to evaluate, `[K, D + 1]` float64; W₀ before the first step.
        values: J of the evaluated weights, in their order, in nats.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.weights = objective.start()
        self.restart()

    def restart(self) -> None:
        """Discards everything but the weights: the sums are over other devices from now on."""
        self.values: list[float] = []
        self._pairs: list[tuple[Array, Array]] = []  # differences of weights and gradients
        self._last: tuple[Array, Array] | None = None  # weights and gradient of the last evaluation
        self._best: Array | None = None

    def step(self, evaluated_kd: Array, summed: GradientSum) -> Array:
        """Takes a step from evaluated weights; returns the next weights, `[K, D + 1]` float64.

        Args:
            evaluated_kd: `weights`, as the devices had them: rounded to float16.
            summed: Sum over the devices at these weights.
        """
        evaluated = evaluated_kd.astype(np.float64)
        value, gradient = self.objective.value_and_gradient(evaluated, summed)
        if self._best is None or value < min(self.values):
            self._best = evaluated
        self.values.append(value)
        if self._last is not None:
            moved, turned = evaluated - self._last[0], gradient - self._last[1]
            if np.vdot(moved, turned) > _MIN_CURVATURE:
                self._pairs.append((moved, turned))
        self._last = evaluated, gradient
        self.weights = evaluated - self._direction(gradient)
        return self.weights

    def _direction(self, gradient: Array) -> Array:
        """Returns the inverse Hessian of L-BFGS times the gradient: the two loops, with all pairs."""
        shares = []
        rest = gradient.copy()
        for moved, turned in reversed(self._pairs):
            share = np.vdot(moved, rest) / np.vdot(moved, turned)
            rest -= share * turned
            shares.append(share)
        result = np.linalg.solve(self.objective.hessian(), rest.T).T
        for (moved, turned), share in zip(self._pairs, reversed(shares), strict=True):
            result += (share - np.vdot(turned, result) / np.vdot(moved, turned)) * moved
        return result

    def final(self) -> Array:
        """Returns the final weights, `[K, D + 1]` (line `step`).

        They are the next ones, or, if the last evaluation was worse than an earlier one, the evaluated ones with the
        least J.
        """
        if self._best is not None and self.values[-1] > min(self.values):
            return self._best
        return self.weights


def space_of_head(objective: Objective, weights_kd: Array, df: int, shrinkage: float) -> ClassSpace:
    """Returns the space in which the nearest centre's logits are those of the head, but for a number added to each row.

    Args:
        objective: Of the head. The space's directions are those of its weights, in which T is the identity.
        weights_kd: W, `[K, D + 1]`.
        df: Degrees of freedom of the merge.
        shrinkage: s of the merge.

    Returns:
        The space in float64; it is sent in float16.
    """
    values, vectors = np.linalg.eigh(objective.metric)
    root = np.sqrt(np.maximum(values, np.finfo(np.float64).tiny))
    above = weights_kd - weights_kd.mean(axis=0)
    classes = len(objective.labels)
    left, sizes, axes = np.linalg.svd((above[:, :-1] @ vectors) * root, full_matrices=False)
    count = min(classes - 1, int((sizes > sizes[0] * _SMALLEST_DIRECTION).sum()))
    centres = left[:, :count] * sizes[:count]
    # v b - |b|^2 / 2 with v = z P - o is the head's logit if o b = m w - bias - |b|^2 / 2, up to one number of all
    wanted = above[:, :-1] @ objective.mean - above[:, -1] - np.square(centres).sum(axis=1) / 2
    origin = np.linalg.lstsq(np.column_stack([centres, np.ones(classes)]), wanted, rcond=None)[0][:count]
    return ClassSpace(
        labels=list(objective.labels),
        counts=objective.counts.astype(np.int32),
        directions=(vectors / root) @ axes[:count].T,
        origin=origin,
        centres=centres,
        df=np.array(df, dtype=np.int64),
        shrinkage=np.array(shrinkage, dtype=np.float64),
        outside=np.zeros(()),
        leverage=objective.leverage(),
    )


def why_refused(summed: GradientSum, shape: tuple[int, int]) -> str | None:
    """Returns why a device's sums cannot be right, as a sentence's end; None if they can.

    Args:
        summed: The sums as they were sent: the gradient in float16.
        shape: `(K, D + 1)`.
    """
    gradient, loss, rows = summed
    if gradient.shape != shape:
        return f"the gradient is {list(gradient.shape)}, expected {list(shape)}"
    if not np.isfinite(gradient).all():
        return "the gradient is not finite"
    if rows < 1:
        return f"the sums are of {rows} rows, expected at least 1"
    if not (math.isfinite(loss) and loss >= 0):
        return f"the loss is {loss:g}, expected a finite number of at least 0"
    wide = gradient.astype(np.float64)
    off = np.abs(wide.sum(axis=0))
    allowed = 2.0**-10 * np.abs(wide).sum(axis=0) + len(wide) * 2.0**-24  # twice what float16 rounds away
    if (off > allowed).any():
        column = int((off - allowed).argmax())
        return f"column {column} of the gradient sums to {wide[:, column].sum():.2g} over the classes, expected 0"
    return None


class GradientChecks:
    """What the sums of one device must satisfy by the class statistics that it has sent.

    Its rows are those of its statistics; no number of a gradient exceeds what their squares allow; and its loss is
    convex: at every head it lies above its tangents at the others, W = 0 included, where the statistics give both. This
    holds whatever the rows are. That the first head, the server's own, is worse than guessing on them is possible, but
    was so of no honest device.
    """

    def __init__(self, moments: Moments, counted: Collection[int], labels: Sequence[int], mean_d: Array) -> None:
        """Takes a device's statistics.

        Args:
            moments: Of the device, as sent.
            counted: Its classes in the merge.
            labels: The K classes of the head.
            mean_d: m, `[D]`.
        """
        at = [place for place, label in enumerate(moments.labels) if label in counted]
        counts, means = moments.counts[at].astype(np.float64), moments.means[at] - mean_d
        self.rows = int(counts.sum())
        squares = counts @ np.square(means) + moments.df * np.diag(moments.covariance)
        self._largest = _SLACK * np.sqrt(self.rows * np.append(squares, self.rows))
        self._rounded = 2.0**-10 * np.append(counts @ np.abs(moments.means[at]), 0.0)  # of the means, by float16
        sums = np.zeros((len(labels), len(mean_d) + 1))
        places = [list(labels).index(moments.labels[place]) for place in at]
        sums[places] = counts[:, None] * np.column_stack([means, np.ones(len(at))])
        start = GradientSum(sums.sum(axis=0) / len(labels) - sums, self.rows * math.log(len(labels)), self.rows)
        self._known: list[tuple[Array, GradientSum]] = [(np.zeros(sums.shape), start)]

    def why_refused(self, weights_kd: Array, summed: GradientSum) -> str | None:
        """Returns why sums at weights cannot be right, as a sentence's end; None if they can, and are remembered."""
        if summed.rows != self.rows:
            return f"the sums are of {summed.rows} rows, its statistics of {self.rows}"
        if len(self._known) == 1 and summed.loss > self._known[0][1].loss:
            return f"the loss is {summed.loss / self.rows:.2f} nats a row, more than by guessing"
        if (np.abs(summed.gradient) > self._largest).any():
            return "the gradient is larger than the rows of its statistics allow"
        weights = weights_kd.astype(np.float64)
        for number, (earlier, known) in enumerate(self._known):
            away = weights - earlier
            blurred = 0.0 if number else float((np.abs(away) @ self._rounded).sum())
            for at, other, step in ((known, summed, away), (summed, known, -away)):
                allowed = _ROUNDING * float(np.vdot(np.abs(at.gradient), np.abs(step)) + at.loss + other.loss) + blurred
                if other.loss < at.loss + float(np.vdot(at.gradient, step)) - allowed:
                    return "loss and gradient contradict those at another head, or its statistics"
        self._known.append((weights, summed))
        return None


def _with_last(square: Array, last: float) -> Array:
    """Returns the matrix with a further diagonal entry."""
    result = np.zeros((len(square) + 1, len(square) + 1))
    result[:-1, :-1], result[-1, -1] = square, last
    return result
