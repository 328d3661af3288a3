"""The table of a simulation's devices on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fleetdistill_server.simulation.report.results import FleetReport
from fleetdistill_server.views.units import readable_bytes

if TYPE_CHECKING:
    from rich.table import Table


def report_table(report: FleetReport) -> Table:
    """The table that a person reads at the end; `ONNX` is the largest difference to PyTorch.

    A device's line has the figures of its general answer; each further one has a line below with its own.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{report.method} on {report.dataset}: accuracy on the global test part, alone -> in the fleet"
    # The lines of further answers are read together with those above, so all columns must fit: 100 characters.
    narrow: dict[str, Any] = {"padding": (0, 1, 0, 0), "show_edge": False, "pad_edge": False}
    layout = narrow if report.further else {"padding": (0, 1)}
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, **layout)
    for name in ("device", "model"):
        table.add_column(name, no_wrap=True)
    for name in ("params", "samples", "alone -> fleet", "own classes", "up", "down", "ONNX"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in report.devices:
        table.add_row(
            one.name,
            one.model,
            f"{one.parameters:,}",
            f"{one.samples:,}",
            _arrow(one.accuracy_alone, one.accuracy_fleet),
            _arrow(one.own_accuracy_alone, one.own_accuracy_fleet),
            readable_bytes(one.bytes_up),
            readable_bytes(one.bytes_down),
            "" if one.onnx_max_difference is None else f"{one.onnx_max_difference:.0e}",
        )
        _add_further(table, one.further)
    table.add_section()
    table.add_row(
        "mean",
        *("", "", f"{sum(one.samples for one in report.devices):,}"),
        _arrow(report.mean_accuracy_alone, report.mean_accuracy_fleet),
        _arrow(report.mean_own_accuracy_alone, report.mean_own_accuracy_fleet),
        readable_bytes(sum(one.bytes_up for one in report.devices) // len(report.devices)),
        readable_bytes(sum(one.bytes_down for one in report.devices) // len(report.devices)),
        "",
    )
    _add_further(table, report.further)
    return table


def _add_further(table: Table, further: Mapping[str, Mapping[str, float]]) -> None:
    for answer, figures in further.items():
        rates = (figures["accuracy"], figures["own_accuracy"])
        table.add_row("", f" {answer} answer", "", "", *(f"{rate:.1%}" for rate in rates))


def _arrow(before: float | None, after: float | None) -> str:
    return " -> ".join(f"{one:.1%}" for one in (before, after) if one is not None)
