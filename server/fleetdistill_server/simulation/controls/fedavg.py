"""The second control of every comparison: FedAvg with one model on every device, on the same data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.engine.contract import build_method
from fleetdistill_server.simulation.controls.local_only import note_start
from fleetdistill_server.simulation.links.links import Watch, run_over_memory
from fleetdistill_server.simulation.progress import OnProgress, watcher
from fleetdistill_server.simulation.report.comparison import cost_of
from fleetdistill_server.simulation.report.controls import FedAvgControl
from fleetdistill_server.simulation.report.history import read_history
from fleetdistill_server.simulation.spec.device import DeviceSpec
from fleetdistill_server.simulation.spec.plan import RUN, Fleet, largest_model, make_run_config, open_store
from fleetdistill_server.simulation.spec.settings import Simulation


def run_fedavg(control: RunConfig, model: str, specs: Sequence[DeviceSpec], work: Path, watch: Watch) -> FedAvgControl:
    """FedAvg on the same data, in memory.

    Args:
        control: Its run.
        model: The one that every device has.
        specs: The devices with it, and with state directories of their own.
        work: Its folder.
        watch: Is given its store after every step of a device.
    """
    run = control.run.name
    store = run_over_memory(control, list(specs), work, watch)
    try:
        plan = asdict(control.method_config())
        return FedAvgControl(model, plan, read_history(store, run, specs), cost_of(store, run, len(specs)))
    finally:
        store.close()


def fedavg_specs(specs: Sequence[DeviceSpec], model: str, work: Path) -> list[DeviceSpec]:
    """The same devices with that model."""
    work.mkdir(exist_ok=True)
    return [replace(spec, model=model, state_dir=str(work / spec.name)) for spec in specs]


def run_fedavg_control(wanted: Simulation, fleet: Fleet, on_progress: OnProgress) -> FedAvgControl | None:
    """FedAvg on the same data; the run itself, with its history and store, where that is FedAvg."""
    config, specs = fleet.config, fleet.specs
    plan = config.method_config()
    if wanted.method == "fedavg":
        with open_store(fleet) as store:
            history, cost = read_history(store, RUN, specs), cost_of(store, RUN, len(specs))
        return FedAvgControl(specs[0].model, asdict(plan), history, cost)
    if not wanted.with_fedavg:
        return None
    model = largest_model(wanted, fleet.data)
    settings = {"local_epochs": _passes(config), "participation_ratio": plan.participation_ratio}
    rounds = wanted.rounds_of_controls
    control = replace(wanted, method="fedavg", models=(model,), settings=settings, rounds=rounds)
    work = fleet.work / "fedavg"
    control_config = make_run_config(control, fleet.data, fleet.work, store=work / "store")
    specs = fedavg_specs(specs, model, work)
    note_start(build_method(control_config).initial(), specs)
    return run_fedavg(control_config, model, specs, work, watcher("fedavg", control_config, on_progress))


def _passes(config: RunConfig) -> int:
    """Passes over the labels in a round of the method; the first one may have a warm-up on top."""
    return int(config.method_config().cross_entropy_epochs(2))


def check_fedavg(wanted: Simulation, config: RunConfig) -> None:
    """Before the fleet runs: FedAvg trains on labels only, so it has no round that makes no pass over them."""
    if wanted.with_fedavg and wanted.method != "fedavg" and _passes(config) < 1:
        raise ConfigurationError(
            f"{wanted.method} makes no pass over the labels in a round with these settings, and FedAvg, its control, "
            "needs one; simulate without FedAvg (with_fedavg, --no-controls), or let the method learn from labels"
        )
