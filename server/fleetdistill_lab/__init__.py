"""Experiments on one machine: simulated fleets, the privacy audit of a run, and conformance tests of the wire format.

    from fleetdistill_lab import Simulation, simulate

    report = simulate(Simulation(devices=5))

Exported names are imported on first use, so importing the package loads neither torch nor pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetdistill.lazy import lazy_exports

if TYPE_CHECKING:
    from fleetdistill_lab.experiments.definition import Experiment, MethodEntry, read_experiment
    from fleetdistill_lab.experiments.runner import run_experiment
    from fleetdistill_lab.simulation.data.datasets import Dataset, load_dataset
    from fleetdistill_lab.simulation.data.own import own_dataset, read_dataset
    from fleetdistill_lab.simulation.fleet import Interrupted, precompute, simulate
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
    "Experiment",
    "FleetBehaviour",
    "FleetReport",
    "Interrupted",
    "MethodEntry",
    "Progress",
    "Simulation",
    "exchange_lines",
    "load_dataset",
    "own_dataset",
    "precompute",
    "read_dataset",
    "read_experiment",
    "read_traces",
    "run_experiment",
    "show_comparison",
    "show_run",
    "simulate",
    "simulate_with_progress",
    "write_report",
]

_WHERE = {
    "ATTACKS": "fleetdistill_lab.simulation.spec.hostile",
    "Dataset": "fleetdistill_lab.simulation.data.datasets",
    "DeviceReport": "fleetdistill_lab.simulation.report.results",
    "Experiment": "fleetdistill_lab.experiments.definition",
    "FleetBehaviour": "fleetdistill_lab.simulation.timing.behaviour",
    "FleetReport": "fleetdistill_lab.simulation.report.results",
    "Interrupted": "fleetdistill_lab.simulation.fleet",
    "MethodEntry": "fleetdistill_lab.experiments.definition",
    "Progress": "fleetdistill_lab.simulation.progress",
    "Simulation": "fleetdistill_lab.simulation.spec.settings",
    "exchange_lines": "fleetdistill_lab.simulation.show",
    "load_dataset": "fleetdistill_lab.simulation.data.datasets",
    "own_dataset": "fleetdistill_lab.simulation.data.own",
    "precompute": "fleetdistill_lab.simulation.fleet",
    "read_dataset": "fleetdistill_lab.simulation.data.own",
    "read_experiment": "fleetdistill_lab.experiments.definition",
    "read_traces": "fleetdistill_lab.simulation.timing.traces",
    "run_experiment": "fleetdistill_lab.experiments.runner",
    "show_comparison": "fleetdistill_lab.simulation.show",
    "show_run": "fleetdistill_lab.simulation.show",
    "simulate": "fleetdistill_lab.simulation.fleet",
    "simulate_with_progress": "fleetdistill_lab.simulation.show",
    "write_report": "fleetdistill_lab.simulation.report.report",
}

__getattr__, __dir__ = lazy_exports(__name__, _WHERE)
