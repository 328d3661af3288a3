"""Networks of the experiments: FedD2S's with another cut, and FedAvg's 2NN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fleetdistill.models import build_model
from fleetdistill_lab.experiments import networks

WHERE = "fleetdistill_lab.experiments.networks"


@pytest.mark.parametrize(
    ("cut", "base", "built_in", "shape"),
    [
        ("digits_cut_at_f1", "digits_convolutions", "fedd2s_digits", (1, 8, 8)),
        ("m1_cut_at_f1", "m1_convolutions", "fedd2s_m1", (3, 32, 32)),
        ("m2_cut_at_f1", "m2_convolutions", "fedd2s_m2", (3, 32, 32)),
    ],
)
def test_cut_network_is_the_built_in_one(cut: str, base: str, built_in: str, shape: tuple[int, ...]) -> None:
    model: Any = build_model(f"{WHERE}:{cut}", input_shape=shape, classes=10)
    usual = build_model(built_in, input_shape=shape, classes=10)
    assert [tuple(weight.shape) for weight in model.parameters()] == [tuple(one.shape) for one in usual.parameters()]
    below = build_model(f"{WHERE}:{base}", input_shape=shape)
    assert below.state_dict().keys() == model.extractor.state_dict().keys()
    assert len(model.predictor.state_dict()) == 6, "three linear layers"
    assert model.stage_names[model.depth_of(model.cut)] == "F1"


@pytest.mark.parametrize("name", ["digits_first", "m1_first", "m2_first"])
def test_first_layer_fits_the_built_in_network(name: str) -> None:
    shape = (1, 8, 8) if name.startswith("digits") else (3, 32, 32)
    model: Any = build_model(f"fedd2s_{name.removesuffix('_first')}", input_shape=shape, classes=10)
    model.extractor.load_state_dict(getattr(networks, name)(shape).state_dict())


def test_scattering_network_has_fixed_features() -> None:
    model = networks.scattering_linear((1, 8, 8), 10)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert model.extractor(torch.zeros(2, 1, 8, 8)).shape == (2, 81, 4, 4)
    assert not list(model.extractor.parameters())


def test_2nn_has_the_published_number_of_parameters() -> None:
    model: Any = build_model(f"{WHERE}:mnist_2nn", input_shape=(1, 28, 28), classes=10)
    assert sum(weight.numel() for weight in model.parameters()) == 199_210, "McMahan et al., section 3"
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
