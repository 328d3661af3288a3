"""A simulation on the terminal: a live progress bar, then the table. The command and the example scripts share it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from fleetdistill_server.simulation.fleet import Interrupted, simulate
from fleetdistill_server.simulation.folder import IfThere
from fleetdistill_server.simulation.not_begun import not_begun
from fleetdistill_server.simulation.progress import Progress as Done
from fleetdistill_server.simulation.report.comparison import NAMES, comparison_table
from fleetdistill_server.simulation.report.results import FleetReport
from fleetdistill_server.simulation.report.table import report_table
from fleetdistill_server.simulation.spec.settings import Simulation
from fleetdistill_server.views.units import readable_bytes

_PIPED_WIDTH = 118
_SPEED_SECONDS = 3600.0
"""The time left comes of the rounds within the last so many seconds: one may take minutes."""


def simulate_and_show(wanted: Simulation, *, if_there: IfThere = "refuse", as_json: bool = False) -> FleetReport:
    """Runs a simulation with a progress bar and prints its tables, or its report as JSON.

    Raises:
        Interrupted: As `simulate`.
    """
    report = simulate_with_progress(wanted, if_there)
    if as_json:
        print(json.dumps(asdict(report), indent=1))
        return report
    show_run(report)
    show_comparison(report, wanted.out)
    return report


def show_run(report: FleetReport) -> None:
    """Prints how the devices did, and what there is to say of the run as a whole."""
    console = Console()
    if console.is_terminal:
        console.print(report_table(report, console.width))
    else:
        Console(width=_PIPED_WIDTH).print(report_table(report))
    lines = (verdict(report), *expected_lines(report), *global_lines(report), *fedavg_lines(report))
    for line in (*lines, *joining_lines(report)):
        _say(console, line)


def show_comparison(report: FleetReport, out: Path) -> None:
    """Prints the method beside its controls, where it has any, and where the files are."""
    console = Console()
    if len(report.comparison) > 1:
        console.print()
        console.print(comparison_table(report.comparison))
    models = sum(1 + len(one.onnx_answers) for one in report.devices)
    _say(console, f"{out}/: report.json, fleet.png, onnx/ ({models} models)")


def _say(console: Console, line: str) -> None:
    """Prints a sentence: wrapped at words on a terminal, on one line elsewhere."""
    console.print(line, soft_wrap=not console.is_terminal)


def simulate_with_progress(wanted: Simulation, if_there: IfThere = "refuse") -> FleetReport:
    """Runs a simulation with a progress bar on stderr."""
    with _Bars(wanted, Console(stderr=True)) as bars:
        return simulate(wanted, bars.show, if_there=if_there)


def interrupted_line(interrupted: Interrupted, out: Path) -> str:
    """What there is after Ctrl-C, and how it goes on."""
    report = interrupted.report
    if not interrupted.begun:
        return not_begun(out)
    if report is None:
        return f"interrupted before the first round was complete; --resume --out {out} goes on from there"
    done = f"{report.completed_rounds} of {report.rounds} rounds"
    return f"interrupted; report.json and fleet.png in {out} are of {done}; --resume --out {out} goes on from there"


def verdict(report: FleetReport) -> str:
    """What the run showed, in one honest sentence."""
    uploads = f"{report.acknowledged_uploads} uploads acknowledged, {report.used_uploads} used"
    if report.mean_accuracy_alone is None:
        return f"{report.seconds:.0f} s; {uploads}"
    gain = 100 * (report.mean_accuracy_fleet - report.mean_accuracy_alone)
    word = "better" if gain > 0 else "worse"
    more = f" for {report.control_rounds} rounds" if report.control_rounds != report.rounds else ""
    text = f"the fleet is {abs(gain):.1f} points {word} than devices that train alone{more}, on average"
    return f"{report.seconds:.0f} s; {text}; {uploads}"


def expected_lines(report: FleetReport) -> list[str]:
    """What the devices expect of their answers, where they can tell without held-out data."""
    if report.leave_one_out is None:
        return []
    rates = ", ".join(f"{answer} answer {rate:.1%}" for answer, rate in report.leave_one_out.items())
    kept = sum(bool(one.own_statistics_kept) for one in report.devices)
    own = f"; {kept} of {len(report.devices)} devices keep a personal answer from their own statistics" if kept else ""
    return [f"Expected on unseen data like each device's own, by leave-one-out, nothing held out: {rates}{own}"]


def exchange_lines(report: FleetReport, out: Path) -> list[str]:
    """What one exchange was, after the tables of a method of many rounds."""
    cost = readable_bytes(round(report.curves[0].bytes[-1]))
    what = f"Then the same fleet over the same wire, one exchange of {NAMES[report.method]}"
    return [f"{what}: {report.seconds:.0f} s, {cost} a device ({out}/)", *expected_lines(report)]


def global_lines(report: FleetReport) -> list[str]:
    """The method's global model, where it has one."""
    accuracy = report.global_accuracy_by_round[-1]
    return [] if accuracy is None else [f"{report.method}'s global model: {accuracy:.1%}"]


def fedavg_lines(report: FleetReport) -> list[str]:
    """The control with one model on every device, where it was run beside the method."""
    if report.fedavg_model is None or report.fedavg_settings is None or report.method == "fedavg":
        return []
    how = "{optimizer} {learning_rate}, {local_epochs} local epochs".format_map(report.fedavg_settings)
    return [
        f"FedAvg with {report.fedavg_model} on every device ({how}): global model "
        f"{_percent(report.mean_accuracy_fedavg_global)}, device models after local training "
        f"{_percent(report.mean_accuracy_fedavg_device)}, on own classes "
        f"{_percent(report.mean_own_accuracy_fedavg_device)}"
    ]


def joining_lines(report: FleetReport) -> list[str]:
    """What protected the devices, where anything did."""
    guards = f"guards fired {report.guards_fired} times" if report.guards_fired else ""
    judged = report.models_kept + report.models_replaced
    kept = f"apps kept their model {report.models_kept} of {judged} times" if judged else ""
    said = "; ".join(one for one in (guards, kept) if one)
    return [said] if said else []


def _percent(rate: float | None) -> str:
    return "not scored" if rate is None else f"{rate:.1%}"


class _Bars:
    """A bar for the fleet, then one for each control, each with the time that is left, or that it took."""

    def __init__(self, wanted: Simulation, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[accuracy]}"),
        )
        self._names = {
            "fleet": f"{wanted.method} over {wanted.link}",
            "alone": "control: alone",
            "fedavg": "control: FedAvg",
        }
        self._progress = Progress(*columns, console=console, speed_estimate_period=_SPEED_SECONDS)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tasks:  # stopped without a start, it prints an empty line
            self._progress.stop()

    def show(self, done: Done) -> None:
        """Moves the bar of a phase."""
        text = "" if done.accuracy is None else f"mean test accuracy {done.accuracy:.1%}"
        if done.phase not in self._tasks:
            self._progress.start()  # not before the settings and the data have proved good
            task = self._progress.add_task(self._names[done.phase], total=done.total, accuracy=text)
            self._tasks[done.phase] = task
        self._progress.update(self._tasks[done.phase], completed=done.completed, accuracy=text)
