"""Both halves of FedDKC with tiny models, and knowledge for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from fleetdistill.knowledge import CUT, RefinedKnowledge, SampleKnowledge
from fleetdistill.methods.base import Ask, Local
from fleetdistill.methods.feddkc.config import FedDKCConfig
from fleetdistill.methods.feddkc.device import FedDKCDevice
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import split_sequential
from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.methods.base import MethodContext
from fleetdistill_server.methods.feddkc.server import FedDKCServer
from fleetdistill_server.testing import FakeCohort, always, play

CLASSES, FEATURES = 3, 4


def identity_extractor(input_shape: tuple[int, ...]) -> nn.Module:
    return nn.Identity()


def small_predictor(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def make_server(**settings: Any) -> FedDKCServer:
    context = MethodContext(
        classes=CLASSES,
        input_shape=(FEATURES,),
        models=ModelSection(
            extractor="methods.feddkc.feddkc_fleet:identity_extractor",
            server="methods.feddkc.feddkc_fleet:small_predictor",
        ),
        torch_device=torch.device("cpu"),
        seed=3,
    )
    return FedDKCServer(FedDKCConfig(**settings).for_classes(CLASSES), context)


def make_knowledge(seed: int, rows: int = 12, right: bool = True) -> SampleKnowledge:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, rows).astype(np.int32)
    said = labels if right else (labels + 1) % CLASSES
    return SampleKnowledge(
        sample_ids=np.arange(rows) * 10 + seed,
        features={CUT: (rng.normal(size=(rows, FEATURES)) + labels[:, None]).astype(np.float32)},
        logits=(4 * np.eye(CLASSES)[said]).astype(np.float32),
        labels=labels,
    )


def run_round(server: FedDKCServer, knowledge: dict[str, SampleKnowledge]) -> FakeCohort:
    """A round in which devices answer with knowledge that a test made."""
    (cohort,) = play(server, {device: always({"knowledge": one}) for device, one in knowledge.items()})
    return cohort


def make_device(rows: int = 20, **settings: Any) -> FedDKCDevice:
    torch.manual_seed(5)
    model = split_sequential(
        nn.Sequential(nn.Linear(6, FEATURES), nn.BatchNorm1d(FEATURES), nn.ReLU(), nn.Linear(FEATURES, CLASSES)), 3
    )
    data = TensorData(torch.randn(rows, 6), torch.arange(rows) % CLASSES)
    local = Local(model=model, taps=model, data=data, classes=CLASSES, torch_device=torch.device("cpu"))
    return FedDKCDevice(FedDKCConfig(**settings).for_classes(CLASSES), local)


def ask(knowledge: RefinedKnowledge, seed: int = 1) -> Ask:
    return Ask(round=1, step="train", seed=seed, parts={"knowledge": knowledge})


NOTHING = RefinedKnowledge(valid=False)
