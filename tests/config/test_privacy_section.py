"""[privacy]: it becomes settings of the method, and nothing else accepts them."""

from __future__ import annotations

import pytest

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods import config_from_plan, config_to_plan
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.config.section import as_toml, read_toml


def given(privacy, method="classstats", **settings):
    return {
        "run": {"name": "r", "method": method, "rounds": 1},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
        "method": settings,
        **({"privacy": privacy} if privacy is not None else {}),
    }


def test_the_section_reaches_the_method_and_the_contract():
    config = run_config(given({"epsilon": 1}))
    settings = config.method_config()
    assert (settings.epsilon, settings.delta, settings.exact) == (1, 1e-5, True)
    assert settings.guarantee.sentence == "each row of each device is (1, 1e-5)-private against the server"
    assert config_from_plan("classstats", config_to_plan(settings)) == settings


def test_the_section_is_part_of_the_runs_identity_and_of_its_file(tmp_path):
    config = run_config(given({"epsilon": 2.0}))
    assert config.fixed_part()["privacy"] == {"epsilon": 2.0, "delta": 1e-5, "exact": True}
    (tmp_path / "run.toml").write_text(as_toml(config))
    assert run_config(read_toml(tmp_path / "run.toml")) == config


def test_a_run_without_the_section_is_what_it_was(tmp_path):
    config = run_config(given(None))
    assert config.method_config().guarantee is None
    assert "privacy" not in config.fixed_part()
    (tmp_path / "run.toml").write_text(as_toml(config))
    assert run_config(read_toml(tmp_path / "run.toml")) == config


@pytest.mark.parametrize(
    ("privacy", "method", "settings", "says"),
    [
        ({}, "classstats", {}, r"^\[privacy\] epsilon is missing$"),
        ({"epsilon": 0.05}, "classstats", {}, r"\[privacy\] epsilon is 0.05, must be at least 0.1"),
        ({"epsilon": 21}, "classstats", {}, r"\[privacy\] epsilon is 21, must be at most 20"),
        ({"epsilon": 1, "delta": 0}, "classstats", {}, r"\[privacy\] delta is 0, must be above 0"),
        ({"epsilon": 1, "delta": 0.1}, "classstats", {}, r"\[privacy\] delta is 0.1, must be at most 0.01"),
        ({"epsilon": 1, "sigma": 1}, "classstats", {}, r"\[privacy\].*unknown setting.*epsilon, delta, exact"),
        ({"epsilon": 1}, "feddkc", {}, r"\[privacy\] is not available for method 'feddkc'"),
        ({"epsilon": 1}, "classstats", {"min_samples": 5}, "min_samples: only valid with a run without"),
        (
            {"epsilon": 1},
            "classstats",
            {"dimensions": 128},
            r"dimensions must be in \[8, 64\] with \[privacy\], got 128",
        ),
        (
            {"epsilon": 1},
            "classstats",
            {"delta": 1e-6, "exact": False},
            r"\[method\] delta, exact: set it in \[privacy\]",
        ),
        (None, "classstats", {"epsilon": 1.0}, r"\[method\] epsilon: set it in \[privacy\] instead"),
    ],
)
def test_impossible_settings_are_refused_with_a_sentence(privacy, method, settings, says):
    with pytest.raises(ConfigurationError, match=says):
        run_config(given(privacy, method, **settings))
