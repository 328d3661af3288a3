"""Simulates a fleet on one machine with the real engine, store, messages and devices, and compares it with controls.

Names are imported on first use, so that importing one module does not load the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetdistill_lab.simulation.data.datasets import Dataset, load_dataset
    from fleetdistill_lab.simulation.data.own import own_dataset, read_dataset
    from fleetdistill_lab.simulation.fleet import Interrupted, simulate
    from fleetdistill_lab.simulation.progress import Progress
    from fleetdistill_lab.simulation.report.report import write_report
    from fleetdistill_lab.simulation.report.results import DeviceReport, FleetReport
    from fleetdistill_lab.simulation.show import exchange_lines, show_comparison, show_run, simulate_with_progress
    from fleetdistill_lab.simulation.spec.hostile import ATTACKS
    from fleetdistill_lab.simulation.spec.settings import Simulation
    from fleetdistill_lab.simulation.timing.behaviour import FleetBehaviour
    from fleetdistill_lab.simulation.timing.traces import read_traces

__all__ = [
    "ATTACKS",
    "Dataset",
    "DeviceReport",
    "FleetBehaviour",
    "FleetReport",
    "Interrupted",
    "Progress",
    "Simulation",
    "exchange_lines",
    "load_dataset",
    "own_dataset",
    "read_dataset",
    "read_traces",
    "show_comparison",
    "show_run",
    "simulate",
    "simulate_with_progress",
    "write_report",
]

_WHERE = {
    "data.datasets": ("Dataset", "load_dataset"),
    "data.own": ("own_dataset", "read_dataset"),
    "fleet": ("Interrupted", "simulate"),
    "progress": ("Progress",),
    "report.report": ("write_report",),
    "report.results": ("DeviceReport", "FleetReport"),
    "show": ("exchange_lines", "show_comparison", "show_run", "simulate_with_progress"),
    "spec.hostile": ("ATTACKS",),
    "spec.settings": ("Simulation",),
    "timing.behaviour": ("FleetBehaviour",),
    "timing.traces": ("read_traces",),
}


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
