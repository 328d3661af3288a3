"""Kinds of events that several packages use."""

from __future__ import annotations

__all__ = ["SECURE_SUM", "SECURE_SUM_FAILED"]

LEFT_OUT = ("summary-left-out", "update-left-out", "upload-left-out")
"""Kinds of events for a device whose answer was left out as an outlier."""
MOST_OF_THE_WEIGHT = "most-of-the-weight"
"""Kind of the event for a device with more than half of the weight in a mean."""
LARGE_DEVICE = "large-device"
"""Kind of the event for a device that declares far more samples than the others; written once per device."""
ENGINE_FAILED = "engine-failed"
"""Kind of the event that records why an engine failed."""
PROCESS_HANGS = "process-hangs"
"""Kind of the event for the front, or a run's engine, that begins or ceases to hang."""
FRONT_RESTARTED = "front-restarted"
"""Kind of the event for the front that exited, or was killed, and was started again."""
ENGINE_RESTARTED = "engine-restarted"
"""Kind of the event for an engine that is started again after a failure, or after a crash of its server."""
SECURE_SUM = "secure-sum"
"""Kind of the event for a secure sum that was made."""
SECURE_SUM_FAILED = "secure-sum-failed"
"""Kind of the event for a secure sum that there is not."""
GUARD = "-guard"
"""Suffix of the event kinds of methods' guards; see `Cohort.guard`."""
