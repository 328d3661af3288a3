"""`fleetdistill serve` of a run on a free port, for tests with clients that do not use the SDK."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from support.processes import COMMAND, PATIENCE_SECONDS, free_port, wait_until

from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.config.section import as_toml
from fleetdistill_server.store.store import Store

RUN = "clients"


@contextlib.contextmanager
def served(work: Path, settings: Mapping[str, Mapping[str, Any]], *options: str) -> Iterator[str]:
    """Serves a run as `supervised`; yields its host and port."""
    with supervised(work, settings, *options) as (address, _):
        yield address


@contextlib.contextmanager
def supervised(work: Path, settings: Mapping[str, Mapping[str, Any]], *options: str) -> Iterator[tuple[str, int]]:
    """Serves a run named `RUN` from the store `work`/store, in plain text unless [server] has a `pki`.

    `options` are those of the command; its output goes to `work`/server.log. Yields its host and port, and the
    supervisor's process id.
    """
    address = f"127.0.0.1:{free_port()}"
    run = {"min_devices": 2, "quorum": 1.0, **settings["run"], "name": RUN}
    server = {"listen": address, "store": str(work / "store"), "torch_device": "cpu", "keep_free_bytes": 0}
    server |= settings.get("server", {})
    (work / "run.toml").write_text(as_toml(run_config({**settings, "run": run, "server": server})))
    with (work / "server.log").open("w") as log:
        process = subprocess.Popen(
            [*COMMAND, "serve", "run.toml", *options],
            cwd=work,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    said = (work / "server.log").read_text
    try:
        wait_until(lambda: "is served on" in said() or process.poll() is not None, "the run is served")
        assert process.poll() is None, said()
        yield address, process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_SECONDS)


def answers_in(work: Path) -> list[tuple[int, str, str]]:
    """Round, step and device of each answer that the run used; the server must have ended."""
    store = Store.open(work / "store")
    try:
        used = [row for row in store.asks.uploads(RUN) if row.status == "used"]
        return sorted((row.round, row.step, row.device) for row in used)
    finally:
        store.close()


def payload_bytes(work: Path, number: int, device: str) -> int:
    """Tensor bytes that the first ask of a round had for a device; the server must have ended."""
    store = Store.open(work / "store")
    try:
        ask = store.asks.get(RUN, number, 1, device)
        return int(ask.payload_bytes) if ask else 0
    finally:
        store.close()
