"""The server that forks the suite's processes."""

from __future__ import annotations

import os
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import pytest
from support.fork_server import forked
from support.processes import PATIENCE_SECONDS


class Killed(Exception):
    """Ends a request as a killed process would."""


def _save_parent(path: Path) -> None:
    path.write_text(str(os.getppid()))


def _kill(*_: Any) -> None:
    raise Killed


def test_a_process_killed_while_it_asks_ends_no_server(tmp_path: Path) -> None:
    parents = []
    for name in ("before", "after"):
        process = forked(_save_parent, tmp_path / name)
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == 0
        parents.append((tmp_path / name).read_text())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reduction, "sendfds", _kill)  # what is sent once the server has accepted the connection
            with pytest.raises(Killed):
                forked(_save_parent, tmp_path / "never")
    assert parents[0] == parents[1]
