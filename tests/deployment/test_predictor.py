"""`Predictor`: the newest complete file, with onnxruntime alone, from any thread and any process."""

from __future__ import annotations

import json
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from deployment.deployed import BATCH, device_of, file_of, logits_of
from hypothesis import given
from hypothesis import strategies as st
from support.hostile_server import CLASSES
from support.open_device import open_device
from support.processes import PATIENCE_SECONDS, python

from fleetdistill import Predictor
from fleetdistill.compute import light_worker
from fleetdistill.deployment.stamp import check_stamp, stamp
from fleetdistill.errors import ConfigurationError, DataError, ModelError, StateError
from fleetdistill_server.testing import MemoryServer


def put(data: bytes, path: Path) -> None:
    """As a device does: complete under another name, then renamed."""
    path.with_suffix(".tmp").write_bytes(data)
    path.with_suffix(".tmp").replace(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[int, bytes]:
    folder = tmp_path_factory.mktemp("files")
    return {version: file_of(version, folder) for version in (1, 2, 3)}


# --- the digest at the end of a file


@given(data=st.binary(max_size=60), cut=st.integers(0, 200), position=st.integers(0, 200), bit=st.integers(0, 7))
def test_no_damaged_file_passes_for_a_complete_one(data: bytes, cut: int, position: int, bit: int) -> None:
    whole = stamp(data, {"version": "12", "quantized": "x" * 200})
    check_stamp(whole)
    flipped = bytearray(whole)
    flipped[position % len(whole)] ^= 1 << bit
    for damaged in (bytes(flipped), whole[: cut % len(whole)], whole + b"\0", data):
        with pytest.raises(ModelError, match="incomplete or damaged"):
            check_stamp(damaged)


def test_a_stamped_file_is_valid_onnx_with_its_metadata(files: dict[int, bytes]) -> None:
    proto = onnx.load_model_from_string(files[2])
    onnx.checker.check_model(proto, full_check=True)
    metadata = {prop.key: prop.value for prop in proto.metadata_props}
    assert (metadata["version"], metadata["round"], len(metadata["sha256"])) == ("2", "2", 64)


# --- with a device


def test_it_follows_the_deliveries_of_a_device(tmp_path: Path) -> None:
    device, events = device_of(tmp_path, range(7, 9))
    with device:
        predictor = Predictor(tmp_path)
        assert not predictor.ready
        with pytest.raises(ModelError, match="no usable model; run the device until its event 'exported'"):
            predictor.predict(BATCH)
        result = []
        for _ in range(2):
            device.step(0)
            result.append(predictor.predict(BATCH.astype(np.float64)))
            np.testing.assert_allclose(result[-1], device.predict(BATCH), atol=1e-5)
            assert predictor.version == device.version == len(result)
        assert np.abs(result[0] - result[1]).max() > 1e-4
    model = predictor.model
    assert (model.version, model.round, model.variant, model.run) == (2, 8, "", "lying")
    assert (model.class_names, model.input_shape, model.quantized) == (("0", "1", "2"), (4,), "")
    assert [event.values["version"] for event in events if event.kind == "exported"] == [1, 2]


CHILD = """
import json, sys
from pathlib import Path
from support.without_torch import block
block("torch", "onnx", "safetensors", "grpc", "google", "fleetdistill_server")
import numpy as np
from fleetdistill import Predictor
predictor = Predictor({folder!r})
logits = predictor.predict(np.array({inputs!r}, np.float32))
print(json.dumps([predictor.version, predictor.round, predictor.variant, logits.tolist(), list(sys.modules)]))
"""


def test_a_process_without_torch_and_grpc_predicts(tmp_path: Path) -> None:
    device, _ = device_of(tmp_path, range(1, 2))
    with device:
        device.step(0)
        expected = device.predict(BATCH)
    version, number, variant, logits, modules = json.loads(
        python(CHILD.format(folder=str(tmp_path), inputs=BATCH.tolist()))
    )
    assert (version, number, variant) == (1, 1, "")
    np.testing.assert_allclose(np.array(logits, np.float32), expected, atol=1e-5)
    assert not {"torch", "grpc", "google", "onnx", "fleetdistill.device"} & set(modules)


def test_predicts_with_each_device_variant_without_pytorch(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run": {"method": "classstats"}, "contract": {"classes": 10, "input_shape": [1, 8, 8]}}
    images = np.random.default_rng(0).random((60, 1, 8, 8), dtype=np.float32)
    worker = light_worker((images, np.arange(60) % 10))
    with (
        MemoryServer(settings) as server,
        open_device(server=server.link(), worker=worker, state_dir=tmp_path) as device,
    ):
        device.run()
        models = dict(device.models)
        in_use = device.predict(images[:4])
    for name, model in models.items():
        predictor = Predictor(tmp_path, variant=name)
        assert (predictor.variant, predictor.version) == (name, 1)
        np.testing.assert_allclose(predictor.predict(images[:4]), model(images[:4]), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(Predictor(tmp_path).predict(images[:4]), in_use, rtol=1e-4, atol=1e-4)


# --- swaps


def test_results_of_predicting_threads_each_match_one_file(tmp_path: Path, files: dict[int, bytes]) -> None:
    path, over = tmp_path / "model.onnx", threading.Event()
    put(files[1], path)
    predictor = Predictor(tmp_path)

    def predict() -> list[np.ndarray]:
        result = []
        while not over.wait(0.0005):
            result.append(predictor.predict(BATCH))
        return result

    with ThreadPoolExecutor(4) as threads:
        predicting = [threads.submit(predict) for _ in range(4)]
        try:
            for turn in range(60):
                put(files[turn % 3 + 1], path)
                put(files[1][: 50 * turn], path)  # and a damaged one
                put(files[turn % 3 + 1], path)
                predictor.refresh()
        finally:
            over.set()
        results = [item for each in predicting for item in each.result(PATIENCE_SECONDS)]
    matches = [sum(np.allclose(result, logits_of(version), rtol=1e-5) for version in files) for result in results]
    assert results
    assert set(matches) == {1}
    put(files[2], path)
    np.testing.assert_allclose(predictor.predict(BATCH), logits_of(2), rtol=1e-5)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_a_damaged_file_keeps_the_previous_model_and_is_reported(
    tmp_path: Path, files: dict[int, bytes], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, new = tmp_path / "model.onnx", bytearray(files[2])
    put(files[1], path)
    predictor = Predictor(tmp_path)
    new[len(new) // 3] ^= 1
    damaged = {"cut": files[2][:-1], "flipped": bytes(new), "empty": b"", "foreign": stamp(b"text", {"version": "2"})}
    put(damaged[damage], path)
    with caplog.at_level(logging.WARNING, "fleetdistill"):
        assert not predictor.refresh()
        np.testing.assert_allclose(predictor.predict(BATCH), logits_of(1), rtol=1e-5)
    assert predictor.version == 1
    assert predictor.error.startswith("the file is not a valid" if damage == "foreign" else "the file is incomplete")
    assert len(caplog.records) == 1, "once, not at every prediction"
    assert predictor.error in caplog.records[0].getMessage()
    put(files[3], path)
    assert predictor.refresh()
    assert (predictor.version, predictor.error) == (3, "")


def test_a_first_file_that_is_damaged_is_named(tmp_path: Path, files: dict[int, bytes]) -> None:
    put(files[1][:100], tmp_path / "model.onnx")
    predictor = Predictor(tmp_path)
    assert not predictor.ready
    damaged = r"model.onnx has no usable model \(the file is incomplete or damaged.*'never'\) writes none, nor one"
    with pytest.raises(ModelError, match=damaged):
        predictor.predict(BATCH)


def test_ready_and_error_look_at_the_newest_file(tmp_path: Path, files: dict[int, bytes]) -> None:
    predictor = Predictor(tmp_path)
    assert (predictor.ready, predictor.error) == (False, "")
    put(files[1][:100], tmp_path / "model.onnx")
    assert predictor.error == "the file is incomplete or damaged: it does not end with the SHA-256 of its content"
    put(files[1], tmp_path / "model.onnx")
    assert (predictor.ready, predictor.error, predictor.version) == (True, "", 1)


@pytest.mark.parametrize("variant", ["model", "personal"])
def test_a_first_export_in_progress_is_no_error(
    tmp_path: Path, files: dict[int, bytes], caplog: pytest.LogCaptureFixture, variant: str
) -> None:
    """The device renames the files one after the other, `model.onnx` last."""
    predictor = Predictor(tmp_path, variant=variant)
    for name in ("general", "own", "personal", "model"):
        assert predictor.error == ""
        put(files[1], tmp_path / f"{name}.onnx")
    assert (predictor.ready, predictor.error, caplog.records) == (True, "", [])


def test_a_variant_that_does_not_exist_is_reported_once(
    tmp_path: Path, files: dict[int, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    predictor = Predictor(tmp_path, variant="persnal")
    assert (predictor.ready, predictor.error) == (False, ""), "the device has exported nothing yet"
    for name in ("model", "general", "personal"):
        put(files[1], tmp_path / f"{name}.onnx")
    for _ in range(3):
        assert not predictor.refresh()
    meant = "no variant 'persnal' was exported; did you mean 'personal'? There are general, model, personal"
    assert predictor.error == meant
    (record,) = caplog.records
    assert record.getMessage() == f"{tmp_path / 'persnal.onnx'} does not exist; {predictor.error}"
    with pytest.raises(ModelError) as error:
        predictor.predict(BATCH)
    assert str(error.value) == f"{tmp_path / 'persnal.onnx'} does not exist; {meant}"
    put(files[1], tmp_path / "persnal.onnx")
    assert predictor.refresh()
    assert predictor.error == ""


def test_a_model_that_disappears_remains_in_use(tmp_path: Path, files: dict[int, bytes]) -> None:
    put(files[1], tmp_path / "model.onnx")
    predictor = Predictor(tmp_path)
    os.remove(tmp_path / "model.onnx")
    assert predictor.predict(BATCH).shape == (5, CLASSES)


# --- errors


def test_wrong_arguments_and_inputs_are_refused(tmp_path: Path, files: dict[int, bytes]) -> None:
    with pytest.raises(StateError, match="absent does not exist; use the device's state_dir"):
        Predictor(tmp_path / "absent")
    with pytest.raises(ConfigurationError, match=r"variant is '\.\./x', must be 1 to 64 letters"):
        Predictor(tmp_path, variant="../x")
    with pytest.raises(ConfigurationError, match="threads is 0, must be at least 1"):
        Predictor(tmp_path, threads=0)
    put(files[1], tmp_path / "model.onnx")
    predictor = Predictor(tmp_path)
    with pytest.raises(DataError, match=r"shape \[4\], expected \[samples, 4\]; a single sample is a batch of 1"):
        predictor.predict(BATCH[0, :])
    with pytest.raises(DataError, match="the inputs are int64, expected an array of floats"):
        predictor.predict(np.zeros((1, 4), np.int64))
