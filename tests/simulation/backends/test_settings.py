"""What computes the devices' work: settings, command line, and errors that cross processes."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fleets import SMALL
from typer.testing import CliRunner

from fleetdistill import errors
from fleetdistill.errors import ConfigurationError
from fleetdistill_lab.simulation import show
from fleetdistill_lab.simulation.checks import check_settings
from fleetdistill_lab.simulation.folder import check_folder, open_folder
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.cli.app import app


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"workers": -1}, "workers is -1, must be auto, or from 0 to devices (2)"),
        ({"workers": 3}, "workers is 3, must be auto, or from 0 to devices (2)"),
        ({"durable": True, "link": "grpc"}, "durable needs link memory"),
        ({"backend": "cluster"}, "backend is 'cluster', must be local, ray or stacked"),
        ({"ray_address": "auto"}, "ray_address needs backend ray"),
        ({"backend": "ray", "ray_address": "auto", "workers": 2}, "ray_address needs backend ray, and workers 0"),
        ({"workers": 2, "durable": True}, "workers and other backends do not work with durable"),
        ({"backend": "ray", "durable": True}, "workers and other backends do not work with durable"),
        ({"backend": "ray", "link": "grpc"}, "backend ray needs link memory"),
        ({"backend": "stacked", "link": "grpc"}, "backend stacked needs link memory"),
        ({"backend": "stacked", "durable": True}, "workers and other backends do not work with durable"),
        ({"backend": "stacked", "workers": 2}, "backend stacked computes in the simulation's process"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_settings(replace(SMALL, **settings))
    assert expected in str(refused.value)


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"the backend ray needs Ray: pip install 'fleetdistill\[ray\]'"):
        check_settings(replace(SMALL, backend="ray"))


def test_a_resumed_simulation_may_have_other_workers(tmp_path: Path) -> None:
    begun = replace(SMALL, out=tmp_path, workers=2)
    with open_folder(begun, "refuse"):
        pass
    check_folder(replace(begun, workers=0), "resume")
    check_folder(replace(begun, workers=0, backend="ray"), "resume")
    with pytest.raises(ConfigurationError, match="backend was 'local', is 'stacked'"):  # it rounds otherwise
        check_folder(replace(begun, workers=0, backend="stacked"), "resume")


def test_the_command_line_chooses_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[Simulation] = []
    monkeypatch.setattr(show, "simulate_and_show", lambda one, **options: wanted.append(one))
    for given in (["--workers", "8"], ["--set", "simulation.backend=ray", "--set", "simulation.ray_address=auto"]):
        done = CliRunner().invoke(app, ["simulate", *given])
        assert done.exit_code == 0, done.output
    assert [(item.workers, item.backend, item.ray_address) for item in wanted] == [(8, "local", ""), (0, "ray", "auto")]


@pytest.mark.parametrize(
    "error",
    [
        errors.CannotAnswer("no"),
        errors.NoSamplesError(),
        errors.PayloadTooLargeError(3, 2),
        errors.RefusedError("late", "too late", {"receipt": "1"}),
        errors.PrivacyBudgetError(1.0, 2.0),
        errors.QuorumNotReached("train", 1, 2),
        errors.WorkInterrupted("stopped", "stopped", 1.0),
        errors.DamagedStateError(Path("file"), "damaged"),
    ],
)
def test_errors_are_the_same_in_another_process(error: errors.FleetDistillError) -> None:
    result = pickle.loads(pickle.dumps(error))
    assert (type(result), str(result), vars(result)) == (type(error), str(error), vars(error))
