"""The device's steps of class statistics in one exchange, and its variants, for devices with and without PyTorch.

Uses NumPy only. Symbols as in `fleetdistill.methods.classstats.class_space`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from fleetdistill.errors import CannotAnswer, DataError, KnowledgeError, WireError
from fleetdistill.knowledge import Array, ClassCount, ClassSpace, LinearHead, Metric, Plan, PlanValue
from fleetdistill.methods.base import Answer, Ask
from fleetdistill.methods.classstats.class_space import (
    best_temperature,
    class_prior,
    coordinates,
    copy_space,
    leave_one_out,
    logits,
    make_space,
    shrinkage_rule,
)
from fleetdistill.methods.classstats.config import SMALLEST_SIDE, ClassStatsConfig, SpaceConfig
from fleetdistill.methods.classstats.refined_head import (
    balanced_prior,
    choose_temperature,
    gradient_sum,
    left_out_logits,
)
from fleetdistill.methods.classstats.refined_head import to_wire as gradient_to_wire
from fleetdistill.methods.classstats.shared_statistics import Moments, moments_of, to_wire
from fleetdistill.training.figures import likelihood

__all__ = ["REFINE"]

REFINE = "refine"
"""Step in which a device sums the gradient of a refined head."""
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


@dataclass(frozen=True, kw_only=True)
class SpacePlan:
    """The server's plan for a class space.

    Attributes:
        merge: The server's number of the space.
        counted: Whether this device's statistics are in the space.
        draw_seed: Seed of the rows drawn in the space.
        left_out: Classes that this device has sent and that are not in the space.
    """

    merge: int
    counted: bool
    draw_seed: int
    left_out: tuple[int, ...] = ()

    def to_wire(self) -> Plan:
        """Returns the plan's wire form."""
        values: dict[str, PlanValue] = {"merge": self.merge, "counted": self.counted, "draw_seed": self.draw_seed}
        return Plan(values=values | ({"left_out": list(self.left_out)} if self.left_out else {}))

    @classmethod
    def of(cls, ask: Ask) -> SpacePlan:
        """Returns the plan of an ask. Raises WireError if a value is missing or of another type."""
        values = ask.part("plan", Plan).values
        expected = {"merge": int, "counted": bool, "draw_seed": int}
        for name, kind in expected.items():
            if type(values.get(name)) is not kind:
                text = f"the plan's {name} is {values.get(name)!r}, expected {kind.__name__}"
                raise WireError(f"step {ask.step!r}: {text}; update whichever of the device and the server is older")
        left_out = values.get("left_out", [])  # missing if empty
        if not isinstance(left_out, list):
            raise WireError(f"step {ask.step!r}: the plan's left_out is {left_out!r}, expected a list of classes")
        known: dict[str, Any] = {name: values[name] for name in expected}
        return cls(**known, left_out=tuple(left_out))

    def counts(self, labels: Iterable[int]) -> list[int]:
        """Returns those of the device's sent classes that are in the space."""
        return [label for label in labels if label not in self.left_out] if self.counted else []


def check_space(space: ClassSpace, dimensions: int, classes: int) -> None:
    """Checks a space from the server.

    Args:
        space: The space.
        dimensions: D, numbers of the device's projected features.
        classes: C, classes of the contract.

    Raises:
        WireError: A shape, class or number does not fit the run, or a number is not finite.
    """
    shapes = [np.shape(item) for item in (space.directions, space.origin, space.centres, space.counts)]
    known, directions = len(space.labels), shapes[1][0] if len(shapes[1]) == 1 else -1
    wanted = [(dimensions, directions), (directions,), (known, directions), (known,)]
    if shapes != wanted or not 1 <= directions < classes:
        raise _faulty_space(f"shapes {shapes}, expected {wanted} with 1 to {classes - 1} directions")
    if not known >= 2 or len(set(space.labels)) != known or not all(0 <= label < classes for label in space.labels):
        raise _faulty_space(f"classes {space.labels[:20]}, expected two or more in [0, {classes})")
    numbers = (space.directions, space.origin, space.centres, space.shrinkage, space.outside)
    if not all(np.isfinite(number).all() for number in numbers) or space.shrinkage.shape or space.df.shape:
        raise _faulty_space("numbers that are not finite, or a shrinkage or df that is not one number")
    if not (0 <= float(space.shrinkage) < 1 and float(space.outside) >= 0 and int(space.df) >= 1):
        text = f"shrinkage {float(space.shrinkage):g}, outside {float(space.outside):g}, df {int(space.df)}"
        raise _faulty_space(f"{text}, expected [0, 1), >= 0 and >= 1")
    if not 0 <= space.leverage < math.inf:
        raise _faulty_space(f"the leverage {space.leverage:g}, expected a finite number of at least 0")
    if (space.counts < 1).any():
        raise _faulty_space("a class without samples, expected at least 1")


def check_head(head: LinearHead, dimensions: int, classes: int) -> None:
    """Checks a head from the server; arguments as in `check_space`.

    Raises:
        WireError: A shape, class or number does not fit the run, or a number is not finite.
    """
    known = len(head.labels)
    shapes = [np.shape(item) for item in (head.counts, head.mean, head.weights)]
    if shapes != [(known,), (dimensions,), (known, dimensions + 1)] or known < 2:
        raise WireError(f"the head has shapes {shapes} for {known} classes of {dimensions} numbers{_FAULTY}")
    if len(set(head.labels)) != known or not all(0 <= label < classes for label in head.labels):
        text = f"the head has classes {list(head.labels)[:20]}, expected different ones in [0, {classes})"
        raise WireError(f"{text}{_FAULTY}")
    if not (np.isfinite(head.mean).all() and np.isfinite(head.weights).all()):
        raise WireError(f"the head has numbers that are not finite{_FAULTY}")


_FAULTY = "; the server is faulty or has another version"


def _faulty_space(what: str) -> WireError:
    return WireError(f"the class space has {what}{_FAULTY}")


def check_images(inputs: Array, input_shape: tuple[int, ...]) -> None:
    """Raises DataError for inputs that are not images for scattering: `[channels, height, width]` in [0, 1]."""
    extractor = "identity" if len(input_shape) == 1 else "package.module:factory"
    remedy = (
        f'in run.toml, set features = "model" in [method] and extractor = "{extractor}" in [model]; '
        f"in a simulation, add --set method.features=model --extractor {extractor}"
    )
    if len(input_shape) != 3 or min(input_shape[1:]) < SMALLEST_SIDE:
        text = f"scattering needs images of at least {SMALLEST_SIDE} pixels a side, got inputs {list(input_shape)}"
        raise DataError(f"{text}; {remedy}")
    low, high = float(inputs.min()), float(inputs.max())
    if low < 0 or high > 1:
        raise DataError(
            f"scattering needs images in [0, 1], got {low:g} to {high:g}; scale them, or ask the operator: {remedy}"
        )


class DeviceStatistics:
    """Base class of a device's statistics; makes the variants from the fleet's space, and performs no training.

    Attributes:
        space: The fleet's space; None before the first one.
        plan: The server's plan for `space`.
        variants: Variants made from `space` and the device's rows; None until they are made.
        labels: Classes of the device's rows, `[n]`.
        min_samples: Minimum number of rows of a class in `moments`, at least 1.
        rows_per_direction: Minimum degrees of freedom per direction of the sent covariance, at least 1.
        sending_steps: Steps in which the device sends its statistics, in their order.
    """

    sending_steps: ClassVar[Sequence[str]] = ("summarise",)
    min_samples: int = 1
    rows_per_direction: int = 1

    def __init__(self, config: SpaceConfig, rows: Callable[[], Array], labels: Array, classes: int) -> None:
        """Creates the statistics without computing features.

        Args:
            config: The method's configuration, from the contract.
            rows: Returns the projected features of all the device's rows, `[n, D]`.
            labels: Classes of the rows, `[n]`.
            classes: C, classes of the contract.
        """
        self._config, self._make_rows, self._classes = config, rows, classes
        self.labels = labels
        self.space: ClassSpace | None = None
        self.plan: SpacePlan | None = None
        self.variants: ClassVariants | None = None

    @cached_property
    def rows(self) -> Array:
        """Projected features of all the device's rows, `[n, D]`."""
        return self._make_rows()

    @cached_property
    def moments(self) -> Moments:
        """Moments of the device's classes that have at least `min_samples` rows."""
        return moments_of(self.rows, self.labels, self.min_samples)

    def summarise(self) -> Answer:
        """Returns the answer to the step `summarise`."""
        raise NotImplementedError

    def first_ask(self) -> Ask:
        """Returns an ask like the first one of a run; see `DeviceMethod.first_ask`."""
        return Ask(round=1, step=self.sending_steps[0], seed=0)

    def send(self, step: str) -> Answer:
        """Returns the answer to one of `sending_steps`."""
        return self.summarise()

    def learn(self, ask: Ask) -> Answer:
        """Stores the fleet's space, and makes both variants from it.

        Raises:
            WireError: The plan or the space does not fit the run.
            CannotAnswer: The plan refers to a space that the device does not have.
        """
        plan = SpacePlan.of(ask)
        self._take_space(ask, plan)  # line space, made by the server
        result = self._make_variants(plan)  # lines general and personal
        return Answer(parts={}, samples=len(self.labels), notes={"own_statistics_kept": int(result.own_kept)})

    def _take_space(self, ask: Ask, plan: SpacePlan) -> None:
        if "space" in ask.parts:
            space = ask.part("space", ClassSpace)
            check_space(space, self.rows.shape[1], self._classes)  # guard
            self.space = copy_space(space)
        else:
            self._check_has_space(ask, plan.merge)  # guard
        self.plan = plan

    def _check_has_space(self, ask: Ask, merge: int) -> None:
        if self.plan is None or self.plan.merge != merge:
            held = "none" if self.plan is None else self.plan.merge
            raise CannotAnswer(
                f"step {ask.step!r} refers to class space {merge}, but this device has {held}; the server will send "
                "it with the next ask"
            )

    def _make_variants(self, plan: SpacePlan) -> ClassVariants:
        assert self.space is not None
        own = self.moments
        self.variants = class_variants(
            self.space,
            self.rows,
            self.labels,
            plan.counts(own.labels),
            self._classes,
            own if self._config.own_statistics_guard else None,
            self.rows_per_direction,
        )
        return self.variants

    def restore(self, space: ClassSpace | None, plan: Mapping[str, Any] | None) -> None:
        """Restores a space and its plan from saved state; `remake_variants` makes the variants from them."""
        self.space = space
        self.plan = None if plan is None else SpacePlan(**{**plan, "left_out": tuple(plan.get("left_out", ()))})
        self.variants = None

    @property
    def space_and_plan(self) -> tuple[ClassSpace, SpacePlan]:
        """Space and plan of the last completed step `learn`."""
        assert self.space is not None
        assert self.plan is not None
        return self.space, self.plan

    @property
    def current_variants(self) -> ClassVariants:
        """Variants of the last completed step `learn`."""
        assert self.variants is not None
        return self.variants

    def remake_variants(self) -> ClassVariants | None:
        """Returns the variants, recomputed after `restore`; None before the first space."""
        if self.variants is None and self.plan is not None:
            return self._make_variants(self.plan)
        return self.variants


class SentStatistics(DeviceStatistics):
    """Statistics that a device sends without noise."""

    _config: ClassStatsConfig

    def __init__(self, config: ClassStatsConfig, rows: Callable[[], Array], labels: Array, classes: int) -> None:
        """Creates the statistics; arguments as in `DeviceStatistics`."""
        super().__init__(config, rows, labels, classes)
        self.min_samples, self.rows_per_direction = config.min_samples, config.rows_per_direction

    def summarise(self) -> Answer:
        """Returns the class means and their shared covariance; no other data about the rows are sent."""
        moments = self.moments  # line device
        sent = to_wire(moments, self._config.rank, self.rows_per_direction)
        too_small = 0 if sent.labels else len(np.unique(self.labels))
        return Answer(parts={"statistics": sent}, samples=len(self.labels), notes={"classes_too_small": too_small})

    def refine(self, ask: Ask) -> Answer:
        """Returns the sums of the gradient over the device's rows of the classes that are in the merge.

        Raises:
            WireError: The run has no refined head, or the head does not fit the run.
            CannotAnswer: No row of this device is in the merge, unless its sums are masked, which must not show it.
        """
        if not self._config.refines:
            raise WireError(f"step {ask.step!r}: the run has no refined head{_FAULTY}")
        head, left_out = ask.part("head", LinearHead), ask.part("plan", Plan).values.get("left_out", [])
        check_head(head, self.rows.shape[1], self._classes)
        if not isinstance(left_out, list):
            raise WireError(f"step {ask.step!r}: the plan's left_out is {left_out!r}, expected a list of classes")
        summed = gradient_sum(head, self.rows, self.labels, set(self.moments.labels) - set(left_out))  # line gradient
        if not (summed.rows or self._config.sums_securely):
            raise CannotAnswer(f"step {ask.step!r}: no row of this device is in the merge")
        parts = {"gradient": gradient_to_wire(summed, head, self._classes)}
        return Answer(parts=parts, samples=len(self.labels))


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
