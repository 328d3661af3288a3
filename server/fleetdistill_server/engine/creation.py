"""The process that creates a run: checks its settings, builds its models, reads its data, and stores it.

`service/creation.py` runs it as `python -m fleetdistill_server.engine.creation`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fleetdistill.errors import FleetDistillError
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.preflight import build, evaluation_samples
from fleetdistill_server.service.creation import CREATION_BYTES, NewRun
from fleetdistill_server.service.leading import clone_settings, create
from fleetdistill_server.service.processes import end_with_parent, limit_memory
from fleetdistill_server.service.registration import is_prepared
from fleetdistill_server.store.location import Location, has_store, set_location
from fleetdistill_server.store.operator_calls import Call
from fleetdistill_server.store.store import Store


def _created(directory: Path, run: NewRun, call: Call) -> str:
    if not has_store(directory):
        set_location(directory, Location.of(run_config(_settings(run.settings, directory)).server))
    store = Store.open(directory)
    try:
        given = run.settings
        if run.clone_of:
            given = clone_settings(store, run.clone_of, run.settings["run"]["name"], run.changes)
        config = run_config(_settings(given, directory))
        _check(store, config)
        with store.operator_calls.with_change(call) as outcome:
            outcome.text = create(store, config, start_it=run.start, who=call.who)
        return outcome.text
    finally:
        store.close()


def _settings(given: Any, directory: Path) -> dict[str, Any]:
    """Returns settings with the actual store, which `start_from` refers to."""
    server = given.get("server", {})
    return {**given, "server": {**server, "store": str(directory)} if isinstance(server, dict) else server}


def _check(store: Store, config: RunConfig) -> None:
    if not is_prepared(store, config):
        build(config)
    evaluation_samples(config)


def main() -> int:
    """Reads a run and its operator's call as JSON from standard input; prints a sentence, or an error and returns 1."""
    end_with_parent(int(sys.argv[2]))
    limit_memory(CREATION_BYTES)
    try:
        given = json.load(sys.stdin)
        print(_created(Path(sys.argv[1]), NewRun(**given["run"]), Call(**given["call"])))
    except FleetDistillError as error:
        print(error)
        return 1
    except MemoryError:
        print(f"the run needs more than {CREATION_BYTES:,} bytes of memory to be checked; use smaller models or data")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
