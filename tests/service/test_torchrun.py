"""`fleetdistill serve` with `[engine] processes`: torchrun starts the processes, and they end with the server."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.answering import AnsweringFleet
from support.processes import wait_until
from support.served import RUN, answers_in, served

from fleetdistill_server.store.store import Store

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "run": {"method": "feddkc", "rounds": 2},
    "contract": {"classes": 10, "input_shape": [1, 8, 8]},
    "method": {"server_epochs": 1},
    "engine": {"processes": 2},
}


def engines(directory: Path) -> list[psutil.Process]:
    """The running processes of torchrun and of the engines that it has started for a server in a directory."""
    result = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "fleetdistill_server.engine" in words and str(directory) in " ".join(words):
                result.append(process)
    return result


def open_addresses(processes: list[psutil.Process]) -> set[str]:
    """The addresses on which processes listen."""
    sockets = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since it was found
            sockets += process.net_connections("inet")
    return {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.cold_start
def test_two_processes_of_torchrun_serve_a_run_and_end_with_it(tmp_path: Path) -> None:
    with served(tmp_path, SETTINGS) as address, AnsweringFleet(int(address.rpartition(":")[2]), RUN, 2):
        wait_until(lambda: len(open_addresses(engines(tmp_path))) and len(engines(tmp_path)) == 3, "all processes")
        assert open_addresses(engines(tmp_path)) == {"127.0.0.1"}
        store = Store.open(tmp_path / "store")
        wait_until(lambda: store.runs.existing(RUN).status == "finished", "the run to finish")
        assert store.history.events(RUN) == []
        store.close()
    assert answers_in(tmp_path) == [(number, "train", device) for number in (1, 2) for device in ("d0", "d1")]
    wait_until(lambda: not engines(tmp_path), "the engine's processes to end")
