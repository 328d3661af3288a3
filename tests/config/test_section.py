"""A configuration as TOML, as the supervisor writes it for front and engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetdistill.errors import ConfigurationError
from fleetdistill_server.config.run_config import load_run_config, run_config
from fleetdistill_server.config.section import as_toml, read_toml
from fleetdistill_server.config.server_config import load_server_config

GIVEN: dict[str, Any] = {
    "run": {"name": "r", "method": "fedavg", "rounds": 0},
    "contract": {"classes": ["zero", "one"], "input_shape": [1, 8, 8]},
    "method": {"learning_rate": 1e-05},
    "server": {"listen": "[::1]:0", "lease_seconds": 0.5, "pki": "p", "enrol_listen": "[::1]:0"},
    "limits": {"uploads_per_hour": 7, "stall_seconds": 1e300},
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def test_a_configuration_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    config = run_config(GIVEN)
    path.write_text(as_toml(config))
    assert load_run_config(path) == config


@given(TEXT)
def test_any_text_reads_back(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(as_toml(run_config({**GIVEN, "evaluation": {"data": text}})), encoding="utf-8")
    assert read_toml(path)["evaluation"]["data"] == text


def test_the_front_reads_its_own_sections_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(as_toml(run_config(GIVEN)) + "[another]\nsection = 1\n")
    config = load_server_config(path)
    assert (config.server, config.limits) == (run_config(GIVEN).server, run_config(GIVEN).limits)


def test_a_wrong_setting_of_the_front_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[server]\nlisten = 5\n[limits]\nuploads = 3\n")
    with pytest.raises(ConfigurationError) as caught:
        load_server_config(path)
    assert f"{path}: [server] listen is 5, must be text in quotes; [limits] uploads: unknown setting" in str(
        caught.value
    )


def test_a_restarted_front_keeps_its_ports() -> None:
    server = run_config(GIVEN).server.on_ports(5001, 5002)
    tls = server.tls()
    assert tls is not None
    assert (server.listen, tls.enrol_listen) == ("[::1]:5001", "[::1]:5002")
    plain = run_config({**GIVEN, "server": {"listen": "localhost:7"}}).server
    assert plain.on_ports(None, None) == plain
