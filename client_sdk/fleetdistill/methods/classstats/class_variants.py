"""What a device makes of the fleet's class space and its own rows: two answers, and what it may expect of them.

In numpy alone, so that devices with and without PyTorch do the same. Letters as in
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
    make_space,
    shrinkage_rule,
)
from fleetdistill.methods.classstats.shared_statistics import Moments

LEAVE_ONE_OUT = "leave_one_out"
"""Metric on split `train`: own rows that the general answer gets right as if each had not been counted; no held-out
data needed."""
PERSONAL_LEAVE_ONE_OUT = "personal/leave_one_out"
"""The same of the personal answer from the fleet's statistics."""
OWN_LEAVE_ONE_OUT = "own_statistics/leave_one_out"
"""The same of a personal answer from the device's own statistics alone, where it has two classes to make one."""
OWN_KEPT = "own_statistics_kept"
"""Metric: sum 1 where the personal answer is made of the device's own statistics, because they are better (3.11)."""
SPLIT = "train"


@dataclass(frozen=True, kw_only=True, eq=False)
class PersonalVariant:
    """softmax(logits / temperature + log prior) in a space (3.9).

    Attributes:
        space: The fleet's, or the device's own.
        temperature: Above 0.
        prior: `[C]`, the device's class shares.
        hits: `[n]`, whether it gets each own row right, left out.
    """

    space: ClassSpace
    temperature: float
    prior: Array
    hits: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassVariants:
    """Both answers of a device.

    Attributes:
        general: The fleet's space.
        personal: Whichever is better on own rows, left out.
        own_kept: Whether that is the one from own statistics.
        figures: What the device expects of its answers.
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
    """Both answers from the fleet's space (3.8, 3.9, 3.11).

    Args:
        space: The fleet's, in the dimensions of the rows.
        rows_nd: All own rows, projected.
        labels_n: Their classes.
        counted: Classes whose rows of this device are in the space.
        classes: C.
        own: The device's own moments, for the guard; None for no guard.
        rows_per_direction: Degrees of freedom for each direction that devices have sent: so many directions of D are
            all that the covariance holds of a row beyond its diagonal.
    """
    held = min(1.0, int(space.df) / (rows_per_direction * rows_nd.shape[1]))
    left_out = leave_one_out(space, coordinates(space, rows_nd), labels_n, counted, classes, held)  # 3.8
    fleets = _personal(space, left_out, labels_n, classes)  # 3.9
    local = local_variant(own, rows_nd, labels_n, classes) if own is not None else None
    personal = _better(fleets, local)  # guard, 3.11
    figures = [
        _metric(LEAVE_ONE_OUT, left_out.argmax(axis=1) == labels_n, labels_n),
        *_figures(fleets, local, labels_n),
    ]
    return ClassVariants(general=space, personal=personal, own_kept=personal is local, figures=figures)


def _better(fleets: PersonalVariant, local: PersonalVariant | None) -> PersonalVariant:
    """The one that gets more own rows right, left out; the fleet's where both get as many."""
    return local if local is not None and local.hits.sum() > fleets.hits.sum() else fleets


def _figures(fleets: PersonalVariant, local: PersonalVariant | None, labels_n: Array) -> list[Metric]:
    found = [_metric(PERSONAL_LEAVE_ONE_OUT, fleets.hits, labels_n)]
    if local is not None:
        own_kept = float(_better(fleets, local) is local)
        found.append(_metric(OWN_LEAVE_ONE_OUT, local.hits, labels_n))
        found.append(Metric(name=OWN_KEPT, split=SPLIT, sum=own_kept, count=1))
    return found


def local_variant(own: Moments, rows_nd: Array, labels_n: Array, classes: int) -> PersonalVariant | None:
    """A personal answer from the device's own statistics; None where they make no space (fewer than two classes)."""
    try:
        space = make_space(own, shrinkage_rule(own.dimensions, own.df))
    except KnowledgeError:
        return None
    left_out = leave_one_out(space, coordinates(space, rows_nd), labels_n, set(own.labels), classes)
    return _personal(space, left_out, labels_n, classes)


def _personal(space: ClassSpace, left_out_nc: Array, labels_n: Array, classes: int) -> PersonalVariant:
    prior = class_prior(labels_n, classes)
    temperature = best_temperature(left_out_nc, labels_n, prior)
    hits = (left_out_nc / temperature + np.log(prior)).argmax(axis=1) == labels_n
    return PersonalVariant(space=space, temperature=temperature, prior=prior, hits=hits)


def _metric(name: str, hits_n: Array, labels_n: Array) -> Metric:
    counts, right = np.bincount(labels_n), np.bincount(labels_n, weights=hits_n)
    by_class = [ClassCount(label=int(c), sum=float(right[c]), count=int(counts[c])) for c in np.flatnonzero(counts)]
    return Metric(name=name, split=SPLIT, sum=float(hits_n.sum()), count=len(hits_n), by_class=by_class)
