"""Server half of classstats: class statistics in one exchange, and the refined head if the run has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np

from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import Array, ClassSpace, HeadGradient, LinearHead, Plan
from fleetdistill.methods.classstats.class_space import pack_space, unpack_space
from fleetdistill.methods.classstats.config import ClassStatsConfig
from fleetdistill.methods.classstats.exchange import REFINE
from fleetdistill.methods.classstats.refined_head import GradientSum, from_wire
from fleetdistill.methods.classstats.shared_statistics import Moments, in_float16
from fleetdistill.methods.classstats.shared_statistics import from_wire as statistics_from_wire
from fleetdistill.wire.kind import PartSchema
from fleetdistill_server.methods.classstats.refinement import (
    GradientChecks,
    Objective,
    Refinement,
    mean_of_rows,
    space_of_head,
    usual_objective,
    why_refused,
)
from fleetdistill_server.methods.classstats.server import ClassStatsServer
from fleetdistill_server.methods.cohort import Cohort, DeviceAnswer, Notes
from fleetdistill_server.methods.traffic import Exchange, Sizes
from fleetdistill_server.texts import counted

_MIN_FALL = 0.01
"""By how much of it the first step must lower the objective; below that, a head gained about a point at most."""
_MIN_SHARE = 0.5
"""Smallest share of the merge's rows that take part in the gradient sums."""
_MAX_GROWTH = 1.1
"""Rows of a merge, as a multiple of those of the head, up to which newcomers get the head that there is."""


class RefiningServer(ClassStatsServer):
    """Merges the devices' statistics; with `refine`, asks the devices for gradient sums and sends the refined head.

    A head stays until a device of it changes or is forgotten, or the merge has grown by a tenth: until then a newcomer
    gets it, and no device is asked.
    """

    config: ClassStatsConfig

    def __init__(self, config: ClassStatsConfig, context: Any) -> None:
        super().__init__(config, context)
        self._moments: Moments | None = None  # of the last merge, unless the server was restarted since
        self._unrefined = 0  # name of the merge that stays without a head
        self._head: ClassSpace | None = None
        self._head_rows: dict[str, tuple[int, str]] = {}  # rows and data version of each part in the head

    @classmethod
    def exchanges(cls, config: ClassStatsConfig, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchanges of class statistics; with `refine`, the gradient sums precede the last."""
        *summarise, learn = super().exchanges(config, sizes)
        if not config.refines:
            return [*summarise, learn]
        refine = Exchange(
            step=REFINE,
            down={"head": LinearHead.schema(classes=sizes.classes, dimensions=cls.dimensions(config, sizes))},
            up={"gradient": cls.gradient_schema(config, sizes)},
            times=config.refine_steps,
            setting="refine_steps",
            end=1,
        )
        return [*summarise, refine, learn]

    @classmethod
    def gradient_schema(cls, config: ClassStatsConfig, sizes: Sizes) -> PartSchema:
        """Returns the schema of a device's sums of the gradient."""
        return HeadGradient.schema(classes=sizes.classes, dimensions=cls.dimensions(config, sizes))

    # --- rounds

    async def _collect_statistics(self, cohort: Cohort, asked: Sequence[str]) -> None:
        await super()._collect_statistics(cohort, asked)
        if not self.config.refines or self._space is None or self._space.is_refined:
            return
        if self._unrefined == self.merge_name:
            return
        moments = self._merge_again(cohort)
        try:
            head = await self._refined(cohort, asked, moments)
        except KnowledgeError as error:  # a head beyond float16; the run continues with the closed form
            cohort.event("not-refined", f"the closed form is used: {error}")
            return
        if head is not None:
            self._head, self._head_rows = head, self._rows_by_part()
            self.use_space(head, cohort)

    async def _refined(self, cohort: Cohort, asked: Sequence[str], moments: Moments) -> ClassSpace | None:
        """Asks the devices for gradient sums step by step; returns the head's space, or None if it is not worth it.

        If too few take part in a step, the head of the steps before is used, if there are two of the same parts.
        """
        mean = in_float16(mean_of_rows(moments), "the mean of the features")
        shrinkage = self._shrinkage(moments)
        objective = usual_objective(moments, mean, shrinkage)
        refinement, taking = Refinement(objective), self._gradient_parts(asked)
        checks = {part: self.checks_of(part, objective) for part in taking}
        for step in range(self.config.refine_steps):
            evaluated = in_float16(refinement.weights, "the head's weights")
            sums, any_refused = await self._gradients(
                cohort, objective, evaluated, {part: checks[part] for part in taking}
            )
            if any_refused:  # perhaps not the first wrong ones
                refinement.restart()
            rows = sum(one.rows for one in sums.values())
            is_short = rows < _MIN_SHARE * objective.rows
            if is_short:
                if len(refinement.values) > 1:
                    break
                text = f"only {rows} of the merge's {objective.rows} rows take part in the gradient sums"
                cohort.event("not-refined", f"{text}, at least {_MIN_SHARE:.0%} must; the closed form is used")
                return None
            if list(sums) != taking and refinement.values:
                refinement.restart()
            taking = list(sums)
            refinement.step(evaluated, _summed(sums))
            if step == 1 and self._falls_too_little(refinement, cohort):
                return None
        change = refinement.values[-1] / refinement.values[0] - 1 if len(refinement.values) > 1 else 0.0
        devices = sum(self._part_of(device) in taking for device in self._counted)
        text = f"the head is refined by {len(refinement.values)} sums of the gradients of {counted(devices, 'device')}"
        less = "; the refinement ended there, because too few rows took part in the next sum" if is_short else ""
        cohort.event("head-refined", f"{text}; its objective changed by {change:+.1%}{less}")
        cohort.report("refined_loss", refinement.values[-1] / objective.rows)
        return space_of_head(objective, refinement.final(), moments.df, shrinkage)

    async def _gradients(
        self, cohort: Cohort, objective: Objective, evaluated_kd: Array, checks: Mapping[str, GradientChecks | None]
    ) -> tuple[dict[str, GradientSum], bool]:
        """Returns the sums of each part of the merge at the weights, and whether implausible ones are left out."""
        head = LinearHead(
            labels=list(objective.labels),
            counts=objective.counts.astype(np.int32),
            mean=objective.mean,
            weights=evaluated_kd,
        )
        sums, any_refused = {}, False
        async for part, received in self.sums_at(cohort, head, list(checks)):
            sent, check = from_wire(received, head), checks[part]
            reason = why_refused(sent, evaluated_kd.shape)
            if reason is None and check is not None:
                reason = check.why_refused(evaluated_kd, sent)
            if reason is not None:
                device, any_refused = part if part in self._counted else "", True
                cohort.event("gradient-left-out", f"{part}: {reason}; its sums are left out", device)
            else:
                sums[part] = sent
        return sums, any_refused

    async def sums_at(
        self, cohort: Cohort, head: LinearHead, parts: Sequence[str]
    ) -> AsyncIterator[tuple[str, HeadGradient]]:
        """Asks for the gradient at a head, and yields the sums of each part of the merge: here, of a device."""
        async for answer in self.ask_gradients(cohort, head, parts):
            yield answer.device, answer.part("gradient", HeadGradient)

    def ask_gradients(self, cohort: Cohort, head: LinearHead, devices: Sequence[str]) -> AsyncIterator[DeviceAnswer]:
        """Asks devices for their sums of the gradient at a head, and yields the answers."""

        def message(device: str) -> Mapping[str, Any]:
            return {"head": head, "plan": Plan(values={"left_out": list(self._left_out_of(device))})}

        return self.deliveries.ask(cohort, REFINE, message, to=devices, quorum=0.0)

    def checks_of(self, part: str, objective: Objective) -> GradientChecks | None:
        """Returns what the sums of a part must satisfy, or None."""
        if self.config.robust == "off":
            return None
        moments = statistics_from_wire(self._parts[part][0])
        return GradientChecks(moments, self._counted[part], objective.labels, objective.mean)

    def _falls_too_little(self, refinement: Refinement, notes: Notes) -> bool:
        """Returns whether the first step has shown that a head is not worth its bytes; the merge then stays without."""
        if len(refinement.values) < 2:  # the second sums are of fewer devices, so nothing can be compared
            return False
        if refinement.values[1] <= (1 - _MIN_FALL) * refinement.values[0]:
            return False
        self._unrefined = self.merge_name
        change = refinement.values[1] / refinement.values[0] - 1
        text = f"a first step changes the objective by {change:+.1%}, at least {-_MIN_FALL:+.0%} is wanted"
        notes.event("not-refined", f"{text}; the closed form is used")
        return True

    # --- the merge

    def merge_parts(self, notes: Notes) -> None:
        """Recomputes the merge; keeps the head that there is if it is of nearly the same rows."""
        super().merge_parts(notes)
        if self._head is None:
            return
        now, before = self._rows_by_part(), self._head_rows
        grown = sum(rows for rows, _ in now.values()) / sum(rows for rows, _ in before.values())
        if before.items() <= now.items() and grown <= _MAX_GROWTH:
            self.use_space(self._head, notes)
        else:
            self._head, self._head_rows = None, {}

    def space_of(self, moments: Moments, notes: Notes) -> ClassSpace:
        """Keeps the moments, for the objective."""
        self._moments = moments
        return super().space_of(moments, notes)

    def _merge_again(self, notes: Notes) -> Moments:
        """Returns the moments of the merge that the space is of."""
        if self._moments is None:
            self.merge_parts(notes)
        assert self._moments is not None
        return self._moments

    def _part_of(self, device: str) -> str:
        """Returns the part of the merge that contains a device: here, the device's own."""
        return device

    def _gradient_parts(self, asked: Sequence[str]) -> list[str]:
        """Returns the parts of the merge that the asked devices are in, in their order."""
        return list(dict.fromkeys(self._part_of(device) for device in asked if self._counted.get(device)))

    def _rows_by_part(self) -> dict[str, tuple[int, str]]:
        """Returns the rows and the data version of each part in the merge."""
        parts = {self._part_of(device) for device, labels in self._counted.items() if labels}
        return {
            name: (int(part.counts.sum()), version) for name, (part, version) in self._parts.items() if name in parts
        }

    def _is_counted(self, device: str) -> bool:
        in_head = self._head is None or self._part_of(device) in self._head_rows
        return in_head and super()._is_counted(device)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        head = None if self._head is None else pack_space(self._head)
        rows = {part: list(item) for part, item in self._head_rows.items()}
        return {**super().state_dict(), "head": head, "head_rows": rows, "unrefined": self._unrefined}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._moments, self._unrefined = None, state["unrefined"]
        self._head = None if state["head"] is None else unpack_space(state["head"])
        self._head_rows = {part: (rows, version) for part, (rows, version) in state["head_rows"].items()}


def _summed(sums: Mapping[str, GradientSum]) -> GradientSum:
    """Returns the sums over the parts, added in their order."""
    gradients, losses, rows = zip(*sums.values(), strict=True)
    return GradientSum(np.sum(gradients, axis=0), sum(losses), sum(rows))
