"""Which devices of a large fleet a table or a figure shows."""

from __future__ import annotations

MOST_ROWS = 60
"""Largest number of devices with a row of their own; report.json has all of them."""


def rows_shown(devices: int) -> list[int]:
    """Returns the positions of the devices that get a row, evenly spaced if there are too many for all."""
    shown = min(devices, MOST_ROWS)
    return [number * devices // shown for number in range(shown)]
