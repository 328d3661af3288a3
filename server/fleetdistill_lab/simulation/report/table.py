"""Formats a simulation's devices as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fleetdistill_lab.simulation.report.results import DeviceReport, FleetReport, VariantRates
from fleetdistill_server.texts import readable_bytes

if TYPE_CHECKING:
    from rich.table import Table


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
