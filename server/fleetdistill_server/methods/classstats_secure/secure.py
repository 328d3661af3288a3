"""Server half of classstats_secure: the sums have noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fleetdistill.knowledge import ClassSums
from fleetdistill.methods.classstats_private.sums import RowSums, to_wire
from fleetdistill.methods.classstats_secure.config import ClassStatsSecureConfig
from fleetdistill.methods.classstats_secure.noise import check_noise
from fleetdistill.secure.session import Parameters
from fleetdistill_server.methods.classstats.merge import Merged, MergeRules
from fleetdistill_server.methods.classstats_private.server import ClassStatsPrivateServer
from fleetdistill_server.methods.classstats_secure.sum_server import SumServer
from fleetdistill_server.methods.cohort import Notes


class ClassStatsSecureServer(SumServer, ClassStatsPrivateServer):
    """Merges sums with noise, each of its own size."""

    config: ClassStatsSecureConfig
    summary = "sums that hide each device's part, one noise for all"
    recommended = (
        "where rows must stay private against the server and ten or more devices can be asked at once: the same "
        "guarantee as classstats_private with less noise, because the sum carries it once. Its limits: five short "
        "asks, grey images or an extractor of at most 128 outputs, no look at single devices. Not yet reviewed by a "
        "cryptographer. docs/reference/methods/ has the figures"
    )
    after_forgetting = "which may be summed again"

    def __init__(self, config: ClassStatsSecureConfig, context: Any) -> None:
        super().__init__(config, context)
        most = config.max_in_sum
        check_noise(config.parameters(context.classes, self.fixed.dimensions, least=most, honest=most))

    def part_of(self, sums: RowSums, parameters: Parameters, devices: int) -> ClassSums:
        """Returns the sums with the size of their noise: the more devices beyond m, the more noise."""
        return to_wire(sums, self.config.guarantee.mu * math.sqrt(parameters.honest / devices), discrete=True)

    def merged_sums(self, parts: Mapping[str, Any], rules: MergeRules, notes: Notes) -> Merged:
        """See `ClassStatsPrivateServer.merged`."""
        return ClassStatsPrivateServer.merged(self, parts, rules, notes)

    def _device_mus(self, parts: Mapping[str, Any], kept: Sequence[str]) -> list[float]:
        sizes = {name: sum(member == name for member in self._members.values()) for name in kept}
        return [self._mu(parts[name]) * math.sqrt(size) for name, size in sizes.items() for _ in range(size)]
