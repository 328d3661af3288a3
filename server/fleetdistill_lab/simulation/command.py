"""`fleetdistill simulate`: simulates a fleet and prints its report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fleetdistill.errors import ConfigurationError
from fleetdistill_console.dashboard.command import check_installed, open_simulation
from fleetdistill_lab.simulation import options as fleet_options
from fleetdistill_server.cli.options import (
    ImportOption,
    JsonOption,
    TrackOption,
    report_errors,
)
from fleetdistill_server.start import INTERRUPTED, ctrl_c_interrupts

if TYPE_CHECKING:
    from fleetdistill_lab.simulation.data.datasets import Dataset
    from fleetdistill_lab.simulation.spec.settings import Simulation

_FIELDS = {
    "model": ("models",),
    "set_": ("settings",),
    "import_": ("modules",),
    "data": ("dataset",),
    "controls": ("with_alone", "with_fedavg"),
    "per_round": ("devices_per_round",),
    "deadline": ("deadline_seconds",),
    **dict.fromkeys(fleet_options.BEHAVIOUR, ("behaviour",)),
}
"""Maps options of `simulate` to fields of `Simulation` with other names."""


@report_errors
def simulate(
    context: typer.Context,
    method: Annotated[str, typer.Option(help="Name of the method.")] = "feddkc",
    import_: ImportOption = None,
    link: Annotated[str, typer.Option(help="Link to the devices: memory (one process) or grpc.")] = "memory",
    durable: Annotated[
        bool, typer.Option("--durable", help="With --link memory, write and fsync all files as over gRPC.")
    ] = False,
    workers: Annotated[
        int, typer.Option(help="Processes that compute the devices' work; 0: with grpc one per core, otherwise none.")
    ] = 0,
    backend: Annotated[
        str, typer.Option(help="What computes the devices' work: local (--workers) or ray (a Ray cluster).")
    ] = "local",
    ray_address: Annotated[
        str, typer.Option(help="Address of a Ray cluster; by default --workers Ray workers on this machine.")
    ] = "",
    dataset: Annotated[
        str,
        typer.Option(
            help="Data set: digits, fashion-mnist, mnist, cifar10, cifar100, emnist-letters or femnist-digits."
        ),
    ] = "digits",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Your own .npz file with inputs and labels, or train_inputs, train_labels, test_inputs, test_labels."
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(envvar="FLEETDISTILL_DATA", help="Directory of data sets; missing ones are downloaded."),
    ] = None,
    devices: Annotated[int, typer.Option(help="Number of devices.")] = 5,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Device model: a name, or package.module:factory. Repeat to assign several in turn."),
    ] = None,
    extractor: Annotated[
        str, typer.Option(help="Extractor of the device models: a name, or package.module:factory.")
    ] = "",
    server_model: Annotated[str, typer.Option(help="Server model: a name, or package.module:factory.")] = "",
    predictor: Annotated[
        list[str] | None,
        typer.Option(help="Device predictor for classstats with predictor=trained. Repeat to assign several in turn."),
    ] = None,
    partition: Annotated[
        str, typer.Option(help="How the training data are split over the devices.")
    ] = "dirichlet_by_class",
    alpha: Annotated[float, typer.Option(help="Concentration of the Dirichlet partitions.")] = 0.5,
    classes_per_device: Annotated[
        int, typer.Option(help="Classes per device, for partitions classes_* and class_shards.")
    ] = 2,
    validation_share: Annotated[
        float, typer.Option(help="Share of each device's samples held out to decide whether its model is replaced.")
    ] = 0.0,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds to complete; default: 30, or 1 for a method with a single exchange.")
    ] = None,
    control_rounds: Annotated[
        int | None,
        typer.Option(help="Rounds of the control runs; default: --rounds, or 30 for a method with a single exchange."),
    ] = None,
    per_round: Annotated[
        int, typer.Option(help="Devices that each round draws at random; 0 takes all present devices.")
    ] = 0,
    over_selection: fleet_options.OverSelectionOption = 1.0,
    quorum: Annotated[float, typer.Option(help="Fraction of a round's devices that must answer.")] = 2 / 3,
    deadline: fleet_options.DeadlineOption = None,
    min_devices: fleet_options.MinDevicesOption = None,
    fleet: fleet_options.FleetOption = None,
    availability: fleet_options.AvailabilityOption = None,
    compute: fleet_options.ComputeOption = None,
    churn: fleet_options.ChurnOption = None,
    join_late: fleet_options.JoinLateOption = None,
    traces: fleet_options.TracesOption = None,
    seed: Annotated[int, typer.Option(help="Seed for the partition, the models and the batches.")] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Setting of the method, such as refinement=kkr; repeatable.")
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="Epsilon of private class statistics, 0.1 to 20, as under [privacy]; needs --method classstats."
        ),
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Width and height in pixels to which images are reduced by averaging.")
    ] = None,
    train_limit: Annotated[int | None, typer.Option(help="Largest number of training images.")] = None,
    test_limit: Annotated[int | None, typer.Option(help="Largest number of test images.")] = None,
    torch_device: Annotated[str, typer.Option(help="PyTorch device of the server half: auto, cpu or cuda.")] = "auto",
    controls: Annotated[
        bool, typer.Option("--controls/--no-controls", help="Also run the controls: local training only, and FedAvg.")
    ] = True,
    out: Annotated[Path, typer.Option(help="Output directory for report.json, fleet.png and the models.")] = Path(
        "out/simulation"
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the simulation in --out with its settings.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the simulation in --out.")] = False,
    track: TrackOption = None,
    open_: Annotated[
        bool, typer.Option("--open", help="Show the run in a browser once it is finished; Ctrl-C ends this.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Simulates a fleet. Example: fleetdistill simulate --link grpc --rounds 10 --set refinement=kkr

    Ctrl-C stops the simulation and writes a report of the completed rounds; --resume continues it.
    """
    from fleetdistill_lab.simulation.not_begun import not_begun

    if resume and overwrite:
        raise ConfigurationError("--resume and --overwrite cannot be combined; use one of them")
    if open_:
        check_installed()
    try:
        ctrl_c_interrupts()
        from fleetdistill_lab.simulation.spec.settings import Simulation

        wanted = Simulation(
            method=method,
            modules=tuple(import_ or ()),
            settings=dict(_setting(one) for one in set_ or []),
            epsilon=epsilon,
            dataset=_dataset(context, dataset, data),
            data_dir=data_dir,
            devices=devices,
            models=tuple(model or ()),
            extractor=extractor,
            server_model=server_model,
            predictors=tuple(predictor or ()),
            partition=partition,
            alpha=alpha,
            classes_per_device=classes_per_device,
            validation_share=validation_share,
            rounds=rounds,
            control_rounds=control_rounds,
            devices_per_round=per_round,
            over_selection=over_selection,
            quorum=quorum,
            deadline_seconds=deadline,
            min_devices=min_devices,
            behaviour=fleet_options.behaviour_of(
                fleet, traces, availability=availability, compute=compute, churn=churn, join_late=join_late
            ),
            seed=seed,
            link=link,  # type: ignore[arg-type]  # checked by simulate
            durable=durable,
            workers=workers,
            backend=backend,  # type: ignore[arg-type]  # checked by simulate
            ray_address=ray_address,
            image_size=image_size,
            train_limit=train_limit,
            test_limit=test_limit,
            torch_device=torch_device,
            with_alone=controls,
            with_fedavg=controls,
            out=out,
        )
        _simulate(context, wanted, "resume" if resume else "overwrite" if overwrite else "refuse", as_json, track)
    except KeyboardInterrupt:  # while torch is being imported
        typer.echo(not_begun(out), err=True)
        raise typer.Exit(INTERRUPTED) from None
    if open_:
        open_simulation(out)


def _simulate(
    context: typer.Context,
    wanted: Simulation,
    if_there: Literal["refuse", "overwrite", "resume"],
    as_json: bool,
    track: list[str] | None,
) -> None:
    from fleetdistill_console.tracking.targets import Tracking, read_targets
    from fleetdistill_lab.simulation.fleet import Interrupted
    from fleetdistill_lab.simulation.folder import saved_simulation
    from fleetdistill_lab.simulation.show import interrupted_line, simulate_and_show

    tracking = Tracking(read_targets(track or ()))
    if if_there == "resume":
        wanted = _with_given(context, saved_simulation(wanted.out), wanted)
    try:
        simulate_and_show(wanted, if_there=if_there, as_json=as_json, tracking=tracking)
    except Interrupted as interrupted:
        typer.echo(interrupted_line(interrupted, wanted.out), err=True)
        raise typer.Exit(INTERRUPTED) from None


def _dataset(context: typer.Context, name: str, file: Path | None) -> str | Dataset:
    from fleetdistill_lab.simulation.data.own import read_dataset

    if file is None:
        return name
    source = context.get_parameter_source("dataset")
    if source is not None and source.name == "COMMANDLINE":
        raise ConfigurationError("--data and --dataset cannot be combined; use one of them")
    return read_dataset(file)


def _with_given(context: typer.Context, saved: Simulation, wanted: Simulation) -> Simulation:
    """Returns the saved simulation with the options given on the command line.

    `simulate` later rejects options that differ from the saved simulation.
    """
    given = {
        name
        for option in context.params
        if (source := context.get_parameter_source(option)) is not None and source.name == "COMMANDLINE"
        for name in _FIELDS.get(option, (option,))
    }
    changes = {one.name: getattr(wanted, one.name) for one in dataclasses.fields(wanted) if one.name in given}
    return dataclasses.replace(saved, **changes)


def _setting(text: str) -> tuple[str, Any]:
    """Parses `name=value` with a TOML value; an unquoted word is a string."""
    import tomllib

    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(f"--set is {text!r}, expected name=value, such as refinement=kkr")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value
