"""ONNX export: the file answers like the model, or there is no file."""

from __future__ import annotations

import copy
import logging
import os
import warnings

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from fleetdistill.errors import ExportError
from fleetdistill.models import build_model
from fleetdistill.training.onnx_export import export_onnx

METADATA = {"run": "digits", "round": "7", "method": "feddkc"}


def digits(samples: int = 5) -> Tensor:
    return torch.randn(samples, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def answers(path, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"input": x.numpy()})[0])


class Sabotaged(nn.Module):
    """A classifier [b, 1, 8, 8] to [b, 10] whose Python code does what a traced graph cannot follow."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.how = how
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.layer(x.flatten(1))
        match self.how:
            case "data":  # a constant of the traced batch
                return logits + float(x.sum())
            case "calls":
                return logits + self.calls
            case "random":
                return nn.functional.dropout(logits, training=True)
            case "batch":  # the traced batch size; x.shape[0] alone would follow the graph's
                return logits * int(x.shape[0])
            case "reshape":
                return self.layer(x.reshape(int(x.shape[0]), 64)).reshape(-1, 10)[: int(x.shape[0])]
            case "nan":
                return logits / 0 - logits / 0
            case "raises":
                raise ValueError("model is broken")
            case "operator":  # no ONNX counterpart
                return logits + torch.linalg.eigvals(logits.T @ logits).real
            case "antialias":
                return logits + nn.functional.interpolate(x, (4, 4), mode="bilinear", antialias=True).sum()
            case "vector":
                return logits.sum(1)
            case _:
                return (logits, x)  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["digits_linear", "digits_mlp_large", "digits_cnn_large", "resnet12"])
def test_onnxruntime_answers_like_the_model_at_any_batch_size(tmp_path, name):
    model = build_model(name, input_shape=(1, 8, 8))
    model(digits(32))  # batch-norm statistics that are not the initial ones
    report = export_onnx(model, tmp_path / "model.onnx", digits(), METADATA)
    with torch.no_grad():
        for batch in (1, 2, 11):
            torch.testing.assert_close(
                answers(report.path, digits(batch)), model.eval()(digits(batch)), rtol=0, atol=1e-4
            )
    assert report.samples == 5
    assert 0 < report.max_difference <= 1e-4
    assert report.bytes == (tmp_path / "model.onnx").stat().st_size
    assert os.listdir(tmp_path) == ["model.onnx"]


def test_the_file_says_what_it_is(tmp_path):
    path = tmp_path / "model.onnx"
    export_onnx(build_model("digits_linear", classes=4), path, digits(), METADATA)
    proto = onnx.load(path)
    facts = {entry.key: entry.value for entry in proto.metadata_props}
    assert facts.pop("fleetdistill_version")
    assert facts == {**METADATA, "classes": "4", "input_shape": "1,8,8"}
    (given,), (made,) = proto.graph.input, proto.graph.output
    assert (given.name, given.type.tensor_type.shape.dim[0].dim_param) == ("input", "batch")
    assert (made.name, made.type.tensor_type.shape.dim[0].dim_param) == ("logits", "batch")


def test_the_callers_metadata_wins(tmp_path):
    export_onnx(build_model("digits_linear"), tmp_path / "m.onnx", digits(), {"classes": "zero,one"})
    assert {"classes": "zero,one"}.items() <= {
        e.key: e.value for e in onnx.load(tmp_path / "m.onnx").metadata_props
    }.items()


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("how", ["data", "calls", "random", "batch", "nan"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:ONNX export mode is set:UserWarning")
def test_a_graph_that_differs_from_the_model_leaves_no_file(tmp_path, how, samples):
    with pytest.raises(ExportError, match="differs from PyTorch"):
        export_onnx(Sabotaged(how).eval(), tmp_path / "model.onnx", digits(samples), METADATA)
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_graph_with_a_fixed_batch_size_leaves_no_file(tmp_path):
    with pytest.raises(ExportError, match="on a batch of 1 failed"):
        export_onnx(Sabotaged("reshape"), tmp_path / "model.onnx", digits(3), METADATA)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("raises", "running the model in PyTorch failed: ValueError: model is broken"),
        ("operator", "tracing the model failed"),
        ("antialias", "_upsample_bilinear2d_aa.*; resize with antialias=False"),
        ("vector", r"shape \(5,\) for a batch of 5, expected logits \[5, classes\]"),
        ("tuple", "returns a tuple"),
    ],
)
def test_what_torch_or_onnx_raise_is_an_export_error(tmp_path, how, sentence, capfd):
    with pytest.raises(ExportError, match=sentence) as raised:
        export_onnx(Sabotaged(how), tmp_path / "model.onnx", digits(), METADATA)
    assert os.listdir(tmp_path) == []
    assert len(str(raised.value).splitlines()) == 1
    assert capfd.readouterr() == ("", "")


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_failed_export_keeps_the_older_file(tmp_path):
    path = tmp_path / "model.onnx"
    export_onnx(build_model("digits_linear"), path, digits(), METADATA)
    older = path.read_bytes()
    with pytest.raises(ExportError):
        export_onnx(Sabotaged("data"), path, digits(), METADATA)
    assert path.read_bytes() == older
    assert os.listdir(tmp_path) == ["model.onnx"]
    export_onnx(build_model("digits_linear"), path, digits(), METADATA)
    assert path.read_bytes() != older


def test_nothing_is_renamed_when_the_checker_refuses(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise onnx.checker.ValidationError("not a model")

    monkeypatch.setattr(onnx.checker, "check_model", refuse)
    with pytest.raises(ExportError, match="checking the exported model failed: ValidationError: not a model"):
        export_onnx(build_model("digits_linear"), tmp_path / "model.onnx", digits(), METADATA)
    assert os.listdir(tmp_path) == []


def test_the_model_keeps_its_modes_weights_and_precision(tmp_path):
    model = build_model("resnet4", input_shape=(1, 8, 8)).double().to(memory_format=torch.channels_last).train()
    model.stages.stem.eval()  # type: ignore[union-attr]
    modes, before = [part.training for part in model.modules()], copy.deepcopy(model.state_dict())
    export_onnx(model, tmp_path / "model.onnx", digits().double(), METADATA)
    assert [part.training for part in model.modules()] == modes
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.dtype == before[name].dtype
        assert value.stride() == before[name].stride()


def test_the_tolerance_grows_with_the_logits(tmp_path):
    model = build_model("digits_mlp_small")
    with torch.no_grad():
        model.stages.head.weight.mul_(1e5)  # type: ignore[operator, union-attr]  # one rounding of a logit of 1e4 is near 1e-3
    report = export_onnx(model, tmp_path / "model.onnx", digits(200), METADATA)
    assert report.max_difference > 1e-4
    with pytest.raises(ExportError, match="differs from PyTorch"):
        export_onnx(model, tmp_path / "model.onnx", digits(200), METADATA, tolerance=1e-9)


def test_an_export_is_silent(tmp_path, capfd, caplog):
    with warnings.catch_warnings(record=True) as heard, caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        export_onnx(build_model("digits_cnn_small"), tmp_path / "model.onnx", digits(), METADATA)
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
    assert heard == []


def test_a_warning_about_the_models_own_code_is_passed_on(tmp_path):
    with pytest.warns(torch.jit.TracerWarning), pytest.raises(ExportError):  # type: ignore[attr-defined]
        export_onnx(Sabotaged("data"), tmp_path / "model.onnx", digits(), METADATA)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"samples": torch.zeros(0, 1, 8, 8)}, r"shape \(0, 1, 8, 8\)"),
        ({"samples": torch.zeros(3)}, r"expected \[n, \*input_shape\]"),
        ({"metadata": {"round": 7}}, "must be strings; convert round"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, change, sentence):
    arguments = {"samples": digits(), "metadata": METADATA} | change
    with pytest.raises(ExportError, match=sentence):
        export_onnx(build_model("digits_linear"), tmp_path / "model.onnx", **arguments)


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(ExportError, match="nowhere does not exist"):
        export_onnx(build_model("digits_linear"), tmp_path / "nowhere" / "model.onnx", digits(), METADATA)
