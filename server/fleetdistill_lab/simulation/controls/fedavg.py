"""Runs the FedAvg control: one model on every device, trained on the same data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from fleetdistill.errors import ConfigurationError
from fleetdistill_lab.simulation.backends.backend import MakeBackend
from fleetdistill_lab.simulation.backends.choice import backend_of, min_ask_seconds
from fleetdistill_lab.simulation.controls.local_only import score_initial_models
from fleetdistill_lab.simulation.links.links import Watch, run_over_memory
from fleetdistill_lab.simulation.progress import OnProgress, watcher
from fleetdistill_lab.simulation.report.comparison import cost_of
from fleetdistill_lab.simulation.report.final_models import FinalModels, log_top_k_of_global_model
from fleetdistill_lab.simulation.report.history import read_history, read_top_k
from fleetdistill_lab.simulation.report.outcome import FedAvgControl
from fleetdistill_lab.simulation.spec.device import DeviceSpec
from fleetdistill_lab.simulation.spec.plan import Fleet, largest_model, make_run_config
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_lab.simulation.timing.behaviour import FleetBehaviour
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.engine.contract import build_method


def run_fedavg(
    control: RunConfig,
    model: str,
    specs: Sequence[DeviceSpec],
    work: Path,
    watch: Watch,
    behaviour: FleetBehaviour | None = None,
    make_backend: MakeBackend | None = None,
    min_ask_seconds: float = 0.0,
) -> FedAvgControl:
    """Runs FedAvg on the same data over the in-memory link.

    Args:
        control: Configuration of the control's run.
        model: Model of every device.
        specs: The control's devices, from `fedavg_specs`.
        work: The control's folder.
        watch: Called with the control's store after every device step.
        behaviour: Behaviour of the fleet in simulated time, if it has one.
        make_backend, min_ask_seconds: See `run_over_memory`.
    """
    run = control.run.name
    store = run_over_memory(
        control,
        list(specs),
        work,
        watch,
        behaviour=behaviour,
        make_backend=make_backend,
        min_ask_seconds=min_ask_seconds,
    )
    try:
        plan = asdict(control.method_config())
        if specs[0].top_k is not None:
            log_top_k_of_global_model(store, control, specs[0])
        if control.evaluation.data:
            FinalModels(store, control).score_global(specs)
        history, top_k = read_history(store, run, specs), read_top_k(store, run, specs)
        return FedAvgControl(model, plan, history, cost_of(store, run, specs), top_k)
    finally:
        store.close()


def fedavg_specs(specs: Sequence[DeviceSpec], model: str, work: Path) -> list[DeviceSpec]:
    """Returns the fleet's devices with another model and separate state directories under `work`."""
    work.mkdir(exist_ok=True)
    return [replace(spec, model=model, state_dir=str(work / spec.name)) for spec in specs]


def run_fedavg_control(wanted: Simulation, fleet: Fleet, on_progress: OnProgress) -> FedAvgControl | None:
    """Runs the FedAvg control of a simulation.

    Returns:
        The control's results; None without this control, and if the fleet's own method is FedAvg.
    """
    if wanted.method == "fedavg" or not wanted.with_fedavg:
        return None
    config = fleet.config
    model = largest_model(wanted, fleet.data)
    settings = {
        "local_epochs": _passes(config),
        "participation_ratio": config.method_config().participation_ratio,
    }
    rounds = wanted.rounds_of_controls
    control = replace(wanted, method="fedavg", models=(model,), settings=settings, rounds=rounds)
    work = fleet.work / "fedavg"
    control_config = make_run_config(control, fleet.data, fleet.work, store=work / "store")
    specs = fedavg_specs(fleet.specs, model, work)
    if wanted.score == "devices":
        score_initial_models(build_method(control_config).initial(), specs)
    watch = watcher("fedavg", control_config, on_progress)
    backend = backend_of(wanted), min_ask_seconds(wanted)
    return run_fedavg(control_config, model, specs, work, watch, wanted.behaviour, *backend)


def _passes(config: RunConfig) -> int:
    """Returns the method's passes over the labels per round, without the first round's warm-up."""
    return int(config.method_config().cross_entropy_epochs(2))


def check_fedavg(wanted: Simulation, config: RunConfig) -> None:
    """Checks that FedAvg can copy the method's local training, which must use the labels.

    Raises:
        ConfigurationError: The simulation has a FedAvg control, but the method makes no pass over the labels.
    """
    if wanted.with_fedavg and wanted.method != "fedavg" and _passes(config) < 1:
        raise ConfigurationError(
            f"{wanted.method} makes no pass over the labels in a round with these settings, but its FedAvg control "
            "needs at least one; raise the method's local epochs, or simulate with --no-controls"
        )
