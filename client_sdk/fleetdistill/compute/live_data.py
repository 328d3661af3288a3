"""`RereadsData`, the optional protocol of a compute backend whose training data may change while it runs."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["RereadsData"]


@runtime_checkable
class RereadsData(Protocol):
    """Optional protocol of a `Compute` that reads the app's training data again before each ask."""

    @property
    def sample_count(self) -> int:
        """Number of training samples; 0 if the app has none yet. The device then waits for samples."""

    def reread_data(self, data: Any) -> bool:
        """Reads the training data again; returns whether a sample was added, removed or changed.

        Args:
            data: `Device(data=...)`, or the argument of `replace_data`; None for a worker, which has its own data.

        Raises:
            DataError: The data cannot be used; the previous data remain in use.
        """


def is_empty(compute: object) -> bool:
    """Returns whether a compute backend has no training samples; False if it does not report their number."""
    return getattr(compute, "sample_count", None) == 0 and isinstance(compute, RereadsData)
