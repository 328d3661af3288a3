"""One rule for the names of runs, devices and people, because they become names of files and words of commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.open_device import open_device
from support.secured import make_pki
from typer.testing import CliRunner

from fleetdistill import Device
from fleetdistill.errors import ConfigurationError
from fleetdistill.models import build_model
from fleetdistill.names import NAME_RULE, is_name
from fleetdistill_server.cli.app import app
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.security.certificates import Role

GOOD = ["a", "7", "digits-of-the-north", "a.b_c-d", "console", "com", "com10", "nulls.txt", "a" * 64, "a-", "x.con"]
BAD = ["", ".", "..", ".a", "-a", "--yes", "_a", "a.", "a" * 65, "a b", "a/b", "a\n", "\u00e4"]
BAD += ["con", "CON", "Prn", "aux", "nul", "NUL.txt", "com1", "COM9.tar.gz", "lpt0"]


def _run(name: str, tmp_path: Path) -> None:
    run_config({"run": {"name": name}, "contract": {"classes": 2, "input_shape": [1, 8, 8]}})


def _starting_run(name: str, tmp_path: Path) -> None:
    run_config({"run": {"name": "new", "start_from": name}, "contract": {"classes": 2, "input_shape": [1, 8, 8]}})


def _device(name: str, tmp_path: Path) -> None:
    images, labels = np.zeros((2, 1, 8, 8), np.float32), np.zeros(2, np.int64)
    state, model = tmp_path / "state", lambda: build_model("digits_linear")
    open_device(
        server="127.0.0.1:1", model=model, data=(images, labels), state_dir=state, run="r", device_id=name
    ).close()


def _person(name: str, tmp_path: Path) -> None:
    make_pki(tmp_path / "pki").issue_person(Role.VIEWER, name, 1.0, tmp_path / "out")


PLACES: list[Callable[[str, Path], None]] = [_run, _starting_run, _device, _person]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", [name for name in BAD if name])
def test_name_unusable_as_file_name_or_like_an_option_is_refused(
    name: str, place: Callable[[str, Path], None], tmp_path: Path
) -> None:
    assert not is_name(name)
    with pytest.raises(ConfigurationError) as refused:
        place(name, tmp_path)
    assert NAME_RULE in str(refused.value)


@pytest.mark.parametrize("name", GOOD)
def test_other_names_are_accepted(name: str, tmp_path: Path) -> None:
    assert is_name(name)
    for place in (_run, _person):
        place(name, tmp_path)


@given(st.text("aCOMnul19.-_ /\n", max_size=8))
def test_a_name_is_a_file_of_its_own_in_any_directory(name: str) -> None:
    if is_name(name):
        assert Path("/directory", name).resolve() == Path("/directory") / name
        assert name[0].isalnum()
        assert name == name.rstrip(". ")


def test_the_help_of_a_name_has_the_rule() -> None:
    said = CliRunner().invoke(app, ["pki", "issue", "--help"], env={"COLUMNS": "400"}).output
    assert NAME_RULE in " ".join(said.split())
    documented = " ".join(str(Device.__doc__).split())
    for part in ("beginning with a letter or digit", "not ending with '.'", "no device of Windows"):
        assert part in documented


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "a/b", "CON", "a\0b"])
def test_a_models_name_is_no_file_name(name: str, tmp_path: Path) -> None:
    images, labels = np.zeros((2, 1, 8, 8), np.float32), np.zeros(2, np.int64)
    state = tmp_path / "inner" / "state"
    with open_device(
        server="127.0.0.1:1",
        model=lambda: build_model("digits_linear"),
        data=(images, labels),
        state_dir=state,
        run="r",
        name=name,
    ) as device:
        device.predict(images)
    assert [path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*") if path.is_file()] != []
    assert all(path.is_relative_to(state) for path in tmp_path.rglob("*") if path.is_file())
    assert not any("outside" in path.name or path.name.startswith("CON") for path in tmp_path.rglob("*"))
