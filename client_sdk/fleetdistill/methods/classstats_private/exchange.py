"""What a device sends in a private run, with and without PyTorch."""

from __future__ import annotations

from fleetdistill.knowledge import PrivateRows
from fleetdistill.methods.base import Answer
from fleetdistill.methods.classstats.exchange import DeviceStatistics


class PrivateStatistics(DeviceStatistics):
    """Statistics that the device releases with noise: of every class, whether the device has rows of it or not."""

    def summarise(self) -> Answer:
        """Returns all rows; the device replaces them by noisy sums before it stores the answer."""
        rows = PrivateRows(self.rows, self.labels, self._classes)
        return Answer(parts={"statistics": rows}, samples=len(self.labels))
