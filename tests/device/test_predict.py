"""`Device.predict`: from any thread, while the device trains and across deliveries, with one delivered model each."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.hostile_server import CLASSES, DATA, LyingLink, ask, device_at, model, terms
from support.open_device import open_device
from support.processes import PATIENCE_SECONDS
from support.small_device import SmallWorker
from torch import Tensor, nn

from fleetdistill import Event, Predictor
from fleetdistill.compute import light_worker
from fleetdistill.compute.torch_compute import FrozenModel, TorchCompute
from fleetdistill.deployment.batch import check_batch, check_logits
from fleetdistill.errors import DamagedStateError, DataError, LinkError, ModelError
from fleetdistill.models import build_model
from fleetdistill.testing import FaultyLink, lost_reply
from fleetdistill.training.model import output_shape, place_of_inputs, split_sequential
from fleetdistill_server.testing import MemoryServer

ROUNDS, THREADS = 12, 3
BATCH = np.random.default_rng(1).random((5, 4)).astype(np.float32)


def logits_of(module: Any) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(module(torch.from_numpy(BATCH)).numpy())


def test_a_model_that_no_run_accepts_does_not_predict(tmp_path: Path) -> None:
    """Else the app would learn it from its first check-in, perhaps in the field."""
    device, _ = device_at(LyingLink(), tmp_path, model=lambda: nn.Sequential(nn.Linear(4, CLASSES)))
    with device, pytest.raises(ModelError, match=r"Sequential lacks features, predict, extractor; use wrap\(model"):
        device.predict(BATCH)


def test_every_prediction_is_that_of_exactly_one_delivered_model(tmp_path: Path) -> None:
    over, versions = threading.Event(), [logits_of(model().eval())]

    def keep(event: Event) -> None:
        if event.kind == "delivered":
            versions.append(logits_of(device.model))
            np.testing.assert_array_equal(device.predict(BATCH), versions[-1], "the event comes after the swap")

    def predict() -> list[tuple[int, np.ndarray, int]]:
        result: list[tuple[int, np.ndarray, int]] = []
        while not over.wait(0.001) or not result:
            result.append((device.version, device.predict(BATCH), device.version))
        return result

    asks = [ask(round=number) for number in range(1, ROUNDS + 1)]
    device, _ = device_at(LyingLink(*asks), tmp_path, on_event=keep)
    with device, ThreadPoolExecutor(THREADS) as threads:
        predicting = [threads.submit(predict) for _ in range(THREADS)]
        try:
            device.run()
        finally:
            over.set()
        results = [item for each in predicting for item in each.result(PATIENCE_SECONDS)]
    assert len(versions) == ROUNDS + 1
    assert all(np.abs(a - b).max() > 1e-4 for a, b in itertools.pairwise(versions))
    for before, result, after in results:
        (number,) = [i for i, version in enumerate(versions) if np.allclose(result, version, rtol=0, atol=1e-6)]
        assert before <= number <= after, "the version changes at the same moment"


class Wide(nn.Module):
    """A model whose first layer has 1 MiB of outputs per row; its batches are global: modules are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 2**18), nn.AdaptiveAvgPool1d(2))

    def forward(self, x: Tensor) -> Tensor:
        wide_batches.append(len(x))
        return self.layers(x)


wide_batches: list[int] = []


def test_a_large_batch_is_predicted_in_parts() -> None:
    module, inputs = Wide(), np.random.default_rng(2).random((100, 4), np.float32)
    wide_batches.clear()
    result = FrozenModel(module, (4,))(inputs)
    assert wide_batches == [2, 63, 37]  # 64 MiB are 63 rows of 1 MiB and 16 bytes; the first two are measured
    with torch.no_grad():
        expected = module(torch.from_numpy(inputs[-5:])).numpy()
    np.testing.assert_allclose(result[-5:], expected, rtol=1e-4, atol=1e-5)


gate = {"entered": threading.Event(), "open": threading.Event()}


class Gate(nn.Module):
    """Stops a training step until the test opens the gate. The events are global: modules are copied."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            gate["entered"].set()
            assert gate["open"].wait(PATIENCE_SECONDS)
        return x


def gated_model() -> nn.Module:
    torch.manual_seed(0)
    return split_sequential(nn.Sequential(nn.Linear(4, 5), Gate(), nn.ReLU(), nn.Linear(5, CLASSES)), 3)


def test_a_prediction_does_not_wait_for_training(tmp_path: Path) -> None:
    for item in gate.values():
        item.clear()
    device, events = device_at(LyingLink(ask()), tmp_path, model=gated_model)
    with device, ThreadPoolExecutor(1) as background:
        running = background.submit(device.run)
        try:
            assert gate["entered"].wait(PATIENCE_SECONDS)
            before = device.predict(BATCH)
            np.testing.assert_array_equal(before, device.predict(BATCH))
            assert events.texts("delivered") == []
        finally:
            gate["open"].set()
        running.result(PATIENCE_SECONDS)
        assert not np.array_equal(device.predict(BATCH), before)


def test_logits_come_in_the_type_of_the_inputs(tmp_path: Path) -> None:
    device, _ = device_at(LyingLink(ask()), tmp_path)
    with device:
        array = device.predict(BATCH.astype(np.float64))
        tensor = device.predict(torch.from_numpy(BATCH))
        assert (array.dtype, array.shape) == (np.float32, (5, CLASSES))
        assert (tensor.dtype, tensor.requires_grad) == (torch.float32, False)
        np.testing.assert_array_equal(array, tensor.numpy())
        assert device.predict(BATCH[:0]).shape == (0, CLASSES)


ARRAYS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mirrored": lambda batch: batch[:, ::-1].copy()[:, ::-1],
    "every second row": lambda batch: np.repeat(batch, 2, axis=0)[::2],
    "other byte order": lambda batch: batch.astype(">f4"),
    "other byte order of 8 bytes": lambda batch: batch.astype(">f8"),
    "long double": lambda batch: batch.astype(np.longdouble),
    "columns first": np.asfortranarray,
    "read-only": lambda batch: np.frombuffer(batch.tobytes(), np.float32).reshape(batch.shape),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", ARRAYS)
def test_any_array_of_floats_gives_the_same_logits(tmp_path: Path, form: str) -> None:
    device, _ = device_at(LyingLink(ask()), tmp_path, export="round")
    with device:
        for _ in range(2):  # before and after the delivery
            np.testing.assert_array_equal(device.predict(ARRAYS[form](BATCH)), device.predict(BATCH))
            device.run()
        predictor = Predictor(tmp_path)
        np.testing.assert_array_equal(predictor.predict(ARRAYS[form](BATCH)), predictor.predict(BATCH))


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (np.zeros((2, 5), np.float32), r"shape \[2, 5\], expected \[samples, 4\]$"),
        (np.zeros(4, np.float32), r"shape \[4\], expected \[samples, 4\]; a single sample is a batch of 1"),
        (
            np.array([[0, 0, 0, 0], [0, 0, np.nan, 0]], np.float32),
            "the inputs contain NaN or infinite values, .* row 1",
        ),
        (torch.tensor([[0.0, float("inf"), 0, 0]]), "the inputs contain NaN or infinite values, first in row 0"),
        (np.zeros((2, 4), np.uint8), "the inputs are uint8, expected an array of floats"),
        ([[0.0] * 4], "the inputs are list, expected an array of floats"),
    ],
)
def test_other_inputs_are_refused(tmp_path: Path, inputs: Any, sentence: str) -> None:
    device, _ = device_at(LyingLink(ask()), tmp_path)
    with device:
        with pytest.raises((DataError, ModelError)):  # the shape is known with the run
            device.predict(inputs)
        device.run()
        with pytest.raises(DataError, match=sentence):
            device.predict(inputs)


class Twofold(nn.Module):
    """Returns its inputs twice."""

    def forward(self, x: Tensor) -> Any:
        return x, x


@pytest.mark.parametrize("rows", [3, 40])
def test_a_model_that_returns_no_tensor_is_an_error_everywhere(tmp_path: Path, rows: int) -> None:
    layers = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, CLASSES), Twofold())
    device, _ = device_at(LyingLink(ask()), tmp_path, model=split_sequential(layers, 1))
    inputs = np.zeros((rows, 4), np.float32)
    with device:
        for give in (device.predict, lambda inputs: device.predict(torch.from_numpy(inputs))):
            with pytest.raises(ModelError, match="tuple"):
                give(inputs)
        with pytest.raises(ModelError, match=r"\(x\) returns a tuple, expected a tensor alone"):
            device.run()


class Overflowing(nn.Module):
    """Leaves numbers as they are, and makes NaN of large ones."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1e38 - x * 1e38) + x


def test_a_model_that_gives_nan_is_an_error(tmp_path: Path) -> None:
    """Of NaN, argmax would make a class; infinity may be a class that the model excludes."""
    overflowing = np.vstack([BATCH[:1], np.full((1, 4), 1e6, np.float32)])
    layers = nn.Sequential(nn.Linear(4, 5), Overflowing(), nn.Linear(5, CLASSES))
    device, _ = device_at(LyingLink(ask()), tmp_path, export="round", model=split_sequential(layers, 2))
    with device:
        for give in (device.predict, lambda inputs: device.predict(torch.from_numpy(inputs))):
            with pytest.raises(ModelError, match=r"the model gives NaN, first for row 1, .* check the scale of the in"):
                give(overflowing)
        device.run()
        assert np.isfinite(device.predict(BATCH)).all()
    with pytest.raises(ModelError, match="the model gives NaN, first for row 1"):
        Predictor(tmp_path).predict(overflowing)
    check_logits(np.array([[0.0, -np.inf], [np.inf, 0.0]]))


@pytest.mark.parametrize(
    ("shape", "remedy"),
    [
        ((2, 8, 8), "; reshape them with inputs.reshape(-1, 1, 8, 8)"),
        ((1, 8, 8), "; reshape them with inputs.reshape(-1, 1, 8, 8)"),
        (
            (2, 8, 8, 1),
            "; reorder the axes with inputs.transpose(0, 3, 1, 2), or permute of a tensor, and do not reshape",
        ),
        ((3, 8, 8), "; reshape them with inputs.reshape(-1, 1, 8, 8)"),
        ((2, 3, 8, 8), ""),
    ],
)
def test_images_of_another_shape_are_told_how_to_change(shape: tuple[int, ...], remedy: str) -> None:
    with pytest.raises(DataError) as error:
        check_batch(np.zeros(shape, np.float32), (1, 8, 8))
    assert str(error.value) == f"the inputs have shape {list(shape)}, expected [samples, 1, 8, 8]{remedy}"


def wider() -> nn.Module:
    return split_sequential(nn.Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, CLASSES)), 2)


class CountingLink(LyingLink):
    """Counts check-ins."""

    check_ins = 0

    def check_in(self, identity: Any, profile: Any) -> Any:
        self.check_ins += 1
        return super().check_in(identity, profile)


@pytest.mark.parametrize("given", [wider, wider()])
def test_updated_network_is_told_before_the_device_takes_part(tmp_path: Path, given: Any) -> None:
    """A check-in would describe the new model, so that the next start would no longer notice."""
    device, _ = device_at(LyingLink(ask()), tmp_path)
    with device:
        device.run()
    for _ in range(2):
        link = CountingLink(ask())
        device, _ = device_at(link, tmp_path, model=given)
        read, step = lambda: device.model, device.step  # noqa: B023
        for use in (step, step, lambda: device.predict(BATCH), read, step):  # noqa: B023
            with pytest.raises(ModelError, match=r"^the saved state is of another model: .* call device\.forget\(\)"):
                use()
        assert not link.check_ins
        device.close()
    device, _ = device_at(link, tmp_path, model=given)
    device.forget()
    device, _ = device_at(link, tmp_path, model=given)
    with device:
        device.run()
        assert device.version == 1


def damage_nothing(state_dir: Path) -> None:
    pass


def damage_state(state_dir: Path) -> None:
    (state_dir / "state.safetensors").write_bytes(b"\xff" * 100)


def lose_state(state_dir: Path) -> None:
    (state_dir / "state.safetensors").unlink()


@pytest.mark.parametrize(
    ("harm", "given", "error"),
    [
        (damage_nothing, wider, ModelError),
        (damage_state, model, DamagedStateError),
        (lose_state, model, DamagedStateError),
    ],
)
def test_delivered_file_predicts_when_the_state_cannot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Any, given: Any, error: type[Exception]
) -> None:
    device, _ = device_at(LyingLink(ask()), tmp_path, export="round")
    with device:
        device.run()
        logits = device.predict(BATCH)
    harm(tmp_path)
    device, _ = device_at(LyingLink(ask(round=2)), tmp_path, model=given, export="round")
    with device:
        np.testing.assert_allclose(device.predict(BATCH), logits, atol=1e-5)
        with pytest.raises(error):
            device.step(0)
        np.testing.assert_allclose(device.predict(torch.from_numpy(BATCH).double()).numpy(), logits, atol=1e-5)
        np.testing.assert_allclose(Predictor(tmp_path).predict(BATCH), logits, atol=1e-5)
        with pytest.raises(DataError, match=r"the inputs are torch\.int64"):
            device.predict(torch.zeros(1, 4, dtype=torch.int64))
    warnings = [record.message for record in caplog.records if "predictions go on with model.onnx" in record.message]
    assert len(warnings) == 1
    assert warnings[0].startswith("predictions go on with model.onnx, version 1, because of an error: ")
    (tmp_path / "model.onnx").unlink()
    device, _ = device_at(LyingLink(), tmp_path, model=given, export="round")
    with device, pytest.raises(error):
        device.predict(BATCH)


def test_network_that_torch_is_loaded_for_later_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle device does not load torch: it finds out at its first ask, before it describes the new model."""
    device, _ = device_at(LyingLink(ask()), tmp_path)
    with device:
        device.run()
    known = (tmp_path / "profile.bin").read_bytes()
    monkeypatch.setattr("fleetdistill.device.backend.get_loaded", lambda name: None)
    device, _ = device_at(LyingLink(ask()), tmp_path, model=wider)
    with device, pytest.raises(ModelError, match=r"^the saved state is of another model: "):
        device.step()
    assert (tmp_path / "profile.bin").read_bytes() == known


@pytest.mark.parametrize(
    ("data", "advice"),
    [
        ((DATA[0][:, :3], DATA[1]), "the training data have this shape, too: reshape both as the model takes them"),
        (lambda: DATA, r"pass \[samples, \*input_shape\], as the model's first layer takes it"),
    ],
)
def test_what_the_apps_own_model_takes_is_told(tmp_path: Path, data: Any, advice: str) -> None:
    device, _ = device_at(LyingLink(ask()), tmp_path, data=data)
    with device, pytest.raises(ModelError, match=rf"cannot process a batch of shape \[5, 3\]: .*; {advice}"):
        device.predict(BATCH[:, :3])


def test_shape_is_checked_before_a_delivery_as_afterwards(tmp_path: Path) -> None:
    device, _ = device_at(LyingLink(ask()), tmp_path)
    with device:
        for _ in range(2):
            with pytest.raises(DataError, match=r"^the inputs have shape \[5, 3\], expected \[samples, 4\]"):
                device.predict(BATCH[:, :3])
            device.run()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    result = [record.message for record in caplog.records if "the inputs of predict" in record.message]
    caplog.clear()
    return result


SCALED = np.random.default_rng(0).random((64, 4)).astype(np.float32)
SCALED.flat[:2] = 0, 1
PIXELS = np.full((2, 4), 255, np.float32)
PIXELS[0, 0] = 0


def test_inputs_of_another_scale_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before and after a delivery, after a restart, and in another process."""
    data = (SCALED, np.arange(64) % CLASSES)
    device, _ = device_at(LyingLink(ask()), tmp_path, data=data, export="round")
    with device:
        for _ in range(2):
            device.predict(SCALED * 3 - 1)
            device.predict(PIXELS[:0])
            assert warnings_of(caplog) == []
            device.predict(torch.from_numpy(PIXELS))
            device.predict(PIXELS)
            (warned,) = warnings_of(caplog)
            assert "values in [0, 255], but the training data in [0, 1]" in warned
            device.run()
    restarted, _ = device_at(LyingLink(), tmp_path, data=data)
    with restarted:
        restarted.predict(PIXELS)
        assert len(warnings_of(caplog)) == 1
    predictor = Predictor(tmp_path)
    predictor.predict(SCALED)
    assert warnings_of(caplog) == []
    predictor.predict(PIXELS)
    predictor.predict(PIXELS)
    (warned,) = warnings_of(caplog)
    assert "values in [0, 255], but the training data in [0, 1]" in warned


@pytest.mark.parametrize(("form", "known"), [(lambda data: lambda: data, 1), (lambda data: [], 0)])
def test_scale_is_known_once_the_data_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, form: Callable[[Any], Any], known: int
) -> None:
    """Of a function with the first answer, and without data never."""
    device, _ = device_at(LyingLink(ask()), tmp_path, data=form((SCALED, np.arange(64) % CLASSES)))
    with device:
        device.predict(PIXELS)
        assert warnings_of(caplog) == []
        device.step(0)
        device.predict(PIXELS)
        assert len(warnings_of(caplog)) == known


def test_predictions_go_on_without_server_and_after_data_change(tmp_path: Path) -> None:
    link = FaultyLink(LyingLink(ask(round=1), ask(round=2)), lost_reply("upload"))
    device, _ = device_at(link, tmp_path)
    with device:
        before = device.predict(BATCH)
        with pytest.raises(LinkError):
            device.step(0)
        np.testing.assert_array_equal(device.predict(BATCH), before, "no receipt, no delivery")
        device.replace_data((DATA[0] + 1, DATA[1]))
        np.testing.assert_array_equal(device.predict(BATCH), before)
        device.step(0)  # settles the answer, with a compute backend of other data
        after = device.predict(BATCH)
        np.testing.assert_array_equal(after, logits_of(device.model))
        assert not np.array_equal(after, before)


def test_a_worker_that_cannot_predict_says_so(tmp_path: Path) -> None:
    changes = {"model": None, "data": None, "worker": SmallWorker}
    device, _ = device_at(LyingLink(ask(), terms=terms()), tmp_path, **changes)
    with device:
        with pytest.raises(ModelError, match="no model yet: its worker gets one from the run"):
            device.predict(BATCH)
        device.run()
        with pytest.raises(ModelError, match="SmallWorker does not support predict; add the method frozen_model"):
            device.predict(BATCH)


def test_default_class_statistics_predict_before_after_delivery(tmp_path: Path) -> None:
    """Their model in closed form has buffers only."""
    settings: dict[str, Any] = {"run": {"method": "classstats"}, "contract": {"classes": 10, "input_shape": [1, 8, 8]}}
    images = np.random.default_rng(0).random((60, 1, 8, 8), dtype=np.float32)
    network, data = partial(build_model, "digits_mlp_small"), (images, np.arange(60) % 10)
    with (
        MemoryServer(settings) as server,
        open_device(server=server.link(), model=network, data=data, state_dir=tmp_path) as device,
    ):
        before = device.predict(images[:3])
        device.run()
        after = device.predict(images[:3])
        np.testing.assert_array_equal(after, device.models["general"](torch.from_numpy(images[:3])).numpy())
        np.testing.assert_allclose(after, Predictor(tmp_path).predict(images[:3]), rtol=1e-4, atol=1e-2)
    assert not np.allclose(before, after)


class OfBuffers(nn.Module):
    """A model that an app has frozen: no parameter, and an integer before the first float."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.weight: Tensor
        self.register_buffer("weight", torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(4, 10))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize(
    ("module", "dtype"), [(OfBuffers(), torch.float64), (nn.Flatten(), torch.float32), (nn.Linear(4, 3), torch.float32)]
)
def test_model_gets_its_input_type_with_or_without_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    assert place_of_inputs(module) == (torch.device("cpu"), dtype)
    with torch.no_grad():
        expected = module(torch.from_numpy(BATCH).to(dtype)).float().numpy()
    np.testing.assert_array_equal(FrozenModel(module, (4,))(BATCH), expected)
    assert output_shape(module, (4,)) == expected.shape[1:]


def test_device_without_pytorch_predicts_from_first_delivery(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run": {"method": "classstats"}, "contract": {"classes": 10, "input_shape": [1, 8, 8]}}
    images = np.random.default_rng(0).random((60, 1, 8, 8), dtype=np.float32)
    worker = light_worker((images, np.arange(60) % 10))
    with (
        MemoryServer(settings) as server,
        open_device(server=server.link(), worker=worker, state_dir=tmp_path, export="never") as device,
    ):
        with pytest.raises(ModelError, match="no model yet"):
            device.predict(images)
        device.run()
        frozen = device.predict(images[:3])
        np.testing.assert_array_equal(frozen, device.model(images[:3]))
        with pytest.raises(DataError, match="the inputs are int64"):
            device.predict(np.zeros((1, 1, 8, 8), np.int64))


def test_failed_copy_is_event_and_next_delivery_copies_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, events = device_at(LyingLink(ask(round=1), ask(round=2)), tmp_path)
    with device:
        before = device.predict(BATCH)
        with monkeypatch.context() as patch:
            patch.setattr(TorchCompute, "frozen_model", lambda self: next(iter(())))  # a StopIteration
            device.step(0)
        np.testing.assert_array_equal(device.predict(BATCH), before)
        assert (device.version, len(events.texts("delivered")), len(events.texts("not-copied"))) == (1, 1, 1)
        device.run()
        np.testing.assert_array_equal(device.predict(BATCH), logits_of(device.model))
    assert (len(events.texts("delivered")), len(events.texts("not-copied"))) == (2, 1)
