"""A server of secure sums, and devices whose classes are easily told apart."""

from __future__ import annotations

from typing import Any

import torch
from methods.classstats.class_statistics_fleet import CPU, SHAPE

from fleetdistill.methods import config_class, device_class
from fleetdistill.methods.base import DeviceMethod, Local
from fleetdistill.models import build_model
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import check_local_model
from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.methods import server_class
from fleetdistill_server.methods.base import MethodContext, ServerMethod

CLASSES, ROWS = 4, 120


SUMMED = "classstats_summed"


def config_of(method: str = "classstats_secure", **settings: Any) -> Any:
    noise = {"epsilon": 5.0} if method == "classstats_secure" else {}
    return config_class(method).from_settings({"dimensions": 16} | noise | settings)


def make_server(method: str = "classstats_secure", **settings: Any) -> Any:
    context = MethodContext(classes=CLASSES, input_shape=SHAPE, models=ModelSection(), torch_device=CPU, seed=3)
    return server_class(method)(config_of(method, **settings), context)


def images(seed: int, rows: int = ROWS) -> TensorData:
    """Grey images whose classes are bright bars at different places."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % CLASSES
    inputs = 0.3 * torch.rand(rows, *SHAPE, generator=random)
    for label in range(CLASSES):
        inputs[labels == label, :, 2 * label : 2 * label + 2, :] += 0.7
    return TensorData(inputs, labels)


def devices(names: str = "abcde", rows: int = ROWS, method: str = "classstats_secure", **settings: Any) -> Any:
    model = build_model("digits_linear", classes=CLASSES)
    return {
        name: device_class(method)(
            config_of(method, **settings),
            Local(
                model=model,
                taps=check_local_model(model),
                data=images(ord(name), rows),
                classes=CLASSES,
                torch_device=CPU,
            ),
        )
        for name in names
    }


def accuracy(half: DeviceMethod, variant: str = "general") -> float:
    data = images(1)
    return float((half.variants()[variant].eval()(data.inputs).argmax(dim=1) == data.labels).float().mean())


def members_of(server: ServerMethod) -> dict[str, str]:
    members: dict[str, str] = server.state_dict()["members"]
    return members
