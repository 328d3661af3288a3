"""Server half of classstats: class statistics in one exchange, and the refined head if the run has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import Array, ClassSpace, HeadGradient, LinearHead, Plan
from fleetdistill.methods.classstats.class_space import pack_space, unpack_space
from fleetdistill.methods.classstats.config import ClassStatsConfig
from fleetdistill.methods.classstats.refined_head import GradientSum, from_wire
from fleetdistill.methods.classstats.shared_statistics import Moments, in_float16
from fleetdistill.methods.classstats.shared_statistics import from_wire as statistics_from_wire
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
from fleetdistill_server.methods.cohort import Cohort, Notes
from fleetdistill_server.methods.traffic import Exchange, Sizes

REFINE = "refine"
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
        self._head_rows: dict[str, tuple[int, str]] = {}  # rows and data version of each device in the head

    @classmethod
    def exchanges(cls, config: ClassStatsConfig, sizes: Sizes) -> Sequence[Exchange]:
        """Returns the exchanges of classstats; with `refine`, the gradient sums are between them."""
        summarise, learn = super().exchanges(config, sizes)
        if not config.refines:
            return [summarise, learn]
        size = {"classes": sizes.classes, "dimensions": cls.dimensions(config, sizes)}
        refine = Exchange(
            step=REFINE,
            down={"head": LinearHead.schema(**size)},
            up={"gradient": HeadGradient.schema(**size)},
            times=config.refine_steps,
            setting="refine_steps",
            end=1,
        )
        return [summarise, refine, learn]

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
            self._head, self._head_rows = head, self._rows_by_device()
            self.use_space(head, cohort)

    async def _refined(self, cohort: Cohort, asked: Sequence[str], moments: Moments) -> ClassSpace | None:
        """Asks the devices for gradient sums step by step; returns the head's space, or None if too few take part."""
        mean = in_float16(mean_of_rows(moments), "the mean of the features")
        shrinkage = self._shrinkage(moments)
        objective = usual_objective(moments, mean, shrinkage)
        refinement, taking = Refinement(objective), [device for device in asked if self._counted.get(device)]
        checks = {device: self._checks_of(device, objective) for device in taking}
        for step in range(self.config.refine_steps):
            evaluated = in_float16(refinement.weights, "the head's weights")
            sums = await self._gradients(cohort, objective, evaluated, {device: checks[device] for device in taking})
            if not self._are_enough(sums, objective, cohort):
                return None
            if list(sums) != taking and refinement.values:
                refinement.restart()
            taking = list(sums)
            refinement.step(evaluated, _summed(sums))
            if step == 1 and self._falls_too_little(refinement, cohort):
                return None
        change = refinement.values[-1] / refinement.values[0] - 1 if len(refinement.values) > 1 else 0.0
        text = f"the head is refined by the gradients of {len(taking)} devices; its objective changed by {change:+.1%}"
        cohort.event("head-refined", text)
        cohort.report("refined_loss", refinement.values[-1] / objective.rows)
        return space_of_head(objective, refinement.final(), moments.df, shrinkage)

    async def _gradients(
        self, cohort: Cohort, objective: Objective, evaluated_kd: Array, checks: Mapping[str, GradientChecks | None]
    ) -> dict[str, GradientSum]:
        """Returns each device's sums at the weights, in device-id order; leaves implausible ones out."""
        head = LinearHead(
            labels=list(objective.labels),
            counts=objective.counts.astype(np.int32),
            mean=objective.mean,
            weights=evaluated_kd,
        )
        sums = {}

        def message(device: str) -> Mapping[str, Any]:
            return {"head": head, "plan": Plan(values={"left_out": list(self._left_out_of(device))})}

        async for answer in self.deliveries.ask(cohort, REFINE, message, to=list(checks), quorum=0.0):
            sent = from_wire(answer.part("gradient", HeadGradient), head)
            check = checks[answer.device]
            reason = why_refused(sent, evaluated_kd.shape)
            if reason is None and check is not None:
                reason = check.why_refused(evaluated_kd, sent)
            if reason is not None:
                cohort.event("gradient-left-out", f"{answer.device}: {reason}; its sums are left out", answer.device)
            else:
                sums[answer.device] = sent
        return sums

    def _checks_of(self, device: str, objective: Objective) -> GradientChecks | None:
        if self.config.robust == "off":
            return None
        moments = statistics_from_wire(self._parts[device][0])
        return GradientChecks(moments, self._counted[device], objective.labels, objective.mean)

    def _are_enough(self, sums: Mapping[str, GradientSum], objective: Objective, notes: Notes) -> bool:
        rows = sum(one.rows for one in sums.values())
        if rows >= _MIN_SHARE * objective.rows:
            return True
        text = f"only {rows} of the merge's {objective.rows} rows take part in the gradient sums"
        notes.event("not-refined", f"{text}, at least {_MIN_SHARE:.0%} must; the closed form is used")
        return False

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
        now, before = self._rows_by_device(), self._head_rows
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

    def _rows_by_device(self) -> dict[str, tuple[int, str]]:
        """Returns the rows and the data version of each device in the merge."""
        return {
            device: (int(part.counts.sum()), version)
            for device, (part, version) in self._parts.items()
            if self._counted.get(device)
        }

    def _is_counted(self, device: str) -> bool:
        in_head = self._head is None or device in self._head_rows
        return in_head and super()._is_counted(device)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        head = None if self._head is None else pack_space(self._head)
        rows = {device: list(item) for device, item in self._head_rows.items()}
        return {**super().state_dict(), "head": head, "head_rows": rows, "unrefined": self._unrefined}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._moments, self._unrefined = None, state["unrefined"]
        self._head = None if state["head"] is None else unpack_space(state["head"])
        self._head_rows = {device: (rows, version) for device, (rows, version) in state["head_rows"].items()}


def _summed(sums: Mapping[str, GradientSum]) -> GradientSum:
    """Returns the sums over the devices, added in their order."""
    gradients, losses, rows = zip(*sums.values(), strict=True)
    return GradientSum(np.sum(gradients, axis=0), sum(losses), sum(rows))
