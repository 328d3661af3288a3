"""The guarantee of classstats_private: settings of its own, of which epsilon has no default."""

from __future__ import annotations

import pytest

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods import config_from_plan, config_to_plan
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.config.section import as_toml, read_toml


def values(method="classstats_private", **settings):
    return {
        "run": {"name": "r", "method": method, "rounds": 1},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
        "method": settings,
    }


def test_the_guarantee_reaches_the_contract():
    settings = run_config(values(epsilon=1)).method_config()
    assert (settings.epsilon, settings.delta, settings.exact) == (1, 1e-5, True)
    assert settings.guarantee.sentence == "each row of each device is (1, 1e-5)-private against the server"
    assert config_from_plan("classstats_private", config_to_plan(settings)) == settings


@pytest.mark.parametrize("given", [values(epsilon=2.0), values("classstats")])
def test_the_settings_are_part_of_the_runs_identity_and_file(tmp_path, given):
    config = run_config(given)
    assert config.fixed_part()["method"] == given["method"]
    (tmp_path / "run.toml").write_text(as_toml(config))
    assert run_config(read_toml(tmp_path / "run.toml")) == config


def test_a_run_of_classstats_has_no_guarantee():
    assert run_config(values("classstats")).method_config().guarantee is None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, r"^\[method\] epsilon is missing$"),
        ({"epsilon": 0.05}, r"epsilon must be in \[0.1, 20\], got 0.05"),
        ({"epsilon": 21}, r"epsilon must be in \[0.1, 20\], got 21"),
        ({"epsilon": 1, "delta": 0}, r"delta must be .*, got 0"),
        ({"epsilon": 1, "delta": 0.1}, r"delta must be .*, got 0.1"),
        ({"epsilon": 1, "sigma": 1}, r"\[method\] sigma: unknown setting.*epsilon, delta, exact"),
        ({"epsilon": 1, "min_samples": 5}, r"min_samples: method classstats_private does not support min_samples"),
        ({"epsilon": 1, "dimensions": 7}, r"dimensions must be in \[8, 192\], got 7"),
        ({"epsilon": 1, "dimensions": 193}, r"dimensions must be in \[8, 192\], got 193"),
    ],
)
def test_impossible_settings_are_refused_with_a_sentence(settings, says):
    with pytest.raises(ConfigurationError, match=says):
        run_config(values(**settings))


@pytest.mark.parametrize("name", ["epsilon", "delta", "exact"])
def test_classstats_refuses_privacy_and_names_the_method(name):
    says = f'method classstats does not support {name}; set .*"classstats_private"'
    with pytest.raises(ConfigurationError, match=says):
        run_config(values("classstats", **{name: 1}))


def test_there_is_no_section_privacy():
    with pytest.raises(ConfigurationError, match=r"\[privacy\]: unknown section"):
        run_config({**values("classstats"), "privacy": {"epsilon": 1}})
