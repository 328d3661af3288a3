"""What a front reports about its work, for metrics. The store and the intake know only this class."""

from __future__ import annotations

from collections.abc import Mapping


class Meter:
    """Ignores what it is told; `fleetdistill_console.metrics.front` counts it."""

    def sent(self, direction: str, kinds: Mapping[str, int]) -> None:
        """Takes the bytes of a payload on the link by kind of part, once they are committed to the store."""

    def acknowledged(self) -> None:
        """Takes an answer that is committed."""

    def grouped(self, jobs: int) -> None:
        """Takes the number of jobs that were committed together."""

    def receipt_took(self, seconds: float) -> None:
        """Takes the seconds from the last byte of an answer to its receipt."""
