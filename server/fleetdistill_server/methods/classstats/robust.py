"""Tests of what devices have sent of their classes: what of it goes into a merge, and how many rows it counts for.

One implementation for both forms of class statistics; docs/reference/robust.md has the rules. Nothing here depends on
the order of the devices: medians over them, and ties that go by their ids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fleetdistill.knowledge import Array
from fleetdistill.training.local_training import TensorData

MOST_ROWS = 3.0
"""Rows that a device counts for, as a multiple of the median device's."""
MOST_SPREAD = 4.0
"""Trace of a covariance, as a multiple of the median one."""
MOST_LENGTH = 4.0
"""Length of a device's longest mean, as a multiple of the median device's."""
LEAST_NEAR = {"gross": 0.25, "strict": 0.5}
"""Share of a device's class means that must be nearest to the centre of their own class."""
COMMON_SHIFT = 0.75
"""Share of the squared distances of a device's means from their centres that makes a common shift one of its images."""
_MOST_DISTANCE, _LEAST_DISTANCE, _DEVICES_DIFFER = 3.0, 3.0, 0.05
_FEWEST_SHIFTED = 4
"""Means; of two that are flipped to a pair of similar classes most of the distance is common too."""
_FEWEST_DEVICES = 3
"""Of two there is no telling which is right."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceStatistics:
    """What the tests look at of one device's statistics.

    Attributes:
        labels: Its K classes, ascending.
        counts: `[K]` int64, rows of each.
        means: `[K, F]`, any float type.
        traces: `[K]` float64, of each class's covariance; `[1]` where the classes share one.
    """

    labels: tuple[int, ...]
    counts: Array
    means: Array
    traces: Array

    def without(self, labels: tuple[int, ...]) -> DeviceStatistics:
        """The other classes."""
        at = np.flatnonzero(~np.isin(self.labels, labels))
        labels = tuple(self.labels[one] for one in at)
        traces = self.traces if len(self.traces) == 1 else self.traces[at]
        return replace(self, labels=labels, counts=self.counts[at], means=self.means[at], traces=traces)


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """What a test leaves out of a merge: classes of one device, or all of them."""

    device: str
    labels: tuple[int, ...]
    reason: str


Fleet = dict[str, DeviceStatistics]
Screened = tuple[Fleet, list[LeftOut]]
"""What is kept, and what is not."""


def capped(fleet: Mapping[str, DeviceStatistics], cap: float) -> Fleet:
    """Counts scaled so that no device counts for more than `cap` times the rows of the median device.

    Every class keeps at least one row. A device below the cap stays as it is, bit for bit.
    """
    if not fleet:
        return {}
    totals = {device: int(one.counts.sum()) for device, one in fleet.items()}
    most = cap * median(totals.values())
    return {
        device: one if totals[device] <= most else replace(one, counts=_scaled(one.counts, most / totals[device]))
        for device, one in fleet.items()
    }


def _scaled(counts: Array, share: float) -> Array:
    return np.maximum(np.rint(counts * share), 1).astype(np.int64)


def screen(fleet: Mapping[str, DeviceStatistics], robust: str, trusted: Mapping[int, Array] | None = None) -> Screened:
    """Leaves out what fails a test, one test after the other: length, spread, nearest centre and, if strict, distance.

    Args:
        fleet: What each device has sent of its classes, in the order of the devices' ids; each has one at least.
        robust: `gross` or `strict`.
        trusted: Centres of classes that the operator vouches for, `[F]` each; they replace the devices' own.

    Returns:
        What is kept of each device of which something is, and all that is left out.
    """
    trusted = trusted or {}
    if not fleet or (len(fleet) < _FEWEST_DEVICES and not trusted):
        return dict(fleet), []
    found: list[LeftOut] = []
    kept = dict(fleet)
    for test in (_drop_long_means, _drop_wide_covariances):
        kept, left_out = test(kept)
        found += left_out
    kept, left_out = _drop_misplaced_devices(kept, robust, len(fleet) // 2, trusted)
    found += left_out
    if robust == "strict":
        kept, left_out = _drop_distant_classes(kept)
        found += left_out
    return kept, found


def trusted_centres(rows: TensorData | None, features: Callable[[Tensor], Array]) -> dict[int, Array]:
    """The mean features of each class that the operator vouches for.

    Args:
        rows: Labelled data that is trusted; None for none.
        features: Inputs to features `[n, F]`.
    """
    if rows is None:
        return {}
    labels = rows.labels.numpy()
    found = {}
    for label in np.unique(labels).tolist():
        of_label = rows.inputs[torch.from_numpy(labels == label)]
        found[label] = features(of_label).astype(np.float64).mean(axis=0)
    return found


# --- length and spread


def _drop_long_means(fleet: Fleet) -> Screened:
    """Means that are many times too long have no larger covariance, and may lie nearest to their own centre."""
    longest = {device: _longest(one.means) for device, one in fleet.items()}
    limit = MOST_LENGTH * median(longest.values())
    left_out = [
        LeftOut(
            device=device,
            labels=one.labels,
            reason=f"its longest class mean has length {longest[device]:.4g}, the limit is {limit:.4g}, "
            f"{MOST_LENGTH:g} times the median device's",
        )
        for device, one in fleet.items()
        if longest[device] > limit
    ]
    return without(fleet, left_out), left_out


def _longest(means_kf: Array) -> float:
    return float(np.sqrt(np.square(means_kf.astype(np.float64)).sum(axis=1).max()))


def _drop_wide_covariances(fleet: Fleet) -> Screened:
    """A covariance that is many times the others' would reach all classes by way of what they share."""
    if not fleet:
        return {}, []
    limit = MOST_SPREAD * float(np.median(np.concatenate([one.traces for one in fleet.values()])))
    left_out = []
    for device, one in fleet.items():
        wide = np.broadcast_to(one.traces > limit, len(one.labels))
        if wide.any():
            labels = tuple(np.array(one.labels)[wide].tolist())
            reason = f"its covariance has trace {one.traces.max():.4g}, the limit is {limit:.4g}, {MOST_SPREAD:g} times"
            left_out.append(LeftOut(device=device, labels=labels, reason=f"{reason} the median"))
    return without(fleet, left_out), left_out


def without(fleet: Fleet, left_out: list[LeftOut]) -> Fleet:
    gone = {one.device: one.labels for one in left_out}
    kept = {device: one.without(gone[device]) if device in gone else one for device, one in fleet.items()}
    return {device: one for device, one in kept.items() if one.labels}


# --- nearest centre


def _drop_misplaced_devices(fleet: Fleet, robust: str, most_left_out: int, trusted: Mapping[int, Array]) -> Screened:
    """Leaves out whole devices, the worst first: a liar shifts the others' centres for as long as it is among them.

    The worst is the one with most means at other classes' centres. Liars that claim all classes may have a larger share
    at their own than honest devices with two, whose centres they shift: by the share the honest would go first.
    """
    kept, left_out, least = dict(fleet), list[LeftOut](), LEAST_NEAR[robust]
    for _ in range(most_left_out):
        centres = Centres(kept, trusted, shifted=robust == "gross")
        compared = {device: near for device, one in kept.items() if (near := centres.near(one)) is not None}
        found = {device: near for device, near in compared.items() if near.share < least}
        if not found:
            break
        worst = min(found, key=lambda device: (found[device].right - found[device].of, device))
        right, of, share = found[worst].right, found[worst].of, found[worst].share
        reason = f"{right} of its {of} class means are nearest to the centre of their class, a share of {share:.3g};"
        reason = f"{reason} {least:g} is the least"
        left_out.append(LeftOut(device=worst, labels=kept.pop(worst).labels, reason=reason))
    return kept, left_out


class Near(NamedTuple):
    """How many of a device's class means are nearest to the centre of their own class, of those that were compared."""

    right: int
    of: int

    @property
    def share(self) -> float:
        return self.right / self.of


class Centres:
    """Coordinate-wise medians of the devices' class means, as they are without one of the devices.

    Each class is sorted once: the median of all numbers but one is made of the two or three in the middle of all.

    Args:
        fleet: The devices.
        trusted: Centres that are given.
        shifted: Whether means may all be shifted alike, as those of another camera or another kind of handwriting are.
    """

    def __init__(self, fleet: Mapping[str, DeviceStatistics], trusted: Mapping[int, Array], *, shifted: bool) -> None:
        self._shifted = shifted
        means = defaultdict[int, list[Array]](list)
        for one in fleet.values():
            for label, mean in zip(one.labels, one.means, strict=True):
                means[label].append(mean)
        self._middle = {label: middle_values(means[label]) for label in means.keys() - trusted.keys()}
        of_all = {label: np.median(middle, axis=0) for label, middle in self._middle.items()}
        self._of_all = dict(sorted((of_all | dict(trusted)).items()))

    def near(self, one: DeviceStatistics) -> Near | None:
        """Of a device's class means; None where fewer than two can be compared."""
        own = dict(zip(one.labels, one.means.astype(np.float64), strict=True))
        centres = self.without(own)
        compared = [label for label in own if label in centres]
        if len(compared) < 2:
            return None
        labels, stacked = list(centres), np.stack(list(centres.values()))
        at = np.array([labels.index(label) for label in compared])
        means = np.stack([own[label] for label in compared])
        if self._shifted and len(compared) >= _FEWEST_SHIFTED:
            means = _without_common_shift(means, stacked[at])
        nearest = np.array([np.square(stacked - mean).sum(axis=1).argmin() for mean in means])
        return Near(int((nearest == at).sum()), len(compared))

    def without(self, own: Mapping[int, Array]) -> dict[int, Array]:
        """The centres, by ascending label, without these means; a class that nobody else has sent has none."""
        centres = dict(self._of_all)
        for label in own.keys() & self._middle.keys():
            middle = self._middle[label]
            if len(middle) == 1:
                del centres[label]
            else:
                centres[label] = np.where(own[label] > middle[:-1], middle[:-1], middle[1:]).mean(axis=0)
        return centres


def _without_common_shift(means_kf: Array, centres_kf: Array) -> Array:
    """Means without what they have in common against their centres, where that is most of how far they are off."""
    away_kf = means_kf - centres_kf
    shift_f = away_kf.mean(axis=0)
    explained, whole = len(away_kf) * np.square(shift_f).sum(), np.square(away_kf).sum()
    return np.asarray(means_kf - shift_f) if explained > COMMON_SHIFT * whole else means_kf


def middle_values(means: list[Array]) -> Array:
    """`[m, F]`: the one number of one, the two in the middle of an even number, the three of an odd one; ascending."""
    ordered, others = np.sort(np.stack(means).astype(np.float64), axis=0), len(means) - 1
    return ordered[max(others - 1, 0) // 2 : others // 2 + 2]


# --- distance


def _drop_distant_classes(fleet: Fleet) -> Screened:
    """Leaves out single classes of devices, where three or more have the class."""
    far = defaultdict[str, list[tuple[int, float, float]]](list)
    for label in sorted({label for one in fleet.values() for label in one.labels}):
        holders = {device: one for device, one in fleet.items() if label in one.labels}
        distances = _standardised_distances(holders, label) if len(holders) >= _FEWEST_DEVICES else {}
        most = max(_MOST_DISTANCE * median(distances.values()), _LEAST_DISTANCE) if distances else 0.0
        for device in (one for one, distance in distances.items() if distance > most):
            far[device].append((label, distances[device], most))
    left_out = []
    for device, found in sorted(far.items()):
        figures = ", ".join(f"{distance:.3g} (class {label}, limit {most:.3g})" for label, distance, most in found)
        reason = f"its class means lie this far from the median device's: {figures}"
        left_out.append(LeftOut(device=device, labels=tuple(label for label, _, _ in found), reason=reason))
    return without(fleet, left_out), left_out


def _standardised_distances(holders: Mapping[str, DeviceStatistics], label: int) -> dict[str, float]:
    """Of each device's mean from the median one, in standard errors of a mean of so many rows."""
    at = {device: one.labels.index(label) for device, one in holders.items()}
    means = np.stack([one.means[at[device]].astype(np.float64) for device, one in holders.items()])
    away = np.sqrt(np.square(means - np.median(means, axis=0)).sum(axis=1))
    spread = median(float(one.traces[0 if len(one.traces) == 1 else at[device]]) for device, one in holders.items())
    if not spread:
        return {}
    counts = np.array([one.counts[at[device]] for device, one in holders.items()])
    found = away / np.sqrt(spread * (1 / counts + _DEVICES_DIFFER))
    return dict(zip(holders, found.tolist(), strict=True))
