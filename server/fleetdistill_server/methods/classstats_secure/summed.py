"""Server half of classstats_summed: the sums have no noise, and the refined head's gradients are summed securely."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np

from fleetdistill.knowledge import ClassSpace, ClassSums, HeadGradient, LinearHead, SecureMessage
from fleetdistill.methods.classstats.shared_statistics import Moments
from fleetdistill.methods.classstats_private.sums import RowSums, from_wire
from fleetdistill.methods.classstats_secure.config import ClassStatsSummedConfig
from fleetdistill.methods.classstats_secure.encoding import gradient_of_sum, moments_of_sums
from fleetdistill.secure.primitives import Numbers, from_bytes, lift, reduce
from fleetdistill.secure.session import Parameters
from fleetdistill.wire.kind import PartSchema
from fleetdistill_server.methods.classstats.merge import Merged, MergeRules, merge_moments
from fleetdistill_server.methods.classstats.refinement import GradientChecks, Objective
from fleetdistill_server.methods.classstats.refining import RefiningServer
from fleetdistill_server.methods.classstats_secure.sum_server import SumServer
from fleetdistill_server.methods.cohort import Cohort, Notes
from fleetdistill_server.methods.traffic import Sizes
from fleetdistill_server.texts import UNREVIEWED, counted


class ClassStatsSummedServer(RefiningServer, SumServer):
    """Merges sums without noise: the moments of all their rows, with the directions that each device kept.

    The gradient is summed over exactly the devices of a sum, in its round: the difference of two sums over devices that
    differ by one would show that device's part.
    """

    config: ClassStatsSummedConfig
    summary = "sums that hide each device's part, without noise"
    recommended = (
        "where the server must not see one device's class means, but the sum over the fleet may be known: the accuracy "
        "of classstats, and rows that are harder to link with every further device. It is no privacy guarantee: use "
        "classstats_secure for one. Its limits: five short asks, 8 times the bytes of classstats, no look at single "
        "devices. Not yet reviewed by a cryptographer. docs/reference/methods/ has the figures"
    )
    after_forgetting = "which are in no sum of this run again: without noise, the difference could show one's part"

    @classmethod
    def gradient_schema(cls, config: Any, sizes: Sizes) -> PartSchema:
        """Returns the schema of a device's masked sums of the gradient."""
        dimensions = cls.dimensions(config, sizes)
        width = config.parameters_for(config.max_in_sum, sizes.classes, dimensions).width
        return SecureMessage.schema("gradient", ((sizes.classes * (dimensions + 1) + 2) * width,))

    # --- the merge

    def part_of(self, sums: RowSums, parameters: Parameters, devices: int) -> ClassSums:
        """Returns the sums in float64, which holds them exactly."""
        upper = np.triu_indices(parameters.dimensions)
        return ClassSums(
            counts=sums.counts, sums=sums.sums, second_moment=sums.second_moment[upper], mu=0.0, discrete=True
        )

    def merged_sums(self, parts: Mapping[str, Any], rules: MergeRules, notes: Notes) -> Merged:
        """Merges the sums' moments exactly."""
        return merge_moments(parts, rules, notes, lambda part: moments_of_sums(from_wire(part)))

    def labels_of(self, part: Any) -> Sequence[int]:
        """Returns all classes: a sum has numbers of every class."""
        return range(self.context.classes)

    def _free(self, devices: Sequence[str]) -> None:
        """Keeps the devices out of further sums."""

    # --- the refined head

    async def _refined(self, cohort: Cohort, asked: Sequence[str], moments: Moments) -> ClassSpace | None:
        """Refines the head of a merge whose sums are all of this round; see `RefiningServer._refined`."""
        earlier = self._rows_by_part().keys() - self._made.keys()
        if not earlier:
            return await super()._refined(cohort, asked, moments)
        self._unrefined = self.merge_name
        text = f"{counted(len(earlier), 'sum')} of the merge {'is' if len(earlier) == 1 else 'are'} of earlier rounds"
        cohort.event("not-refined", f"{text}, whose devices sum no further gradients; the closed form is used")
        return None

    def _part_of(self, device: str) -> str:
        return self._members.get(device, "")

    async def sums_at(
        self, cohort: Cohort, head: LinearHead, parts: Sequence[str]
    ) -> AsyncIterator[tuple[str, HeadGradient]]:
        """Yields the gradient of each secure sum all of whose devices have answered."""
        devices = sorted(device for device, name in self._members.items() if name in parts)
        masked = defaultdict[str, list[Numbers]](list)
        answered = set()
        async for answer in self.ask_gradients(cohort, head, devices):
            name = self._members[answer.device]
            data = answer.part("gradient", SecureMessage).gradient
            assert data is not None  # checked by the front
            masked[name].append(from_bytes(np.asarray(data).tobytes(), self._made[name].width))
            answered.add(answer.device)
        for name in parts:
            missing = [device for device in devices if self._members[device] == name and device not in answered]
            if missing:
                text = f"{missing[0]} and {len(missing) - 1} more" if len(missing) > 1 else missing[0]
                text = f"{text} did not answer, so nothing is known of the gradient of this sum's devices"
                cohort.event("gradient-left-out", f"{name}: {text} {UNREVIEWED}")
                continue
            width = self._made[name].width
            total = reduce(np.sum(masked[name], axis=0, dtype=np.uint64), width)
            yield name, gradient_of_sum(lift(total, width), self._made[name])

    def checks_of(self, part: str, objective: Objective) -> GradientChecks:
        """Returns what the gradient of a secure sum must satisfy; without these tests, one wrong mask spoils all."""
        moments = moments_of_sums(from_wire(self._parts[part][0]))
        labels = next(self._counted[device] for device, name in self._members.items() if name == part)
        return GradientChecks(moments, labels, objective.labels, objective.mean)
