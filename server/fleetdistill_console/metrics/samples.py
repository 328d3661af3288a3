"""Makes metrics for a scrape from values."""

from __future__ import annotations

from prometheus_client.metrics_core import Metric

from fleetdistill_console.metrics.catalogue import Description


class Samples:
    """Collects values and returns them as metrics."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(self, what: Description, value: float, *labels: str) -> Samples:
        """Adds a value with the values of the metric's labels, in their order."""
        name = what.name.removesuffix("_total") if what.type == "counter" else what.name
        metric = self._metrics.setdefault(what.name, Metric(name, what.help, what.type))
        metric.add_sample(what.name, dict(zip(what.labels, labels, strict=True)), value)
        return self

    def metrics(self) -> list[Metric]:
        """Returns the metrics in the order in which they were first added."""
        return list(self._metrics.values())
