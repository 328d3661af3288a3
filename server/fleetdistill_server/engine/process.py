"""Entry point of the engine process and its exit statuses."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
from dataclasses import dataclass
from pathlib import Path

from fleetdistill.errors import (
    ConfigurationError,
    DamagedError,
    FleetDistillError,
    NoSpaceError,
    RunError,
    StoreError,
    StoreUnavailableError,
)
from fleetdistill_server.config.run_config import RunConfig, load_run_config
from fleetdistill_server.config.section import read_toml
from fleetdistill_server.config.server_config import load_server_config
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.engine.group import Group, follow, joins
from fleetdistill_server.engine.measuring import measure, measure_waits, open_meter
from fleetdistill_server.engine.round_spans import RoundSpans
from fleetdistill_server.event_kinds import ENGINE_FAILED
from fleetdistill_server.logs import LogFormat, LogLevel, about, configure
from fleetdistill_server.service.engine_files import engine_directory
from fleetdistill_server.service.heartbeat import start_heartbeat
from fleetdistill_server.service.processes import (
    EXIT_CONFIGURATION,
    EXIT_DAMAGED,
    EXIT_NO_SPACE,
    EXIT_STORE_AWAY,
    allow_open_files,
    end_with,
    end_with_parent,
)
from fleetdistill_server.service.wakeups import Ends, Wakeups
from fleetdistill_server.store.blobs import disk_errors
from fleetdistill_server.store.disk_space import Bounds, DiskSpace
from fleetdistill_server.store.retention import sweep
from fleetdistill_server.store.states import ACTIVE, RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.tracing.spans import open_spans

logger = logging.getLogger("fleetdistill.server.engine")
_MAX_FAILURE = 1000
_PATIENCE_SECONDS = 60.0
"""Time for which an engine waits for a lost database, with its work in memory, before it ends and starts anew."""


@dataclass(frozen=True)
class _Arguments:
    config: Path
    store: Path
    wakeups: Ends
    max_short_rounds: int | None
    token: str | None
    directory: Path
    waits_for: int | None


async def _main(arguments: _Arguments, group: Group | None) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    store = Store.open(arguments.store, patience_seconds=_PATIENCE_SECONDS)
    try:
        config = _load(store, arguments)
        await _run(store, config, arguments, group)
    except asyncio.CancelledError:
        return
    finally:
        store.close()


def _load(store: Store, arguments: _Arguments) -> RunConfig:
    """Loads the run.toml; records an error for the run, so that the supervisor can report it."""
    try:
        return load_run_config(arguments.config)
    except ConfigurationError as error:
        run = _run_of(arguments.config)
        if store.runs.get(run) is not None:
            _note_failure(store, run, str(error))
        raise


def _run_of(config: Path) -> str:
    """Returns the name of the run in an unchecked run.toml, or an empty string."""
    return str(read_toml(config).get("run", {}).get("name", ""))


def _follow(arguments: _Arguments, group: Group) -> None:
    store = Store.open(arguments.store, patience_seconds=_PATIENCE_SECONDS)
    try:
        follow(group, store, load_run_config(arguments.config))
    finally:
        store.close()


async def _run(store: Store, config: RunConfig, arguments: _Arguments, group: Group | None) -> None:
    bounds = Bounds(config.server.disk_budget_bytes, config.server.keep_free_bytes)
    store.blobs.space = DiskSpace(arguments.store, store.blobs, bounds, lambda: sweep(store))
    wakeups = Wakeups(arguments.wakeups, store.database, "engine")
    spans = None
    try:
        spans = open_spans(config.server.traces, "engine")
        meter, terms = open_meter(config), (arguments.max_short_rounds, arguments.directory, group, arguments.token)
        engine = Engine(store, config, measure_waits(wakeups, meter), *terms)
        engine.waits_for = arguments.waits_for
        if spans is not None:
            rounds = RoundSpans(spans, store, config.run.name, config.run.deadline_seconds)
            engine.around_round = rounds.of_round
        if meter is not None:
            measure(engine, meter)
        await engine.run()
        if group is not None:
            group.send(None)
    except (NoSpaceError, StoreUnavailableError):
        raise
    except Exception as error:
        if why := _why_taken(store, config.run.name, arguments.token):
            logger.info("the engine stops: %s", why, extra=about(run=config.run.name))
            return
        known = isinstance(error, FleetDistillError)
        _note_failure(store, config.run.name, str(error) if known else f"{type(error).__name__}: {error}")
        raise
    finally:
        wakeups.close()
        if spans is not None:
            spans.close()


def _why_taken(store: Store, run: str, token: str | None) -> str:
    """Returns why the run is not this engine's any more, so that the engine has not failed; empty if it is."""
    known_run = store.runs.get(run)
    if known_run is None:
        return "the run was deleted"
    if known_run.status is RunStatus.CANCELLED or (token is not None and known_run.engine != token):
        works_on = known_run.status in ACTIVE
        return "another engine works on the run" if works_on else f"the run is {known_run.status}"
    return ""


def _note_failure(store: Store, run: str, why: str) -> None:
    """Records in the store why the engine ended; the supervisor reports it as the run's reason."""
    with contextlib.suppress(StoreError):
        store.history.add_event(run, ENGINE_FAILED, why[:_MAX_FAILURE])


def main() -> int:
    """Runs the engine of one run; returns the process's exit status."""
    parser = argparse.ArgumentParser(prog="fleetdistill-engine", description="Runs the engine of one run.")
    parser.add_argument("config", type=Path)
    parser.add_argument("--wakeups", type=Ends.parse, default=Ends())
    parser.add_argument("--parent", type=int)
    parser.add_argument("--supervisor", type=int)
    parser.add_argument("--max-short-rounds", type=int)
    parser.add_argument("--token")
    parser.add_argument("--waits", action="store_true")  # for what it lacks, as its last process said
    parser.add_argument("--waits-for", type=int)  # what the run waited for when it gave up its last engine
    parser.add_argument("--log-format", choices=list(LogFormat), default=LogFormat.TEXT)
    parser.add_argument("--log-level", choices=list(LogLevel), default=LogLevel.INFO)
    options = parser.parse_args()
    configure("engine", options.log_format, options.log_level)
    end_with_parent(options.parent)
    if options.supervisor is not None:
        end_with(options.supervisor)
    allow_open_files()  # averaging maps the payloads of all answers at the same time
    run = ""
    try:
        store = Path(load_server_config(options.config).server.store)
        run = _run_of(options.config)
        directory = engine_directory(store, run)
        with disk_errors(f"creating {directory}"):
            directory.mkdir(parents=True, exist_ok=True)
        arguments = _Arguments(
            options.config,
            store,
            options.wakeups,
            options.max_short_rounds,
            options.token,
            directory,
            options.waits_for,
        )
        group = Group() if joins() else None
        if group is not None and group.ranks.rank > 0:
            _follow(arguments, group)
            return 0
        start_heartbeat(directory)
        asyncio.run(_main(arguments, group))
    except (ConfigurationError, DamagedError, RunError) as error:  # a restart would not help
        logger.error("the engine stops: %s", error, extra=about(run=run, event=ENGINE_FAILED))
        return EXIT_DAMAGED if isinstance(error, DamagedError) else EXIT_CONFIGURATION
    except (NoSpaceError, StoreUnavailableError) as error:
        logger.log(logging.DEBUG if options.waits else logging.WARNING, "%s", error, extra=about(run=run))
        return EXIT_NO_SPACE if isinstance(error, NoSpaceError) else EXIT_STORE_AWAY
    except FleetDistillError as error:  # the message says all
        logger.error("the engine failed: %s", error, extra=about(run=run, event=ENGINE_FAILED))
        return 1
    except Exception:  # logged here; the supervisor restarts the engine
        logger.exception("the engine failed", extra=about(run=run, event=ENGINE_FAILED))
        return 1
    return 0
