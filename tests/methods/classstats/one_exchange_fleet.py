"""Class statistics in one exchange: both halves, rounds and spaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from methods.classstats.class_statistics_fleet import CLASSES, CPU, SHAPE, Rounds, rows_of

from fleetdistill.knowledge import (
    ClassSpace,
    SharedStatistics,
)
from fleetdistill.methods.base import Ask, Local
from fleetdistill.methods.classstats.config import ClassStatsConfig
from fleetdistill.methods.classstats.device import RefiningDevice
from fleetdistill.models import build_model
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import check_local_model
from fleetdistill.wire.codec import decode, encode
from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.methods.base import MethodContext
from fleetdistill_server.methods.classstats.refining import RefiningServer

SMALL: dict[str, Any] = {"rows_per_direction": 2}


def config_of(**settings: Any) -> ClassStatsConfig:
    return ClassStatsConfig.from_settings({**SMALL, **settings}).for_classes(CLASSES)


def make_server(shape: tuple[int, ...] = SHAPE, extractor: str = "scattering", **settings: Any) -> RefiningServer:
    context = MethodContext(
        classes=CLASSES,
        input_shape=shape,
        models=ModelSection(extractor=extractor, server="digits_server"),
        torch_device=CPU,
        seed=3,
    )
    return RefiningServer(config_of(**settings), context)


def images_of(counts: Sequence[int], seed: int) -> TensorData:
    """Rows whose label can be seen, as images in [0, 1]."""
    rows = rows_of(counts, seed)
    return TensorData(rows.inputs / 1.2, rows.labels)


def device_on(data: TensorData, model: str = "digits_linear", **settings: Any) -> RefiningDevice:
    torch.manual_seed(1)
    module = build_model(model, classes=CLASSES)
    local = Local(model=module, taps=check_local_model(module), data=data, classes=CLASSES, torch_device=CPU)
    return RefiningDevice(config_of(**settings), local)


def make_device(counts: Sequence[int], seed: int = 1, **settings: Any) -> RefiningDevice:
    return device_on(images_of(counts, seed), **settings)


def devices(**settings: Any) -> dict[str, RefiningDevice]:
    return {
        "a": make_device([20, 12, 3, 0], seed=1, **settings),
        "b": make_device([0, 9, 14, 8], seed=2, **settings),
        "c": make_device([6, 0, 7, 9], seed=3, **settings),
    }


def fleet(names: str = "ab", **settings: Any) -> Rounds:
    chosen = {name: half for name, half in devices(**settings).items() if name in names}
    return Rounds(make_server(**settings), chosen)


def space_of(played: Rounds) -> ClassSpace:
    """What the server has sent last."""
    sent = [parts["space"] for step, _, parts in played.asked if step == "learn" and "space" in parts]
    assert isinstance(sent[-1], ClassSpace)
    return sent[-1]


def statistics_of(half: RefiningDevice) -> SharedStatistics:
    sent = half.handle(Ask(round=1, step="summarise", seed=1)).parts["statistics"]
    result = decode(encode({"statistics": sent}))["statistics"]
    assert isinstance(result, SharedStatistics)
    return result
