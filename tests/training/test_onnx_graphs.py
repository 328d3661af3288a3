"""One graph for all models of an architecture: the filled file is the one that a trace would have written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest
import torch
from support.long import long_except
from support.onnx_traces import traced_models
from torch import Tensor, nn

from fleetdistill.models import MODELS, build_model
from fleetdistill.training.onnx_export import export_onnx
from fleetdistill.training.onnx_graphs import Graphs

CLASSIFIERS = [name for name in MODELS if not name.endswith(("extractor", "identity", "scattering"))]
SHAPES = {"dafkd_cnn": (1, 28, 28), "feddkd_femnist": (1, 28, 28)}


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return traced_models(monkeypatch)


def rows(*shape: int) -> Tensor:
    return torch.rand(5, *shape, generator=torch.Generator().manual_seed(3))


def with_weights(model: nn.Module, seed: int) -> nn.Module:
    """The model with other weights and statistics of batch norm."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) / 4 + 0.1)
    return model


def answers(path: Path, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"input": x.numpy()})[0])


@pytest.mark.parametrize(
    "name", long_except(CLASSIFIERS, "digits_linear", "digits_cnn_large", "resnet4", "fedd2s_digits")
)
def test_a_filled_file_is_the_traced_one(name: str, tmp_path: Path, traces: list[str]) -> None:
    shape = SHAPES.get(name, (1, 8, 8))
    first, other = (with_weights(build_model(name, input_shape=shape), seed) for seed in (1, 2))
    graphs, x = Graphs(), rows(*shape)
    export_onnx(first, tmp_path / "first.onnx", x, {}, graphs=graphs)
    export_onnx(other, tmp_path / "filled.onnx", x, {}, graphs=graphs)
    assert len(traces) == 1
    export_onnx(other, tmp_path / "traced.onnx", x, {}, graphs=Graphs())
    export_onnx(other, tmp_path / "alone.onnx", x, {})
    assert len(traces) == 3
    assert (tmp_path / "filled.onnx").read_bytes() == (tmp_path / "traced.onnx").read_bytes()
    assert (tmp_path / "filled.onnx").read_bytes() != (tmp_path / "first.onnx").read_bytes()
    torch.testing.assert_close(answers(tmp_path / "filled.onnx", x), answers(tmp_path / "alone.onnx", x))


class Odd(nn.Module):
    """A classifier [b, 64] to [b, 10] in which `how` says what a trace does with the number `scale`."""

    outside: Tensor

    def __init__(self, how: str, scale: float) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.how = how
        nn.init.constant_(self.layer.weight, scale)
        if how == "attribute":
            self.scale = scale
        elif how == "tensor":
            self.plain = torch.full((10,), scale)
        elif how == "object":
            self.opaque = SimpleNamespace(scale=scale)
        elif how == "buffer":
            self.register_buffer("outside", torch.full((10,), scale), persistent=False)
        elif how in ("equal", "tied"):
            self.second = nn.Linear(64, 10)
            self.second.load_state_dict(self.layer.state_dict())
        if how == "tied" and scale == 1:
            self.second.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        logits: Tensor = self.layer(x)
        match self.how:
            case "attribute":
                return logits * self.scale
            case "tensor":
                return logits * self.plain
            case "object":
                return logits * self.opaque.scale
            case "buffer":
                return logits * self.outside
            case "data":
                return logits + x @ self.layer.weight.data.T
            case "python":
                return logits + float(self.layer.weight.sum())
            case "transposed":
                return logits + x @ self.layer.weight.T.exp()
            case "branch":
                return logits if float(self.layer.weight.sum()) > 700 else -logits
            case _:
                return logits + self.second(x)


@pytest.mark.parametrize(
    ("how", "count"),
    [
        ("attribute", 2),  # another architecture
        ("tensor", 2),
        ("tied", 2),
        ("object", 2),  # the filled file fails its comparison
        ("python", 2),
        ("data", 2),
        ("branch", 2),
        ("buffer", 1),  # not in the state, but filled in
        ("transposed", 1),
        ("equal", 1),
    ],
)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:Converting a tensor")
def test_a_model_that_does_not_fit_the_graph_is_traced(how: str, count: int, tmp_path: Path, traces: list[str]) -> None:
    graphs, x = Graphs(), rows(1, 8, 8)
    models = [Odd(how, scale).eval() for scale in (1.0, 2.0)]
    if how == "equal":
        nn.init.constant_(models[1].second.weight, 3.0)
    for number, model in enumerate(models):
        export_onnx(model, tmp_path / f"{number}.onnx", x, {}, graphs=graphs)
        torch.testing.assert_close(answers(tmp_path / f"{number}.onnx", x), model(x).detach())
    assert len(traces) == count


def test_inputs_of_another_shape_or_opset_are_another_graph(tmp_path: Path, traces: list[str]) -> None:
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)
    graphs, model = Graphs(), nn.Sequential(*layers)
    for options in ({}, {"opset": 17}, {"dynamic_size": True}, {}, {"opset": 18}):
        export_onnx(model, tmp_path / "model.onnx", rows(1, 8, 8), {}, graphs=graphs, **options)
    export_onnx(model, tmp_path / "model.onnx", rows(1, 12, 12), {}, graphs=graphs)
    assert len(traces) == 4


def test_weights_under_other_names_are_never_filled_in(
    tmp_path: Path, traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an exporter would that fuses batch norm whatever it is told."""
    counted = torch.onnx.export

    def export(model: nn.Module, *given: Any, **options: Any) -> Any:
        fusing = {"training": torch.onnx.TrainingMode.EVAL, "do_constant_folding": True}
        return counted(model, *given, **options | fusing)

    monkeypatch.setattr(torch.onnx, "export", export)
    graphs, x = Graphs(), rows(1, 8, 8)
    for seed in (1, 2, 3):
        model = with_weights(build_model("digits_linear", input_shape=(1, 8, 8)), seed)
        export_onnx(model, tmp_path / "model.onnx", x, {}, graphs=graphs)
        torch.testing.assert_close(answers(tmp_path / "model.onnx", x), model.eval()(x).detach())
    assert len(traces) == 4  # the first model is traced a second time, then each once
