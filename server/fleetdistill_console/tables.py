"""Tables of the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleetdistill.printable import printable
from fleetdistill_server.views.runs import UNTIL_STOPPED, TableRow, View

Tables = Sequence[Table | Text | str]
"""What is printed of a view."""
_PIPED_WIDTH = 240


def open_console() -> Console:
    """Returns the console for tables, as wide as the terminal, or wide enough for most tables without one."""
    console = Console()
    if not console.is_terminal:
        console.width = _PIPED_WIDTH
    return console


def tables(view: View) -> Tables:
    """Returns a view as tables. Markup is disabled, because devices choose some of the texts."""
    shown = {name: value for name, value in _display_row(view.facts).items() if value != ""}
    lines = [printable(f"{_HEADINGS.get(name, name)}: {value}") for name, value in shown.items()]
    facts = [Text("\n".join(lines))] if lines else []
    lists = {title: [_display_row(row) for row in rows] for title, rows in view.lists.items()}
    return [
        *facts,
        *(_table(title, rows) if rows else Text(printable(f"{title} (0)")) for title, rows in lists.items()),
    ]


def show(view: View, as_json: bool, make_tables: Callable[[View], Tables] = tables) -> None:
    """Prints a view as JSON, or as tables."""
    if as_json:
        typer.echo(view.json())
    else:
        print_all(open_console(), make_tables(view))


def print_all(console: Console, shown: Tables) -> None:
    """Prints tables and texts as they are, without markup. Without a terminal lines have no spaces at their ends."""
    if console.is_terminal:
        console.print(*shown, sep="\n\n", markup=False)
        return
    with console.capture() as capture:
        # A long text above the tables stays on its line, for grep; cells are wrapped all the same.
        console.print(*shown, sep="\n\n", soft_wrap=True, markup=False)
    typer.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _display_row(row: TableRow) -> TableRow:
    """Replaces values of None with text for display in a table."""
    return {**row, "wanted_rounds": UNTIL_STOPPED} if row.get("wanted_rounds", 0) is None else row


_HEADINGS = {
    "devices": "devices registered",
    "cohort": "devices asked",
    "used": "answers used",
    "reported": "answers not used",
    "min_devices": "q",
    "threshold": "t",
    "noise_shares": "m",
}
"""Headings for columns and facts whose names, which scripts read, are too terse."""


def heading(name: str) -> str:
    """Returns the table heading of a column."""
    return _HEADINGS.get(name, name.replace("_", " "))


def _table(title: str, rows: Sequence[TableRow]) -> Table:
    """Builds a table from rows with equal keys; columns that are empty in all rows are omitted."""
    names = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)]
    table = Table(
        title=Text(printable(f"{title} ({len(rows)})")), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for name in names:
        table.add_column(Text(printable(heading(name))), overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if row[name] is None else printable(str(row[name]))) for name in names))
    return table
