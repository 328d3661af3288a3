"""Command line `fleetdistill`: the application, and the commands that need no module of their own.

Commands are thin: they parse options, call one function, and print a table or JSON. Exit statuses: 0 for success, 1 for
an error, which is printed as one sentence, and 2 for invalid usage.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fleetdistill.device.command import main as device_command
from fleetdistill.errors import ConfigurationError
from fleetdistill.version import VERSION
from fleetdistill_server.cli.options import (
    DEFAULT_STORE,
    IdentityOption,
    JsonOption,
    RunArgument,
    ServerOption,
    StoreOption,
    report_errors,
)
from fleetdistill_server.cli.pki import pki_app
from fleetdistill_server.cli.serve import serve
from fleetdistill_server.operations.client import open_source
from fleetdistill_server.texts import counted
from fleetdistill_server.views.results import backed_up

device_app = typer.Typer(no_args_is_help=True, help="Inspects or erases the state directory of a device.")
"""A command of the SDK. `start.main` calls it directly, so that a device does not need this package's dependencies."""
_StateDirectory = Annotated[Path, typer.Argument(help="State directory, as in Device(state_dir=...).")]
_ENTRY_POINTS = "fleetdistill.commands"
"""Group of the entry points with the commands of the annexes: a function, or a `typer.Typer` with subcommands."""
_STYLE: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # Rich would parse [server] as markup and drop it
}


@report_errors
def doctor(
    config: Annotated[Path | None, typer.Argument(help="Path of run.toml or server.toml, to examine a server.")] = None,
    state: Annotated[Path | None, typer.Option(help="State directory of a device, to examine the device.")] = None,
    server: Annotated[str | None, typer.Option(help="host:port of the device's server; default: the last one.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Do not compare every payload with its digest.")] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="As for serve: plain text is wanted.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Finds out what is wrong with a server or a device. Example: fleetdistill doctor run.toml

    Changes nothing and works beside a running server or device. The exit status is 1 if there is an error.
    """
    from fleetdistill.device import doctor as of_device

    if (config is None) == (state is None):
        raise ConfigurationError("give either a run.toml or server.toml, or --state with a device's directory")
    if state is not None:
        result = of_device.examine(state, server)
    else:
        from fleetdistill_server.cli.server_checks import examine

        assert config is not None
        result = examine(config, quick=quick, insecure=insecure)
    raise typer.Exit(of_device.show(result, as_json=as_json))


@report_errors
def health(
    server: Annotated[str, typer.Argument(help="host:port of the server.")],
    ca: Annotated[
        Path | None,
        typer.Option(help="The server's ca.pem: checks the enrolment port of a server with TLS, without an identity."),
    ] = None,
    identity: IdentityOption = None,
    service: Annotated[str, typer.Option(help="Only this service, such as fleetdistill.engine.")] = "",
) -> None:
    """Exits with 0 if a server works. Example: fleetdistill health localhost:50052 --ca fleetdistill-pki/ca.pem

    In plain text, or with --identity on the server's main port, front, database, engines and disk must work. With --ca
    the enrolment port must answer with the server's certificate, which is all that it tells anyone.
    """
    from fleetdistill_server.operations.health import check_health

    typer.echo(f"{server} {check_health(server, ca=ca, identity=identity, service=service)}")


@report_errors
def backup(
    out: Annotated[Path, typer.Argument(help="Directory of the backup; it must be empty or not exist.")],
    store: StoreOption = DEFAULT_STORE,
    server: ServerOption = None,
    identity: IdentityOption = None,
) -> None:
    """Backs up a store, even while a server uses it. Example: fleetdistill backup /backups/today

    With --server, an operator copies the backup to this machine. An interrupted copy begins again. The exit status is 1
    if the store has lost payloads; the backup has all others.
    """
    with open_source(store, server, identity) as source:
        made = source.back_up(out)
    for item in made.lost:
        typer.echo(f"warning: not in the backup: {item}", err=True)
    if made.missing > len(made.lost):
        typer.echo(f"warning: and {counted(made.missing - len(made.lost), 'more payload')}", err=True)
    typer.echo(f"{out}: {backed_up(made.payloads, made.bytes, made.missing)}")
    if made.missing:
        raise typer.Exit(1)


@report_errors
def restore(
    backup: Annotated[Path, typer.Argument(help="Directory created by `fleetdistill backup`.")],
    store: StoreOption = DEFAULT_STORE,
) -> None:
    """Restores a store from a backup. Example: fleetdistill restore /backups/today --store fleetdistill-store"""
    from fleetdistill_server.store.backup import VOID
    from fleetdistill_server.store.backup import restore as make_store

    payloads = make_store(backup, store)
    restored = f"{store}: {counted(payloads, 'payload')} and the database"
    typer.echo(f"{restored}; a server whose [server] store is this directory continues from the backup")
    typer.echo(
        f"{VOID}: repeat `pki revoke`, `devices revoke` and `devices forget`; revoke open tokens (`enrol --list`)"
    )


@device_app.command("inspect")
def device_inspect(
    state_dir: _StateDirectory,
    as_json: JsonOption = False,
    entries: Annotated[int, typer.Option(help="Number of newest messages to list.")] = 10,
) -> None:
    """Shows what a state directory contains and what was sent. Example: fleetdistill device inspect fleet-state"""
    options = ["--entries", str(entries), *(["--json"] if as_json else [])]
    raise typer.Exit(device_command(["inspect", str(state_dir), *options]))


@device_app.command("forget")
def device_forget(
    state_dir: _StateDirectory,
    server: Annotated[str | None, typer.Option(help="Server of the run, HOST:PORT; by default the app's last.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Only erase; do not ask the server.")] = False,
    insecure: Annotated[bool, typer.Option("--insecure", help="Allow plain text to another machine.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Erases a device, and asks the server to delete its data. Example: fleetdistill device forget fleet-state"""
    flags = [flag for flag, is_set in (("--local", local), ("--insecure", insecure), ("--yes", yes)) if is_set]
    raise typer.Exit(device_command(["forget", str(state_dir), *(["--server", server] if server else []), *flags]))


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
