"""The merge of the devices' class statistics, without the devices and the classes that cannot be right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median

import numpy as np

from fleetdistill.class_statistics import ClassSummary, from_wire, length, merge
from fleetdistill.knowledge import Array, ClassStatistics
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
    for part in _of_one_scale(parts, notes):
        for label in part.labels:
            by_class[label].append(part)
    alone = sorted(label for label, known in by_class.items() if len(known) < 2)
    if alone:
        notes.event("class-of-one-device", f"classes {alone} are known from one device each; they are used")
    return {label: merge([_one_class(part, label) for part in by_class[label]], rank) for label in sorted(by_class)}


def too_large(classes: Classes, limit: float, notes: Notes) -> list[int]:
    """Labels of classes with a number over the limit of the wire, which no honest devices' features make together."""
    fits = {label: max(map(_largest, (c.mean, c.directions, c.variance))) <= limit for label, c in classes.items()}
    over = [label for label, fit in fits.items() if not fit]
    for label in over:
        notes.event("class-left-out", f"class {label}: its merged statistics go over {limit:g}; it is left out")
    return over


def _of_one_scale(parts: Mapping[str, ClassStatistics], notes: Notes) -> list[ClassStatistics]:
    """Guard: without those of a device whose features are many times as long as the fleet's.

    Its variance would reach all classes by way of the pooled one. Of two devices neither is left out: there is no
    telling which of them is right, and the median is their mean.
    """
    known = {device: part for device, part in sorted(parts.items()) if part.labels}
    lengths = {device: max(map(length, from_wire(part).values())) for device, part in known.items()}
    limit = _LONGEST * median(lengths.values()) if lengths else 0.0
    for device in [device for device in lengths if lengths[device] > limit]:
        text = f"its features have length {lengths.pop(device):g}, {_LONGEST:g} times the fleet's is {limit:g}"
        notes.event("summary-left-out", f"{device}: {text}; its summary is left out of the merge", device)
    return [known[device] for device in lengths]


def _one_class(part: ClassStatistics, label: int) -> ClassSummary:
    """In float64, class by class: all parts at once may be more than there is memory."""
    row = part.labels.index(label)
    names = ("counts", "means", "directions", "variances")
    arrays = {name: array[row : row + 1] for name in names if (array := getattr(part, name)) is not None}
    return from_wire(ClassStatistics(labels=[label], **arrays))[label]


def _largest(array: Array) -> float:
    return float(np.abs(array).max(initial=0))
