"""`fleetdistill serve`: serves all runs of a store, or one run, until the server is stopped."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetdistill.device.interrupts import StopRequest
from fleetdistill.errors import ConfigurationError, FleetDistillError, NoSpaceError
from fleetdistill.printable import printable
from fleetdistill.version import VERSION
from fleetdistill_server.cli.options import TrackOption, report_errors
from fleetdistill_server.extras import load_part
from fleetdistill_server.logs import LogFormat, LogLevel, configure

if TYPE_CHECKING:
    from fleetdistill_server.config.run_config import RunConfig
    from fleetdistill_server.config.server_config import ServerConfig, ServerSection
    from fleetdistill_server.service.supervisor import Supervisor

    Config = RunConfig | ServerConfig

logger = logging.getLogger("fleetdistill.server.serve")


class Part(StrEnum):
    """A process of the server."""

    FRONT = "front"
    ENGINE = "engine"


@report_errors
def serve(
    config: Annotated[Path, typer.Argument(help="Path of run.toml, or of server.toml to serve many runs.")],
    until_finished: Annotated[
        bool, typer.Option("--until-finished", help="Exit once the run has ended and every device has been notified.")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow plain text on an address other than loopback.")
    ] = False,
    only: Annotated[
        Part | None,
        typer.Option("--only", help="Run only the front, or only the engine; needs [server] database and blobs."),
    ] = None,
    track: TrackOption = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the settings, models, data, ports and store; store nothing.")
    ] = False,
    log_format: Annotated[LogFormat, typer.Option(help="Format of the log on standard error.")] = LogFormat.TEXT,
    log_level: Annotated[LogLevel, typer.Option(help="Lowest level that is logged.")] = LogLevel.INFO,
) -> None:
    """Serves a run; restarts processes that fail. Example: fleetdistill serve examples/run.toml

    A file without the section [run] serves all runs of the store, which `fleetdistill runs create` adds. Ctrl-C stops
    the server cleanly; starting it again continues its runs.
    """
    stopped = StopRequest()
    if not check:
        _stop_on_signals(stopped)  # before the slow imports
    from fleetdistill_server.cli.serve_checks import (
        RUN_CHECKS,
        SERVER_CHECKS,
        cautions,
        check_new_run,
        check_security,
        problems_of_file,
    )
    from fleetdistill_server.config.run_config import load_run_config
    from fleetdistill_server.config.section import read_toml
    from fleetdistill_server.config.server_config import load_service_config
    from fleetdistill_server.views.health import disk_problems

    try:
        loaded = load_run_config(config) if "run" in read_toml(config) else load_service_config(config)
    except ConfigurationError as error:
        if not check:
            raise
        _print_problems(problems_of_file(config, error, insecure))
        return
    run, log_options = _run_of(loaded), ["--log-format", log_format, "--log-level", log_level]
    where = Path(loaded.server.store), "" if run is None else run.run.name
    tracking = load_part("tracking")(track, *where, log_options) if track else contextlib.nullcontext()
    _check_until_finished(run, until_finished)
    _check_only(loaded, only)
    if check:
        _print_check(loaded, config, insecure)
        return
    configure("serve", log_format, log_level)
    with _logs_errors(log_format):
        for server_check in SERVER_CHECKS:
            server_check(loaded.server)
        warning = check_security(loaded.server, insecure)
        if warning:
            logger.warning("%s", warning)
        for text in (*cautions(loaded.server, many_runs=run is None), *disk_problems(loaded.server, where[0])):
            logger.warning("%s", text)
        if run is not None:
            for run_check in RUN_CHECKS:
                run_check(run)
        if only != Part.FRONT and run is not None:
            check_new_run(config, run, stopped)
        with tracking:
            _serve(config, loaded, stopped, until_finished, log_options, only or "")


def _stop_on_signals(stopped: StopRequest) -> None:
    """Stops the server on Ctrl-C, SIGTERM, and SIGHUP of a terminal that closes; without one, SIGHUP is ignored."""

    def stop(number: int, frame: object) -> None:
        if not stopped.is_set():
            logger.info("stopping because of %s", signal.Signals(number).name)
        stopped.set()

    def ignore(number: int, frame: object) -> None:
        logger.warning("SIGHUP is ignored; restart the server to read its settings again")

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    if sys.platform != "win32" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has set it
        signal.signal(signal.SIGHUP, stop if sys.stderr.isatty() else ignore)


@contextlib.contextmanager
def _logs_errors(log_format: LogFormat) -> Iterator[None]:
    """Ends the command with an error of the block; in a log in JSON it is a line like all others."""
    try:
        yield
    except FleetDistillError as error:
        if log_format is not LogFormat.JSON:
            raise
        logger.error("%s", printable(str(error)))
        raise typer.Exit(1) from error


def _serve(
    path: Path, config: Config, stopped: StopRequest, until_finished: bool, log_options: list[str], only: str
) -> None:
    from fleetdistill_server.service.supervisor import Supervisor

    over = False
    what = _name(config)
    its = "its runs" if _run_of(config) is None else "the run"
    if not stopped.is_set():
        with _what_to_free(config.server.store):
            supervisor = Supervisor(
                config,
                on_listening=lambda port: typer.echo(_where(config, supervisor)),
                stopped=stopped,
                log_options=log_options,
                only=only,
            )
        logger.info("fleetdistill %s serves the store %s", VERSION, Path(config.server.store).absolute())
        if only == Part.ENGINE:
            typer.echo(f"the engine of {what} runs; press Ctrl-C to stop")
        with _metrics(config.server, supervisor, with_runs=only != Part.FRONT):
            over = supervisor.serve(
                until_finished=until_finished,
                on_over=lambda status: typer.echo(f"{what} is {status}; notifying its devices"),
            )
    logger.info("stopped")
    typer.echo("stopped; the run has ended" if over else f"stopped; `fleetdistill serve {path}` continues {its}")


@contextlib.contextmanager
def _what_to_free(store: str) -> Iterator[None]:
    """Adds to an error about a full disk what to free: no command that frees space works without any."""
    try:
        yield
    except NoSpaceError as error:
        raise NoSpaceError(
            f"{error}; free some megabytes on the disk of {store} and start the server again: move backups, logs and "
            f"files of other programs away, or delete {Path(store) / 'blobs' / 'quarantine'}, but nothing else of "
            "the store"
        ) from error


@contextlib.contextmanager
def _metrics(config: ServerSection, supervisor: Supervisor, *, with_runs: bool) -> Iterator[None]:
    """Opens the endpoint of `[server] metrics` in the block, if it is set."""
    if not config.metrics:
        yield
        return
    endpoint = load_part("metrics-endpoint")(config, supervisor.processes, with_runs)
    typer.echo(f"metrics on http://{config.metrics.rpartition(':')[0]}:{endpoint.port}/metrics")
    try:
        yield
    finally:
        endpoint.close()


def _run_of(config: Config) -> RunConfig | None:
    """Returns the configuration of the only run that is served, or None."""
    from fleetdistill_server.config.run_config import RunConfig

    return config if isinstance(config, RunConfig) else None


def _name(config: Config) -> str:
    run = _run_of(config)
    return f"the store {config.server.store}" if run is None else f"run {run.run.name!r}"


def _check_until_finished(run: RunConfig | None, until_finished: bool) -> None:
    if until_finished and run is None:
        raise ConfigurationError("--until-finished requires the run.toml of one run; remove the option")
    if until_finished and run is not None and not run.run.rounds:
        raise ConfigurationError(
            f"--until-finished requires [run] rounds above 0, but run {run.run.name!r} runs until stopped; "
            "remove the option, and stop the server with Ctrl-C or SIGTERM"
        )


def _check_only(config: Config, only: Part | None) -> None:
    if only is not None and not (config.server.database and config.server.blobs):
        raise ConfigurationError(
            f"--only {only} requires [server] database and blobs, because the machines share nothing else"
        )


def _print_check(config: Config, path: Path, insecure: bool) -> None:
    from fleetdistill_server.cli.serve_checks import (
        cautions,
        not_in_use,
        problems,
        service_problems,
        service_summary,
        summary,
    )

    run = _run_of(config)
    result = service_problems(config.server, insecure) if run is None else problems(run, insecure)
    _print_problems(result)
    lines = [
        *(service_summary(config.server) if run is None else summary(run)),
        *(f"warning: {text}" for text in cautions(config.server, many_runs=run is None)),
    ]
    typer.echo("\n".join([f"{path} can be served", *lines, *filter(None, [not_in_use(path)])]))


def _print_problems(found: Sequence[str]) -> None:
    """Prints errors; ends the command if there are any."""
    for item in found:
        typer.echo(f"error: {printable(item)}", err=True)
    if found:
        raise typer.Exit(1)


def _where(config: Config, supervisor: Supervisor) -> str:
    """Returns the line that reports the addresses at which devices reach the run."""
    tls = config.server.tls()
    enrol = ""
    if tls is not None:
        enrol = f" with TLS, devices enrol on {tls.enrol_listen.rpartition(':')[0]}:{supervisor.enrol_port}"
    host = config.server.listen.rpartition(":")[0]
    return f"{_name(config)} is served on {host}:{supervisor.port}{enrol}; press Ctrl-C to stop"
