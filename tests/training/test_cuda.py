"""Trainings on a GPU: close to those on a CPU, with data that are kept there or streamed, in float32 and bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from fleetdistill_server.config.engine_config import EngineSection
from fleetdistill_server.training.hardware import Hardware
from fleetdistill_server.training.rows import Pool
from fleetdistill_server.training.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA GPU")
ROWS, CLASSES = 1000, 3


def trained(hardware: Hardware) -> dict[str, Tensor]:
    """Weights after two epochs on float16 features of three answers, on the CPU."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES)]
    model, drawn = nn.Sequential(*layers).to(hardware.device), torch.Generator().manual_seed(1)
    features = torch.randn(ROWS, 2, 4, 4, generator=drawn).half()
    labels = torch.randint(0, CLASSES, (ROWS,), generator=drawn).to(hardware.device)
    Trainer(hardware).train_steps(
        model,
        ROWS,
        epochs=2,
        batch_size=64,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        losses=lambda epoch, rows, read: [functional.cross_entropy(model(read.float()), labels[rows])],
        generator=torch.Generator().manual_seed(2),
        pool=Pool([features[:300], features[300:301], features[301:]], hardware),
    )
    return {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("resident_bytes", [0, 1])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-2), ("auto", 5e-2)])
def test_a_gpu_trains_as_a_cpu(precision: str, tolerance: float, resident_bytes: int) -> None:
    settings = EngineSection.model_validate({"precision": precision, "resident_bytes": resident_bytes})
    expected = trained(Hardware(device=torch.device("cpu")))
    result = trained(Hardware.of(torch.device("cuda"), settings))
    for name, value in expected.items():
        assert_close(result[name], value, atol=tolerance, rtol=tolerance)
