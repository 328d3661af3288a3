"""The server that forks the suite's processes."""

from __future__ import annotations

import os
import time
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import pytest
from support.fork_server import forked
from support.processes import PATIENCE_SECONDS, REGISTRY, children, start_of


class Killed(Exception):
    """Ends a request as a killed process would."""


def _kill(*_: Any) -> None:
    raise Killed


def test_a_process_killed_while_it_asks_ends_no_server() -> None:
    parents = []
    for _ in range(2):
        process = forked(time.sleep, PATIENCE_SECONDS)
        parents.append(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
        process.kill()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reduction, "sendfds", _kill)  # what is sent once the server has accepted the connection
            with pytest.raises(Killed):
                forked(time.sleep, 0.0)
    assert parents[0] == parents[1]


def test_a_number_that_was_used_again_is_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry, me = tmp_path / "processes", os.getpid()
    monkeypatch.setenv(REGISTRY, str(registry))
    registry.write_text(f"{me} {me} {start_of(me)} there\n{me} {me} 1 ended\n")
    assert children(me, "there") == [me]
    assert children(me, "ended") == []
