"""Class statistics in one exchange: what a device does with or without PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from fleetdistill.errors import CannotAnswer, DataError, WireError
from fleetdistill.knowledge import Array, ClassSpace, Plan, PlanValue
from fleetdistill.methods.base import Answer, Ask
from fleetdistill.methods.classstats.class_variants import ClassVariants, class_variants
from fleetdistill.methods.classstats.config import SMALLEST_SIDE, ClassStatsConfig
from fleetdistill.methods.classstats.kept_space import copied
from fleetdistill.methods.classstats.shared_statistics import Moments, moments_of, to_wire


@dataclass(frozen=True, kw_only=True)
class SpacePlan:
    """What the server's plan says of a space.

    Attributes:
        merge: The server's name of it.
        counted: Whether this device's statistics are in it.
        draw_seed: Of rows that are drawn in it.
        left_out: Classes that this device has sent and that are not in it all the same.
    """

    merge: int
    counted: bool
    draw_seed: int
    left_out: tuple[int, ...] = ()

    def to_wire(self) -> Plan:
        """As it travels."""
        values: dict[str, PlanValue] = {"merge": self.merge, "counted": self.counted, "draw_seed": self.draw_seed}
        return Plan(values=values | ({"left_out": list(self.left_out)} if self.left_out else {}))

    @classmethod
    def of(cls, ask: Ask) -> SpacePlan:
        """Raises WireError for a plan that lacks something, or gives it in another type."""
        values = ask.part("plan", Plan).values
        expected = {"merge": int, "counted": bool, "draw_seed": int}
        for name, kind in expected.items():
            if type(values.get(name)) is not kind:
                text = f"the plan's {name} is {values.get(name)!r}, expected {kind.__name__}"
                raise WireError(f"step {ask.step!r}: {text}; update the older of device and server")
        left_out = values.get("left_out", [])  # not there where nothing is, and from earlier servers
        if not isinstance(left_out, list):
            raise WireError(f"step {ask.step!r}: the plan's left_out is {left_out!r}, expected a list of classes")
        known: dict[str, Any] = {name: values[name] for name in expected}
        return cls(**known, left_out=tuple(left_out))

    def counts(self, labels: Iterable[int]) -> list[int]:
        """Of the classes that this device has sent those that are in the space."""
        return [label for label in labels if label not in self.left_out] if self.counted else []


def check_space(space: ClassSpace, dimensions: int, classes: int) -> None:
    """Raises WireError for a space that is not of this run, or not finite: a server may be broken or hostile."""
    shapes = [np.shape(one) for one in (space.directions, space.origin, space.centres, space.counts)]
    known, directions = len(space.labels), shapes[1][0] if len(shapes[1]) == 1 else -1
    wanted = [(dimensions, directions), (directions,), (known, directions), (known,)]
    if shapes != wanted or not 1 <= directions < classes:
        raise WireError(f"the class space has shapes {shapes}, expected {wanted} and 1 to {classes - 1} directions")
    if not known >= 2 or len(set(space.labels)) != known or not all(0 <= one < classes for one in space.labels):
        raise WireError(f"the class space has classes {space.labels[:20]}, expected two or more of {classes}")
    numbers = (space.directions, space.origin, space.centres, space.shrinkage, space.outside)
    if not all(np.isfinite(one).all() for one in numbers) or space.shrinkage.shape or space.df.shape:
        raise WireError("the class space has numbers that are not finite, or no single shrinkage")
    if not (0 <= float(space.shrinkage) < 1 and float(space.outside) >= 0 and int(space.df) >= 1):
        text = f"shrinkage {float(space.shrinkage):g}, outside {float(space.outside):g}, df {int(space.df)}"
        raise WireError(f"the class space has {text}; expected [0, 1), >= 0 and >= 1")
    if (space.counts < 1).any():
        raise WireError("the class space has a class without samples")


def check_images(inputs: Array, input_shape: tuple[int, ...]) -> None:
    """Raises DataError for inputs that scattering is not made for, with the way out."""
    way_out = "take features = 'model' with an extractor of your own, or 'identity' for vectors"
    if len(input_shape) != 3 or min(input_shape[1:]) < SMALLEST_SIDE:
        text = f"scattering needs images of at least {SMALLEST_SIDE} pixels a side, got inputs {list(input_shape)}"
        raise DataError(f"{text}; {way_out}")
    low, high = float(inputs.min()), float(inputs.max())
    if low < 0 or high > 1:
        raise DataError(f"scattering needs images in [0, 1], got {low:g} to {high:g}; scale them, or {way_out}")


class DeviceStatistics:
    """What a device makes of its rows and of the fleet's space: the steps but for training, with PyTorch or without.

    Attributes:
        space: The fleet's, once there is one.
        plan: What the server said of it.
        answers: Made of it and of own rows.
        labels: Classes of own rows, `[n]`.
    """

    def __init__(self, config: ClassStatsConfig, rows: Callable[[], Array], labels: Array, classes: int) -> None:
        """Computes nothing yet.

        Args:
            config: Of the contract.
            rows: Gives the projected features of all own rows, `[n, D]`.
            labels: Their classes, `[n]`.
            classes: C.
        """
        self._config, self._make_rows, self._classes = config, rows, classes
        self.labels = labels
        self.space: ClassSpace | None = None
        self.plan: SpacePlan | None = None
        self.variants: ClassVariants | None = None

    @cached_property
    def rows(self) -> Array:
        """Projected features of all own rows."""
        return self._make_rows()

    @cached_property
    def moments(self) -> Moments:
        """Of own rows, of all classes that may be sent; the one place where noise would be added."""
        return moments_of(self.rows, self.labels, self._config.min_samples)

    def summarise(self) -> Answer:
        """Means of own classes and their one covariance (3.3, 3.4): all that ever leaves of the rows."""
        moments = self.moments  # 3.3
        sent = to_wire(moments, self._config.rank, self._config.rows_per_direction)  # 3.4
        too_small = 0 if sent.labels else len(np.unique(self.labels))
        return Answer(parts={"statistics": sent}, samples=len(self.labels), notes={"classes_too_small": too_small})

    def learn(self, ask: Ask) -> Answer:
        """Takes the fleet's space, and makes both answers of it (3.6 to 3.11)."""
        plan = SpacePlan.of(ask)
        self._take_space(ask, plan)
        found = self._make_variants(plan)
        return Answer(parts={}, samples=len(self.labels), notes={"own_statistics_kept": int(found.own_kept)})

    def _take_space(self, ask: Ask, plan: SpacePlan) -> None:
        if "space" in ask.parts:
            space = ask.part("space", ClassSpace)
            check_space(space, self.rows.shape[1], self._classes)  # guard
            self.space = copied(space)
        else:
            self._check_has_space(ask, plan.merge)  # guard
        self.plan = plan

    def _check_has_space(self, ask: Ask, merge: int) -> None:
        if self.plan is None or self.plan.merge != merge:
            held = "none" if self.plan is None else self.plan.merge
            raise CannotAnswer(
                f"step {ask.step!r} is about class space {merge}, this device has {held}; the server sends it "
                "with the next ask"
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
            self._config.rows_per_direction,
        )
        return self.variants

    def restore(self, space: ClassSpace | None, plan: Mapping[str, Any] | None) -> None:
        """Takes up a space and its plan that were kept; the answers are made of them when they are asked for."""
        self.space = space
        self.plan = None if plan is None else SpacePlan(**{**plan, "left_out": tuple(plan.get("left_out", ()))})
        self.variants = None

    @property
    def space_and_plan(self) -> tuple[ClassSpace, SpacePlan]:
        """Of the last step that has taken them."""
        assert self.space is not None
        assert self.plan is not None
        return self.space, self.plan

    @property
    def current_variants(self) -> ClassVariants:
        """The answers of the last step that has made them."""
        assert self.variants is not None
        return self.variants

    def remake_variants(self) -> ClassVariants | None:
        """The answers; after `restore` they are made anew. None before there is a space."""
        if self.variants is None and self.plan is not None:
            return self._make_variants(self.plan)
        return self.variants
