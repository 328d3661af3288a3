"""ONNX of the layers that real networks have: the file answers like the model, also at other sizes of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from support.hostile_server import CLASSES
from torch import Tensor, nn

from fleetdistill.deployment.predictor import DeployedModel
from fleetdistill.deployment.stamp import stamp
from fleetdistill.errors import DataError, ExportError
from fleetdistill.training.onnx_export import export_onnx
from fleetdistill.training.onnx_file import cpu_session


class Residual(nn.Module):
    """Two normalised convolutions with dropout, beside a projection or the identity."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Dropout2d(0.3),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        same = channels == out and stride == 1
        self.beside = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.beside(x))


def network(name: str) -> nn.Module:
    """One of the networks, after some batches, so that its statistics and weights are not the initial ones."""
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES)]
    networks = {
        "batch-norm": [nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), *head],
        "dropout": [nn.Conv2d(2, 6, 3), nn.Dropout(0.5), nn.ReLU(), *head],
        "residual": [Residual(2, 6, 2), Residual(6, 6), *head],
        "fixed size": [nn.Conv2d(2, 6, 3, padding=1), nn.Flatten(), nn.Linear(6 * 10 * 8, CLASSES)],
    }
    model = nn.Sequential(*networks[name])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for seed in range(3):
        optimizer.zero_grad()
        model(images(8, seed=seed)).square().mean().backward()
        optimizer.step()
    return model


def images(samples: int, height: int = 10, width: int = 8, seed: int = 9) -> Tensor:
    return 3 * torch.rand(samples, 2, height, width, generator=torch.Generator().manual_seed(seed)) - 1


def expected(model: nn.Module, x: Tensor) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(model.eval()(x).numpy())


class Attends(nn.Module):
    """Runs layers of attention on each column of an image, between two of its own."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.before, self.layers, self.head = nn.Linear(20, 8), layers, nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        columns = self.before(x.flatten(1, 2).transpose(1, 2))
        if isinstance(self.layers, nn.MultiheadAttention):
            return self.head(self.layers(columns, columns, columns)[0].mean(1))
        return self.head(self.layers(columns).mean(1))


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    "layers",
    [
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
    ],
    ids=["attention", "layer", "encoder"],
)
def test_attention_is_exported(tmp_path: Path, layers: Callable[[], nn.Module], trains: bool) -> None:
    """In eval mode without gradients PyTorch runs one fused operator, which ONNX does not have."""
    torch.manual_seed(0)
    model = Attends(layers()).requires_grad_(trains).eval()
    export_onnx(model, tmp_path / "model.onnx", images(8), {})
    session = cpu_session(str(tmp_path / "model.onnx"))
    result = session.run(["logits"], {"input": images(5).numpy()})[0]
    np.testing.assert_allclose(result, expected(model, images(5)), atol=1e-5)
    assert all(parameter.requires_grad is trains for parameter in model.parameters())


def test_a_batch_size_in_the_code_of_a_model_is_named(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(len(x), 160)[:, :CLASSES]

    with pytest.raises(ExportError, match="the model fixes the batch size in Python code; take it from tensors"):
        export_onnx(Fixed(), tmp_path / "model.onnx", images(8), {})


@pytest.mark.parametrize("name", ["batch-norm", "dropout", "residual"])
@pytest.mark.parametrize("dynamic_size", [False, True])
@pytest.mark.parametrize("opset", [None, 13, 20])
def test_the_file_answers_like_the_model(tmp_path: Path, name: str, dynamic_size: bool, opset: int | None) -> None:
    model = network(name)
    model.train()  # an export must not depend on the mode
    export_onnx(model, tmp_path / "m.onnx", images(5), {}, opset=opset, dynamic_size=dynamic_size)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    sizes = [(10, 8), (10, 13), (31, 7), (64, 64)] if dynamic_size else [(10, 8)]
    for height, width in sizes:
        for samples in (1, 6):
            x = images(samples, height, width)
            (result,) = session.run(["logits"], {"input": x.numpy()})
            np.testing.assert_allclose(result, expected(model, x), atol=1e-5)


def test_a_model_of_one_size_cannot_be_exported_for_any_size(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="running the model in PyTorch failed"):
        export_onnx(network("fixed size"), tmp_path / "m.onnx", images(5), {}, dynamic_size=True)
    assert not list(tmp_path.iterdir())


class OfTracedSize(nn.Module):
    """Runs at any size in PyTorch, but its Python code makes the traced size a constant of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.sum(dim=(2, 3)) / (int(x.shape[2]) * int(x.shape[3])))
        return logits


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_graph_that_is_right_for_one_size_only_leaves_no_file(tmp_path: Path) -> None:
    export_onnx(OfTracedSize(), tmp_path / "m.onnx", images(5), {})
    (tmp_path / "m.onnx").unlink()
    with pytest.raises(ExportError, match="onnxruntime differs from PyTorch"):
        export_onnx(OfTracedSize(), tmp_path / "m.onnx", images(5), {}, dynamic_size=True)
    assert not list(tmp_path.iterdir())


def test_a_predictor_accepts_the_sizes_that_the_file_accepts(tmp_path: Path) -> None:
    model = network("residual")
    for dynamic_size in (False, True):
        export_onnx(model, tmp_path / "m.onnx", images(5), {"round": "1"}, dynamic_size=dynamic_size)
        deployed = DeployedModel(stamp((tmp_path / "m.onnx").read_bytes(), {"version": "1"}))
        x = images(2, 20, 30)
        if dynamic_size:
            assert deployed.input_shape == (2, None, None)
            np.testing.assert_allclose(deployed.predict(x.numpy()), expected(model, x), atol=1e-5)
            with pytest.raises(DataError, match=r"expected \[samples, 2, any, any\]"):
                deployed.predict(x.numpy()[:, :1])
        else:
            with pytest.raises(DataError, match=r"shape \[2, 2, 20, 30\], expected \[samples, 2, 10, 8\]"):
                deployed.predict(x.numpy())
