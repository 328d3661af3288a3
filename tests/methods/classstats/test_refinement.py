"""The server's mathematics of the refined head: oracles (R-1 to R-3, R-6 to R-8), laws, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from methods.classstats.refined_rows import LABELS, MINIMUM, ROWS, head, objective, summed
from numpy.testing import assert_allclose, assert_array_equal

from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats.refined_head import GradientSum, gradient_sum
from fleetdistill.methods.classstats.shared_statistics import from_wire as statistics_from_wire
from fleetdistill.methods.classstats.shared_statistics import merge, moments_of
from fleetdistill.methods.classstats.shared_statistics import to_wire as statistics_to_wire
from fleetdistill_server.methods.classstats.refinement import (
    GradientChecks,
    Objective,
    Refinement,
    bounded_strength,
    make_objective,
    mean_of_rows,
    strength_rule,
    why_refused,
)


def refined(steps: int) -> Refinement:
    result = Refinement(objective())
    for _ in range(steps):
        result.step(result.weights, summed(result.weights))
    return result


# --- oracles


def test_r_1_mean_covariance_and_strength() -> None:
    moments, result = moments_of(ROWS, LABELS), objective()
    assert (result.counts.tolist(), moments.df, result.rows) == ([5, 4, 3], 9, 12)
    means: Any = [[3, -0.6], [0, 2], [-2, -2]]
    assert_allclose(result.means, means, atol=1e-12)
    assert_allclose(result.mean, [0.75, -0.0833333333], atol=5e-11)
    expected: Any = [[1.5555555556, -1], [-1, 1.4666666667]]
    assert_allclose(moments.covariance, expected, atol=5e-11)
    assert result.strength == 2
    assert result.curvature == pytest.approx(0.2222222222, abs=5e-11)


def test_r_2_metric_and_scatter() -> None:
    expected: Any = [[1.5555570667, -0.75], [-0.75, 1.4666681778]]
    assert_allclose(objective().metric, expected, atol=5e-11)
    expected = [[64.2500136000, -3], [-3, 42.9166802667]]
    assert_allclose(objective().scatter, expected, atol=5e-10)


def test_r_3_start() -> None:
    expected = [
        [0.6348973999, -0.0968473012, 0.3747189608],
        [-0.0912346256, 0.6523987762, 0],
        [-0.5436627744, -0.5555514750, -0.3747189608],
    ]
    assert_allclose(objective().start(), expected, atol=5e-10)


def test_r_6_values_and_weights_of_two_steps() -> None:
    result = refined(3)
    assert_allclose(result.values, [4.6747587667, 4.5607193054, 4.5232552681], atol=5e-10)
    expected = [
        [0.6104003134, -0.0175055995, 0.5768417683],
        [-0.0842821213, 0.6061135886, 0.0650875135],
        [-0.5261181920, -0.5886079892, -0.6419292817],
    ]
    assert_allclose(refined(2).weights, expected, atol=5e-10)


def test_r_7_minimum() -> None:
    value, gradient = objective().value_and_gradient(MINIMUM, summed(MINIMUM))
    assert value == pytest.approx(4.5041132708, abs=5e-10)
    assert_allclose(gradient, 0, atol=1e-8)
    result = refined(40)
    assert result.values[-1] == pytest.approx(4.5041132708, abs=5e-10)
    assert_allclose(result.weights, MINIMUM, atol=1e-6)


def test_r_8_leverage_by_trace_and_eigenvalues() -> None:
    result = objective()
    assert result.leverage() == pytest.approx(0.4697586200, abs=5e-11)
    twice = 2 * result.curvature
    values = np.linalg.eigvals(np.linalg.solve(result.metric, result.scatter)).real
    traced = (values / (twice * values + 2)).sum() + 12 / (twice * 12 + 2)
    assert traced / 12 == pytest.approx(0.4697586200, abs=5e-11)


# --- the objective


def test_objective_is_convex_and_its_gradient_a_slope() -> None:
    generator, step, made = np.random.default_rng(0), 1e-5, objective()
    for _ in range(5):
        weights, direction = generator.standard_normal((2, 3, 3))
        ends = [
            made.value_and_gradient(weights + item * direction, summed(weights + item * direction))
            for item in (-step, 0, step)
        ]
        slope = (ends[2][0] - ends[0][0]) / (2 * step)
        assert slope == pytest.approx(float(np.vdot(ends[1][1], direction)), abs=1e-6)
        assert np.vdot(ends[2][1] - ends[0][1], direction) > 0


def test_start_is_newtons_step_from_no_weights() -> None:
    """The devices' own gradient at 0 is what the start takes from the moments alone."""
    made = objective()
    gradient = summed(np.zeros((3, 3))).gradient
    assert_allclose(made.start(), np.linalg.solve(made.hessian(), -gradient.T).T, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "classes", "dimensions", "expected"),
    [(3_000, 10, 384, 300), (8_000, 10, 384, 384), (6_000, 104, 384, 57.7)],
)
def test_strength_is_the_rows_of_a_class(rows: int, classes: int, dimensions: int, expected: float) -> None:
    assert strength_rule(rows, classes, dimensions) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("bound", [0.4, 0.1, 0.01])
def test_bounded_strength_has_exactly_this_leverage(bound: float) -> None:
    made = objective()
    strength = bounded_strength(made, bound)
    assert strength > made.strength
    assert replace(made, strength=strength).leverage() == pytest.approx(bound, rel=1e-9)


def test_strength_of_small_leverage_stays() -> None:
    """h is 0.47."""
    assert bounded_strength(objective(), 0.5) == objective().strength
    assert bounded_strength(objective()) == objective().strength


def test_no_objective_of_one_class_or_constant_features() -> None:
    one = moments_of(ROWS, np.zeros(12, int))
    with pytest.raises(KnowledgeError, match="at least two classes, but the merge has 1"):
        make_objective(one, mean_of_rows(one), 0.25, 1.0)
    flat = moments_of(np.ones((4, 2)), np.array([0, 0, 1, 1]))
    with pytest.raises(KnowledgeError, match="no feature varies"):
        make_objective(flat, mean_of_rows(flat), 0.25, 1.0)


# --- steps


def random_fleet(seed: int) -> tuple[Objective, Any]:
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(4), 12)
    rows = generator.standard_normal((48, 5)) + generator.standard_normal((4, 5))[labels]
    moments = moments_of(rows, labels)
    made = make_objective(moments, mean_of_rows(moments).astype(np.float16), 0.1, 2.0)

    def evaluate(weights: Array) -> GradientSum:
        return gradient_sum(head(weights, made), rows, labels, range(4))

    return made, evaluate


@given(seed=st.integers(0, 2**32 - 1))
def test_steps_lead_to_the_minimum(seed: int) -> None:
    made, evaluate = random_fleet(seed)
    result = Refinement(made)
    for _ in range(60):
        result.step(result.weights, evaluate(result.weights))
    _, gradient = made.value_and_gradient(result.final(), evaluate(result.final()))
    assert_allclose(gradient, 0, atol=1e-4)
    assert result.values[-1] <= result.values[0]


def test_final_weights_are_the_next_ones_while_values_fall() -> None:
    result = refined(2)
    assert_array_equal(result.final(), result.weights)
    assert_array_equal(Refinement(objective()).final(), objective().start())


def test_final_weights_are_those_of_least_value_after_a_rise() -> None:
    result = refined(2)
    least = result.weights
    result.step(least, summed(least))
    worse = least + 1
    result.step(worse, summed(worse))
    assert result.values.index(min(result.values)) == 2
    assert_array_equal(result.final(), least)


def test_restart_keeps_only_the_weights() -> None:
    result = refined(3)
    weights = result.weights
    result.restart()
    assert (result.values, result.weights is weights) == ([], True)
    fresh = Refinement(objective())
    sums = summed(weights)
    assert_array_equal(result.step(weights, sums), fresh.step(weights, sums))


# --- what is refused


@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-7, 1e-3, 1.0, 100.0]), rows=st.integers(1, 30))
def test_rounding_to_float16_is_never_refused(seed: int, scale: float, rows: int) -> None:
    generator = np.random.default_rng(seed)
    points, labels = scale * generator.standard_normal((rows, 2)), generator.integers(3, size=rows)
    at = replace(head(generator.standard_normal((3, 3))), mean=np.zeros(2))
    sums = gradient_sum(at, points, labels, (0, 1, 2))
    assert why_refused(sums._replace(gradient=sums.gradient.astype(np.float16)), (3, 3)) is None


GRADIENT = np.array([[1, -1, 0], [-0.5, 0.5, 0], [-0.5, 0.5, 0]], np.float16)


def test_possible_sums_are_taken() -> None:
    assert why_refused(GradientSum(GRADIENT, 1.0, 5), (3, 3)) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gradient": GRADIENT[:2]}, r"is \[2, 3\], expected \[3, 3\]"),
        ({"gradient": np.where(GRADIENT == 1, np.nan, GRADIENT)}, "not finite"),
        ({"gradient": np.where(GRADIENT == 1, np.inf, GRADIENT)}, "not finite"),
        ({"gradient": np.where(GRADIENT == 1, 1.01, GRADIENT)}, "column 0 .* sums to 0.0098 .* expected 0"),
        ({"loss": -0.5}, "loss is -0.5"),
        ({"loss": float("nan")}, "loss is nan"),
        ({"rows": 0}, "of 0 rows, expected at least 1"),
    ],
)
def test_impossible_sums_are_refused_with_a_reason(changes: dict[str, Any], says: str) -> None:
    reason = why_refused(GradientSum(GRADIENT, 1.0, 5)._replace(**changes), (3, 3))
    assert reason is not None
    assert re.search(says, reason)


# --- what a device's own statistics say of its sums


def checks_of(rows: Array, labels: Array, made: Objective, mean: Array) -> GradientChecks:
    """Of the statistics as a device sends them."""
    sent = statistics_from_wire(statistics_to_wire(moments_of(rows, labels), 128, 2))
    return GradientChecks(sent, sent.labels, made.labels, mean)


def fleet_with(seed: int, size: float = 1.0, offset: float = 0.0) -> tuple[Objective, Array, Array]:
    """Two devices' rows, of which those of the second are returned."""
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(4), 12)
    rows = generator.standard_normal((48, 5)) + 2 * generator.standard_normal((4, 5))[labels]
    rows = (size * rows + offset).astype(np.float32).astype(np.float64)
    moments = merge([moments_of(rows[::2], labels[::2]), moments_of(rows[1::2], labels[1::2])])
    made = make_objective(moments, mean_of_rows(moments).astype(np.float16), 0.1, 2.0)
    return made, rows[1::2], labels[1::2]


@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([0.01, 1.0, 50.0]), offset=st.sampled_from([0.0, 3.0]))
def test_honest_sums_are_never_refused(seed: int, size: float, offset: float) -> None:
    """At the heads of the fleet's own steps, with statistics, heads and gradients rounded as they travel."""
    made, rows, labels = fleet_with(seed, size, offset)
    checks, refinement = checks_of(rows, labels, made, made.mean), Refinement(made)
    whole = rows, labels
    for _ in range(4):
        weights = refinement.weights.astype(np.float16)
        sums = gradient_sum(head(weights, made), *whole, range(4))
        narrow = sums._replace(gradient=sums.gradient.astype(np.float16).astype(np.float64))
        reason = checks.why_refused(weights, narrow)
        assert reason is None or "more than by guessing" in reason  # the head is of both devices' rows
        refinement.step(weights, narrow)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda sums: sums._replace(rows=sums.rows + 1), "of 25 rows, its statistics of 24"),
        (lambda sums: sums._replace(gradient=1000 * sums.gradient), "larger than the rows"),
        (lambda sums: sums._replace(gradient=-5 * sums.gradient), "contradict those at another head|larger than"),
        (lambda sums: sums._replace(loss=24 * np.log(4) + 0.1), "1.39 nats a row, more than by guessing"),
    ],
)
def test_sums_that_contradict_the_statistics_are_refused(change, says: str) -> None:
    made, rows, labels = fleet_with(3)
    checks, refinement = checks_of(rows, labels, made, made.mean), Refinement(made)
    weights = refinement.weights
    sums = gradient_sum(head(weights, made), rows, labels, range(4))
    refinement.step(weights, sums)
    reasons = [checks.why_refused(weights, change(sums))]
    later = refinement.weights
    reasons.append(checks.why_refused(later, change(gradient_sum(head(later, made), rows, labels, range(4)))))
    assert any(reason and re.search(says, reason) for reason in reasons), reasons


def test_the_tangent_at_no_weights_is_that_of_the_statistics() -> None:
    """By hand: two rows, x = 0 and 2 around the mean 1, classes 0 and 1; loss 2 log 2, gradient +-1 there."""
    rows, labels = np.array([[0.0], [0.0], [2.0], [2.0]]), np.array([0, 0, 1, 1])
    moments = moments_of(rows, labels)
    checks = GradientChecks(moments, (0, 1), (0, 1), np.array([1.0]))
    weights = np.array([[-1.0, 0.0], [1.0, 0.0]])
    p = 1 / (1 + np.exp(-2.0))
    gradient = np.array([[4 * (1 - p), 0.0], [-4 * (1 - p), 0.0]])
    honest = GradientSum(gradient, -4 * np.log(p), 4)
    assert checks.why_refused(weights, honest) is None
    above = honest._replace(gradient=5 * gradient)  # its tangent is 5.3 at no weights, where the loss is 2.8
    assert checks.why_refused(weights, above) == "loss and gradient contradict those at another head, or its statistics"
