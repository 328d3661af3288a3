"""Screens the devices' private sums before a merge, with the tests of statistics without noise.

The tests see only what was sent, so they cost no privacy. A class whose mean is mostly noise is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

import numpy as np

from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats_private.merge import merge_private
from fleetdistill.methods.classstats_private.sums import NoiseScale, RowSums
from fleetdistill_server.methods.classstats.merge import (
    MAX_ROWS,
    DeviceStatistics,
    LeftOutReasons,
    MergeRules,
    note_left_out,
    screen,
)
from fleetdistill_server.methods.cohort import Notes

Releases = dict[str, tuple[RowSums, NoiseScale]]
"""Each device's sums with the size of their noise, by ascending device id."""
_NOISE_SHARE = 0.25
"""Largest expected squared noise of a compared mean, as a share of the smallest squared distance of two centres."""


def screen_releases(
    releases: Releases, weights: Mapping[str, float], rules: MergeRules, notes: Notes
) -> tuple[Releases, LeftOutReasons]:
    """Returns the releases to merge, scaled to the cap of rows and by their precision, and why others are left out.

    Args:
        releases: Releases by device.
        weights: Each release's weight of precision; without them, one device with far more noise than the others
            would spoil the merge.
        rules: Settings of the tests.
        notes: Takes events.

    A device with one suspicious class is left out as a whole: its second moment cannot be split by class.
    """
    off = rules.robust == "off"
    cap = rules.count_cap or (0.0 if off else MAX_ROWS)
    capped = _cap(releases, cap, notes) if cap else releases
    bounded = {device: _scale(*one, weights[device]) for device, one in capped.items()}
    if off:
        return bounded, {}
    _, result = screen(_comparable(bounded), rules.robust, rules.trusted)
    left_out: LeftOutReasons = {}
    for item in result:
        left_out.setdefault(item.device, []).append(f"{item.device}: {item.reason}; its statistics are left out")
    note_left_out(left_out, notes)
    return {device: one for device, one in bounded.items() if device not in left_out}, left_out


def _cap(releases: Releases, cap: float, notes: Notes) -> Releases:
    """Scales releases, and their noise with them, so that none counts more than `cap` times the median's rows."""
    totals = {device: float(sums.counts.sum()) for device, (sums, _) in releases.items()}
    most = cap * max(median(totals.values()), 1.0) if totals else 0.0
    result: Releases = {}
    for device, (sums, noise) in releases.items():
        share = min(1.0, most / totals[device]) if totals[device] > 0 else 1.0
        if share < 1:
            text = f"{device} sent noisy sums of {totals[device]:.0f} rows, which count as {most:.0f}: the limit is"
            notes.event("rows-capped", f"{text} {cap:g} times the median device's rows", device)
        result[device] = _scale(sums, noise, share)
    return result


def _scale(sums: RowSums, noise: NoiseScale, share: float) -> tuple[RowSums, NoiseScale]:
    scaled = {name: share * value for name, value in vars(sums).items()}
    return replace(sums, **scaled), NoiseScale(*(share * var for var in vars(noise).values()))


def _comparable(releases: Releases) -> Mapping[str, DeviceStatistics]:
    """Returns the means that stand out from their noise, of the devices that have any."""
    merged = merge_private([sums for sums, _ in releases.values()], [noise for _, noise in releases.values()])
    if merged is None or len(merged.labels) < 2:
        return {}
    max_noise = _NOISE_SHARE * _smallest_square(merged.means)
    result = {device: _statistics_of(*one, max_noise) for device, one in releases.items()}
    return {device: one for device, one in result.items() if one.labels}


def _smallest_square(means_kf: Array) -> float:
    squares = np.square(means_kf[:, None] - means_kf[None]).sum(axis=2)
    return float(squares[~np.eye(len(means_kf), dtype=bool)].min())


def _statistics_of(sums: RowSums, noise: NoiseScale, max_noise: float) -> DeviceStatistics:
    counts, dimensions = np.maximum(sums.counts, 1.0), sums.sums.shape[1]
    labels = np.flatnonzero(
        (sums.counts > 2 * noise.counts) & (dimensions * np.square(noise.sums / counts) <= max_noise)
    )
    return DeviceStatistics(
        labels=tuple(labels.tolist()),
        counts=np.rint(counts[labels]).astype(np.int64),
        means=sums.sums[labels] / counts[labels, None],
        trace=float(np.trace(sums.second_moment)) / max(float(sums.counts.sum()), 1.0),
    )
