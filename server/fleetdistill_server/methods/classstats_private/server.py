"""Server half of private class statistics: merges noisy sums, knowing how large their noise is.

Everything here is computed from what the devices have released, so it costs no privacy. The formulas are in
docs/reference/methods/classstats_private.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from torch import nn

from fleetdistill.errors import RunError
from fleetdistill.knowledge import ClassSpace, ClassSums, Kind
from fleetdistill.methods.classstats.class_space import make_space
from fleetdistill.methods.classstats.config import SCATTERING
from fleetdistill.methods.classstats.shared_statistics import Moments
from fleetdistill.methods.classstats_private.config import MAX_OUTPUTS, ClassStatsPrivateConfig
from fleetdistill.methods.classstats_private.merge import (
    PrivateMoments,
    merge_private,
    much_noise,
    other_dimensions,
    precisions,
    strength,
    too_few_rows,
)
from fleetdistill.methods.classstats_private.public_features import private_extractor
from fleetdistill.methods.classstats_private.sums import NoiseScale, from_wire
from fleetdistill.wire.kind import PartSchema
from fleetdistill_server.figures import Figure
from fleetdistill_server.methods.classstats.merge import Merged, MergeRules
from fleetdistill_server.methods.classstats.server import ClassStatsServer
from fleetdistill_server.methods.classstats_private.screen import Releases, screen_releases
from fleetdistill_server.methods.cohort import Notes
from fleetdistill_server.methods.traffic import Sizes

_ROUNDING = 1 + 1e-9


class ClassStatsPrivateServer(ClassStatsServer):
    """Stores each device's noisy sums separately, and the class space of their merge."""

    config: ClassStatsPrivateConfig
    summary = "one exchange of sums with noise, closed form"
    figures = {"strength": Figure("Strength", digits=1)}  # noqa: RUF012  (a ClassVar of the base)
    recommended = (
        "where rows must stay private against the server too: each row is (epsilon, delta)-private. It costs accuracy, "
        "less with more rows and devices. Its limits: grey images, or an app's pretrained extractor of at most 128 "
        "outputs. docs/reference/methods/ has the figures"
    )
    kind: ClassVar[type[Kind]] = ClassSums

    def __init__(self, config: ClassStatsPrivateConfig, context: Any) -> None:
        super().__init__(config, context)
        self._too_few_rows: str | None = None  # why the last merge is mostly noise

    def make_extractor(self, given: nn.Module | None, input_shape: tuple[int, ...]) -> nn.Module:
        """Returns the public extractor, as the devices make it; `given` is the run's own, None with scattering."""
        return private_extractor(self.config.features, given, input_shape, self.config.dimensions)

    @classmethod
    def dimensions(cls, config: Any, sizes: Sizes) -> int:
        """Returns F, numbers of a row of features."""
        return min(config.dimensions if config.features == SCATTERING else MAX_OUTPUTS, sizes.features)

    @classmethod
    def statistics_schema(cls, config: Any, sizes: Sizes) -> PartSchema:
        """Returns the schema of the noisy sums, which have the same shapes whatever data a device has."""
        return ClassSums.schema(classes=sizes.classes, dimensions=cls.dimensions(config, sizes), features=sizes.cuts)

    def note_received(self, device: str, sent: Any, notes: Notes) -> None:
        """Adds an event for a device that releases with a smaller epsilon than the run's."""
        if sent.mu * _ROUNDING < self.config.guarantee.mu:
            text = f"{device} adds more noise than the run asks for: its app allows a smaller epsilon"
            notes.event("more-noise", text, device)

    def labels_of(self, part: Any) -> Sequence[int]:
        """Returns all classes: a device sends sums of every class."""
        return range(self.context.classes)

    # --- the merge

    def merged(self, parts: Mapping[str, Any], rules: MergeRules, notes: Notes) -> Merged:
        """Merges the noisy sums of the devices that pass the tests."""
        unit = math.sqrt(self.fixed.dimensions)
        rules = replace(rules, trusted={label: centre / unit for label, centre in rules.trusted.items()})
        releases = {device: self._release(part) for device, part in sorted(parts.items())}
        weights = self._precisions(parts)
        kept, left_out = screen_releases(releases, weights, rules, notes)
        result = (
            merge_private([one for one, _ in kept.values()], [noise for _, noise in kept.values()]) if kept else None
        )
        self._note_strength(parts, kept, weights, notes)
        if result is None:
            return None, {}, left_out
        counted = {device: result.labels.tolist() for device in kept}
        return self._moments_of(result), counted, left_out

    def _release(self, part: ClassSums) -> Any:
        return from_wire(part), NoiseScale.of(self._mu(part))

    def _mu(self, part: ClassSums) -> float:
        return min(part.mu, self.config.guarantee.mu)  # a device that claims less noise would count for more

    def _precisions(self, parts: Mapping[str, Any]) -> dict[str, float]:
        return dict(zip(parts, precisions([self._mu(part) for part in parts.values()]), strict=True)) if parts else {}

    def _moments_of(self, found: PrivateMoments) -> Moments:
        """Returns the moments of rows of length sqrt(F), as the features of both variants have."""
        counts, size = np.maximum(np.rint(found.counts), 1).astype(np.int64), self.fixed.dimensions
        return Moments(
            labels=tuple(found.labels.tolist()),
            counts=counts,
            means=found.means * math.sqrt(size),
            covariance=found.covariance * size,
            df=max(int(counts.sum()) - len(counts), 1),
        )

    def _note_strength(
        self, parts: Mapping[str, Any], kept: Releases, weights: Mapping[str, float], notes: Notes
    ) -> None:
        """Guard: reports R, with events if accuracy will be far below that without noise, or better with other F."""
        if not kept:
            return
        mus = self._device_mus(parts, list(kept))
        weighted = sum(float(sums.counts.sum()) for sums, _ in kept.values())
        rows = max(weighted / sum(weights[name] for name in kept), 0.0) * len(kept) / len(mus)
        mean_mu, result = math.sqrt(float(np.mean(np.square(mus)))), strength(rows, mus)
        self._too_few_rows = too_few_rows(rows, len(mus), mean_mu, self.config.epsilon)
        notes.report("strength", round(result, 1))
        if self._too_few_rows is None:
            for warning in much_noise(result):
                notes.event("much-noise", warning)
            for advice in other_dimensions(result, self.config.features, self.config.dimensions):
                text = f"{advice}; in a new run the devices release their rows again"
                notes.event("other-dimensions", text, once=True)

    def _device_mus(self, parts: Mapping[str, Any], kept: Sequence[str]) -> list[float]:
        """Returns the Gaussian-DP parameter of each device in the merge."""
        return [self._mu(parts[device]) for device in kept]

    def check_merge(self) -> None:
        """Ends the run if the merge is mostly noise. Raises RunError."""
        if self._too_few_rows is not None:
            raise RunError(f"{self._too_few_rows}; then start a new run")

    def space_of(self, moments: Moments, notes: Notes) -> ClassSpace:
        """Returns the space without shrinkage: the merge has bounded the eigenvalues by what is known of the noise."""
        return make_space(moments, shrinkage=0.0)
