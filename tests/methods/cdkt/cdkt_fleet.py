"""CDKT-FL's server with a tiny model, its proxy set, and knowledge for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from fleetdistill.knowledge import ProxyKnowledge
from fleetdistill.methods.cdkt.config import CDKTConfig
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import SplitModel
from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.methods.base import MethodContext
from fleetdistill_server.methods.cdkt import CDKTServer

CLASSES, INPUTS, WIDTH, PROXY = 3, 6, 5, 7


def tiny_model(input_shape: tuple[int, ...] = (INPUTS,), classes: int = CLASSES) -> SplitModel:
    stages = {"stem": nn.Linear(INPUTS, WIDTH), "relu": nn.ReLU(), "head": nn.Linear(WIDTH, classes)}
    return SplitModel(stages, cut="stem")


def make_proxy(rows: int = PROXY) -> TensorData:
    generator = torch.Generator().manual_seed(11)
    return TensorData(torch.randn(rows, INPUTS, generator=generator), torch.arange(rows) % CLASSES)


def make_server(**settings: Any) -> CDKTServer:
    context = MethodContext(
        classes=CLASSES,
        input_shape=(INPUTS,),
        models=ModelSection(server="methods.cdkt.cdkt_fleet:tiny_model"),
        torch_device=torch.device("cpu"),
        seed=3,
        proxy=make_proxy(),
    )
    return CDKTServer(CDKTConfig(**settings).for_classes(CLASSES), context)


def made_up(seed: int = 0, rows: int = PROXY, columns: str = "logits embeddings") -> ProxyKnowledge:
    random = np.random.default_rng(seed)
    both = {
        "logits": random.normal(size=(rows, CLASSES)).astype(np.float32),
        "embeddings": random.random((rows, WIDTH), np.float32),
    }
    return ProxyKnowledge(valid=True, **{name: both[name] for name in columns.split()})  # type: ignore[arg-type]
