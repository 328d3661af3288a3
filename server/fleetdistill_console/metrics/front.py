"""What a front measures. Imported only if `[server] metrics` is set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

from fleetdistill_console.metrics import catalogue
from fleetdistill_console.metrics.catalogue import Description
from fleetdistill_console.metrics.files import FRONT, OF_A_FRONT, keep_values
from fleetdistill_server.store.meter import Meter

TICK_SECONDS = 0.5


class FrontMeter(Meter):
    """Keeps the metrics of a front in the store's directory.

    Args:
        store: The store's directory.

    Raises:
        OSError: There is no space for the files.
    """

    def __init__(self, store: Path) -> None:
        keep_values(store, FRONT, OF_A_FRONT)
        self._bytes = cache(_counter(catalogue.BYTES).labels)
        self._acknowledged = _counter(catalogue.ACKNOWLEDGED)
        self._begun = _counter(catalogue.BEGUN)
        self._refused = _counter(catalogue.REFUSED)
        self._calls = cache(_counter(catalogue.CALLS).labels)  # a lookup there takes longer than the count
        self._groups = _histogram(catalogue.GROUPS)
        self._receipts = _histogram(catalogue.RECEIPT)
        self._lag = _histogram(catalogue.LAG)
        self._tick = Gauge(catalogue.TICK.name, catalogue.TICK.help, registry=None, multiprocess_mode="livemostrecent")

    def sent(self, direction: str, kinds: Mapping[str, int]) -> None:
        for kind, size in kinds.items():
            self._bytes(direction, kind).inc(size)

    def acknowledged(self) -> None:
        self._acknowledged.inc()

    def grouped(self, jobs: int) -> None:
        self._groups.observe(jobs)

    def receipt_took(self, seconds: float) -> None:
        self._receipts.observe(seconds)

    def upload_begun(self) -> None:
        """Counts an upload call."""
        self._begun.inc()

    def upload_refused(self, code: str) -> None:
        """Counts an upload call that ended with an error code."""
        self._refused.labels(code).inc()

    def call_ended(self, method: str, code: str) -> None:
        """Counts a call of any method."""
        self._calls(method, code).inc()

    async def watch_loop(self) -> None:
        """Measures the event loop's lag until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self._lag.observe(max(loop.time() - due, 0.0))
            self._tick.set(time.time())


def _counter(what: Description) -> Counter:
    return Counter(what.name, what.help, what.labels, registry=None)


def _histogram(what: Description) -> Histogram:
    return Histogram(what.name, what.help, buckets=what.buckets, registry=None)
