"""A simulation whose extractor is a pretrained network: one setting, and a file of weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.fleets import SMALL
from torch import nn
from torchvision import models

from fleetdistill.models import build_model
from fleetdistill_lab.simulation.data.datasets import load_dataset
from fleetdistill_lab.simulation.data.own import read_dataset
from fleetdistill_lab.simulation.fleet import precompute, simulate
from fleetdistill_lab.simulation.spec.plan import make_run_config
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.engine.contract import build_method

NETWORK = "torchvision:shufflenet_v2_x0_5"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of weights whose batch norms have seen noise, so that features differ between images."""
    torch.manual_seed(2)
    network = models.shufflenet_v2_x0_5()
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = None  # the mean of all batches
    with torch.no_grad():
        network(torch.randn(4, 3, 64, 64))
    file = tmp_path_factory.mktemp("weights") / "network.pt"
    torch.save(network.state_dict(), file)
    return str(file)


def small(weights: str, out: Path) -> Simulation:
    return replace(SMALL, method="classstats", rounds=1, extractor=NETWORK, extractor_weights=weights, out=out)


@pytest.mark.long
def test_the_extractor_is_all_that_a_simulation_needs(weights: str, tmp_path: Path) -> None:
    report = simulate(small(weights, tmp_path / "out"))
    assert {device.model for device in report.devices} == {f"linear:{NETWORK}"}
    assert (tmp_path / "out" / "onnx" / "device-0-general.onnx").exists()


def test_the_run_has_the_weights_of_the_file(weights: str, tmp_path: Path) -> None:
    wanted = small(weights, tmp_path)
    assert wanted.configuration().features == "model"
    method = build_method(make_run_config(wanted, load_dataset("digits", train_limit=20), tmp_path))
    initial = method.initial()
    expected = build_model(NETWORK, input_shape=(1, 8, 8), weights=weights).state_dict()
    assert initial is not None
    assert torch.equal(
        torch.from_numpy(initial.parameters["network.conv1.0.weight"]), expected["network.conv1.0.weight"]
    )


def test_a_method_s_own_setting_remains(weights: str, tmp_path: Path) -> None:
    wanted = replace(small(weights, tmp_path), settings={"features": "scattering"})
    assert wanted.configuration().features == "scattering"
    assert replace(wanted, settings={}, method="fedavg").configuration().local_epochs == 2


@pytest.mark.long
def test_precomputed_features_give_the_same_classes(weights: str, tmp_path: Path) -> None:
    wanted = replace(small(weights, tmp_path / "images"), settings={"dimensions": 64}, export="none")
    on_images = simulate(wanted)
    on_features = simulate(replace(precompute(wanted, tmp_path / "features.npz"), out=tmp_path / "features"))
    assert read_dataset(tmp_path / "features.npz").train_images.shape == (60, 1024)
    assert on_features.mean_accuracy_fleet == pytest.approx(on_images.mean_accuracy_fleet)
    assert {device.model for device in on_features.devices} == {"linear:identity"}
