"""Settings of class statistics, and the forms that they choose."""

from __future__ import annotations

from typing import Any

import pytest
from methods.classstats.one_exchange_fleet import config_of, device_on, images_of, make_server

from fleetdistill.errors import ConfigurationError, DataError
from fleetdistill.methods import config_class, device_class
from fleetdistill.methods.classstats.config import ClassStatsConfig
from fleetdistill.methods.classstats.device import ClassStatsDevice
from fleetdistill.training.local_training import TensorData
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.methods import server_class
from fleetdistill_server.methods.classstats.server import ClassStatsServer


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"features": "pixels"}, "unknown features 'pixels', expected one of scattering, model"),
        ({"predictor": "forest"}, "unknown predictor 'forest', expected one of closed_form, trained"),
        ({"own_network": "sold"}, "unknown own_network 'sold', expected one of kept, taught"),
        ({"dimensions": 7}, r"dimensions must be 0 or in \[8, 2048\], got 7"),
        ({"dimensions": 2049}, r"dimensions must be 0 or in \[8, 2048\], got 2049"),
        ({"rank": 513}, r"rank must be in \[0, 512\], got 513"),
        ({"rank": -1}, r"rank must be in \[0, 512\], got -1"),
        ({"rows_per_direction": 1}, "rows_per_direction must be >= 2, got 1"),
        ({"min_samples": 1}, "min_samples must be >= 2, got 1"),
        ({"shrinkage": 1.0}, "shrinkage must be >= 0 and < 1, got 1.0"),
        ({"shrinkage": "much"}, "unknown shrinkage 'much', expected one of rule"),
        ({"count_cap": 0.5}, "count_cap must be >= 1, got 0.5"),
        ({"predictor_steps": 0}, "predictor_steps must be >= 1"),
        ({"own_network_epochs": 0}, "own_network_epochs must be >= 1"),
        ({"own_network_rate": 0.0}, "own_network_rate must be > 0"),
        ({"drawn_images": -1}, "drawn_images must be >= 0"),
        (
            {"own_network": "taught", "features": "model"},
            "needs images from the scattering, but features is 'model'",
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        config_of(**settings)


def test_classstats_is_one_exchange() -> None:
    config = config_class("classstats")()
    assert isinstance(config, ClassStatsConfig)
    assert issubclass(device_class("classstats"), ClassStatsDevice)
    assert issubclass(server_class("classstats"), ClassStatsServer)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"delta": 1e-6, "rank": 4},
            'delta: method classstats does not support delta; set method = "classstats_private" or method = "classst',
        ),
        ({"epsilon": 1.0}, 'epsilon: method classstats does not .* method = "classstats_secure" or method = "feddkc"'),
        ({"dimension": 64}, "dimension: unknown setting"),
    ],
)
def test_a_setting_of_another_method_is_refused_with_its_method(given: dict[str, Any], says: str) -> None:
    values: dict[str, Any] = {
        "run": {"name": "r", "method": "classstats"},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
        "method": given,
    }
    with pytest.raises(ConfigurationError, match=rf"\[method\] {says}"):
        run_config(values)


@pytest.mark.parametrize(("shape", "extractor"), [((1, 7, 8), "package.module:factory"), ((16,), "identity")])
def test_inputs_unfit_for_scattering_are_refused_with_advice(shape: tuple[int, ...], extractor: str) -> None:
    advice = rf'set features = "model" in \[method\] and extractor = "{extractor}" in \[model\]; in a simulation, '
    advice += rf"add --set method.features=model --extractor {extractor}$"
    with pytest.raises(ConfigurationError, match=rf"^\[contract\] input_shape: .*{advice}"):
        make_server(shape)


@pytest.mark.parametrize("factor", [2.0, -1.0])
def test_images_outside_0_to_1_are_refused_with_the_way_out(factor: float) -> None:
    data = images_of([5, 5, 5, 5], 1)
    with pytest.raises(DataError, match=r'images in \[0, 1\], got .*set features = "model" in \[method\]'):
        device_on(TensorData(data.inputs * factor, data.labels))
