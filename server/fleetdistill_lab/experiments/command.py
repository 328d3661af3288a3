"""`fleetdistill compare`: several methods on the same fleets, with several seeds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetdistill.errors import ConfigurationError
from fleetdistill.names import unknown_name
from fleetdistill_console.tables import show
from fleetdistill_server.cli.options import JsonOption, report_errors
from fleetdistill_server.start import INTERRUPTED, ctrl_c_interrupts
from fleetdistill_server.views.runs import View

if TYPE_CHECKING:
    from fleetdistill_lab.experiments.sweep import Sections
    from fleetdistill_lab.simulation.spec.settings import Simulation

CONTROLS = {"fedavg": "the weighted mean of the models", "no_transfer": "training alone"}
"""Methods without which a comparison says little."""


@report_errors
def compare(
    config: Annotated[
        Path | None, typer.Argument(help="TOML file with settings in the sections [simulation], [method] and [fleet].")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="A method; repeatable. Differences are from the first one.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, as 0-4 or 0,2,7.")] = "0-2",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any setting of `simulate`: simulation.key=value, method.key=value for all methods that have it, or "
            "fedprox.mu=0.01 for one; repeatable.",
        ),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(envvar="FLEETDISTILL_DATA", help="Folder of the data sets.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs and results.")] = Path("out/compare"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Repeat runs that are in --out.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compares methods over seeds. Example: fleetdistill compare --method classstats --method fedavg --seeds 0-4

    Every seed gives all methods the same data, partition and initial weights. Finished runs in --out are not repeated.
    """
    from fleetdistill_lab.experiments.sweep import read_seeds, simulations

    if not method or len(set(method)) < len(method):
        raise ConfigurationError("--method must be given once for each method to compare, and each name once")
    sections = _sections(config, set_ or [], method)
    if data_dir is not None:
        sections = {**sections, "simulation": {"data_dir": data_dir, **sections.get("simulation", {})}}
    wanted = simulations(method, read_seeds(seeds), sections, out)
    try:
        ctrl_c_interrupts()
        _run(wanted, method, out, as_json, overwrite)
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command continues the comparison", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _sections(config: Path | None, texts: list[str], methods: list[str]) -> Sections:
    """Returns the settings of a file and of `--set`, by section; those of one method under its name."""
    from fleetdistill_lab.simulation.options import read_settings

    known = (*methods, "simulation", "fleet", "method")
    for text in texts:
        section = text.partition(".")[0].strip()
        if "." in text and section not in known:
            raise ConfigurationError(f"--set {unknown_name('section', section, known)}")
    of_one = {name: [text for text in texts if text.partition(".")[0].strip() == name] for name in methods}
    shared = read_settings(config, [text for text in texts if not any(text in of for of in of_one.values())])
    own = {
        name: read_settings(None, [f"method.{text.partition('.')[2]}" for text in of])["method"]
        for name, of in of_one.items()
        if of
    }
    return {**shared, **own}


def _run(wanted: list[Simulation], methods: list[str], out: Path, as_json: bool, overwrite: bool) -> None:
    from fleetdistill_lab.experiments.figures import lines_of, make_table, save_csv, save_figure
    from fleetdistill_lab.experiments.sweep import run

    def announce(number: int, simulation: Simulation) -> None:
        text = f"run {number + 1} of {len(wanted)}: {simulation.method}, seed {simulation.seed}"
        typer.echo(text, err=True)

    results = list(run(wanted, announce, overwrite=overwrite))
    lines = lines_of(results)
    first = wanted[0]
    seeds = sorted({simulation.seed for simulation in wanted})
    title = f"{first.devices} devices, {first.partition}, seeds {', '.join(map(str, seeds))}"
    save_csv(results, out / "compare.csv")
    save_figure(lines, out / "compare.png", title)
    missing = [name for name in CONTROLS if name not in methods]
    facts = {"partition": first.partition, "devices": first.devices, "seeds": seeds, "controls_missing": missing}
    view = View({"models": [asdict(line) for line in lines]}, facts)
    said = [
        "Accuracy in %, mean ± standard deviation over seeds; p: paired t test, adjusted by Holm's method.",
        *(f"A control is missing: {CONTROLS[name]}; add --method {name}." for name in missing),
        f"{out}/: compare.csv, compare.png, and a folder for each run",
    ]
    show(view, as_json, lambda view: [make_table(lines, title), *said])
