"""An extractor that comes with weights, end to end: the worked example of the documentation, and any other module."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.testing import assert_allclose
from support.driving import DriveDevices
from support.forked import ForkedProgram
from support.open_device import open_device
from support.processes import COMMAND, PATIENCE_SECONDS
from torch import Tensor, nn

from fleetdistill import Device, Splits, TorchModel
from fleetdistill.compute.onnx_extractor import extractor_of
from fleetdistill.compute.torch_compute import TorchCompute
from fleetdistill.errors import ModelError, RefusedError
from fleetdistill.models.pretrained import ImageInputs
from fleetdistill.state.state_file import unpack_state
from fleetdistill.wire.codec import decode
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.contract import build_method, make_contract
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.store import Store

RUN = "given"
PAGE = (Path(__file__).parents[2] / "docs/reference/methods/classstats.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Use a pretrained extractor")[1].split("\n## ")[0]
ANSWERS = ("general", "personal")


def onnx_logits(file: Path, inputs: np.ndarray) -> np.ndarray:
    return np.asarray(onnxruntime.InferenceSession(str(file)).run(["logits"], {"input": inputs})[0])


# --- the page's example


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The example's files as the page has them, on a free port; weights of this test's making."""
    from torchvision.models import resnet18

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
    pretrained, app = blocks("python")
    (run,) = blocks("toml")
    (tmp_path / "pretrained.py").write_text(pretrained)
    (tmp_path / "app.py").write_text(app.replace("127.0.0.1:50051", where))
    (tmp_path / "run.toml").write_text(f'{run}\n[server]\nlisten = "{where}"\n')
    torch.manual_seed(8)
    torch.save(resnet18(weights=None).state_dict(), tmp_path / "resnet18.pt")
    return tmp_path


def served(folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*COMMAND, "serve", "run.toml"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.long
@pytest.mark.slow
def test_the_page_s_example_runs_as_it_stands(folder: Path) -> None:
    devices: list[ForkedProgram] = []
    server = served(folder)
    try:
        devices = [ForkedProgram(["app.py", str(part)], folder / f"{part}.log", folder) for part in range(3)]
        for device in devices:
            device.start()
        ended = [device.ended() for device in devices]
        said = [device.said for device in devices]
    finally:
        for device in devices:
            device.kill()
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=PATIENCE_SECONDS)
    assert ended == [0, 0, 0], said
    assert all(text.endswith("\nown general personal\n") for text in said)
    inputs = np.random.default_rng(0).random((3, 3, 32, 32), dtype=np.float32)
    for part in range(3):
        own = folder / f"device-{part}"
        answers = [onnx_logits(own / f"{name}.onnx", inputs) for name in ANSWERS]
        assert not np.array_equal(*answers)  # type: ignore[arg-type]
        assert layers_of(own) == layers_of(folder)


def layers_of(folder: Path) -> dict[str, list[float]]:
    """The first layers' tensors in the file of weights, or in the model with which a device computes."""
    if (folder / "resnet18.pt").exists():
        result = torch.load(folder / "resnet18.pt", weights_only=True)
    else:
        result = unpack_state((folder / "state.safetensors").read_bytes())["model"]
    firsts = ("conv1.weight", "bn1.running_mean", "bn1.weight", "layer1.1.conv2.weight", "layer1.1.bn2.running_var")
    (before,) = {name.removesuffix(firsts[-1]) for name in result if name.endswith(firsts[-1])}
    return {first: result[before + first].flatten().tolist() for first in firsts}


# --- torchvision's and any other module, in whole runs in this process

CLASSES = 4


class Given:
    """Where the file of weights lies that the factories read; set by a test."""

    weights = Path()


def torchvision_layers(input_shape: Sequence[int]) -> nn.Module:
    whole = resnet_of(torch.load(Given.weights, weights_only=True))
    return nn.Sequential(whole.conv1, whole.bn1, whole.relu, whole.maxpool)


def resnet_of(weights: Any) -> Any:
    from torchvision.models import resnet18

    whole = resnet18(weights=None)
    whole.load_state_dict(weights)
    return whole


class Waves(nn.Module):
    """No chain of layers, no convolution, and features below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.zeros(12, 3 * 16 * 16))
        self.register_buffer("shift", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x.flatten(1) @ self.mixing.T + self.shift)  # type: ignore[operator]


def waves(input_shape: Sequence[int]) -> nn.Module:
    module = Waves()
    module.load_state_dict(torch.load(Given.weights, weights_only=True))
    return module


class AppModel(nn.Module):
    """A model of an app's own: the layers that all have, without the weights, and a predictor that only it has."""

    def __init__(self, extractor: nn.Module, *predictor: nn.Module) -> None:
        super().__init__()
        self.extractor = extractor
        self.predictor = nn.Sequential(nn.Flatten(), *predictor)

    def features(self, x: Tensor) -> Tensor:
        return self.extractor(x)

    def predict(self, features: Tensor) -> Tensor:
        return self.predictor(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.predict(self.features(x))


def blank_torchvision_layers() -> nn.Module:
    whole = resnet_of(_resnet_weights())
    return nn.Sequential(whole.conv1, whole.bn1, whole.relu, whole.maxpool)


def _resnet_weights() -> dict[str, Tensor]:
    from torchvision.models import resnet18

    return resnet18(weights=None).state_dict()


def predictors(features: int) -> list[list[nn.Module]]:
    return [
        [nn.Linear(features, CLASSES)],
        [nn.Linear(features, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES)],
        [nn.Linear(features, 24), nn.Tanh(), nn.Linear(24, CLASSES)],
    ]


def bright_rows(seed: int, count: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """Images whose label can be seen: a bright band for each class; every device lacks one of the classes."""
    random = np.random.default_rng(seed)
    labels = random.choice([label for label in range(CLASSES) if label != seed], count)
    images = random.random((count, 3, 16, 16), dtype=np.float32) / 5
    for image, label in zip(images, labels, strict=True):
        image[:, 4 * label : 4 * label + 3] += 1
    return images, labels


def devices_of(store: Store, blank: Any, features: int, directory: Path, stack: ExitStack) -> list[Device]:
    api = DeviceApi(store)
    return [
        stack.enter_context(
            open_device(
                server=MemoryLink(api),
                model=AppModel(blank(), *predictor),
                data=bright_rows(number),
                state_dir=directory / f"d{number}",
                device_id=f"d{number}",
                export="finish",
            )
        )
        for number, predictor in enumerate(predictors(features))
    ]


FACTORIES: dict[str, tuple[Any, Any, int]] = {
    "torchvision_layers": (_resnet_weights, blank_torchvision_layers, 64 * 4 * 4),
    "waves": (lambda: {"mixing": torch.randn(12, 768) / 16, "shift": torch.randn(12)}, Waves, 12),
}


@pytest.fixture(params=FACTORIES)
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A run whose extractor has the weights of a file, its store, and what its devices' models are made of."""
    weights, blank, features = FACTORIES[request.param]
    torch.manual_seed(3)
    monkeypatch.setattr(Given, "weights", tmp_path / "weights.pt")
    torch.save(weights(), Given.weights)
    config = run_config(
        {
            "run": {"name": RUN, "method": "classstats", "rounds": 1, "min_devices": 3},
            "contract": {"classes": CLASSES, "input_shape": [3, 16, 16]},
            "model": {"extractor": f"{__name__}:{request.param}", "server": "digits_server"},
            "method": {"features": "model"},
            "server": {"torch_device": "cpu"},
        }
    )
    store = Store.in_memory()
    yield config, store, blank, features
    store.close()


def publish(config: RunConfig, store: Store) -> None:
    """What the engine does before it waits for devices."""
    store.runs.begin(RUN, config.fixed_part())
    contract, initial, _ = make_contract(config, build_method(config))
    assert initial is not None
    store.blobs.put(initial)
    store.runs.publish_contract(RUN, contract.SerializeToString())


@pytest.mark.long
def test_fleet_of_mixed_predictors_learns_on_given_extractor(case: Any, tmp_path: Path) -> None:
    config, store, blank, features = case
    given = torch.load(Given.weights, weights_only=True)
    unseen, _ = bright_rows(seed=9)
    with ExitStack() as stack:
        devices = devices_of(store, blank, features, tmp_path, stack)
        asyncio.run(Engine(store, config, DriveDevices(devices, lambda: None)).run())
        for device in devices:
            device.step(0.0)
            assert sorted(device.models) == sorted(("own", *ANSWERS))
            for name, model in device.models.items():
                with torch.no_grad():
                    expected = model(torch.from_numpy(unseen)).numpy()
                assert_allclose(
                    onnx_logits(device.state_dir / f"{name}.onnx", unseen), expected, atol=1e-5 * np.abs(expected).max()
                )
            tensors = device.models["general"].state_dict()
            (first,) = (one for name, one in tensors.items() if name.endswith(("extractor.0.weight", ".mixing")))
            assert torch.equal(first, given.get("conv1.weight", given.get("mixing")))
    assert {row.step for row in store.asks.uploads(RUN)} == {"summarise", "learn"}


def test_a_model_that_begins_otherwise_is_refused_at_check_in(case: Any, tmp_path: Path) -> None:
    config, store, blank, features = case
    publish(config, store)
    shape = blank().eval()(torch.zeros(1, 3, 16, 16)).shape[1:]
    layers = nn.Sequential(nn.Flatten(), nn.Linear(768, features), nn.Unflatten(1, shape))
    other = AppModel(layers, *predictors(features)[0])
    with (
        open_device(
            server=MemoryLink(DeviceApi(store)), model=other, data=bright_rows(0), state_dir=tmp_path / "d"
        ) as device,
        pytest.raises((RefusedError, ModelError), match="extractor"),
    ):
        device.step(0.0)


@pytest.mark.long
def test_before_the_first_delivery_there_is_only_the_own_network(case: Any, tmp_path: Path) -> None:
    config, store, blank, features = case
    publish(config, store)
    with ExitStack() as stack:
        device = devices_of(store, blank, features, tmp_path, stack)[0]
        assert list(device.models) == ["own"]
        assert device.models.get("personal", device.model) is device.models["own"]
        with pytest.raises(ModelError, match=r"no 'personal' model, only own; .*models.get\('personal'"):
            device.models["personal"]


# --- images outside [0, 1]


def prepared(input_shape: Sequence[int]) -> nn.Module:
    return nn.Sequential(ImageInputs(input_shape, 8, [0.5] * 3, [0.25] * 3), nn.AvgPool2d(4))


@pytest.mark.parametrize(("scale", "warned"), [(1, False), (255, True)])
def test_images_outside_the_range_are_warned_about(scale: int, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    config = run_config(
        {
            "run": {"name": RUN, "method": "classstats"},
            "contract": {"classes": CLASSES, "input_shape": [3, 16, 16]},
            "model": {"extractor": f"{__name__}:prepared"},
            "method": {"features": "model"},
            "server": {"torch_device": "cpu"},
        }
    )
    contract, _, file = make_contract(config, build_method(config))
    images, labels = np.random.default_rng(0).random((6, 3, 16, 16), np.float32), np.arange(6) % CLASSES
    model = AppModel(prepared([3, 16, 16]), nn.Linear(12, CLASSES))
    TorchCompute(contract, model=TorchModel(model), data=Splits((images * scale, labels)))
    assert ["needs [0, 1]" in record.getMessage() for record in caplog.records] == [True] * warned
    caplog.clear()
    assert file is not None
    light = extractor_of(decode(file), contract.input_shape, 1)
    for _ in range(2):  # it warns once
        light.of(images * scale)
    assert ["needs [0, 1]" in record.getMessage() for record in caplog.records] == [True] * warned
