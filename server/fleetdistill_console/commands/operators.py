"""`fleetdistill operators`: what operators have changed, as a table: when, who, from where, what, and the result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import unquote

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fleetdistill.printable import printable
from fleetdistill_console.tables import open_console, print_all
from fleetdistill_server.cli.options import (
    DEFAULT_STORE,
    IdentityOption,
    JsonOption,
    ServerOption,
    StoreOption,
    report_errors,
)
from fleetdistill_server.operations.client import open_source
from fleetdistill_server.security.roles import in_words
from fleetdistill_server.store.operator_calls import BEGUN, LOCAL, caller_in_words
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.views.runs import TableRow, View

_WIDE = 110
"""Columns of a terminal from which the time and the caller have one line each."""
_WIDTHS = {"when (UTC)": (10, 19), "who": (15, 30), "operation": (12, 17), "run": (12, 16)}
"""Largest widths of the columns on a narrow and on a wide terminal; the result has the rest."""

_CHANGES = {
    RunStatus.RUNNING: "start a run",
    RunStatus.PAUSED: "pause a run",
    RunStatus.STOPPED: "stop a run",
    RunStatus.CANCELLED: "cancel a run",
}
"""What ChangeRun does, by the status that it gives a run."""


@report_errors
def operators(
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
    call: Annotated[str, typer.Option(help="Only calls of this method, such as RevokeDevice.")] = "",
    text: Annotated[str, typer.Option(help="Only calls whose caller, arguments, address or result contain this.")] = "",
    before: Annotated[int | None, typer.Option(help="Only calls older than the one with this id.")] = None,
    most: Annotated[int, typer.Option(help="Largest number of calls, 1 to 1000.")] = 200,
    as_json: JsonOption = False,
) -> None:
    """Lists operators' calls, newest first: changes and refused calls. Example: fleetdistill operators --text alice

    The privacy audit of a run is `fleetdistill audit`.
    """
    with open_source(store, server, identity) as source:
        result = source.operators(before=before, call=call, text=text, most=most)
    if as_json:
        typer.echo(View(result.lists).json())
        return
    console = open_console()
    print_all(console, [table(result.lists["operators"], console.width)])
    if result.facts["more"]:
        typer.echo(f"there are older calls: --before {result.lists['operators'][-1]['id']}")


def table(calls: Sequence[TableRow], width: int) -> Table | Text:
    """Returns calls as a table for a terminal of `width` columns."""
    if not calls:
        return Text("operators (0)")
    rows = [list(cells(call).values()) for call in calls]
    made = Table(title=Text(f"operators ({len(rows)})"), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, (heading, widths) in enumerate(_WIDTHS.items()):
        longest = max(len(heading), *(len(row[number]) for row in rows))
        made.add_column(heading, width=min(longest, widths[width >= _WIDE]), overflow="fold")
    made.add_column("result", overflow="fold")
    for row in rows:
        made.add_row(*(Text(item) for item in row))
    return made


def cells(call: TableRow) -> dict[str, str]:
    """Returns a call in words: at, who, what, run and result; without control characters."""
    arguments = _parse(call["arguments"])
    run, what = str(arguments.pop("run", "")), in_words(call["call"])
    if call["call"] == "ChangeRun" and arguments.get("status") in _CHANGES:
        what = _CHANGES[arguments.pop("status")]
    if call["call"] == "RollBackRun" and run:
        arguments.setdefault("to", 0)  # a request's JSON has no zeros
    when = call["at"].replace("T", " ").removesuffix("Z")
    texts = {"at": when, "who": _who(call), "what": what, "run": run}
    texts["result"] = "; ".join(filter(None, map(str.strip, _result(call["result"], arguments).split("\n"))))
    return {name: printable(text) for name, text in texts.items()}


def _who(call: TableRow) -> str:
    caller = caller_in_words(call["role"], call["name"])
    if call["role"] == LOCAL:
        return caller
    host = unquote(call["address"]).partition(":")[2].rpartition(":")[0]  # such as ipv4:127.0.0.1:40412
    return f"{caller} from {host or call['address']}"


def _parse(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except ValueError:  # it was too long to be stored
        return {"arguments": text}


def _result(result: str, arguments: dict[str, Any]) -> str:
    """Returns the result in words, with what else was given: texts, numbers and lists that are not empty."""
    listed = ", ".join(_phrase(name, value) for name, value in arguments.items() if value or name == "to")
    kind, _, text = result.partition(": ")
    if kind == "refused":
        code, colon, why = text.partition(": ")
        text = why if colon and " " not in code else text
        return f"refused: {text}"
    if kind == "done":
        return f"{text} ({listed})" if text and listed else text or listed or kind
    shown = "begun, or interrupted" if result == BEGUN else result
    return f"{shown} ({listed})" if listed else shown


def _phrase(name: str, value: Any) -> str:
    words = name.replace("_", " ")
    if value is True:
        return words
    listed = ", ".join(map(str, value)) if isinstance(value, list) else value
    return f"{words} {listed:g}" if isinstance(listed, float) else f"{words} {listed}"
