"""The examples' apps with a server in memory, and with the faults that `fleetdistill.testing` offers to every app."""

from __future__ import annotations

import functools
import importlib
import re
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.outside import EXAMPLES

from fleetdistill import Device, Runtime
from fleetdistill.testing import Fault, FaultyLink, ManualClock, late, lost, lost_reply, oversized, refused, revoked
from fleetdistill_server.testing import MemoryServer

CONTRACT = {"classes": 10, "input_shape": [1, 8, 8]}
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "embed_in_app": {
        "run": {"method": "fedavg", "rounds": 2, "deadline_seconds": 60.0},
        "contract": CONTRACT,
        "model": {"extractor": "", "server": "", "device": "digits_linear"},
    },
    "light_device": {"run": {"method": "classstats", "deadline_seconds": 60.0}, "contract": CONTRACT},
}


@pytest.fixture
def app(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module(request.param)
    monkeypatch.setattr(module, "stop_on_ctrl_c", lambda device: None)  # the handlers belong to the test runner
    return module


def run(app: ModuleType, faults: list[Fault], clock: ManualClock, work: Path) -> tuple[int, str]:
    """Exit status of the app, whose device has this link and clock, and the status of the run."""
    with MemoryServer(RUNS[app.__name__], clock) as server, pytest.MonkeyPatch.context() as patch:
        link = FaultyLink(server.link(), *faults)
        given = Namespace(server=link, enrolment=None, state_dir=work, model="digits_linear", part=(0, 30), run="")
        given.device_id = "app"
        patch.setattr(app, "parse_arguments", lambda: given)
        patch.setattr(app, "Device", functools.partial(Device, runtime=Runtime(clock=clock)))
        status = app.main()
        assert link.left == []
        return status, server.status


@pytest.mark.parametrize("app", RUNS, indirect=True)
def test_an_app_outlasts_lost_refused_late_and_oversized_calls(
    app: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = ManualClock()
    faults = [lost("check_in"), refused("next_ask", "too-many"), late(clock, 61.0), lost_reply("upload"), oversized(2)]
    assert run(app, faults, clock, tmp_path / "state") == (0, "finished")
    said = capsys.readouterr().out
    kinds = re.findall(r"^ *(\S+)  ", said, re.MULTILINE)
    assert (kinds.count("dropped"), kinds.count("refused")) == (1, 1)
    assert "classifies" in said


@pytest.mark.parametrize("app", RUNS, indirect=True)
def test_an_app_whose_device_is_revoked_says_so(
    app: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, [revoked("next_ask")], ManualClock(), tmp_path / "state")[0] == 1
    assert "revoked" in capsys.readouterr().err
