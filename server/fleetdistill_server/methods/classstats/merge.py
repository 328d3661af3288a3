"""Merges the devices' class statistics: leaves out implausible ones, and caps row counts.

Statistics with and without noise use the same tests; docs/reference/robust.md describes them. Their results do not
depend on the order of the devices: they use medians over devices, and device ids break ties.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats.shared_statistics import Moments, from_wire, merge
from fleetdistill.training.local_training import TensorData
from fleetdistill_server.methods.cohort import Notes

MAX_ROWS = 3.0
"""Largest row count of a device, as a multiple of the median device's."""
MAX_SPREAD = 4.0
"""Largest trace of a covariance, as a multiple of the median trace."""
MAX_LENGTH = 4.0
"""Largest length of a device's longest class mean, as a multiple of the median device's."""
MIN_NEAR = {"gross": 0.25, "strict": 0.5}
"""Smallest share of a device's class means that must be nearest to the centre of their own class."""
COMMON_SHIFT = 0.75
"""Share of a device's squared distances from the centres above which a common shift is attributed to its images."""
_MAX_DISTANCE, _MIN_DISTANCE, _DEVICES_DIFFER = 3.0, 3.0, 0.05
_FEWEST_SHIFTED = 4
"""Fewest means for a common shift: with two swapped, similar classes most of the distance is common as well."""
_FEWEST_DEVICES = 3
"""Fewest devices for a test: of two that differ, neither can be identified as wrong."""


@dataclass(frozen=True, kw_only=True)
class MergeRules:
    """Tests and limits that a merge applies to the devices' statistics.

    Attributes:
        robust: `gross`, `strict` or `off`.
        count_cap: Largest row count of a device, as a multiple of the median device's; 0 for the default of `robust`.
        trusted: Class centres from the operator's own data, `[F]` each.
    """

    robust: str
    count_cap: float = 0.0
    trusted: Mapping[int, Array] = field(default_factory=dict)


LeftOutReasons = dict[str, list[str]]
"""Maps each device to the reasons why its statistics are left out, as sentences."""
Merged = tuple[Moments | None, dict[str, list[int]], LeftOutReasons]
"""The merge, or None if no class remains; each device's classes in it; and why statistics are left out."""


def note_left_out(left_out: LeftOutReasons, notes: Notes, devices: Collection[str] | None = None) -> None:
    """Adds an event for everything that a merge leaves out; called in each round with the round's devices.

    Args:
        left_out: Reasons from `merge_moments`.
        notes: Receives the events.
        devices: Devices to report; None for all.
    """
    for device in left_out if devices is None else sorted(left_out.keys() & set(devices)):
        for text in left_out[device]:
            notes.event("summary-left-out", text, device)


def merge_moments(
    parts: Mapping[str, Any], rules: MergeRules, notes: Notes, moments_of: Callable[[Any], Moments] = from_wire
) -> Merged:
    """Merges statistics with one shared covariance, exactly: N, M and S of docs/reference/methods/classstats.md.

    Args:
        parts: Statistics by device id, or by the name of a secure sum.
        rules: Tests and limits for the statistics.
        notes: Receives events about statistics that are left out or capped.
        moments_of: Returns the moments of a part; called twice for each, so that one at a time is in memory.

    Returns:
        The merge, or None if no class remains; for each device its classes in the merge; and the reasons for
        statistics that are left out.
    """
    fleet = {device: _statistics_of(moments_of(part)) for device, part in sorted(parts.items())}
    kept, left_out = _screen({device: one for device, one in fleet.items() if one.labels}, rules, notes)
    counted = {device: list(one.labels) for device, one in kept.items()}
    moments = (_moments_of(moments_of(parts[device]), one) for device, one in kept.items())
    return merge(moments) if kept else None, counted, left_out


# --- screening


def _screen(fleet: Fleet, rules: MergeRules, notes: Notes) -> tuple[Fleet, LeftOutReasons]:
    off = rules.robust == "off"
    cap = rules.count_cap or (0.0 if off else MAX_ROWS)
    bounded = capped(fleet, cap) if cap else fleet
    for device in (device for device in fleet if bounded[device] is not fleet[device]):
        rows, counted = int(fleet[device].counts.sum()), int(bounded[device].counts.sum())
        text = (
            f"{device} sent statistics of {rows} rows, which count as {counted}: the limit is {cap:g} times the median"
        )
        notes.event("rows-capped", f"{text} device's rows", device)
    kept, reasons = (bounded, list[LeftOut]()) if off else screen(bounded, rules.robust, rules.trusted)
    left_out: LeftOutReasons = {}
    for reason in reasons:
        what = f"class{'es' if len(reason.labels) > 1 else ''} {', '.join(map(str, reason.labels))}"
        text = f"{reason.device}: {reason.reason}; its statistics of {what} are left out of the merge"
        left_out.setdefault(reason.device, []).append(text)
    note_left_out(left_out, notes)
    return kept, left_out


def _statistics_of(moments: Moments) -> DeviceStatistics:
    trace = float(np.trace(moments.covariance)) if moments.labels else 0.0
    return DeviceStatistics(labels=moments.labels, counts=moments.counts, means=moments.means, trace=trace)


def _moments_of(moments: Moments, kept: DeviceStatistics) -> Moments:
    """Restricts a device's moments to the kept classes and their capped counts."""
    at = np.flatnonzero(np.isin(moments.labels, kept.labels))
    df = moments.df if (moments.counts.tolist() == kept.counts.tolist()) else _degrees(kept.counts)
    return replace(moments, labels=kept.labels, counts=kept.counts, means=moments.means[at], df=df)


def _degrees(counts: Array) -> int:
    return max(int(counts.sum()) - len(counts), 0)


def note_no_class(device: str, labels: Sequence[int], min_samples: int, notes: Notes) -> None:
    """Adds an event for a device whose statistics contain no class."""
    if not labels:
        text = f"{device} has no class with at least {min_samples} samples (min_samples); none of its rows are merged"
        notes.event("no-class-sent", text, device)


def note_single_classes(labels_of_devices: Collection[Sequence[int]], notes: Notes) -> None:
    """Adds an event for classes of which only one device has sent statistics that are in the merge."""
    devices = Counter(label for labels in labels_of_devices for label in labels)
    if single := sorted(label for label, count in devices.items() if count < 2):
        notes.event("class-of-one-device", f"classes {single} come from one device each; they are used")


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceStatistics:
    """The part of one device's statistics that the tests use.

    Attributes:
        labels: The device's K classes, ascending.
        counts: `[K]` int64, rows of each class.
        means: `[K, F]`, any float type.
        trace: Trace of the covariance that the classes share.
    """

    labels: tuple[int, ...]
    counts: Array
    means: Array
    trace: float

    def without(self, labels: tuple[int, ...]) -> DeviceStatistics:
        """Returns the statistics of the other classes."""
        at = np.flatnonzero(~np.isin(self.labels, labels))
        labels = tuple(self.labels[item] for item in at)
        return replace(self, labels=labels, counts=self.counts[at], means=self.means[at])


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Classes of one device that a test leaves out of a merge."""

    device: str
    labels: tuple[int, ...]
    reason: str


Fleet = dict[str, DeviceStatistics]
Screened = tuple[Fleet, list[LeftOut]]
"""The statistics that are kept, and those that are left out."""


def capped(fleet: Mapping[str, DeviceStatistics], cap: float) -> Fleet:
    """Scales counts so that no device contributes more than `cap` times the median device's rows.

    Every class keeps at least one row. Devices below the cap are returned unchanged.
    """
    if not fleet:
        return {}
    totals = {device: int(one.counts.sum()) for device, one in fleet.items()}
    most = cap * median(totals.values())
    return {
        device: one if totals[device] <= most else replace(one, counts=_scale(one.counts, most / totals[device]))
        for device, one in fleet.items()
    }


def _scale(counts: Array, share: float) -> Array:
    return np.maximum(np.rint(counts * share), 1).astype(np.int64)


def screen(fleet: Mapping[str, DeviceStatistics], robust: str, trusted: Mapping[int, Array] | None = None) -> Screened:
    """Applies the tests in order: length, spread, nearest centre and, if `strict`, distance.

    Args:
        fleet: Statistics by device id, in id order, with at least one class each.
        robust: `gross` or `strict`.
        trusted: Class centres from the operator's data, `[F]` each; they replace the devices' centres.

    Returns:
        The kept statistics of each device that keeps at least one class, and everything that is left out.
    """
    trusted = trusted or {}
    if not fleet or (len(fleet) < _FEWEST_DEVICES and not trusted):
        return dict(fleet), []
    result: list[LeftOut] = []
    kept = dict(fleet)
    for test in (_drop_long_means, _drop_wide_covariances):
        kept, left_out = test(kept)
        result += left_out
    kept, left_out = _drop_misplaced_devices(kept, robust, len(fleet) // 2, trusted)
    result += left_out
    if robust == "strict":
        kept, left_out = _drop_distant_classes(kept)
        result += left_out
    return kept, result


def trusted_centres(rows: TensorData | None, features: Callable[[Tensor], Array]) -> dict[int, Array]:
    """Returns the mean features of each class in the operator's trusted data, `[F]` float64 by label.

    Args:
        rows: Trusted labelled data; None if there is none.
        features: Maps inputs to features `[n, F]`.
    """
    if rows is None:
        return {}
    labels = rows.labels.numpy()
    result = {}
    for label in np.unique(labels).tolist():
        of_label = rows.inputs[torch.from_numpy(labels == label)]
        result[label] = features(of_label).astype(np.float64).mean(axis=0)
    return result


# --- length and spread


def _drop_long_means(fleet: Fleet) -> Screened:
    """Leaves out devices whose longest mean is too long; such a mean may still be nearest to its own centre."""
    longest = {device: _longest(one.means) for device, one in fleet.items()}
    limit = MAX_LENGTH * median(longest.values())
    left_out = [
        LeftOut(
            device=device,
            labels=one.labels,
            reason=f"its longest class mean has length {longest[device]:.4g}, the limit is {limit:.4g}, "
            f"{MAX_LENGTH:g} times the median device's",
        )
        for device, one in fleet.items()
        if longest[device] > limit
    ]
    return without(fleet, left_out), left_out


def _longest(means_kf: Array) -> float:
    return float(np.sqrt(np.square(means_kf.astype(np.float64)).sum(axis=1).max()))


def _drop_wide_covariances(fleet: Fleet) -> Screened:
    """Leaves out devices whose covariance is too large; it would affect all classes through the shared covariance."""
    if not fleet:
        return {}, []
    limit = MAX_SPREAD * median(item.trace for item in fleet.values())
    left_out = [
        LeftOut(
            device=device,
            labels=one.labels,
            reason=f"its covariance has trace {one.trace:.4g}, the limit is {limit:.4g}, {MAX_SPREAD:g} times the "
            "median",
        )
        for device, one in fleet.items()
        if one.trace > limit
    ]
    return without(fleet, left_out), left_out


def without(fleet: Fleet, left_out: list[LeftOut]) -> Fleet:
    gone = {item.device: item.labels for item in left_out}
    kept = {device: one.without(gone[device]) if device in gone else one for device, one in fleet.items()}
    return {device: one for device, one in kept.items() if one.labels}


# --- nearest centre


def _drop_misplaced_devices(fleet: Fleet, robust: str, max_left_out: int, trusted: Mapping[int, Array]) -> Screened:
    """Leaves out devices whose class means are nearest to the centres of other classes, the worst device first.

    Centres are recomputed after each device, because a hostile device shifts the others' centres. The worst device is
    the one with the most misplaced means, not the largest share of them: hostile devices that send all classes can
    reach a smaller share than honest devices with two classes.
    """
    kept, left_out, least = dict(fleet), list[LeftOut](), MIN_NEAR[robust]
    for _ in range(max_left_out):
        centres = Centres(kept, trusted, shifted=robust == "gross")
        compared = {device: near for device, one in kept.items() if (near := centres.near(one)) is not None}
        result = {device: near for device, near in compared.items() if near.share < least}
        if not result:
            break
        worst = min(result, key=lambda device: (result[device].right - result[device].of, device))
        right, of, share = result[worst].right, result[worst].of, result[worst].share
        reason = f"{right} of its {of} class means are nearest to the centre of their class, a share of {share:.3g};"
        reason = f"{reason} at least {least:g} is required"
        left_out.append(LeftOut(device=worst, labels=kept.pop(worst).labels, reason=reason))
    return kept, left_out


class Near(NamedTuple):
    """Number of a device's class means that are nearest to their own class's centre, and number of compared means."""

    right: int
    of: int

    @property
    def share(self) -> float:
        return self.right / self.of


class Centres:
    """Coordinate-wise medians of the devices' class means, leaving out one device at a time.

    Each class is sorted once: the median of all values but one depends on the two or three middle values only.

    Args:
        fleet: Statistics by device id.
        trusted: Class centres from the operator's data; they replace the medians.
        shifted: Whether to remove an offset that all of a device's means share, such as that of a different camera.
    """

    def __init__(self, fleet: Mapping[str, DeviceStatistics], trusted: Mapping[int, Array], *, shifted: bool) -> None:
        self._shifted = shifted
        means = defaultdict[int, list[Array]](list)
        for item in fleet.values():
            for label, mean in zip(item.labels, item.means, strict=True):
                means[label].append(mean)
        self._middle = {label: middle_values(means[label]) for label in means.keys() - trusted.keys()}
        of_all = {label: np.median(middle, axis=0) for label, middle in self._middle.items()}
        self._of_all = dict(sorted((of_all | dict(trusted)).items()))

    def near(self, one: DeviceStatistics) -> Near | None:
        """Compares a device's class means with the centres; None if fewer than two can be compared."""
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
        """Returns the centres without these means, by ascending label, of the classes that other devices sent too."""
        centres = dict(self._of_all)
        for label in own.keys() & self._middle.keys():
            middle = self._middle[label]
            if len(middle) == 1:
                del centres[label]
            else:
                centres[label] = np.where(own[label] > middle[:-1], middle[:-1], middle[1:]).mean(axis=0)
        return centres


def _without_common_shift(means_kf: Array, centres_kf: Array) -> Array:
    """Subtracts the means' common shift from their centres if it explains most of their distance."""
    away_kf = means_kf - centres_kf
    shift_f = away_kf.mean(axis=0)
    explained, whole = len(away_kf) * np.square(shift_f).sum(), np.square(away_kf).sum()
    return np.asarray(means_kf - shift_f) if explained > COMMON_SHIFT * whole else means_kf


def middle_values(means: list[Array]) -> Array:
    """Returns each coordinate's middle values, ascending, `[m, F]` float64.

    m is 1 for one mean, 2 for an even and 3 for an odd number of means.
    """
    ordered, others = np.sort(np.stack(means).astype(np.float64), axis=0), len(means) - 1
    return ordered[max(others - 1, 0) // 2 : others // 2 + 2]


# --- distance


def _drop_distant_classes(fleet: Fleet) -> Screened:
    """Leaves out single classes of devices that are too far from the median of at least three devices."""
    far = defaultdict[str, list[tuple[int, float, float]]](list)
    for label in sorted({label for item in fleet.values() for label in item.labels}):
        holders = {device: one for device, one in fleet.items() if label in one.labels}
        distances = _standardised_distances(holders, label) if len(holders) >= _FEWEST_DEVICES else {}
        most = max(_MAX_DISTANCE * median(distances.values()), _MIN_DISTANCE) if distances else 0.0
        for device in (one for one, distance in distances.items() if distance > most):
            far[device].append((label, distances[device], most))
    left_out = []
    for device, result in sorted(far.items()):
        figures = ", ".join(f"{distance:.3g} (class {label}, limit {most:.3g})" for label, distance, most in result)
        reason = f"its class means are too far from the median device's: {figures}"
        left_out.append(LeftOut(device=device, labels=tuple(label for label, _, _ in result), reason=reason))
    return without(fleet, left_out), left_out


def _standardised_distances(holders: Mapping[str, DeviceStatistics], label: int) -> dict[str, float]:
    """Returns each device's distance from the median mean, in standard errors of a mean of its row count."""
    at = {device: one.labels.index(label) for device, one in holders.items()}
    means = np.stack([one.means[at[device]].astype(np.float64) for device, one in holders.items()])
    away = np.sqrt(np.square(means - np.median(means, axis=0)).sum(axis=1))
    spread = median(holder.trace for holder in holders.values())
    if not spread:
        return {}
    counts = np.array([one.counts[at[device]] for device, one in holders.items()])
    result = away / np.sqrt(spread * (1 / counts + _DEVICES_DIFFER))
    return dict(zip(holders, result.tolist(), strict=True))
