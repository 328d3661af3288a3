"""Server half of classstats_summed: the sums have no noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fleetdistill.knowledge import ClassSums
from fleetdistill.methods.classstats_private.sums import RowSums, from_wire
from fleetdistill.methods.classstats_secure.config import ClassStatsSummedConfig
from fleetdistill.methods.classstats_secure.encoding import moments_of_sums
from fleetdistill.secure.session import Parameters
from fleetdistill_server.methods.classstats.merge import Merged, MergeRules, merge_moments
from fleetdistill_server.methods.classstats_secure.sum_server import SumServer
from fleetdistill_server.methods.cohort import Notes


class ClassStatsSummedServer(SumServer):
    """Merges sums without noise: the moments of all their rows, with the directions that each device kept."""

    config: ClassStatsSummedConfig
    summary = "sums that hide each device's part, without noise"
    recommended = (
        "where the server must not see one device's class means, but the sum over the fleet may be known: the accuracy "
        "of classstats, and rows that are harder to link with every further device. It is no privacy guarantee: use "
        "classstats_secure for one. Its limits: five short asks, 8 times the bytes of classstats, no look at single "
        "devices. Not yet reviewed by a cryptographer. docs/reference/methods/ has the figures"
    )
    after_forgetting = "which are in no sum of this run again: without noise, the difference could show one's part"

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
