"""Merges the devices' class statistics, and leaves out implausible ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats.shared_statistics import Moments, from_wire, merge
from fleetdistill_server.methods.classstats.robust import MAX_ROWS, DeviceStatistics, Fleet, LeftOut, capped, screen
from fleetdistill_server.methods.cohort import Notes


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
