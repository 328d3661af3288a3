"""Detects devices that declare far more samples than the rest of their fleet.

The number of samples is a device's weight in averages.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator

from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.event_kinds import LARGE_DEVICE
from fleetdistill_server.store.store import Store

_LARGE = 20.0  # multiple of the fleet's median


class FleetSizes:
    """In-memory index of the sample counts that devices declared. Thread-safe.

    Args:
        store: Store from which earlier check-ins are read, once per run.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._fleets: dict[str, _Fleet] = {}

    def add(self, run: str, device: str, samples: int) -> list[tuple[str, str]]:
        """Records a stored check-in and returns the devices to report, as (device id, event text).

        The result can include devices that checked in earlier, when too few other devices were known for comparison.
        """
        with self._lock:
            fleet = self._fleets.get(run)
            if fleet is None:
                fleet = self._fleets[run] = _Fleet.read(self._store, run)
            fleet.put(device, samples)
            return list(fleet.newly_large())

    def forget(self, run: str) -> None:
        """Removes a deleted run from the index."""
        with self._lock:
            self._fleets.pop(run, None)


class _Fleet:
    def __init__(self) -> None:
        self._samples: dict[str, int] = {}
        self._ordered: list[tuple[int, str]] = []
        self._reported: set[str] = set()

    @classmethod
    def read(cls, store: Store, run: str) -> _Fleet:
        fleet = cls()
        fleet._samples = {
            device.id: contract_pb2.DeviceProfile.FromString(device.profile).samples
            for device in store.devices.all(run)
        }
        fleet._ordered = sorted((samples, device) for device, samples in fleet._samples.items())
        fleet._reported = {event.device for event in store.history.events(run, LARGE_DEVICE)}
        return fleet

    def put(self, device: str, samples: int) -> None:
        earlier = self._samples.get(device)
        if earlier is not None:
            del self._ordered[bisect.bisect_left(self._ordered, (earlier, device))]
        self._samples[device] = samples
        bisect.insort(self._ordered, (samples, device))

    def newly_large(self) -> Iterator[tuple[str, str]]:
        count = len(self._ordered)
        median = (self._ordered[(count - 1) // 2][0] + self._ordered[count // 2][0]) / 2
        for samples, device in reversed(self._ordered):
            if samples <= _LARGE * median:
                return
            if device not in self._reported:
                self._reported.add(device)
                text = f"{device} declares {samples} samples, more than {_LARGE:g} times the fleet's median, {median:g}"
                yield device, text
