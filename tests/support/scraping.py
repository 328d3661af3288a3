"""Reads a server's metrics, as Prometheus does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from urllib.error import URLError
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families
from support.processes import wait_until


class Scraped:
    """One scrape.

    Attributes:
        text: The reply.
    """

    def __init__(self, port: int) -> None:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
            self.text: str = reply.read().decode()
        self._samples = [sample for family in text_string_to_metric_families(self.text) for sample in family.samples]

    @property
    def names(self) -> set[str]:
        """Names of all samples."""
        return {sample.name for sample in self._samples}

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples with this name, without its prefix, and these labels; 0 without any."""
        return sum(self.by(name, **labels).values())

    def by(self, name: str, **labels: str) -> dict[tuple[str, ...], float]:
        """Values of the samples with a name and labels, by the values of all labels in the order of their names."""
        result = [
            sample
            for sample in self._samples
            if sample.name == f"fleetdistill_{name}" and labels.items() <= sample.labels.items()
        ]
        return {tuple(value for _, value in sorted(item.labels.items())): item.value for item in result}


def scraped_until(port: int, condition: Callable[[Scraped], object], what: str) -> Scraped:
    """The first scrape for which a condition holds."""
    kept: list[Scraped] = []

    def look() -> object:
        kept.clear()
        with contextlib.suppress(URLError):  # the server still starts
            kept.append(Scraped(port))
        return kept and condition(kept[0])

    wait_until(look, what)
    return kept[0]
