"""`fleetdistill serve`: one run, until it is stopped or over."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.cli.options import one_sentence
from fleetdistill_server.logs import LogFormat, LogLevel, configure

if TYPE_CHECKING:
    from fleetdistill_server.config.run_config import RunConfig
    from fleetdistill_server.service.supervisor import Supervisor

logger = logging.getLogger("fleetdistill.server.serve")


@one_sentence
def serve(
    config: Annotated[Path, typer.Argument(help="The run.toml.")],
    until_finished: Annotated[
        bool, typer.Option("--until-finished", help="End once the run is over and every device knows it.")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow plain text on an address that is not the loopback.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the file, with models, data, ports and store; store nothing.")
    ] = False,
    log_format: Annotated[LogFormat, typer.Option(help="Of the log on standard error.")] = LogFormat.TEXT,
    log_level: Annotated[LogLevel, typer.Option(help="Lines below it are left out.")] = LogLevel.INFO,
) -> None:
    """Serves a run: front and engine, restarted when they die. Example: fleetdistill serve examples/run.toml

    Ctrl-C ends it cleanly; starting it again goes on where it was.
    """
    stopped = threading.Event()
    if not check:
        for number in (signal.SIGINT, signal.SIGTERM):  # before all that takes a while
            signal.signal(number, lambda signum, frame: stopped.set())
    from fleetdistill_server.cli.serve_checks import check_new_run, check_security
    from fleetdistill_server.config.run_config import load_run_config

    loaded = load_run_config(config)
    _check_until_finished(loaded, until_finished)
    if check:
        _say_check(loaded, config, insecure)
        return
    configure("serve", log_format, log_level)
    warning = check_security(loaded.server, insecure)
    if warning:
        logger.warning("%s", warning)
    check_new_run(config, loaded, stopped)
    log_options = ["--log-format", log_format, "--log-level", log_level]
    _serve(config, loaded, stopped, until_finished, log_options)


def _serve(
    path: Path, config: RunConfig, stopped: threading.Event, until_finished: bool, log_options: list[str]
) -> None:
    from fleetdistill_server.service.supervisor import Supervisor

    over = False
    if not stopped.is_set():
        supervisor = Supervisor(
            path,
            config,
            on_listening=lambda port: typer.echo(_where(config, supervisor)),
            stopped=stopped,
            log_options=log_options,
        )
        over = supervisor.serve(
            until_finished=until_finished,
            on_over=lambda status: typer.echo(f"run {config.run.name!r} is {status}; devices are still told so"),
        )
    typer.echo("stopped; the run is over" if over else f"stopped; `fleetdistill serve {path}` goes on from here")


def _check_until_finished(config: RunConfig, until_finished: bool) -> None:
    if until_finished and not config.run.rounds:
        raise ConfigurationError(
            f"[run] rounds is 0, so run {config.run.name!r} has no end that --until-finished could wait for; leave the "
            "option out, and stop the server with Ctrl-C or SIGTERM"
        )


def _say_check(config: RunConfig, path: Path, insecure: bool) -> None:
    from fleetdistill_server.cli.serve_checks import problems, summary

    found = problems(config, insecure)
    for one in found:
        typer.echo(f"error: {one}", err=True)
    if found:
        raise typer.Exit(1)
    typer.echo("\n".join([f"{path} can be served", *summary(config)]))


def _where(config: RunConfig, supervisor: Supervisor) -> str:
    """Says where devices find the run."""
    tls = config.server.tls()
    enrol = ""
    if tls is not None:
        enrol = f" with TLS, devices enrol on {tls.enrol_listen.rpartition(':')[0]}:{supervisor.enrol_port}"
    host = config.server.listen.rpartition(":")[0]
    return f"run {config.run.name!r} is served on {host}:{supervisor.port}{enrol}; Ctrl-C ends it"
