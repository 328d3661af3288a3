"""Kinds of a run's events that more than one folder names."""

from __future__ import annotations

LEFT_OUT = ("summary-left-out", "update-left-out", "upload-left-out")
"""Kinds of the events about a device whose answer is far from the others'."""
MOST_OF_THE_WEIGHT = "most-of-the-weight"
"""Kind of the event about a device that has more than half of a mean's weight."""
LARGE_DEVICE = "large-device"
"""Kind of the event about a device that declares far more samples than the others; once for each."""
ENGINE_FAILED = "engine-failed"
"""Kind of the event that says why an engine ended."""
GUARD = "-guard"
"""How the kind of an event ends that a method's guard wrote; see `Cohort.guard`."""
