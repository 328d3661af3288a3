"""`fleetdistill serve` with `[engine] processes`: torchrun starts the processes, and they end with the server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.answering import AnsweringFleet
from support.processes import wait_until
from support.served import RUN, answers_in, served

from fleetdistill_server.store.store import Store

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "run": {"rounds": 2},
    "contract": {"classes": 10, "input_shape": [1, 8, 8]},
    "method": {"server_epochs": 1},
    "engine": {"processes": 2},
}


def engines() -> list[str]:
    """Command lines of all processes whose first module is the engine's, on this machine."""
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            lines += [" ".join(words)] * ("fleetdistill_server.engine" in words)
    return lines


@pytest.mark.slow
@pytest.mark.cold_start
def test_two_processes_of_torchrun_serve_a_run_and_end_with_it(tmp_path: Path) -> None:
    with served(tmp_path, SETTINGS) as address, AnsweringFleet(int(address.rpartition(":")[2]), RUN, 2):
        store = Store.open(tmp_path / "store")
        wait_until(lambda: (store.runs.get(RUN) or {})["status"] == "finished", "the run to finish")
        assert store.history.events(RUN) == []
        store.close()
    assert answers_in(tmp_path) == [(number, "train", device) for number in (1, 2) for device in ("d0", "d1")]
    mine = str(tmp_path)
    wait_until(lambda: not [line for line in engines() if mine in line], "the engine's processes to end")
