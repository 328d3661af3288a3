"""What is wrong with a running server, in sentences for the command line and the dashboard."""

from __future__ import annotations

import shutil
from pathlib import Path

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.config.server_config import ServerSection, load_server_config
from fleetdistill_server.service.process_state import read_processes
from fleetdistill_server.service.serve_lock import SERVED_FILE, serving
from fleetdistill_server.store.blobs import disk_errors
from fleetdistill_server.store.disk_space import bytes_under
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import readable_bytes, shorten, when

_MAX_REASON = 300


def problems(store: Store, directory: Path) -> list[str]:
    """Returns a sentence for each process that hangs or is missing and each disk limit; empty without a server.

    Raises:
        StoreError: The store could not be read, for example because its database is away.
    """
    result = problems_of_processes(store, directory)
    if serving(directory) is None:
        return result
    try:
        server = load_server_config(directory / SERVED_FILE).server
    except ConfigurationError:  # of a server by hand
        return result
    return [*result, *_of_the_disk(server, directory)]


def problems_of_processes(store: Store, directory: Path) -> list[str]:
    """Returns the sentences on processes, as `problems`."""
    if serving(directory) is None:
        return []
    return [text for process in read_processes(directory) for text in process.problems()]


def failed_runs(store: Store) -> list[str]:
    """Returns a sentence for each run that its failing engine stopped, until the run is started again or deleted."""
    text = "run {name!r} stopped after a failure at {at}: {reason}; when it is mended, `fleetdistill runs start {name}`"
    return [
        text.format(name=run.name, at=when(run.at), reason=shorten(run.reason, _MAX_REASON))
        for run in store.run_control.failed()
    ]


def _of_the_disk(server: ServerSection, directory: Path) -> list[str]:
    keep, budget = server.keep_free_bytes, server.disk_budget_bytes
    with disk_errors("measuring free disk space"):
        free = shutil.disk_usage(directory).free
    if free < keep:
        text = f"only {readable_bytes(free)} are free on the store's disk, so uploads are refused"
        return [f"{text}; [server] keep_free_bytes is {readable_bytes(keep)}"]
    if budget and (used := bytes_under(directory)) >= budget:
        text = f"the store has {readable_bytes(used)}, so uploads are refused"
        return [f"{text}; [server] disk_budget_bytes is {readable_bytes(budget)}"]
    return []
