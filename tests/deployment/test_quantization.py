"""int8 files of a device: as good as the float file, or the float file; and the limit for the size."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from support.hostile_server import CLASSES, Events, LyingLink, ask, device_at
from support.open_device import open_device
from torch import nn

from fleetdistill import Deployment, Device, Predictor
from fleetdistill.compute import light_worker
from fleetdistill.training.model import split_sequential
from fleetdistill_server.testing import MemoryServer

INPUTS = 3 * np.random.default_rng(2).normal(size=(60, 4)).astype(np.float32)
LABELS = np.arange(60) % CLASSES
WIDTH = 128


def wide() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return split_sequential(nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)), 2)


def shifted() -> nn.Module:
    """Its logits are near 1,000, where the 256 steps of int8 are larger than their differences."""
    model = wide()
    head = list(model.modules())[-1]
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.bias.fill_(1000.0)
    return model


def delivered(state_dir: Path, rounds: int = 1, **changes: Any) -> tuple[Device, Events]:
    """A device after some rounds; closed."""
    link = LyingLink(*(ask(round=number) for number in range(1, rounds + 1)))
    settings = {"model": wide, "data": (INPUTS, LABELS), "export": "round", **changes}
    device, events = device_at(link, state_dir, **settings)
    with device:
        for _ in range(rounds):
            device.step(0)
    return device, events


def metadata_of(path: Path) -> dict[str, str]:
    return {prop.key: prop.value for prop in onnx.load(path).metadata_props}


@pytest.mark.parametrize("how", ["dynamic", "static"])
@pytest.mark.parametrize("validation", [None, (INPUTS, LABELS)], ids=["samples", "validation"])
def test_an_int8_file_is_smaller_and_answers_like_the_model(tmp_path: Path, how: Any, validation: Any) -> None:
    deployment = Deployment(quantize=how, max_quantization_drop=0.1, max_accuracy_drop=1.0)
    plain, _ = delivered(tmp_path / "float")
    device, events = delivered(tmp_path / "int8", deployment=deployment, validation_data=validation)
    predictor = Predictor(device.state_dir)
    assert (predictor.version, predictor.model.quantized, predictor.error) == (1, how, "")
    sizes = [(item.state_dir / "model.onnx").stat().st_size for item in (plain, device)]
    assert sizes[1] < sizes[0] / 1.5
    logits = predictor.predict(INPUTS)
    expected = device.predict(INPUTS)
    assert 0 < np.abs(logits - expected).max() < 0.1 * np.abs(expected).max()
    assert (logits.argmax(axis=1) == expected.argmax(axis=1)).mean() >= 0.9
    metadata = metadata_of(device.state_dir / "model.onnx")
    assert metadata.items() >= {"run": "lying", "round": "1", "method": "feddkc", "quantized": how}.items()
    exported = next(event for event in events if event.kind == "exported")
    assert exported.values["bytes"] == sizes[1]
    difference = float(np.abs(logits - expected).max())
    assert difference / 2 < exported.values["max_difference"] < 2 * difference + 1e-3, "that of the int8 file"
    assert "not-quantized" not in [event.kind for event in events]


@pytest.mark.parametrize("measured", ["agreement", "accuracy"])
def test_an_int8_file_that_loses_too_much_is_not_used(tmp_path: Path, measured: str) -> None:
    first, _ = delivered(tmp_path / "float", model=shifted)
    labels = first.predict(INPUTS).argmax(axis=1)  # on which the float model is right
    assert len(set(labels)) > 1
    deployment = Deployment(quantize="static", max_quantization_drop=0.0, max_accuracy_drop=1.0)
    changes: dict[str, Any] = {"validation_data": (INPUTS, labels)} if measured == "accuracy" else {}
    device, events = delivered(tmp_path / "int8", model=shifted, deployment=deployment, **changes)
    (event,) = [event for event in events if event.kind == "not-quantized"]
    assert event.values[measured] > event.values["quantized"]
    assert f"{measured} of the int8 file is" in event.text
    assert event.text.endswith("; max_quantization_drop is 0")
    assert event.values["max_quantization_drop"] == 0
    assert event.text.startswith("model.onnx is exported as a float file: ")
    predictor = Predictor(device.state_dir)
    assert predictor.model.quantized == ""
    np.testing.assert_allclose(predictor.predict(INPUTS), device.predict(INPUTS), rtol=1e-3, atol=1e-2)


def test_the_accuracy_of_a_file_is_over_rows_not_batches(tmp_path: Path) -> None:
    """64 rows are right, and one is wrong, which is in a batch of its own."""
    inputs = np.concatenate([INPUTS, INPUTS[:5]])
    first, _ = delivered(tmp_path / "float", model=shifted)
    labels = first.predict(inputs).argmax(axis=1)
    labels[-1] = (labels[-1] + 1) % CLASSES
    deployment = Deployment(quantize="static", max_quantization_drop=0.0, max_accuracy_drop=1.0)
    given: dict[str, Any] = {"model": shifted, "deployment": deployment, "validation_data": (inputs, labels)}
    _, events = delivered(tmp_path / "int8", **given)
    (event,) = [event for event in events if event.kind == "not-quantized"]
    assert event.values["accuracy"] == pytest.approx(64 / 65)


def test_a_file_that_cannot_be_quantised_is_exported_as_float(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime.quantization

    def fail(*given: Any, **settings: Any) -> None:
        raise ValueError("no node to quantise")

    monkeypatch.setattr(onnxruntime.quantization, "quantize_dynamic", fail)
    device, events = delivered(tmp_path, deployment=Deployment(quantize="dynamic"))
    (text,) = events.texts("not-quantized")
    assert "quantising model.onnx failed: ValueError: no node to quantise" in text
    assert Predictor(device.state_dir).model.quantized == ""
    assert not list(tmp_path.rglob("*.int8")), "nothing is left behind"


def test_quantisation_leaves_the_apps_logging_alone(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = (list(root.handlers), list(root.filters), root.level)
    delivered(tmp_path, deployment=Deployment(quantize="static"))
    assert (list(root.handlers), list(root.filters), root.level) == before


def test_a_device_without_pytorch_quantises_each_variant(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run": {"method": "classstats"}, "contract": {"classes": 10, "input_shape": [1, 8, 8]}}
    images = np.random.default_rng(0).random((60, 1, 8, 8), dtype=np.float32)
    worker = light_worker((images, np.arange(60) % 10))
    deployment = Deployment(quantize="dynamic", max_quantization_drop=1.0)
    with (
        MemoryServer(settings) as server,
        open_device(server=server.link(), worker=worker, state_dir=tmp_path, deployment=deployment) as device,
    ):
        device.run()
    for variant in ("general", "personal", "model"):
        model = Predictor(tmp_path, variant=variant).model
        assert model.quantized == "dynamic"
        assert model.predict(images[:3]).shape == (3, 10)
    assert (tmp_path / "model.onnx").read_bytes() == (tmp_path / "general.onnx").read_bytes()


# --- the target's limits


def test_a_file_that_is_too_large_keeps_the_previous_one(tmp_path: Path) -> None:
    delivered(tmp_path)
    before = (tmp_path / "model.onnx").read_bytes()
    link = LyingLink(ask(round=2))
    limited, events = device_at(
        link,
        tmp_path,
        model=wide,
        data=(INPUTS, LABELS),
        export="round",
        deployment=Deployment(max_bytes=len(before) - 1),
    )
    with limited:
        limited.step(0)
        (event,) = [event for event in events if event.kind == "too-large"]
        assert event.values == {"bytes": len(before), "max_bytes": len(before) - 1, "version": 2}
        assert limited.version == 2, "the app's model is delivered anyway"
        assert (tmp_path / "model.onnx").read_bytes() == before
        assert Predictor(tmp_path).version == 1
        assert limited.roll_back() == 1
        limited.step(0)
        np.testing.assert_allclose(Predictor(tmp_path).predict(INPUTS), limited.predict(INPUTS), atol=1e-4)
    assert "exported" not in [event.kind for event in events]


def test_the_limit_is_that_of_each_file_not_of_the_one_in_use(tmp_path: Path) -> None:
    """Beside `model.onnx`, a copy of the variant in use, there is a file of each; another one is larger."""
    settings: dict[str, Any] = {
        "run": {"method": "classstats", "rounds": 1},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
    }
    worker = light_worker((np.random.default_rng(0).random((60, 1, 8, 8), dtype=np.float32), np.arange(60) % 10))

    def files(folder: Path, deployment: Deployment, events: Events) -> dict[str, int]:
        with (
            MemoryServer(settings) as server,
            open_device(
                server=server.link(), worker=worker, state_dir=folder, deployment=deployment, on_event=events.append
            ) as device,
        ):
            device.run()
        return {path.name: path.stat().st_size for path in folder.glob("*.onnx")}

    sizes = files(tmp_path / "all", Deployment(), Events())
    assert sizes.keys() == {"general.onnx", "personal.onnx", "model.onnx"}
    limit, largest = sizes["model.onnx"], max(sizes.values())
    assert limit < largest
    events = Events()
    assert files(tmp_path / "none", Deployment(max_bytes=limit), events) == {}
    (event,) = [event for event in events if event.kind == "too-large"]
    assert event.values == {"bytes": largest, "max_bytes": limit, "version": 1}


@pytest.mark.parametrize("opset", [13, 17, 20])
def test_the_file_has_the_opset_of_the_target(tmp_path: Path, opset: int) -> None:
    device, _ = delivered(tmp_path, deployment=Deployment(opset=opset))
    (result,) = [item.version for item in onnx.load(tmp_path / "model.onnx").opset_import if item.domain == ""]
    assert result == opset
    np.testing.assert_allclose(Predictor(tmp_path).predict(INPUTS), device.predict(INPUTS), atol=1e-4)


def test_failed_export_counts_version_and_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivered(tmp_path)
    before = (tmp_path / "model.onnx").read_bytes()

    def refuse(*given: Any, **settings: Any) -> None:
        raise onnx.checker.ValidationError("not a model")

    monkeypatch.setattr(onnx.checker, "check_model", refuse)
    device, events = device_at(LyingLink(ask(round=2)), tmp_path, model=wide, data=(INPUTS, LABELS), export="round")
    with device:
        device.step(0)
        assert device.version == 2
    assert [event.values["error"] for event in events if event.kind == "not-exported"] == ["ExportError"]
    assert (tmp_path / "model.onnx").read_bytes() == before
    assert not (tmp_path / "export.new").exists()
