"""The attack on gradient sums of a refined head, against its definition with whole matrices."""

from __future__ import annotations

import numpy as np
import pytest
from audit.conftest import run_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetdistill.knowledge import LinearHead
from fleetdistill.methods.classstats.refined_head import gradient_sum
from fleetdistill_lab.audit.audit import Audit, audit, record_run, report
from fleetdistill_lab.audit.gradient_sums import Stack, likelihood_ratios, stack
from fleetdistill_lab.audit.knowledge import PublicMoments, features_of
from fleetdistill_lab.audit.public_set import split_public
from fleetdistill_lab.simulation.data.datasets import load_dataset

CLASSES, SIZE = 3, 4
WEIGHT = 0.6


def random_stack(generator: np.random.Generator, rows: int, heads: list[LinearHead]) -> Stack:
    labels = np.arange(rows) % CLASSES
    features = generator.standard_normal((rows, SIZE)) + 0.7 * labels[:, None]
    return stack(heads, features, labels, CLASSES)


def random_heads(generator: np.random.Generator, count: int) -> list[LinearHead]:
    return [
        LinearHead(
            labels=[0, 2],
            counts=np.array([5, 5]),
            mean=generator.standard_normal(SIZE),
            weights=generator.standard_normal((2, SIZE + 1)),
        )
        for _ in range(count)
    ]


def by_matrices(own: Stack, public: Stack, seen: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The ratio with the whole covariance of vec(e xT): its diagonal is that of the mean square of e, x is whitened."""
    total = counts.sum()
    values, vectors = np.linalg.eigh(PublicMoments(public.x[:, :-1], public.labels).pooled)
    whitening = np.eye(SIZE + 1)
    whitening[:-1, :-1] = vectors / np.sqrt(values)
    share = (counts / total / np.bincount(public.labels, minlength=CLASSES))[public.labels]
    size = np.sqrt(np.maximum(share @ np.square(public.e), 1e-6))

    def added(one: Stack) -> np.ndarray:
        return np.einsum("ni,nj->nij", one.e / size, one.x @ whitening).reshape(len(one.x), -1)

    means = np.stack([added(public)[public.labels == c].mean(axis=0) for c in range(CLASSES)])
    others = added(public) - means[public.labels]
    covariance = WEIGHT * np.eye(others.shape[1]) + (1 - WEIGHT) * (others.T * share) @ others
    away = ((seen / size[:, None]) @ whitening).ravel() - counts @ means
    rows = added(own) - means[own.labels]
    inverse = WEIGHT * np.linalg.inv(covariance)
    return (rows @ inverse @ away - np.einsum("ni,ij,nj->n", rows, inverse, rows) / 2) / total


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 3))
def test_the_score_is_the_ratio_of_two_normal_likelihoods(seed: int, steps: int) -> None:
    generator = np.random.default_rng(seed)
    heads = random_heads(generator, steps)
    own, public, device = (random_stack(generator, rows, heads) for rows in (9, 30, 12))
    seen, counts = device.e.T @ device.x, np.bincount(device.labels, minlength=CLASSES)
    found = likelihood_ratios(own, public, seen, counts)
    np.testing.assert_allclose(found, by_matrices(own, public, seen, counts), atol=1e-8)


def test_the_stack_has_the_class_and_the_probabilities() -> None:
    """At W = (1, 0, 0, 0, 0) and 0 of the classes 0 and 2, x = (log 3, ...): probabilities 3/4 and 1/4."""
    head = LinearHead(
        labels=[0, 2], counts=np.array([1, 1]), mean=np.zeros(SIZE), weights=np.eye(2, SIZE + 1) * [[1], [0]]
    )
    made = stack([head], np.array([[np.log(3), 5, 6, 7]]), np.array([1]), CLASSES)
    np.testing.assert_allclose(made.e, [[0, 1, 0, 0.75, 0, 0.25]])
    np.testing.assert_allclose(made.x, [[np.log(3), 5, 6, 7, 1]])


@pytest.mark.slow
@pytest.mark.long
def test_an_audit_asks_the_gradient_sums_of_a_refined_run() -> None:
    config = run_of("classstats", "", refine="gradients")
    result = audit(Audit(config=config, data=load_dataset("digits"), devices=2, rows=300, rounds=1))
    assert set(result.parts["gradient"]) == {"means and gradients"}
    found, means = result.parts["gradient"]["means and gradients"], result.parts["statistics"]["means"]
    assert found.auc > 0.6
    assert found.auc > means.auc - 0.05


@pytest.mark.slow
@pytest.mark.long
def test_the_secure_sums_of_gradients_are_attacked() -> None:
    """The server's sum at each head is that of all rows' gradients, and no device's gradient is seen in clear."""
    config = run_of("classstats_summed", "", refine="gradients")
    wanted = Audit(config=config, data=load_dataset("digits"), devices=3, rows=300, rounds=1)
    public = split_public(wanted.data, wanted.rows, wanted.seed)
    recorded = record_run(wanted, public)
    (summed,) = recorded.sums
    assert len(summed.gradients) == 5
    (head, sent), *_ = summed.gradients
    known = recorded.method.known_extractor("sum", {})
    assert known is not None
    own = [(features_of(known, rows.inputs), rows.labels.numpy()) for rows in recorded.rows.values()]
    counted = [np.flatnonzero(np.bincount(labels, minlength=10) >= 5) for _, labels in own]
    exact = [gradient_sum(head, *rows, labels) for rows, labels in zip(own, counted, strict=True)]
    assert sent.rows == sum(one.rows for one in exact)
    assert sent.loss == pytest.approx(sum(one.loss for one in exact), rel=1e-3)
    assert np.abs(sent.gradient[list(head.labels)] - sum(one.gradient for one in exact)).max() < 0.1
    result = report(wanted, public, recorded)
    found = result.parts["sum of 3 devices"]
    assert set(found) == {"means", "covariance", "means and covariance", "means and gradients"}
    assert found["means and gradients"].auc > 0.6
    assert result.parts["gradient"] == {}
