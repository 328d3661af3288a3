"""`fleetdistill compare` and `fleetdistill experiment`: several methods on the same fleets, with several seeds."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetdistill.errors import ConfigurationError, RunError
from fleetdistill.methods.outside import import_modules
from fleetdistill.names import unknown_name
from fleetdistill_console.tables import open_console, show
from fleetdistill_server.cli.options import ImportOption, JsonOption, report_errors
from fleetdistill_server.config.section import read_toml
from fleetdistill_server.start import INTERRUPTED, ctrl_c_interrupts
from fleetdistill_server.texts import counted
from fleetdistill_server.views.runs import View

if TYPE_CHECKING:
    from fleetdistill_lab.experiments.definition import Experiment
    from fleetdistill_lab.experiments.runner import Progress

experiment_app = typer.Typer(no_args_is_help=True, help="Runs experiments that a file describes, and reports them.")
_DataDir = Annotated[Path | None, typer.Option(envvar="FLEETDISTILL_DATA", help="Folder of the data sets.")]
_PIPED_WIDTH = 160
_TITLE_WIDTH = 120
"""Number of characters of a line above a picture as wide as a page."""
_Workers = Annotated[int, typer.Option(help="Number of runs at the same time, each a process.")]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Repeat runs that are in --out.")]


@report_errors
def compare(
    config: Annotated[
        Path | None,
        typer.Argument(help="TOML file with settings in the sections [simulation], [method], [partition], [fleet]."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help="A method, or LABEL=METHOD for another entry of it; repeatable. Differences are from the first one.",
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, as 0-4 or 0,2,7.")] = "0-2",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any setting of `simulate`: simulation.key=value, such as simulation.rounds=10, method.key=value for "
            "all methods that have it, or fedprox.mu=0.01 and fedprox.simulation.rounds=60 for one; repeatable.",
        ),
    ] = None,
    import_: ImportOption = None,
    data_dir: _DataDir = None,
    workers: _Workers = 1,
    out: Annotated[Path, typer.Option(help="Folder of the runs and results.")] = Path("out/compare"),
    overwrite: _Overwrite = False,
    as_json: JsonOption = False,
) -> None:
    """Compares methods over seeds. Example: fleetdistill compare --method classstats --method fedavg --seeds 0-4

    Every seed gives all methods the same data and partition. Finished runs in --out are not repeated.
    `fleetdistill experiment` runs grids of settings, from a file.
    """
    from fleetdistill_lab.experiments.definition import Experiment, MethodEntry, parse_seeds

    named = [(name.partition("=")[0], name.rpartition("=")[2]) for name in method or ()]
    methods = dict(named)
    if not methods or len(methods) < len(named):
        raise ConfigurationError("--method must be given once for each method to compare, and each name once")
    sections, own = _sections(config, set_ or [], list(methods))
    if import_:
        sections["simulation"] = {**sections.get("simulation", {}), "modules": import_}
    import_modules(sections.get("simulation", {}).get("modules", ()), "--import")
    experiment = Experiment(
        name="compare",
        title=f"{', '.join(methods)}",
        seeds=parse_seeds(seeds),
        methods={label: MethodEntry(method=name, **own[label]) for label, name in methods.items()},
        sections=sections,
    )
    try:
        _run(experiment, out, "", workers, overwrite, data_dir, "comparison")
    except RunError:  # some runs failed; the others are worth a table
        _show_comparison(experiment, out, as_json)
        raise
    _show_comparison(experiment, out, as_json)


def _sections(
    config: Path | None, texts: Sequence[str], methods: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], Mapping[str, Mapping[str, dict[str, Any]]]]:
    """Returns the settings of a file and of `--set`: by section, and the fields of `MethodEntry` by method."""
    from fleetdistill_lab.simulation.options import read_values

    known = (*methods, "simulation", "partition", "fleet", "method")
    for text in texts:
        section = text.partition(".")[0].strip()
        if "." in text and section not in known:
            raise ConfigurationError(f"--set {unknown_name('section', section, known)}")
    of_one = {name: [text for text in texts if text.partition(".")[0].strip() == name] for name in methods}
    shared = read_values(config, [text for text in texts if not any(text in of for of in of_one.values())])
    own = {}
    for name, of in of_one.items():
        rests = [text.partition(".")[2] for text in of]
        given = read_values(None, [rest if rest.startswith("simulation.") else f"method.{rest}" for rest in rests])
        own[name] = {"settings": given.get("method", {}), "simulation": given.get("simulation", {})}
    return shared, own


def _run(
    experiment: Experiment,
    out: Path,
    definition: str,
    workers: int,
    overwrite: bool,
    data_dir: Path | None,
    what: str,
) -> None:
    """Runs an experiment with progress on stderr. Raises RunError at the end if a run failed."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bars

    from fleetdistill_lab.experiments.definition import join_names
    from fleetdistill_lab.experiments.notes import cautions
    from fleetdistill_lab.experiments.runner import run_experiment

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    failed, begun = list[str](), set[bool]()  # whether the tuning, and the grid, has begun
    bars = Bars(*columns, console=console, transient=True)
    task = bars.add_task("runs", total=None, left="")

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    def note(done: Progress) -> None:
        bars.start()
        of_tuning = " of the tuning" if done.following else ""
        left = f"{_duration(done.seconds_left)} left{of_tuning}" if done.seconds_left else ""
        bars.update(task, total=done.total, completed=done.finished + done.failed, left=left)
        if done.cell is None:
            if (done.following > 0) in begun:
                return
            what, then = "", ""
            if experiment.tune and done.following:
                what = f" that tune {experiment.tune.setting}"
                then = f"; {counted(done.following, 'run')} of the grid follow"
            elif experiment.tune:
                what = " of the grid"
            if done.finished:
                more = f"; {left}" if left and done.finished < done.total else ""
                runs = f" runs{what}" if what else ""
                say(f"{done.finished} of {done.total}{runs} finished before{more}{then}")
            for sentence in cautions(experiment) if not begun else ():
                say(sentence)
            if not done.finished:
                say(f"{counted(done.total, 'run')}{what}; a line follows when one ends{then}")
            begun.add(done.following > 0)
            return
        where = join_names(done.cell.label, done.cell.point, f"seed {done.cell.simulation.seed}", done.cell.tried)
        if done.error:
            failed.append(f"{where}: {done.error} (its output: {out / 'runs' / done.cell.run / 'errors.log'})")
        line = f"failed: {done.error}" if done.error else f"{done.seconds:.0f} s"
        count = f"{done.finished + done.failed} of {done.total}"
        more = f"; {left}" if left and done.finished + done.failed < done.total else ""
        say(f"{count}: {where}: {line}{more}")

    try:
        ctrl_c_interrupts()
        run_experiment(
            experiment,
            out,
            definition=definition,
            workers=workers,
            overwrite=overwrite,
            data_dir=data_dir,
            on_progress=note,
        )
    except KeyboardInterrupt:
        typer.echo(f"interrupted; the same command continues the {what}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        if bars.live.is_started:  # stopping a display that was never started prints an empty line
            bars.stop()
    if failed:
        raise RunError(f"{counted(len(failed), 'run')} failed; the same command tries again. First: {failed[0]}")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return "less than a minute"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def _show_comparison(experiment: Experiment, out: Path, as_json: bool) -> None:
    from fleetdistill_lab.experiments.figures import draw_lines, save_figure
    from fleetdistill_lab.experiments.notes import cautions, controls_missing, header_notes, notes, power_notes
    from fleetdistill_lab.experiments.results import open_results
    from fleetdistill_lab.experiments.summary import lines_of
    from fleetdistill_lab.experiments.tables import fit, model_table, rich_table, save_csv
    from fleetdistill_lab.simulation.data.partition import partition_parameters
    from fleetdistill_lab.simulation.report.comparison import devices_lines

    with open_results(out) as results:
        rows, devices, left_out = results.models(""), results.devices(""), results.clients_left_out()
    if not rows:
        return
    lines = lines_of(rows, next(iter(experiment.methods)), len(experiment.seeds))
    first = experiment.cells()[0].simulation
    rounds = "rounds by method" if first.rounds is None else counted(first.rounds, "round")
    named = [name for name in ("alpha", "classes_per_device") if name in partition_parameters(first.partition_path)]
    parameters = "".join(f"{name} {getattr(first, name):g}, " for name in named)
    networks = dict.fromkeys(row.networks.replace(",", ", ") for row in rows)
    own = {name: {**entry.settings, **entry.simulation} for name, entry in experiment.methods.items()}
    title = "; ".join(
        [
            f"{getattr(first.dataset, 'name', first.dataset)}, {counted(devices, 'device')}, {first.partition_path}, "
            f"{parameters}{rounds}, seeds {', '.join(map(str, experiment.seeds))}",
            f"networks {next(iter(networks))}" if len(networks) == 1 else "networks differ between methods",
            *(
                f"{name} with {', '.join(f'{key} = {value}' for key, value in of.items())}"
                for name, of in own.items()
                if of
            ),
        ]
    )
    save_csv(rows, out / "compare.csv")
    save_figure(draw_lines(lines, textwrap.fill(title, _TITLE_WIDTH)), out, "compare", ("png",))
    facts = {
        "partition": first.partition_path,
        "devices": devices,
        "seeds": list(experiment.seeds),
        "controls_missing": [control.label for control in controls_missing(experiment)],
    }
    view = View({"models": [asdict(line) for line in lines]}, facts)
    said = [
        "Accuracy in %, mean ± standard deviation over seeds; differences are paired by seed, and p is of a paired t "
        "test, adjusted by Holm's method for its column.",
        *power_notes(
            len(experiment.seeds), sum(line.p is not None for line in lines) or sum(bool(line.base) for line in lines)
        ),
        *notes(experiment),
        *header_notes(experiment),
        *cautions(experiment),
        *devices_lines(lines, devices),
        *left_out,
        f"{out}/: compare.csv, compare.png, results.sqlite, parquet/, and runs/ with a folder for each run",
    ]
    shown = fit(model_table(lines, title), open_console().width)
    show(view, as_json, lambda view: [*map(rich_table, shown), *said])


_File = Annotated[str, typer.Argument(help="TOML file, or the name of an experiment that comes with the package.")]
_Scale = Annotated[str, typer.Option(help="Scale: `paper`, or a section under [scales] of the file, such as small.")]


def _folder(out: Path | None, experiment: Experiment) -> Path:
    return out or Path("out/experiments") / f"{experiment.name}-{experiment.scale}"


@experiment_app.command("run")
@report_errors
def run(
    file: _File,
    scale: _Scale = "paper",
    workers: _Workers = 1,
    data_dir: _DataDir = None,
    out: Annotated[Path | None, typer.Option(help="Folder; by default out/experiments/NAME-SCALE.")] = None,
    overwrite: _Overwrite = False,
) -> None:
    """Runs an experiment and writes its report. Example: fleetdistill experiment run feddkc-tables-5-7 --scale small

    Finished runs are not repeated, interrupted ones continue. Cells with the same settings share a run.
    """
    from fleetdistill_lab.experiments.definition import find_experiment, read_experiment

    path = find_experiment(file)
    experiment = read_experiment(path, scale)
    folder = _folder(out, experiment)
    try:
        _run(experiment, folder, path.read_text(encoding="utf-8"), workers, overwrite, data_dir, "experiment")
    except (RunError, typer.Exit):  # some runs failed, or Ctrl-C: the others are worth a report
        _write_report(experiment, folder)
        raise
    _write_report(experiment, folder)


@experiment_app.command("list")
@report_errors
def list_experiments() -> None:
    """Lists the experiments that come with the package. Example: fleetdistill experiment list"""
    from fleetdistill_lab.experiments.definition import packaged

    for name, file in packaged().items():
        typer.echo(f"{name:<20}  {read_toml(file)['title']}")


@experiment_app.command("show")
@report_errors
def show_experiment(file: _File) -> None:
    """Prints the file of an experiment, to be changed. Example: fleetdistill experiment show one-exchange > my.toml"""
    from fleetdistill_lab.experiments.definition import find_experiment

    typer.echo(find_experiment(file).read_text(encoding="utf-8"), nl=False)


@experiment_app.command("report")
@report_errors
def report(
    file: _File,
    scale: _Scale = "paper",
    out: Annotated[Path | None, typer.Option(help="Folder; by default out/experiments/NAME-SCALE.")] = None,
) -> None:
    """Writes the report of the finished runs again. Example: fleetdistill experiment report feddkc-tables-5-7

    It follows an edited file, and says what has not run of it. The page report/index.html needs no other file; beside
    it are tables as CSV and LaTeX and figures as PDF and SVG.
    """
    from fleetdistill_lab.experiments.definition import find_experiment, read_experiment
    from fleetdistill_lab.experiments.runner import follow_edits

    path = find_experiment(file)
    experiment = read_experiment(path, scale)
    folder = _folder(out, experiment)
    found = [item.parent.name for item in folder.parent.glob(f"{experiment.name}-*/results.sqlite")]
    if out is None and found and folder.name not in found:
        scales = " and ".join(sorted(name.removeprefix(f"{experiment.name}-") for name in found))
        raise ConfigurationError(f"{folder} does not exist; there are results of --scale {scales}")
    follow_edits(experiment, folder, path.read_text(encoding="utf-8"))
    _write_report(experiment, folder)


def _write_report(experiment: Experiment, folder: Path) -> None:
    from rich.console import Console

    from fleetdistill_lab.experiments.page import write_report
    from fleetdistill_lab.experiments.results import open_results
    from fleetdistill_lab.experiments.tables import fit, rich_table

    typer.echo(f"writing the report of what has run to {folder / 'report'}", err=True)  # takes up to half a minute
    with open_results(folder) as results:
        written = write_report(experiment, results, folder / "report")
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH)
    for table in chain.from_iterable(fit(table, console.width) for table in written.tables):
        console.print(rich_table(table))
        console.print()
    reference = experiment.reference or next(iter(experiment.methods))
    stars = f"*: differs from {reference} (paired t test, Holm, p <= 0.05)"
    for warning in (f"Mean ± standard deviation over seeds; {stars}", *written.warnings):
        console.print(warning, soft_wrap=True, highlight=False, markup=False)
    console.print(f"{written.page}, and tables/ and figures/ beside it", soft_wrap=True, highlight=False, markup=False)


@experiment_app.command("compare")
@report_errors
def compare_experiments(
    first: Annotated[Path, typer.Argument(help="Folder of an experiment.")],
    second: Annotated[Path, typer.Argument(help="Folder of another experiment, or of the same one at another time.")],
    metric: Annotated[list[str] | None, typer.Option("--metric", help="A metric; repeatable; by default all.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Says what changed between two experiments. Example: fleetdistill experiment compare out/before out/after

    Settings, versions of packages, and metrics that differ over the seeds that both have.
    """
    from fleetdistill_lab.experiments.changes import changed_definition, changed_results, changed_versions, shared_cells
    from fleetdistill_lab.experiments.metrics import METRICS
    from fleetdistill_lab.experiments.results import open_results
    from fleetdistill_lab.experiments.tables import change_table, rich_table

    for name in metric or ():
        if name not in METRICS:
            raise ConfigurationError(unknown_name("metric", name, METRICS))
    with open_results(first) as old, open_results(second) as new:
        sentences = [*changed_definition(old, new), *changed_versions(old, new)]
        changes, shared = changed_results(old, new, metric or []), shared_cells(old, new)
    view = View({"metrics": [asdict(change) for change in changes]}, {"settings": sentences, "shared": shared})
    same = f"no metric differs in the {counted(shared, 'cell')} that both have"
    nothing = "nothing is shared: no method, grid point and seed has finished in both, so no metric can be compared"
    show(
        view,
        as_json,
        lambda view: [*sentences, rich_table(change_table(changes)) if changes else same if shared else nothing],
    )
