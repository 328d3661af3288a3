"""Modules that only some processes load."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from fleetdistill.lazy import get_loaded

SLOW = """
import threading
begun, go_on = threading.Event(), threading.Event()
begun.set()
go_on.wait()
finished = True
"""


def test_a_module_that_nobody_imports_is_not_loaded() -> None:
    assert get_loaded("antigravity") is None
    assert "antigravity" not in sys.modules


def test_a_module_of_another_thread_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for an app with two devices, of which one imports torch while the other starts."""
    (tmp_path / "slow_module.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    importing = threading.Thread(target=__import__, args=("slow_module",))
    importing.start()
    while "begun" not in vars(sys.modules.get("slow_module", threading)):
        importing.join(0.001)
    partial = sys.modules["slow_module"]
    assert partial.begun.wait()
    assert not hasattr(partial, "finished")
    threading.Timer(0.1, partial.go_on.set).start()
    module = get_loaded("slow_module")
    importing.join()
    monkeypatch.delitem(sys.modules, "slow_module")
    assert module is not None
    assert module.finished
