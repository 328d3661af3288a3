"""The device's mathematics of the refined head: oracles (R-4, R-5, R-8 to R-10), computed independently, and laws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from methods.classstats.refined_rows import (
    EVERY_CLASS,
    LABELS,
    LABELS_A,
    LABELS_B,
    MINIMUM,
    ROWS,
    A,
    B,
    head,
    objective,
    space,
    summed,
)
from numpy.testing import assert_allclose

from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import LinearHead
from fleetdistill.methods.classstats.class_space import class_prior, coordinates, logits
from fleetdistill.methods.classstats.refined_head import (
    REFINED_TEMPERATURES,
    GradientSum,
    balanced_prior,
    choose_temperature,
    from_wire,
    gradient_sum,
    left_out_logits,
    to_wire,
)
from fleetdistill.methods.classstats.shared_statistics import moments_of
from fleetdistill.training.figures import likelihood
from fleetdistill_server.methods.classstats.refinement import make_objective, mean_of_rows, space_of_head

H = 0.4697586200


def random_head(generator: np.random.Generator, classes: int, size: int) -> LinearHead:
    return LinearHead(
        labels=list(range(classes)),
        counts=generator.integers(1, 50, size=classes),
        mean=generator.standard_normal(size),
        weights=generator.standard_normal((classes, size + 1)),
    )


def logits_of(rows):
    """W* x, by hand."""
    return np.column_stack([rows - objective().mean, np.ones(len(rows))]) @ MINIMUM.T


def left_out_of_a():
    return left_out_logits(space(MINIMUM), logits_of(A), LABELS_A, EVERY_CLASS)


def personal_logits(logits_nc, temperature, prior):
    """What a personal variant computes."""
    return logits_nc / temperature + np.log(balanced_prior(space(MINIMUM), temperature, prior))


# --- oracles


def test_r_4_loss_and_gradient_at_the_start() -> None:
    start = objective().start()
    losses = [gradient_sum(head(start), *part, EVERY_CLASS).loss for part in ((A, LABELS_A), (B, LABELS_B))]
    assert_allclose(losses, [1.7529564120, 1.0026220493], atol=5e-10)
    result = summed(start)
    assert_allclose(result.loss, 2.7555784612, atol=5e-10)
    expected = [
        [-1.8054116676, 0.4667685829, -0.4069115713],
        [1.1994872059, -1.4922096664, 0.0525285373],
        [0.6059244616, 1.0254410835, 0.3543830340],
    ]
    assert_allclose(result.gradient, expected, atol=5e-10)
    assert result.rows == 12


def test_r_5_gradient_of_one_device() -> None:
    result = gradient_sum(head(objective().start()), A, LABELS_A, EVERY_CLASS)
    expected = [
        [-1.0366926562, 0.2478547629, -0.7574144464],
        [0.9265144721, -0.4746519935, 0.4427321815],
        [0.1101781841, 0.2267972305, 0.3146822649],
    ]
    assert_allclose(result.gradient, expected, atol=5e-10)


def test_r_8_left_out_logits_at_the_minimum() -> None:
    assert_allclose(left_out_of_a()[4], [0.8836444759, 1.9429054975, -2.8269720454], atol=2e-9)
    of_b = left_out_logits(space(MINIMUM), logits_of(B), LABELS_B, EVERY_CLASS)
    assert_allclose(of_b[0], [0.3189301984, 0.6664738143, -0.9913595265], atol=2e-9)


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, 1.3128110230), (1, 1.9065061774), (2, 2.5813350390)])
def test_r_9_left_out_likelihood_of_temperatures(temperature: float, expected: float) -> None:
    result = personal_logits(left_out_of_a(), temperature, class_prior(LABELS_A, 3))
    assert -likelihood(result, LABELS_A) == pytest.approx(expected, abs=5e-9)


def test_r_9_personal_answer() -> None:
    result = np.exp(personal_logits(logits_of(np.array([[1.0, 1.0]])), 0.5, class_prior(LABELS_A, 3)))
    assert_allclose(result / result.sum(), [[0.4521469312, 0.5463650263, 0.0014880425]], atol=1e-9)


@pytest.mark.parametrize(("classes", "size", "expected"), [(10, 384, 85_508), (10, 768, 170_756), (104, 384, 881_688)])
def test_r_10_bytes_of_five_steps(classes: int, size: int, expected: int) -> None:
    generator, steps = np.random.default_rng(0), 5
    sent = random_head(generator, classes, size)
    sums = gradient_sum(sent, generator.standard_normal((3, size)), np.array([0, 1, 2]), range(classes))
    down = sent.mean.astype(np.float16).nbytes + (steps + 1) * sent.weights.astype(np.float16).nbytes
    up = steps * (sums.gradient.astype(np.float16).nbytes + np.float32(sums.loss).nbytes + np.int32(sums.rows).nbytes)
    assert down + up == expected


# --- sums


@given(seed=st.integers(0, 2**32 - 1), devices=st.integers(1, 6))
def test_any_partition_of_the_rows_gives_the_same_sum(seed: int, devices: int) -> None:
    generator = np.random.default_rng(seed)
    rows, labels = generator.standard_normal((40, 5)), generator.integers(4, size=40)
    at, owner = random_head(generator, 4, 5), generator.integers(devices, size=40)
    parts = [gradient_sum(at, rows[owner == item], labels[owner == item], range(4)) for item in range(devices)]
    whole = gradient_sum(at, rows, labels, range(4))
    assert_allclose(sum(part.gradient for part in parts), whole.gradient, rtol=1e-12, atol=1e-12)
    assert_allclose(sum(part.loss for part in parts), whole.loss, rtol=1e-12)
    assert sum(part.rows for part in parts) == whole.rows == 40


def by_loops(at: LinearHead, rows, labels) -> GradientSum:
    gradient, loss = np.zeros(at.weights.shape), 0.0
    for row, label in zip(rows, labels, strict=True):
        x = [*(row - at.mean), 1.0]
        scores = [sum(w * item for w, item in zip(weights, x, strict=True)) for weights in at.weights]
        total = sum(np.exp(score) for score in scores)
        for number, score in enumerate(scores):
            gradient[number] += (np.exp(score) / total - (at.labels[number] == label)) * np.array(x)
        loss += np.log(total) - scores[at.labels.index(label)]
    return GradientSum(gradient, loss, len(rows))


def test_sums_of_many_rows_are_those_of_plain_loops() -> None:
    generator = np.random.default_rng(1)
    rows, labels = generator.standard_normal((2_500, 3)), 2 * generator.integers(3, size=2_500)
    at = replace(random_head(generator, 3, 3), labels=[0, 2, 4])
    result, expected = gradient_sum(at, rows, labels, (0, 2, 4)), by_loops(at, rows, labels)
    assert_allclose(result.gradient, expected.gradient, atol=1e-9)
    assert_allclose((result.loss, result.rows), expected[1:], rtol=1e-12)


def test_gradient_is_the_slope_of_the_loss() -> None:
    generator, step = np.random.default_rng(2), 1e-5
    at = random_head(generator, 3, 2)
    gradient = gradient_sum(at, ROWS, LABELS, EVERY_CLASS).gradient
    for place in np.ndindex(3, 3):
        moved = np.zeros((3, 3))
        moved[place] = step
        ends = [
            gradient_sum(replace(at, weights=at.weights + sign * moved), ROWS, LABELS, EVERY_CLASS).loss
            for sign in (1, -1)
        ]
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(gradient[place], abs=1e-6)


def test_only_counted_rows_are_in_the_sum() -> None:
    at = head(MINIMUM)
    only = gradient_sum(at, ROWS, LABELS, (0, 2, 7))
    kept = LABELS != 1
    expected = gradient_sum(at, ROWS[kept], LABELS[kept], EVERY_CLASS)
    assert_allclose(only.gradient, expected.gradient, rtol=1e-12)
    assert only.loss == pytest.approx(expected.loss)
    assert only.rows == 8


def test_no_counted_row_gives_a_sum_of_zeros() -> None:
    result = gradient_sum(head(MINIMUM), A, LABELS_A, ())
    assert not result.gradient.any()
    assert (result.loss, result.rows) == (0.0, 0)


def test_large_logits_give_finite_sums() -> None:
    at = replace(head(MINIMUM), weights=np.array([[1e5, 0, 0], [0, 1e5, 0], [0, 0, 0]]))
    result = gradient_sum(at, ROWS, LABELS, EVERY_CLASS)
    assert np.isfinite(result.gradient).all()
    assert np.isfinite(result.loss)


def test_rows_of_other_features_are_refused() -> None:
    with pytest.raises(KnowledgeError, match=r"rows \[5, 1\], expected \[n, 2\]"):
        gradient_sum(head(MINIMUM), A[:, :1], LABELS_A, EVERY_CLASS)


@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([1e-9, 1e-3, 1.0, 1e6, 1e30]))
def test_sums_of_any_size_keep_float16s_digits(seed: int, size: float) -> None:
    generator = np.random.default_rng(seed)
    at = replace(random_head(generator, 3, 4), labels=[0, 2, 4])
    sums = GradientSum(size * generator.standard_normal((3, 5)), 2.5, 7)
    sent = to_wire(sums, at, 6)
    narrow = replace(sent, gradient=sent.gradient.astype(np.float16))
    assert narrow.gradient.shape == (6, 5)
    assert not narrow.gradient[[1, 3, 5]].any()
    result = from_wire(narrow, at)
    assert_allclose(result.gradient, sums.gradient, rtol=2**-11, atol=size * 2**-24)
    assert (result.loss, result.rows) == (2.5, 7)


def test_a_gradient_of_zeros_is_sent_as_it_is() -> None:
    sent = to_wire(GradientSum(np.zeros((3, 3)), 0.0, 1), head(MINIMUM), 3)
    assert sent.scale == 1.0
    assert not sent.gradient.any()


# --- answers


def test_space_of_a_head_has_its_answers() -> None:
    """Its logits differ from the head's by a number of each row."""
    made = space(MINIMUM)
    found = logits(made, coordinates(made, ROWS), 3) - logits_of(ROWS)
    assert_allclose(found - found[:, :1], 0, atol=1e-9)
    assert float(made.leverage) == pytest.approx(H, abs=1e-9)


@given(seed=st.integers(0, 2**32 - 1), classes=st.integers(2, 8), size=st.integers(8, 12))
def test_every_head_has_a_space(seed: int, classes: int, size: int) -> None:
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), 8)
    rows = generator.standard_normal((len(labels), size)) + generator.standard_normal((classes, size))[labels]
    moments = moments_of(rows, labels)
    made = make_objective(moments, mean_of_rows(moments), 0.1, 2.0)
    weights = generator.standard_normal((classes, size + 1))
    found = space_of_head(made, weights, moments.df, 0.1)
    expected = np.column_stack([rows - made.mean, np.ones(len(rows))]) @ weights.T
    away = logits(found, coordinates(found, rows), classes) - expected
    assert_allclose(away - away[:, :1], 0, atol=1e-6)


def test_rows_that_were_not_counted_are_not_corrected() -> None:
    result = left_out_logits(space(MINIMUM), logits_of(A), LABELS_A, (0,))
    assert (result[3:] == logits_of(A)[3:]).all()
    assert (result[:3, 0] < logits_of(A)[:3, 0]).all()


def test_temperature_is_the_likeliest_of_all() -> None:
    prior = class_prior(LABELS_A, 3)
    found = [likelihood(personal_logits(left_out_of_a(), item, prior), LABELS_A) for item in REFINED_TEMPERATURES]
    best = REFINED_TEMPERATURES[int(np.argmax(found))]
    assert choose_temperature(space(MINIMUM), left_out_of_a(), LABELS_A, prior) == best


def test_classes_without_statistics_leave_the_temperature() -> None:
    labels = np.concatenate([LABELS_A, np.full(5, 3)])
    wide = np.column_stack([np.tile(logits_of(A), (2, 1)), np.full(10, -9.0)])
    left_out = left_out_logits(space(MINIMUM), wide, labels, EVERY_CLASS)
    prior = class_prior(labels, 4)
    found = choose_temperature(space(MINIMUM), left_out, labels, prior)
    assert found == choose_temperature(space(MINIMUM), left_out[:5], LABELS_A, prior) < 2


def test_prior_of_a_class_that_the_head_lacks_is_its_share() -> None:
    prior = np.array([0.4, 0.3, 0.2, 0.1])
    result = balanced_prior(space(MINIMUM), 2.0, prior)
    assert_allclose(result, prior / np.sqrt([5 / 12, 4 / 12, 3 / 12, 1]))
