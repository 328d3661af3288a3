"""DaFKD in whole runs: the bytes of every message."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from methods.dafkd.dafkd_fleet import CLASSES, QUICK, VARIANTS, make_server
from support.fleets import RUN, assert_no_upload_lost, prepare, run_in_memory
from torch import nn

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import (
    Discriminator,
    Generator,
    Kind,
    ModelParameters,
    Plan,
    WeightedPredictions,
    Weights,
)
from fleetdistill.methods.dafkd.config import DaFKDConfig
from fleetdistill.training.model import SplitModel
from fleetdistill.training.parameters import model_parameters
from fleetdistill.wire.codec import encode
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.methods.base import MethodContext
from fleetdistill_server.methods.dafkd.server import DaFKDServer
from fleetdistill_server.methods.traffic import Sizes, round_bytes


def model_of(count: int) -> ModelParameters:
    return ModelParameters(parameters={"w": np.zeros(count, np.float32)})


def test_daf_12_bytes_of_every_message() -> None:
    classifier = model_of(300_000)
    generator = Generator(parameters=model_of(120_000), noise_size=100)
    head = Discriminator(parameters=model_of(256 + 1), shares_extractor=True)
    whole = Discriminator(parameters=classifier, shares_extractor=False)
    predictions = WeightedPredictions(noise_seed=2**64 - 1, values=np.zeros((1280, 10), np.float32))
    plan = Plan(values={"noise_seed": 2**63 - 1, "adversarial": True})
    both: dict[str, Kind] = {"parameters": classifier, "generator": generator}
    assert encode({**both, "discriminator": head}, np.float16).data_bytes == 1_681_028
    assert encode({**both, "plan": plan}, np.float16).data_bytes == 1_680_000  # the plan is in the header
    assert encode({**both, "predictions": predictions}, np.float16).data_bytes == 1_731_200
    assert encode({"generator": generator, "predictions": predictions}, np.float16).data_bytes == 531_200
    assert encode({**both, "discriminator": whole}, np.float16).data_bytes == 2_880_000


def state_bytes(module: nn.Module) -> int:
    """4 bytes a parameter, and what batch-norm adds: its statistics and its counters."""
    return sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())


FLEET = Simulation(
    method="dafkd",
    devices=2,
    rounds=2,
    train_limit=80,
    test_limit=20,
    alpha=10.0,
    models=("digits_mlp_small",),
    torch_device="cpu",
)


def test_features_below_0_are_refused_at_feature_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """The feature generator ends in a ReLU, so a cut behind a tanh would get a useless one in silence."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh())
    monkeypatch.setattr(
        MethodContext,
        "device_model",
        lambda self: SplitModel({"body": body, "last": nn.Linear(8, CLASSES)}, cut="body"),
    )
    with pytest.raises(ConfigurationError, match=r"features of SplitModel reach -0\.\d+; the generator"):
        make_server(**VARIANTS["feature level"])
    assert make_server(**VARIANTS["server"])


@pytest.mark.parametrize("name", ["server", "no sharing", "lagged", "exact", "soft-only", "feature level"])
def test_daf_12_a_run_sends_what_the_formula_says(name: str, tmp_path: Path) -> None:
    settings = {**QUICK, **VARIANTS[name]}
    store = run_in_memory(prepare(replace(FLEET, settings=settings), tmp_path / "work"))
    assert_no_upload_lost(store)
    server = make_server(**VARIANTS[name])
    parts = (server.model, server.generator, server.member.discriminator)
    model, generator, discriminator = (Weights.of(model_parameters(part)) for part in parts)
    sizes = Sizes(classes=CLASSES, embedding=32, model=model, generator=generator, discriminator=discriminator)
    predicted = round_bytes(DaFKDServer.exchanges(DaFKDConfig(**settings).for_classes(CLASSES), sizes), "float16")
    up, down, w = predicted["up"], predicted["down"], state_bytes(server.model)
    rows = {
        (item.direction, item.round): item.tensor_bytes
        for item in store.history.traffic(RUN)
        if item.device == "device-0" and item.round > 0
    }
    assert (rows["up", 1], rows["up", 2]) == (up, up)
    assert rows["down", 1] in (down, down + w)  # and the first weights, where the method gives them
    assert rows["down", 2] == down + w  # and the end result
    assert not store.history.events(RUN, "refused")
    store.close()


def test_over_the_wire_a_replayed_seed_fits(tmp_path: Path) -> None:
    """A noise seed is 63 bits of the run's seed tree: it must survive plan, answer and back."""
    settings = {**QUICK, **VARIANTS["lagged"], "maturity_guard": False}
    store = run_in_memory(prepare(replace(FLEET, rounds=1, settings=settings), tmp_path / "work"))
    assert not store.history.events(RUN, "member-left-out")
    store.close()
