"""Rows of two devices, for the oracles of the refined head: D 2, K 3, exact moments, s 0.25."""

from __future__ import annotations

import numpy as np

from fleetdistill.knowledge import Array, ClassSpace, LinearHead
from fleetdistill.methods.classstats.refined_head import GradientSum, gradient_sum
from fleetdistill.methods.classstats.shared_statistics import merge, moments_of
from fleetdistill_server.methods.classstats.refinement import (
    Objective,
    make_objective,
    mean_of_rows,
    space_of_head,
    strength_rule,
)

A = np.array([[1, 0], [2, 1], [3, 0], [0, 2], [1, 3]], float)
B = np.array([[0, 1], [-1, 2], [4, -1], [5, -3], [-2, -2], [-3, -1], [-1, -3]], float)
LABELS_A, LABELS_B = np.array([0, 0, 0, 1, 1]), np.array([1, 1, 0, 0, 2, 2, 2])
ROWS, LABELS = np.concatenate([A, B]), np.concatenate([LABELS_A, LABELS_B])
EVERY_CLASS = (0, 1, 2)
SHRINKAGE = 0.25
MINIMUM = np.array(
    [
        [0.6227598464, -0.0059803955, 0.6362590604],
        [-0.0476406625, 0.6155141832, 0.1703060123],
        [-0.5751191840, -0.6095337877, -0.8065650727],
    ]
)
"""W*, the weights of R-7."""


def objective() -> Objective:
    moments = merge([moments_of(A, LABELS_A), moments_of(B, LABELS_B)])
    return make_objective(moments, mean_of_rows(moments), SHRINKAGE, strength_rule(12, 3, 2))


def head(weights: Array, made: Objective | None = None) -> LinearHead:
    made = made or objective()
    return LinearHead(labels=list(made.labels), counts=made.counts, mean=made.mean, weights=weights)


def space(weights: Array) -> ClassSpace:
    made = objective()
    return space_of_head(made, weights, 9, SHRINKAGE)


def summed(weights: Array) -> GradientSum:
    """The sum of both devices."""
    a, b = (gradient_sum(head(weights), rows, labels, EVERY_CLASS) for rows, labels in ((A, LABELS_A), (B, LABELS_B)))
    return GradientSum(a.gradient + b.gradient, a.loss + b.loss, a.rows + b.rows)
