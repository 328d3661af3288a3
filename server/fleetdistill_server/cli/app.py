"""Command line `fleetdistill`: the application and the command `export`.

Commands are thin: they parse options, call one function, and print a table or JSON. Exit statuses: 0 for success, 1 for
an error, which is printed as one sentence, and 2 for invalid usage.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fleetdistill.version import VERSION
from fleetdistill_server.cli.device import device_app
from fleetdistill_server.cli.doctor import doctor, health
from fleetdistill_server.cli.options import (
    DEFAULT_STORE,
    IdentityOption,
    RunArgument,
    ServerOption,
    StoreOption,
    report_errors,
)
from fleetdistill_server.cli.pki import pki_app
from fleetdistill_server.cli.serve import serve
from fleetdistill_server.cli.store import backup, restore
from fleetdistill_server.operations.client import open_source

_ENTRY_POINTS = "fleetdistill.commands"
"""Group of the entry points with the commands of the annexes: a function, or a `typer.Typer` with subcommands."""
_STYLE: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # Rich would parse [server] as markup and drop it
}


class Commands(TyperGroup):
    """The commands of the core and of the annexes. An annex is imported when its command is used."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of all commands, sorted."""
        return sorted({*super().list_commands(ctx), *entry_points(group=_ENTRY_POINTS).names})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a command, or None if there is none of this name."""
        if cmd_name in self.commands or cmd_name not in entry_points(group=_ENTRY_POINTS).names:
            return super().get_command(ctx, cmd_name)
        loaded = entry_points(group=_ENTRY_POINTS)[cmd_name].load()
        annex = typer.Typer(**_STYLE)
        if isinstance(loaded, typer.Typer):
            annex.add_typer(loaded, name=cmd_name)
        else:
            annex.command(cmd_name)(loaded)
        return typer.main.get_group(annex).commands[cmd_name]


app = typer.Typer(
    cls=Commands, help="Federated knowledge distillation for fleets of edge devices.", no_args_is_help=True, **_STYLE
)
app.add_typer(pki_app, name="pki")
app.add_typer(device_app, name="device")
for _command in (serve, health, doctor, backup, restore):
    app.command()(_command)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(VERSION)
        raise typer.Exit


@app.command()
@report_errors
def export(
    run: RunArgument,
    store: StoreOption = DEFAULT_STORE,
    out: Annotated[Path | None, typer.Option(help="Output file; default: RUN-server.onnx.")] = None,
    server: ServerOption = None,
    identity: IdentityOption = None,
) -> None:
    """Exports the server's model of a run to ONNX. Example: fleetdistill export digits --out teacher.onnx"""
    path = out or Path(f"{run}-server.onnx")
    with open_source(store, server, identity) as source:
        report = source.export(run, path)
    typer.echo(f"{path}: {report.bytes:,} bytes, agrees with PyTorch to {report.max_difference:.1e}")
