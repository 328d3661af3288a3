"""A device's two variants from the fleet's class space and its own rows, with estimates of their accuracy.

Uses NumPy only, so that devices with and without PyTorch compute the same results. Symbols as in
`fleetdistill.methods.classstats.class_space`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import Array, ClassCount, ClassSpace, Metric
from fleetdistill.methods.classstats.class_space import (
    best_temperature,
    class_prior,
    coordinates,
    leave_one_out,
    logits,
    make_space,
    shrinkage_rule,
)
from fleetdistill.methods.classstats.refined_head import balanced_prior, choose_temperature, left_out_logits
from fleetdistill.methods.classstats.shared_statistics import Moments
from fleetdistill.training.figures import likelihood

LEAVE_ONE_OUT = "leave_one_out"
"""Metric on split `train`: the device's rows that the general variant classifies correctly, each left out of the space.

It estimates the accuracy on unseen rows without held-out data."""
PERSONAL_LEAVE_ONE_OUT = "personal/leave_one_out"
"""Metric on split `train`: as `LEAVE_ONE_OUT`, for the personal variant from the fleet's statistics."""
OWN_LEAVE_ONE_OUT = "own_statistics/leave_one_out"
"""Metric on split `train`: as `LEAVE_ONE_OUT`, for the personal variant from only the device's own statistics."""
OWN_KEPT = "own_statistics_kept"
"""Metric: sum 1 if the personal variant is made from the device's own statistics, because it is better; otherwise 0."""
SPLIT = "train"


@dataclass(frozen=True, kw_only=True, eq=False)
class PersonalVariant:
    """A personal variant: softmax(logits / temperature + log prior) in a space (line `personal`).

    Attributes:
        space: The fleet's space, or the space of the device's own statistics.
        temperature: τ, above 0.
        prior: π, the device's class shares, `[C]`; with a refined head, those of `balanced_prior`.
        hits: Whether each own row is classified correctly when left out, `[n]`.
        log_likelihood: Sum of the log-probabilities of the own rows' labels, each left out, in nats.
    """

    space: ClassSpace
    temperature: float
    prior: Array
    hits: Array
    log_likelihood: float


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassVariants:
    """Both variants of a device.

    Attributes:
        general: The fleet's space, in which the general variant classifies.
        personal: The better of two personal variants on the device's left-out rows (guard *Own statistics*).
        own_kept: Whether `personal` is made from the device's own statistics.
        figures: Leave-one-out metrics of the variants.
    """

    general: ClassSpace
    personal: PersonalVariant
    own_kept: bool
    figures: list[Metric]


def class_variants(
    space: ClassSpace,
    rows_nd: Array,
    labels_n: Array,
    counted: Collection[int],
    classes: int,
    own: Moments | None,
    rows_per_direction: int = 1,
) -> ClassVariants:
    """Makes both variants from the fleet's space.

    Args:
        space: The fleet's space, for rows of D numbers.
        rows_nd: Projected features of all the device's rows, `[n, D]`.
        labels_n: Classes of the rows, `[n]`.
        counted: Classes whose rows of this device are in the space.
        classes: C.
        own: The device's own moments, for the guard; None for no guard.
        rows_per_direction: Minimum degrees of freedom per direction that devices have sent. With few directions the
            covariance contains only a share of a row's outer product.
    """
    where = coordinates(space, rows_nd)
    if space.is_refined:
        left_out = left_out_logits(space, logits(space, where, classes), labels_n, counted)
    else:
        held = min(1.0, int(space.df) / (rows_per_direction * rows_nd.shape[1]))
        left_out = leave_one_out(space, where, labels_n, counted, classes, held)  # leave-one-out
    fleets = _personal(space, left_out, labels_n, classes)  # line personal
    local = local_variant(own, rows_nd, labels_n, classes) if own is not None else None
    personal = _better(fleets, local)  # guard
    figures = _figures(fleets, local, labels_n)
    if not space.is_refined:
        figures.insert(0, _metric(LEAVE_ONE_OUT, left_out.argmax(axis=1) == labels_n, labels_n))
    return ClassVariants(general=space, personal=personal, own_kept=personal is local, figures=figures)


def _better(fleets: PersonalVariant, local: PersonalVariant | None) -> PersonalVariant:
    """Returns the variant with more correctly classified left-out rows; the fleet's if both have equally many.

    With a refined head, the one with the larger likelihood: the head's hits are too few for small devices.
    """
    if local is None:
        return fleets
    if fleets.space.is_refined:
        return local if local.log_likelihood > fleets.log_likelihood else fleets
    return local if local.hits.sum() > fleets.hits.sum() else fleets


def _figures(fleets: PersonalVariant, local: PersonalVariant | None, labels_n: Array) -> list[Metric]:
    """Returns the metrics of the personal variants; a refined head's logits of left-out rows estimate no accuracy."""
    result = [] if fleets.space.is_refined else [_metric(PERSONAL_LEAVE_ONE_OUT, fleets.hits, labels_n)]
    if local is not None:
        own_kept = float(_better(fleets, local) is local)
        result.append(_metric(OWN_LEAVE_ONE_OUT, local.hits, labels_n))
        result.append(Metric(name=OWN_KEPT, split=SPLIT, sum=own_kept, count=1))
    return result


def local_variant(own: Moments, rows_nd: Array, labels_n: Array, classes: int) -> PersonalVariant | None:
    """Returns a personal variant from the device's own statistics; None if these do not suffice for a space."""
    try:
        space = make_space(own, shrinkage_rule(own.dimensions, own.df))
    except KnowledgeError:
        return None
    left_out = leave_one_out(space, coordinates(space, rows_nd), labels_n, set(own.labels), classes)
    return _personal(space, left_out, labels_n, classes)


def _personal(space: ClassSpace, left_out_nc: Array, labels_n: Array, classes: int) -> PersonalVariant:
    prior = class_prior(labels_n, classes)
    if space.is_refined:
        temperature = choose_temperature(space, left_out_nc, labels_n, prior)
        prior = balanced_prior(space, temperature, prior)
    else:
        temperature = best_temperature(left_out_nc, labels_n, prior)
    answers = left_out_nc / temperature + np.log(prior)
    return PersonalVariant(
        space=space,
        temperature=temperature,
        prior=prior,
        hits=answers.argmax(axis=1) == labels_n,
        log_likelihood=likelihood(answers, labels_n),
    )


def _metric(name: str, hits_n: Array, labels_n: Array) -> Metric:
    counts, right = np.bincount(labels_n), np.bincount(labels_n, weights=hits_n)
    by_class = [ClassCount(label=int(c), sum=float(right[c]), count=int(counts[c])) for c in np.flatnonzero(counts)]
    return Metric(name=name, split=SPLIT, sum=float(hits_n.sum()), count=len(hits_n), by_class=by_class)
