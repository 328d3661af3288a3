"""FedD2S's settings, and what they make of the contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from methods.fedd2s.fedd2s_fleet import CLASSES, INPUTS, device_of, make_config, make_context, make_server
from support.wire_samples import make_contract, make_profile
from torch import nn

from fleetdistill.errors import ConfigurationError, ModelError, RefusedError
from fleetdistill.knowledge import SampleKnowledge
from fleetdistill.methods.fedd2s.config import FedD2SConfig
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import split_sequential
from fleetdistill.wire.codec import encode
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.engine.cohort import with_columns
from fleetdistill_server.intake.admission import check_profile
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.methods.traffic import features_of
from fleetdistill_server.store.memory_blobs import MemoryBlobs

# --- what is declared, and how it is checked


def test_contract_names_first_layer_and_all_possible_cuts() -> None:
    server = make_server(l_min=3)
    assert features_of(server.run_exchanges()) == {"a": (8,), "c": (5,), "d": (3,)}
    assert list(features_of(make_server(l_min=1).run_exchanges())) == ["a", "b", "c", "d"]
    assert list(server.requirements().columns) == ["features", "labels"]
    initial = server.initial()
    assert initial is not None
    for name, tensor in server.network.state_dict().items():
        np.testing.assert_array_equal(initial.parameters[f"stages.{name}"], tensor.numpy())
    assert make_server(shared_initial=False).initial() is None


def test_an_ask_takes_exactly_the_columns_that_it_names() -> None:
    shapes = {"a": (8,), "c": (5,), "d": (3,)}
    contract = make_contract(
        features=[contract_pb2.NamedShape(name=name, shape=shape) for name, shape in shapes.items()],
        requirements=contract_pb2.Requirements(columns=["features", "labels"]),
    )
    expects = with_columns({"knowledge": "sample_knowledge"}, ["a", "d"])

    def send(**features: tuple[int, ...]) -> None:
        columns = {name: np.zeros((4, *shape), np.float32) for name, shape in features.items()}
        knowledge = SampleKnowledge(sample_ids=np.arange(4), features=columns, labels=np.zeros(4, np.int32))
        payload = encode({"knowledge": knowledge})
        Ingest("d1", payload.header(), contract, expects).start(MemoryBlobs().stage("key", payload.parts))

    send(a=(8,), d=(3,))
    with pytest.raises(RefusedError, match="lacks features/d, which feddkc needs"):
        send(a=(8,))
    with pytest.raises(RefusedError, match="'knowledge/features/c' is not part of the contract"):
        send(a=(8,), c=(5,), d=(3,))
    with pytest.raises(RefusedError, match=r"features/d has shape \[4, 5\], expected \[N, 3\]"):
        send(a=(8,), d=(5,))


def test_a_device_without_the_cuts_is_refused_at_check_in() -> None:
    contract = make_contract(
        features=[contract_pb2.NamedShape(name="a", shape=(8,))],
        requirements=contract_pb2.Requirements(columns=["features", "labels"]),
    )
    check_profile(contract, make_profile(features=[contract_pb2.NamedShape(name="a", shape=(8,))]))
    with pytest.raises(RefusedError, match="feature shape at cut 'a': the device has no such cut, run"):
        check_profile(contract, make_profile())
    kept_back = make_profile(
        features=[contract_pb2.NamedShape(name="a", shape=(8,))], allowed_columns=["features", "logits"]
    )
    with pytest.raises(RefusedError, match="the app does not allow labels"):
        check_profile(contract, kept_back)


def test_models_not_a_chain_of_stages_are_refused_with_advice() -> None:
    class OneCut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.extractor, self.last = nn.Linear(INPUTS, 4), nn.Linear(4, CLASSES)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.extractor(x)

        def predict(self, features: torch.Tensor) -> torch.Tensor:
            return self.last(features)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.predict(self.features(x))

    data = TensorData(torch.randn(4, INPUTS), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ModelError, match="got OneCut; build one from a list of stages"):
        device_of(OneCut(), data, CLASSES, make_config())
    with pytest.raises(ConfigurationError, match=r"\[model\] device is a Linear"):
        make_server(make_context("methods.fedd2s.fedd2s_fleet:plain_model"))
    device_of(split_sequential(nn.Sequential(nn.Linear(INPUTS, 4), nn.Linear(4, CLASSES)), 1), data, 3, make_config())


# --- configuration


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"drop_every": 0}, "drop_every must be >= 1"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"steps": "both"}, "unknown steps 'both', expected one of joint, alternating"),
        ({"s2c_mode": "grad"}, "unknown s2c_mode 'grad', expected one of head, feature_grad"),
        ({"distance": "l1"}, "unknown distance 'l1', expected one of head, mse"),
        ({"average": "median"}, "unknown average 'median', expected one of uniform, samples"),
        ({"distill_epochs": -1}, "distill_epochs must be >= 0"),
        ({"label_epochs": -1}, "label_epochs must be >= 0"),
        ({"distill_epochs": 0, "label_epochs": 0}, "nothing would be trained"),
        (
            {"s2c_mode": "feature_grad", "distill_epochs": 2},
            "distill_epochs is 2, must be 1 with s2c_mode = 'feature_grad'",
        ),
        (
            {"s2c_mode": "feature_grad", "distance": "mse"},
            "cannot be combined with distance = 'mse', which does not use the head",
        ),
        ({"warmup_epochs": -1}, "warmup_epochs must be >= 0"),
        ({"participation_ratio": 0.0}, "participation_ratio must be in (0, 1]"),
        ({"participation_ratio": 1.5}, "participation_ratio must be in (0, 1]"),
        ({"l_min": 2, "dropping_set": "F3"}, "set one of them"),
        ({"learning_rate": 0.0}, "learning_rate must be > 0"),
        ({"batch_size": 0}, "batch_size must be >= 1"),
    ],
)
def test_a_setting_out_of_range_says_so(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        FedD2SConfig(**settings)
    assert sentence in str(error.value)


def test_defaults_match_specification_and_paper_disables_ours() -> None:
    config = FedD2SConfig().for_classes(10)
    assert (config.local_epochs, config.distill_epochs, config.label_epochs) == (4, 2, 2)
    assert (config.optimizer, config.learning_rate, config.batch_size) == ("adam", 0.01, 128)
    assert (config.drop_every, config.temperature, config.warmup_epochs, config.steps) == (3, 1.0, 1, "joint")
    paper = FedD2SConfig.from_settings({"paper": True}).for_classes(10)
    assert (paper.steps, paper.warmup_epochs, paper.shared_initial, paper.teacher_guard) == (
        "alternating",
        0,
        False,
        False,
    )
    assert FedD2SConfig(s2c_mode="feature_grad").for_classes(10).distill_epochs == 1
    assert FedD2SConfig(local_epochs=1).for_classes(10).label_epochs == 1


def test_controls_match_the_passes_over_labels() -> None:
    config = FedD2SConfig().for_classes(10)
    assert [config.cross_entropy_epochs(number) for number in (1, 2, 3)] == [3, 2, 2]
    assert FedD2SConfig(warmup_epochs=0, label_epochs=3).cross_entropy_epochs(1) == 3
