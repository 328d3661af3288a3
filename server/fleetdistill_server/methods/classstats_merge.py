"""The merges of the devices' class statistics, without the devices and the classes that cannot be right."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from fleetdistill.class_statistics import ClassSummary, from_wire, length, merge
from fleetdistill.knowledge import Array, ClassStatistics, SharedStatistics
from fleetdistill.shared_statistics import Moments
from fleetdistill.shared_statistics import from_wire as from_wire_shared
from fleetdistill.shared_statistics import merge as merge_shared
from fleetdistill_server.methods.base import Notes

_LONGEST = 10.0  # times the fleet's median; rows of one extractor's features do not differ so much
Classes = dict[int, ClassSummary]


def merged(parts: Mapping[str, ClassStatistics], rank: int, notes: Notes) -> Classes:
    """Every class over the devices that have sent it, by label, in the order of the devices' ids; not yet shrunk.

    Args:
        parts: What each device has sent.
        rank: Directions wanted, at least 0.
        notes: Hears of classes of one device alone, and of devices that are left out.
    """
    by_class: dict[int, list[ClassStatistics]] = defaultdict(list)
    known = {device: part for device, part in sorted(parts.items()) if part.labels}
    lengths = {device: max(map(length, from_wire(part).values())) for device, part in known.items()}
    kept = [known[device] for device in _of_one_scale(lengths, notes)]
    for part in kept:
        for label in part.labels:
            by_class[label].append(part)
    _note_single_classes([part.labels for part in kept], notes)
    return {label: merge([_one_class(part, label) for part in by_class[label]], rank) for label in sorted(by_class)}


def merged_moments(parts: Mapping[str, SharedStatistics], count_cap: float, notes: Notes) -> Moments | None:
    """The exact merge of statistics with one covariance; None where no device has a class.

    Args:
        parts: What each device has sent, in the order of the devices' ids.
        count_cap: Most rows that a device counts for, as a multiple of the median device's; 0 for no bound.
        notes: Takes events about classes of one device alone, and about devices that are left out or bounded.
    """
    known = {device: part for device, part in parts.items() if part.labels}
    lengths = {device: _length(from_wire_shared(part)) for device, part in known.items()}
    kept = [device for device in known if device in _of_one_scale(lengths, notes)]
    if not kept:
        return None
    _note_single_classes([known[device].labels for device in kept], notes)
    shares = _capped({device: _rows(known[device]) for device in kept}, count_cap, notes)
    return merge_shared(_counted_for(from_wire_shared(known[device]), shares[device]) for device in kept)


def _length(moments: Moments) -> float:
    """Root mean square length of the rows of the class that has the longest."""
    return float(np.sqrt(np.square(moments.means).sum(axis=1).max() + np.trace(moments.covariance)))


def _rows(part: SharedStatistics) -> int:
    return 0 if part.counts is None else int(part.counts.astype(np.int64).sum())


def _capped(rows: Mapping[str, int], cap: float, notes: Notes) -> dict[str, float]:
    """The share of its rows that each device counts for."""
    most = cap * median(rows.values()) if cap else float("inf")
    for device in (one for one, count in rows.items() if count > most):
        text = f"{device} has sent statistics of {rows[device]} rows; they count as {most:g}, count_cap = {cap:g} times"
        notes.event("rows-capped", f"{text} the median device's", device)
    return {device: min(1.0, most / count) for device, count in rows.items()}


def _counted_for(moments: Moments, share: float) -> Moments:
    if share == 1.0:
        return moments
    counts = np.maximum((moments.counts * share).astype(np.int64), 1)
    return replace(moments, counts=counts, df=max(int(counts.sum()) - len(counts), 0))


def too_large(classes: Classes, limit: float, notes: Notes) -> list[int]:
    """Labels of classes with a number over the limit of the wire, which no honest devices' features make together."""
    fits = {label: max(map(_largest, (c.mean, c.directions, c.variance))) <= limit for label, c in classes.items()}
    over = [label for label, fit in fits.items() if not fit]
    for label in over:
        notes.event("class-left-out", f"class {label}: its merged statistics go over {limit:g}; it is left out")
    return over


def _of_one_scale(lengths: Mapping[str, float], notes: Notes) -> list[str]:
    """Guard: the devices without those whose features are many times as long as the fleet's.

    The variance of such a device would reach all classes by way of the pooled one. Of two devices neither is left out:
    there is no telling which of them is right, and the median is their mean.
    """
    limit = _LONGEST * median(lengths.values()) if lengths else 0.0
    for device in (one for one in lengths if lengths[one] > limit):
        text = f"its features have length {lengths[device]:g}, {_LONGEST:g} times the fleet's is {limit:g}"
        notes.event("summary-left-out", f"{device}: {text}; its summary is left out of the merge", device)
    return [device for device in lengths if lengths[device] <= limit]


def _note_single_classes(labels_of_devices: Sequence[Sequence[int]], notes: Notes) -> None:
    devices = Counter(label for labels in labels_of_devices for label in labels)
    if alone := sorted(label for label, count in devices.items() if count < 2):
        notes.event("class-of-one-device", f"classes {alone} are known from one device each; they are used")


def _one_class(part: ClassStatistics, label: int) -> ClassSummary:
    """In float64, class by class: all parts at once may be more than there is memory."""
    row = part.labels.index(label)
    names = ("counts", "means", "directions", "variances")
    arrays = {name: array[row : row + 1] for name in names if (array := getattr(part, name)) is not None}
    return from_wire(ClassStatistics(labels=[label], **arrays))[label]


def _largest(array: Array) -> float:
    return float(np.abs(array).max(initial=0))
