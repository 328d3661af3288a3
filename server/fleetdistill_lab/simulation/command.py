"""`fleetdistill simulate`: simulates a fleet and prints its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetdistill.errors import ConfigurationError
from fleetdistill_console.dashboard.command import check_installed, open_simulation
from fleetdistill_lab.simulation.options import merge_settings, not_begun, read_settings, with_options
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.cli.options import JsonOption, TrackOption, report_errors
from fleetdistill_server.start import INTERRUPTED, ctrl_c_interrupts

if TYPE_CHECKING:
    from fleetdistill_lab.simulation.folder import IfThere


@report_errors
@with_options
def simulate(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(help="TOML file with settings in the sections [simulation], [method], [partition], [fleet]."),
    ] = None,
    *,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any setting, as section.key=value, such as method.refinement=kkr; repeatable."),
    ] = None,
    controls: Annotated[
        bool, typer.Option("--controls/--no-controls", help="Also run the controls: local training only, and FedAvg.")
    ] = True,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the simulation in --out with its settings.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the simulation in --out.")] = False,
    track: TrackOption = None,
    open_: Annotated[
        bool, typer.Option("--open", help="Show the run in a browser once it is finished; Ctrl-C ends this.")
    ] = False,
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """Simulates a fleet. Example: fleetdistill simulate --method fedavg --rounds 10 --set method.local_epochs=2

    Options precede --set, and --set precedes the file. docs/reference/python-api.md has all settings. Ctrl-C stops the
    simulation and writes a report of the completed rounds; --resume continues it.
    """
    if resume and overwrite:
        raise ConfigurationError("--resume and --overwrite cannot be combined; use one of them")
    if open_:
        check_installed()
    try:
        ctrl_c_interrupts()
        simulation = _read(context, read_settings(config, set_ or ()), given, controls, resume)
        _simulate(simulation, "resume" if resume else "overwrite" if overwrite else "refuse", as_json, track or ())
    except KeyboardInterrupt:  # while torch is being imported
        typer.echo(not_begun(given["out"] or Simulation.out), err=True)
        raise typer.Exit(INTERRUPTED) from None
    if open_:
        open_simulation(simulation.out)


def _read(
    context: typer.Context,
    sections: dict[str, dict[str, Any]],
    options: Mapping[str, Any],
    controls: bool,
    resume: bool,
) -> Simulation:
    """Returns the simulation that is described; a resumed one has its saved settings besides."""
    from fleetdistill_lab.simulation.checks import check_used
    from fleetdistill_lab.simulation.folder import saved_simulation

    sources = {name: source.name for name in options if (source := context.get_parameter_source(name)) is not None}
    from_variables = {name: options[name] for name, source in sources.items() if source == "ENVIRONMENT" and not resume}
    from_options = {name: options[name] for name, source in sources.items() if source == "COMMANDLINE"}
    fields = sections["simulation"] = {**from_variables, **sections.get("simulation", {}), **from_options}
    if not controls:
        fields |= {"with_alone": False, "with_fedavg": False}
    base = saved_simulation(fields.get("out", Simulation.out)) if resume else None
    result = merge_settings(base, sections)
    check_used(result.partition_path, fields)
    return result


def _simulate(simulation: Simulation, if_there: IfThere, as_json: bool, track: Sequence[str]) -> None:
    from fleetdistill_console.tracking.targets import Tracking, read_targets
    from fleetdistill_lab.simulation.fleet import Interrupted
    from fleetdistill_lab.simulation.show import interrupted_line, simulate_and_show

    tracking = Tracking(read_targets(track))
    try:
        simulate_and_show(simulation, if_there=if_there, as_json=as_json, tracking=tracking)
    except KeyboardInterrupt as pressed:  # also while the results are shown
        interrupted = pressed if isinstance(pressed, Interrupted) else Interrupted(None)
        typer.echo(interrupted_line(interrupted, simulation.out), err=True)
        raise typer.Exit(INTERRUPTED) from None
