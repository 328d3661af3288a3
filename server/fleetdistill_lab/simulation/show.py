"""Shows a simulation on the terminal: progress bars, then tables of devices. Used by the command and the examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from fleetdistill_console.tracking.targets import NOT_TRACKED, Tracking
from fleetdistill_lab.simulation.fleet import Interrupted, simulate
from fleetdistill_lab.simulation.folder import IfThere
from fleetdistill_lab.simulation.options import not_begun
from fleetdistill_lab.simulation.progress import Progress as Done
from fleetdistill_lab.simulation.report.comparison import ALONE, NAMES, comparison_table, devices_lines
from fleetdistill_lab.simulation.report.plots import FIGURES
from fleetdistill_lab.simulation.report.report import describe_partition, json_lines, privacy_lines
from fleetdistill_lab.simulation.report.results import DeviceReport, FleetReport, VariantRates
from fleetdistill_lab.simulation.report.simulated_time import time_lines
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.texts import counted, readable_bytes

if TYPE_CHECKING:
    from rich.table import Table


_PIPED_WIDTH = 118
_SPEED_SECONDS = 3600.0
"""Seconds of past rounds from which the remaining time is estimated; one round may take minutes."""


def simulate_and_show(
    wanted: Simulation, *, if_there: IfThere = "refuse", as_json: bool = False, tracking: Tracking = NOT_TRACKED
) -> FleetReport:
    """Runs a simulation with progress bars and prints its tables, or its report as JSON.

    Raises:
        Interrupted: See `simulate`.
    """
    report = simulate_with_progress(wanted, if_there, tracking)
    if as_json:
        print(*json_lines(report), sep="", end="")
        return report
    show_run(report)
    show_comparison(report, wanted.out)
    return report


def show_run(report: FleetReport) -> None:
    """Prints the table of devices and the summary lines of a run."""
    console = Console()
    if console.is_terminal:
        console.print(report_table(report, console.width))
    else:
        Console(width=_PIPED_WIDTH).print(report_table(report))
    lines = (
        *privacy_lines(report),
        f"Partition of the data: {describe_partition(report)}",
        summary_line(report),
        scored_line(report),
        *time_lines(report.simulated_time),
        *expected_lines(report),
        *global_lines(report),
        *fedavg_lines(report),
    )
    for line in (*lines, *protection_lines(report)):
        _print_line(console, line)


def show_comparison(report: FleetReport, out: Path) -> None:
    """Prints the comparison of the method with its controls, if there are any, and the report's files."""
    console = Console()
    if len(report.comparison) > 1:
        console.print()
        console.print(comparison_table(report.comparison, report.top_k))
        for line in devices_lines(report.comparison, len(report.devices)):
            _print_line(console, line)
    models = sum(bool(device.onnx_file) + len(device.onnx_answers) for device in report.devices)
    figures = [name for name in (f"fleet.{kind}" for kind in FIGURES) if (out / name).exists()]
    _print_line(console, f"{out}/: {', '.join(['report.json', *figures])}, onnx/ ({models} models)")


def _print_line(console: Console, line: str) -> None:
    """Prints a line, wrapped at words on a terminal and unwrapped elsewhere."""
    console.print(line, soft_wrap=not console.is_terminal)


def simulate_with_progress(
    wanted: Simulation, if_there: IfThere = "refuse", tracking: Tracking = NOT_TRACKED
) -> FleetReport:
    """Runs a simulation with progress bars on stderr."""
    with Bars(wanted, Console(stderr=True)) as bars:
        return simulate(wanted, bars.show, if_there=if_there, tracking=tracking, tell=bars.tell)


def interrupted_line(interrupted: Interrupted, out: Path) -> str:
    """Returns the line that is printed after Ctrl-C, with the command line option that resumes the simulation."""
    report = interrupted.report
    if not interrupted.begun:
        return not_begun(out)
    if report is None:
        when = "" if interrupted.has_rounds else " before the first round was complete"
        return f"interrupted{when}; continue with --resume --out {out}"
    done = f"{report.completed_rounds} of {counted(report.rounds, 'round')}"
    return f"interrupted; report.json and the figure in {out} cover {done}; continue with --resume --out {out}"


def summary_line(report: FleetReport) -> str:
    """Returns the run's duration, its mean gain over local-only training in percentage points, and its uploads."""
    uploads = f"{counted(report.acknowledged_uploads, 'upload')} acknowledged, {report.used_uploads} used"
    if report.mean_accuracy_alone is None or report.mean_accuracy_fleet is None:
        return f"{report.seconds:.0f} s; {uploads}"
    gain = 100 * (report.mean_accuracy_fleet - report.mean_accuracy_alone)
    word = "better" if gain > 0 else "worse"
    scored = next(row.devices for row in report.comparison if row.name == ALONE)
    who = "the fleet is" if scored == len(report.devices) else f"the {scored} devices that took part are"
    more = f" for {counted(report.control_rounds, 'round')}" if report.control_rounds != report.rounds else ""
    untrained = _untrained(report, ALONE, ", {} of which never took part and have their initial models")
    text = f"{who} on average {abs(gain):.1f} points {word} than devices that train alone{more}{untrained}"
    return f"{report.seconds:.0f} s; {text}; {uploads}"


def scored_line(report: FleetReport) -> str:
    """Returns which models were scored, when, and on how many rows of the test set."""
    scored = report.scored
    rows, of_rows = scored["rows"], scored["test_rows"]
    every = "after each round" if scored["every"] == 1 else f"every {scored['every']} rounds and at the end"
    parts = []
    if any(rate is not None for rate in report.global_accuracy_by_round):
        parts.append(f"the global model {every if not rows else 'after each round'}, on {of_rows:,} test rows")
    if rows:
        some = f"{rows:,} of the {of_rows:,} test rows, drawn by class" if rows < of_rows else f"{of_rows:,} test rows"
        which = f"the models of a round's devices {every}, and of all that took part at the end"
        if scored["models"] == "devices":
            initial = [of["untrained"] for of in report.counted_by_round]
            count = f" ({initial[0]} of {len(report.devices)} after round 1, {max(initial[-20:])} in the last 20)"
            which = f"the models of all devices {every}, with initial ones before a device takes part"
            which += count if any(initial) else ""
        parts.append(f"{which}, on {some}")
    if rows and report.test_part != "global":
        parts.append(f"own figures on each device's own rows ({report.test_part})")
    return f"Scored (--score {scored['models']}): {'; '.join(parts) or 'no model'}"


def expected_lines(report: FleetReport) -> list[str]:
    """Returns the devices' leave-one-out accuracy, for methods that estimate it without held-out data."""
    if report.leave_one_out is None:
        return []
    rates = ", ".join(f"{variant} model {rate:.1%}" for variant, rate in report.leave_one_out.items())
    kept = sum(bool(device.own_statistics_kept) for device in report.devices)
    own = f"; {kept} of {len(report.devices)} devices keep a personal model from their own statistics" if kept else ""
    return [f"Leave-one-out estimate of the accuracy on unseen data like each device's own: {rates}{own}"]


def exchange_lines(report: FleetReport, out: Path) -> list[str]:
    """Returns the summary of a one-exchange run that follows a run of another method."""
    cost = readable_bytes(round(report.curves[0].bytes[-1]))
    what = f"The same fleet with one exchange of {NAMES[report.method]}"
    line = f"{what}: {report.seconds:.0f} s, {cost} per device ({out}/)"
    return [line, *privacy_lines(report), *expected_lines(report)]


def global_lines(report: FleetReport) -> list[str]:
    """Returns the accuracy of the method's global model, if it has one."""
    accuracy = report.global_accuracy_by_round[-1]
    return [] if accuracy is None else [f"{report.method}'s global model: {accuracy:.1%}"]


def fedavg_lines(report: FleetReport) -> list[str]:
    """Returns the figures of the FedAvg control, if it was run."""
    if report.fedavg_model is None or report.fedavg_settings is None or report.method == "fedavg":
        return []
    how = "{optimizer} {learning_rate}, {local_epochs} local epochs".format_map(report.fedavg_settings)
    untrained = _untrained(report, "FedAvg devices", "; {} never took part")
    return [
        f"FedAvg with {report.fedavg_model} on every device ({how}): global model "
        f"{_percent(report.mean_accuracy_fedavg_global)}, device models after local training "
        f"{_percent(report.mean_accuracy_fedavg_device)}, on own classes "
        f"{_percent(report.mean_own_accuracy_fedavg_device)}{untrained}"
    ]


def protection_lines(report: FleetReport) -> list[str]:
    """Returns how often guards fired and apps kept their models, if either happened."""
    guards = f"guards fired {report.guards_fired} times" if report.guards_fired else ""
    validated = report.models_kept + report.models_replaced
    kept = f"apps kept their model {report.models_kept} of {validated} times" if validated else ""
    text = "; ".join(item for item in (guards, kept) if item)
    return [text] if text else []


def _untrained(report: FleetReport, name: str, text: str) -> str:
    """Returns a text with the number of devices that never took part and count in a comparison's row; empty if 0."""
    count = next((row.untrained for row in report.comparison if row.name == name), 0)
    return text.format(count) if count else ""


def _percent(rate: float | None) -> str:
    return "not scored" if rate is None else f"{rate:.1%}"


class Bars:
    """Progress bars for the fleet and each control, with the remaining or the elapsed time."""

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
            "alone": "control: local only",
            "fedavg": "control: FedAvg",
        }
        self._progress = Progress(*columns, console=console, speed_estimate_period=_SPEED_SECONDS)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tasks:  # stopping a progress display that was never started prints an empty line
            self._progress.stop()

    def tell(self, line: str) -> None:
        """Prints a line above the bars."""
        _print_line(self._progress.console, line)

    def show(self, done: Done) -> None:
        """Updates the bar of a phase."""
        text = "" if done.accuracy is None else f"mean test accuracy {done.accuracy:.1%}"
        if done.phase not in self._tasks:
            self._progress.start()  # only now, after the settings and the data have passed their checks
            task = self._progress.add_task(self._names[done.phase], total=done.total, accuracy=text)
            self._tasks[done.phase] = task
        self._progress.update(self._tasks[done.phase], completed=done.completed, accuracy=text)


_MIN_NEEDED = ("ONNX", "params", "down", "samples", "up")
"""Columns that a narrow terminal omits, in this order; report.json has all figures."""
_LEFT = ("device", "model")


def report_table(report: FleetReport, width: int | None = None) -> Table:
    """Returns the table of a report's devices; `ONNX` is the largest difference to PyTorch's logits.

    Of more than 60 devices, 60 are shown, evenly spaced.

    A device's row has the figures of its general variant; each further variant has a row below it.

    Args:
        report: Results of the simulation.
        width: Width of the terminal in characters; columns are omitted to fit. None keeps all columns.
    """
    from rich.console import Console

    rows = [(_cells(report.devices[at]), report.devices[at].further) for at in rows_shown(len(report.devices))]
    mean = _mean_cells(report)
    for dropped in range(len(_MIN_NEEDED) + 1):
        names = [name for name in rows[0][0] if name not in _MIN_NEEDED[:dropped]]
        table = _table(report, names, rows, mean)
        if width is None or Console(width=1000).measure(table).maximum <= width:
            break
    return table


def _cells(one: DeviceReport) -> dict[str, str]:
    return {
        "device": one.name,
        "model": one.model,
        "params": f"{one.parameters:,}",
        "samples": f"{one.samples:,}",
        "alone -> fleet": _arrow(one.accuracy_alone, one.accuracy_fleet),
        "own classes": _arrow(one.own_accuracy_alone, one.own_accuracy_fleet),
        "up": readable_bytes(one.bytes_up),
        "down": readable_bytes(one.bytes_down),
        "ONNX": "" if one.onnx_max_difference is None else f"{one.onnx_max_difference:.0e}",
    }


def _mean_cells(report: FleetReport) -> dict[str, str]:
    devices = report.devices
    return {
        "device": "mean",
        "samples": f"{sum(device.samples for device in devices):,}",
        "alone -> fleet": _arrow(report.mean_accuracy_alone, report.mean_accuracy_fleet),
        "own classes": _arrow(report.mean_own_accuracy_alone, report.mean_own_accuracy_fleet),
        "up": readable_bytes(sum(device.bytes_up for device in devices) // len(devices)),
        "down": readable_bytes(sum(device.bytes_down for device in devices) // len(devices)),
    }


_Cells = Mapping[str, str]
_Further = Mapping[str, VariantRates]


def _table(report: FleetReport, names: Sequence[str], rows: Sequence[tuple[_Cells, _Further]], mean: _Cells) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    tested = "the global test set" if report.test_part == "global" else "all devices' test rows"
    title = f"{report.method} on {report.dataset}: accuracy on {tested}, alone -> in the fleet"
    # With rows for further variants the table is harder to read, so all columns must fit into 100 characters.
    narrow: dict[str, Any] = {"padding": (0, 1, 0, 0), "show_edge": False, "pad_edge": False}
    layout = narrow if report.further else {"padding": (0, 1)}
    left_out = len(report.devices) - len(rows)
    caption = f"{len(rows)} of {len(report.devices):,} devices; report.json has all of them" if left_out else None
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, **layout)
    for name in names:
        table.add_column(name, no_wrap=True, justify="left" if name in _LEFT else "right")
    for cells, further in rows:
        _add_row(table, names, cells)
        _add_further(table, names, further)
    table.add_section()
    _add_row(table, names, mean)
    _add_further(table, names, report.further)
    return table


def _add_row(table: Table, names: Sequence[str], cells: _Cells) -> None:
    table.add_row(*(cells.get(name, "") for name in names))


def _add_further(table: Table, names: Sequence[str], further: _Further) -> None:
    for variant, figures in further.items():
        rates = {"alone -> fleet": figures["accuracy"], "own classes": figures["own_accuracy"]}
        cells = {name: f"{rate:.1%}" for name, rate in rates.items() if rate is not None}
        _add_row(table, names, {"model": f" {variant} model", **cells})


def _arrow(before: float | None, after: float | None) -> str:
    if before is not None and after is None:
        return f"{before:.1%} -> ?"
    return " -> ".join(f"{item:.1%}" for item in (before, after) if item is not None)


MAX_ROWS = 60
"""Largest number of devices with a row of their own; report.json has all of them."""


def rows_shown(devices: int) -> list[int]:
    """Returns the positions of the devices that get a row, evenly spaced if there are too many for all."""
    shown = min(devices, MAX_ROWS)
    return [number * devices // shown for number in range(shown)]
