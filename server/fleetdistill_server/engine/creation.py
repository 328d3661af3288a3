"""The process that creates a run: checks its settings, builds its models, reads its data, and stores it.

`service/creation.py` runs it as `python -m fleetdistill_server.engine.creation`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fleetdistill.errors import ConfigurationError, FleetDistillError
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.preflight import build_run, evaluation_samples, is_out_of_memory
from fleetdistill_server.service.creation import NewRun
from fleetdistill_server.service.processes import end_with_parent, limit_memory
from fleetdistill_server.service.registration import is_prepared
from fleetdistill_server.service.run_changes import RunState, clone_settings, create
from fleetdistill_server.store.location import Location, has_store, set_location
from fleetdistill_server.store.operator_calls import Call
from fleetdistill_server.store.store import Store


def _create(directory: Path, run: NewRun, call: Call) -> RunState:
    if not has_store(directory):
        set_location(directory, Location.of(run_config(_settings(run.settings, directory)).server))
    store = Store.open(directory)
    try:
        settings, approved = run.settings, frozenset[str]()
        if run.clone_of:
            settings = clone_settings(store, run.clone_of, _name_of_clone(run.settings), run.changes)
            approved = _data_files(store.run_control.setup(run.clone_of) or {})
        config = run_config(_settings(settings, directory))
        if run.data_directories is not None:
            _check_places(config, run.data_directories, approved)
        if not is_prepared(store, config):
            build_run(config)
        evaluation_samples(config)
        with store.operator_calls.with_change(call) as outcome:
            created = create(store, config, start_it=run.start, who=call.who, may_change=not run.clone_of)
            outcome.text = created.sentence
        return created
    finally:
        store.close()


def _name_of_clone(settings: Mapping[str, Any]) -> str:
    """Returns the name in a clone's run.toml. Raises ConfigurationError if it has none, or other settings."""
    section = settings.get("run")
    name = section.get("name") if isinstance(section, Mapping) else None
    if not isinstance(name, str) or settings != {"run": {"name": name}}:
        raise ConfigurationError("the run.toml of a clone has [run] name alone; give its other settings as changes")
    return name


def _settings(settings: Any, directory: Path) -> dict[str, Any]:
    """Returns settings with the actual store, which `start_from` refers to."""
    server = settings.get("server", {})
    return {**settings, "server": {**server, "store": str(directory)} if isinstance(server, dict) else server}


def _data_files(setup: Mapping[str, Any]) -> frozenset[str]:
    """Returns the absolute paths of the data files that a run's stored settings name."""
    return frozenset(one for name in ("proxy", "evaluation") if (one := setup.get(name, {}).get("data")))


def _check_places(config: RunConfig, directories: Sequence[str], approved: frozenset[str]) -> None:
    """Raises ConfigurationError if a data file is outside the directories, links resolved, and not approved."""
    allowed = [Path(directory).resolve() for directory in directories]
    setup = config.setup()
    for name in ("proxy", "evaluation"):
        file = setup[name]["data"]
        if file and file not in approved and not _is_in(file, allowed):
            places = ", ".join(map(str, allowed)) or "none"
            raise ConfigurationError(
                f"[{name}] data: {getattr(config, name).data!r} is outside the directories for data of this server "
                f"({places}); put the file into one of them, or add its directory to [server] data_directories of the "
                "server's file"
            )


def _is_in(file: str, directories: Sequence[Path]) -> bool:
    try:
        path = Path(file).resolve()
    except (OSError, RuntimeError, ValueError):  # links in a circle, or a null character
        return False
    return any(path.is_relative_to(directory) for directory in directories)


def main() -> int:
    """Creates the run in the JSON on standard input; prints it as JSON, or prints an error and returns 1."""
    end_with_parent(int(sys.argv[2]))
    request = json.load(sys.stdin)
    limit_memory(request["memory"])
    try:
        created = _create(Path(sys.argv[1]), NewRun(**request["run"]), Call(**request["call"]))
    except (FleetDistillError, MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            limit = f"{request['memory']:,} bytes of memory"
            print(f"the run needs more than {limit} to be checked; use smaller models or data")
        elif isinstance(error, FleetDistillError):
            print(error)
        else:
            raise
        return 1
    print(json.dumps(asdict(created)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
