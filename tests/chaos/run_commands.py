"""Commands that change a run, as processes that can be killed, and what they leave."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos.run_changes import CHANGED, summary
from support.processes import COMMAND
from support.serving import write_config

from fleetdistill.state.failpoints import VARIABLE
from fleetdistill_server.config.run_config import load_run_config
from fleetdistill_server.service import run_changes
from fleetdistill_server.store.states import RunStatus
from fleetdistill_server.store.store import Store

COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "create": ([], ["create", "run.toml", "--start"]),
    "start": (["create"], ["start", CHANGED]),
    "pause": (["create", "start"], ["pause", CHANGED]),
    "start again": (["create", "start", "pause"], ["start", CHANGED]),
    "stop": (["create", "start"], ["stop", CHANGED]),
    "clone": (["create"], ["clone", CHANGED, "copy", "--set", "run.seed=7"]),
    "delete": (["create", "start"], ["delete", CHANGED, "--yes"]),
}


def run_command(folder: Path, words: list[str], points: str = "") -> subprocess.CompletedProcess[str]:
    where = ["--store", str(folder / "store")]
    environment = os.environ | ({VARIABLE: points} if points else {})
    return subprocess.run(
        [*COMMAND, "runs", *words, *where], cwd=folder, env=environment, capture_output=True, text=True
    )


def prepare(folder: Path, actions: list[str]) -> None:
    """A store in which these actions were done, with another run that nobody touches."""
    folder.mkdir()
    config = load_run_config(write_config(folder, run_name=CHANGED, run_rounds=3))
    store = Store.open(folder / "store")
    run_changes.create(store, load_run_config(write_config(folder, run_name="other")))
    write_config(folder, run_name=CHANGED, run_rounds=3)
    steps: dict[str, Callable[[], object]] = {
        "create": lambda: run_changes.create(store, config),
        "start": lambda: run_changes.change(store, CHANGED, RunStatus.RUNNING),
        "pause": lambda: run_changes.change(store, CHANGED, RunStatus.PAUSED),
    }
    for action in actions:
        steps[action]()
    store.close()


def state_of(folder: Path) -> Any:
    store = Store.open(folder / "store")
    try:
        return summary(store)
    finally:
        store.close()
