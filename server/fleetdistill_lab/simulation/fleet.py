"""Simulates a fleet on one machine with the real engine, store, messages and devices.

`simulate` partitions a data set over devices, runs a whole training over one of two links, and compares each device
with local-only training. The link `memory` runs everything in this process, one step at a time. The link `grpc` runs
front and engine as processes on the loopback interface, and the devices in a few more. Both give the same figures for
one seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from fleetdistill.errors import RefusedError
from fleetdistill.training.figures import Counts
from fleetdistill.training.local_training import extract
from fleetdistill_console.tracking.follower import Followed
from fleetdistill_console.tracking.process import track
from fleetdistill_console.tracking.run_figures import settings_of
from fleetdistill_console.tracking.targets import NOT_TRACKED, Tracking
from fleetdistill_lab.simulation.backends.choice import auto_line, backend_of, min_ask_seconds
from fleetdistill_lab.simulation.checks import check_plan, check_settings
from fleetdistill_lab.simulation.controls.fedavg import run_fedavg_control
from fleetdistill_lab.simulation.controls.local_only import score_initial_models, train_fleet_local_only
from fleetdistill_lab.simulation.data.datasets import Dataset, load_dataset
from fleetdistill_lab.simulation.data.hugging_face import is_hugging_face, read_hugging_face
from fleetdistill_lab.simulation.data.own import limit_rows, save_dataset
from fleetdistill_lab.simulation.folder import IfThere, check_folder, discard_folder, open_folder, saved_settings
from fleetdistill_lab.simulation.links.links import run_over_grpc, run_over_memory
from fleetdistill_lab.simulation.links.simulated_devices import Recipients
from fleetdistill_lab.simulation.progress import OnProgress, Progress, watcher
from fleetdistill_lab.simulation.report.comparison import cost_of
from fleetdistill_lab.simulation.report.final_models import FinalModels, devices_to_export, log_top_k_of_global_model
from fleetdistill_lab.simulation.report.history import (
    FleetHistory,
    read_history,
    read_top_k,
    read_top_k_alone,
    rounds_with_receipts,
    shares_global_model,
)
from fleetdistill_lab.simulation.report.outcome import Controls, ExportedModel, FedAvgControl, Outcome
from fleetdistill_lab.simulation.report.plots import load_matplotlib
from fleetdistill_lab.simulation.report.report import make_report
from fleetdistill_lab.simulation.report.results import FleetReport
from fleetdistill_lab.simulation.spec.plan import (
    RUN,
    Fleet,
    deal_with_tests,
    hold_out_proxy,
    limit_test_set,
    make_run_config,
    make_specs,
    open_store,
    proxy_per_class,
    with_devices,
)
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.engine.contract import build_method
from fleetdistill_server.store.states import RoundStatus
from fleetdistill_server.store.store import Store


class Interrupted(KeyboardInterrupt):
    """Raised when Ctrl-C interrupts a simulation, which can be resumed.

    Attributes:
        report: Report of the completed rounds, as written to the folder; None if no round is complete, or if Ctrl-C
            was pressed again before it was written.
        begun: Whether the folder contains the simulation, so that it can be resumed.
        has_rounds: Whether a round may be complete.
    """

    def __init__(self, report: FleetReport | None, *, begun: bool = True, has_rounds: bool = True) -> None:
        super().__init__("the simulation was interrupted")
        self.report = report
        self.begun = begun
        self.has_rounds = has_rounds


def simulate(
    wanted: Simulation,
    on_progress: OnProgress = lambda progress: None,
    *,
    if_there: IfThere = "refuse",
    tracking: Tracking = NOT_TRACKED,
    tell: Callable[[str], None] = lambda line: None,
) -> FleetReport:
    """Runs a simulation and writes report.json, the figure and the exported models to `out`.

    An interrupted or killed simulation can be resumed with `if_there="resume"`, with the same results. A simulation
    that fails its checks, or is interrupted before it begins, does not change `out`. One whose devices the run refuses
    leaves nothing there.

    Args:
        wanted: Settings of the simulation.
        on_progress: Called after every round of the fleet and of the controls.
        if_there: How to handle an earlier simulation in `out`; see `open_folder`.
        tracking: Trackers that the figures are copied to, of the controls too.
        tell: Called with a line for the user: what `workers = "auto"` has chosen, and which of several models is used.

    Returns:
        The report, as written to report.json.

    Raises:
        ConfigurationError: A setting is out of range, or `out` contains another simulation.
        DataError: The data set cannot be loaded or partitioned.
        RefusedError: The run refuses a device, whose model does not fit it.
        RunError: The run failed.
        Interrupted: Ctrl-C was pressed; the report of the completed rounds has been written.
    """
    started = time.monotonic()
    begun = has_rounds = has_progress = False

    def note(done: Progress) -> None:
        nonlocal has_progress
        has_progress = has_progress or done.completed > 0
        on_progress(done)

    try:
        check_settings(wanted)
        load_matplotlib()  # without it, the report could not be written
        check_folder(wanted, if_there)
        data = load_data(wanted)
        check_plan(wanted, data)
        with open_folder(wanted, if_there) as work, track(_follow(wanted, work, tracking), tracking):
            begun, has_rounds = True, if_there == "resume"
            settled = replace(with_devices(wanted, data), proxy_per_class=proxy_per_class(wanted, data))
            fleet = _prepare(settled, data, work)
            del data  # the devices map its images from files
            has_rounds = True
            if len(set(wanted.model_paths)) > 1 and len(models := {spec.model for spec in fleet.specs}) == 1:
                why = f"{wanted.method} needs one architecture; it is the largest of {', '.join(wanted.model_paths)}"
                tell(f"all devices have {models.pop()}, because {why}")
            return _run(settled, fleet, note, started, tell)
    except Interrupted:
        raise
    except RefusedError:  # by the run, at a device's check-in
        if begun and if_there != "resume" and not has_progress:
            discard_folder(wanted.out)
        raise
    except KeyboardInterrupt as interrupt:
        raise Interrupted(None, begun=begun, has_rounds=has_rounds) from interrupt


def precompute(wanted: Simulation, file: str | Path) -> Simulation:
    """Computes the features of a simulation's extractor once, and writes them to a file as a data set of vectors.

    Simulations on the features give the same class statistics as on the images, without the extractor's time.

        simulate(precompute(Simulation(dataset="cifar10", extractor="torchvision:mobilenet_v3_small"), "features.npz"))

    Args:
        wanted: The simulation; its data, its extractor and the extractor's weights are used.
        file: `.npz` file to write, float32 features `[N, F]` and labels of training and test set.

    Returns:
        The simulation on the features, with the extractor `identity`.

    Raises:
        ConfigurationError: The extractor cannot be built or does not fit the data.
        DataError: The data cannot be read.
    """
    data = load_data(wanted)
    method = build_method(make_run_config(wanted, data, wanted.out))
    extractor = method.context.extractor().to(method.context.torch_device)
    features = replace(
        data,
        train_images=extract(extractor, data.train_images).flatten(1),
        test_images=extract(extractor, data.test_images).flatten(1),
    )
    save_dataset(features, Path(file))
    settings = dict(wanted.settings)
    if hasattr(method.config, "features"):
        settings["features"] = "model"
    return replace(
        wanted,
        dataset=str(file),
        image_size=None,
        train_limit=None,
        test_limit=None,
        extractor="identity",
        extractor_weights="",
        settings=settings,
    )


def _follow(wanted: Simulation, work: Path, tracking: Tracking) -> Followed:
    """Returns what a tracker follows: the run of the simulation, and its report."""
    saved, began = saved_settings(wanted.out)
    data = saved["dataset"]["name"] if isinstance(saved["dataset"], dict) else saved["dataset"]
    return Followed(
        store=str(work / "store"),
        run=RUN,
        title=tracking.title or f"{wanted.method} on {data}, seed {wanted.seed}",
        began=began,
        settings=settings_of(saved, "simulation."),
        results=str(wanted.out.resolve()),
    )


def load_data(wanted: Simulation) -> Dataset:
    """Loads the data set of a simulation, with its limits.

    Raises:
        ConfigurationError: A limit is out of range.
        DataError: The data set is missing, damaged or cannot be downloaded.
    """
    limit, size, seed = wanted.train_limit, wanted.image_size, wanted.seed
    if isinstance(wanted.dataset, Dataset):
        data = limit_rows(wanted.dataset, limit, size, seed)
    elif is_hugging_face(wanted.dataset):
        data = limit_rows(
            read_hugging_face(str(wanted.dataset), wanted.client_column, wanted.data_dir), limit, size, seed
        )
    else:
        data = load_dataset(str(wanted.dataset), wanted.data_dir, train_limit=limit, image_size=size, seed=seed)
    return limit_test_set(data, wanted)


def _prepare(wanted: Simulation, data: Dataset, work: Path) -> Fleet:
    """Partitions the data and builds the run and its devices; deterministic, so that a resume rebuilds both."""
    data = hold_out_proxy(wanted, data, work)
    dealt = deal_with_tests(wanted, data)
    config = make_run_config(wanted, dealt.data, work)
    specs = make_specs(wanted, dealt.data, dealt.split, work, dealt.own_tests)
    initial = build_method(config).initial()
    if wanted.score == "devices":
        score_initial_models(initial, specs)
    return Fleet(dealt.data.without_images(), dealt.split, config, specs, initial, work)


def _run(
    wanted: Simulation, fleet: Fleet, on_progress: OnProgress, started: float, tell: Callable[[str], None]
) -> FleetReport:
    """Runs the fleet and its controls and writes the report; Ctrl-C writes a report of the completed rounds."""
    alone: dict[str, list[Counts | None]] = {}
    try:
        watch = watcher("fleet", fleet.config, on_progress)
        if wanted.link == "memory":
            store = run_over_memory(
                fleet.config,
                fleet.specs,
                fleet.work,
                watch,
                durable=wanted.durable,
                behaviour=wanted.behaviour,
                make_backend=backend_of(wanted),
                min_ask_seconds=min_ask_seconds(wanted),
                on_measured=lambda seconds: tell(auto_line(wanted, seconds)),
                recipients=_recipients(wanted, fleet),
            )
        else:
            if wanted.workers == "auto":
                tell(auto_line(wanted, 0.0))
            store = run_over_grpc(
                fleet.config,
                fleet.specs,
                fleet.work,
                watch,
                workers=0 if isinstance(wanted.workers, str) else wanted.workers,
            )
        store.close()
        if wanted.with_alone:
            alone = _train_local_only(wanted, fleet, on_progress)
        fedavg = run_fedavg_control(wanted, fleet, on_progress)
    except KeyboardInterrupt as interrupt:
        done = Controls(alone, None)
        report = _report(wanted, fleet, done, started, finished=False)
        raise Interrupted(report, has_rounds=report is not None) from interrupt
    report = _report(wanted, fleet, Controls(alone, fedavg), started, finished=True)
    assert report is not None  # a finished run has at least one round
    return report


def _recipients(wanted: Simulation, fleet: Fleet) -> Recipients:
    """Returns which devices need the run's final model for the scores and exports."""
    if not shares_global_model(wanted.method, fleet.specs):
        return Recipients.ALL if wanted.score == "devices" else Recipients.PARTICIPANTS
    are_many_exported = wanted.export == "all" or isinstance(wanted.export, int)
    return Recipients.PARTICIPANTS if are_many_exported else Recipients.LAST_ROUND


def _report(
    wanted: Simulation, fleet: Fleet, controls: Controls, started: float, *, finished: bool
) -> FleetReport | None:
    """Writes and returns the report of the completed rounds; returns None if there are none."""
    with open_store(fleet) as store:
        if not any(item.status is RoundStatus.CLOSED for item in store.runs.rounds(RUN)):
            return None
        history, exports = _score_and_export(wanted, fleet, store, finished=finished)
        cost = cost_of(store, RUN, fleet.specs)
        if finished and wanted.method == "fedavg":
            settings = asdict(fleet.config.method_config())
            controls = replace(controls, fedavg=FedAvgControl(fleet.specs[0].model, settings, history, cost))
        return make_report(
            Outcome(
                wanted=wanted,
                store=store,
                config=fleet.config,
                data=fleet.data,
                split=fleet.split,
                specs=fleet.specs,
                history=history,
                cost=cost,
                controls=controls,
                exports=exports,
                top_k=read_top_k(store, RUN, fleet.specs),
                top_k_alone=read_top_k_alone(fleet.specs),
                seconds=time.monotonic() - started,
                finished=finished,
            )
        )


def _score_and_export(
    wanted: Simulation, fleet: Fleet, store: Store, *, finished: bool
) -> tuple[FleetHistory, dict[str, ExportedModel]]:
    """Scores and exports the devices' models at the end; returns the run's history and the exported models."""
    models = FinalModels(store, fleet.config)
    if finished and wanted.scores_devices and not shares_global_model(wanted.method, fleet.specs):
        models.score(fleet.specs, rounds_with_receipts(store, RUN))
    if wanted.top_k is not None:
        log_top_k_of_global_model(store, fleet.config, fleet.specs[0])
    if finished and wanted.score != "none":
        models.score_global(fleet.specs)
    history = read_history(store, RUN, fleet.specs)
    exporting = devices_to_export(wanted, fleet.specs, history) if finished else []
    written = {spec.name: models.export(spec, wanted.out, history.further) for spec in exporting}
    return history, {name: model for name, model in written.items() if model is not None}


def _train_local_only(wanted: Simulation, fleet: Fleet, on_progress: OnProgress) -> dict[str, list[Counts | None]]:
    """Runs the local-only control with progress."""
    completed = 0
    total = wanted.rounds_of_controls * len(fleet.specs)

    def after_rounds(more: int) -> None:
        nonlocal completed
        completed += more
        on_progress(Progress("alone", completed, total))

    with open_store(fleet) as store:
        history = read_history(store, RUN, fleet.specs)
    return train_fleet_local_only(wanted, fleet.config, fleet.initial, fleet.specs, history, after_rounds)
