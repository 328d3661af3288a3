"""`--track`: what it takes, and that a password in it is shown nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetdistill.errors import ConfigurationError
from fleetdistill_console.tracking.targets import Target, read_targets


def test_targets_are_read_once_each_and_in_order(tmp_path: Path) -> None:
    given = [f"tensorboard:{tmp_path}/a/b", "mlflow:http://127.0.0.1:5000", f"tensorboard:{tmp_path}/a/b"]
    assert read_targets(given) == (
        Target("tensorboard", str(tmp_path / "a" / "b")),
        Target("mlflow", "http://127.0.0.1:5000"),
    )
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("given", ["mlflow", "mlflow:", "wandb:project", "http://127.0.0.1:5000", ""])
def test_anything_else_is_an_error_that_shows_what_is_expected(given: str) -> None:
    with pytest.raises(ConfigurationError, match=r"expected mlflow:URI.* or tensorboard:DIRECTORY"):
        read_targets([given])


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot create it"):
        read_targets([f"tensorboard:{tmp_path}/file/events"])


def test_a_target_is_shown_without_its_password() -> None:
    target = Target("mlflow", "https://ann:s3cret@tracking.example:443/base")
    assert str(target) == "mlflow:https://tracking.example:443/base"
    with pytest.raises(ConfigurationError) as raised:
        read_targets(["mlfow:https://ann:s3cret@tracking.example"])
    assert "s3cret" not in str(raised.value)
