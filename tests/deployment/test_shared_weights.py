"""The weights of a frozen extractor in a state directory: how often they are there, and what needs them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from deployment.shared_extractor_fleet import DEVICES, ROUNDS, Fleet, bright_rows

from fleetdistill import Predictor
from fleetdistill.device.inspection import inspect
from fleetdistill.errors import DamagedStateError, StateError
from fleetdistill.state import failpoints
from fleetdistill.state.own_files import own_files, own_folders

LIMITS = {"given": 2.1, "downloaded": 3.1, "light": 2.1}
"""One copy for all files and one in `model.onnx`; with PyTorch the app's own network if its weights are others."""
IMAGES = bright_rows(9)[0]


class Crash(Exception):
    """Stands for the moment a process dies."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"))
    made.play()
    yield made
    made.close()


@pytest.fixture
def copied(fleet: Fleet, tmp_path: Path) -> Path:
    """Copies of the state directories after the run, which a test may change."""
    shutil.copytree(fleet.folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


def predicted(directory: Path, variant: str = "model") -> np.ndarray:
    predictor = Predictor(directory, variant=variant)
    assert predictor.error == ""
    return predictor.predict(IMAGES)


@pytest.mark.parametrize("name", DEVICES)
def test_a_state_folder_has_few_copies_of_the_weights(fleet: Fleet, name: str, copied: Path) -> None:
    with fleet.open(name) as device:
        device.predict(IMAGES)
        device.step(0.0)
        fleet.note(name, "restarted")
        for change, version in ((device.roll_back, 1), (device.roll_forward, ROUNDS)):
            change()
            device.step(0.0)
            fleet.note(name, change.__name__)
            assert device.version == Predictor(device.state_dir).version == version
    moments = fleet.copies[name]
    assert {"version 0", "version 1", f"version {ROUNDS}", "restarted", "roll_back", "roll_forward"} <= moments.keys()
    assert max(moments.values()) < LIMITS[name], moments


@pytest.mark.parametrize("name", DEVICES)
def test_each_file_is_loaded_by_onnxruntime_alone(fleet: Fleet, name: str, copied: Path) -> None:
    whole = onnxruntime.InferenceSession((copied / name / "model.onnx").read_bytes())
    with fleet.open(name, copied) as device:
        device.predict(IMAGES)
        for variant, model in device.models.items():
            with torch.no_grad():
                expected = np.asarray(model(IMAGES if name == "light" else torch.from_numpy(IMAGES)))
            session = onnxruntime.InferenceSession(str(copied / name / f"{variant}.onnx"))
            for logits in (session.run(["logits"], {"input": IMAGES})[0], predicted(copied / name, variant)):
                np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    logits = whole.run(["logits"], {"input": IMAGES})[0]
    np.testing.assert_allclose(logits, predicted(copied / name, "general"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", DEVICES)
def test_a_killed_roll_back_restores_the_file_byte_for_byte(
    fleet: Fleet, name: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hit(point: str) -> None:
        if point == "device.roll-back.after-file":
            raise Crash

    device = fleet.open(name, copied)
    assert device.roll_back() == 1
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "hit", hit)
        with pytest.raises(Crash):
            device.step(0.0)
    device.close(leave=False)
    with fleet.open(name, copied) as device:
        device.step(0.0)
        assert (copied / name / "model.onnx").read_bytes() == fleet.first[name]
        np.testing.assert_allclose(device.predict(IMAGES), predicted(copied / name), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("missing", [False, True], ids=["damaged", "missing"])
@pytest.mark.parametrize("name", ["given", "downloaded"])
def test_model_onnx_does_without_the_shared_weights(fleet: Fleet, name: str, copied: Path, missing: bool) -> None:
    directory = copied / name
    expected = predicted(directory)
    weights = sorted((directory / "weights").iterdir(), key=lambda path: path.stat().st_size)
    for path in weights:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.unlink() if missing else path.write_bytes(content)
    assert any("weights/" in text for text in inspect(directory).damage)
    assert not Predictor(directory, variant="personal").ready
    np.testing.assert_array_equal(predicted(directory), expected)
    with fleet.open(name, copied) as device:
        np.testing.assert_array_equal(device.predict(IMAGES), expected)
        with pytest.raises(StateError, match="weights/"):
            device.roll_back()
        with pytest.raises(DamagedStateError, match="weights/"):
            device.models["general"]


def test_a_lost_extractor_file_is_downloaded_and_used_again(fleet: Fleet, copied: Path) -> None:
    directory = copied / "light"
    expected = predicted(directory, "personal")
    payload = max((directory / "downloads").iterdir(), key=lambda path: path.stat().st_size)
    payload.unlink()
    assert not Predictor(directory, variant="personal").ready
    with fleet.open("light", copied) as device:
        assert device.roll_back() == 1
        device.step(0.0)
        device.roll_forward()
        device.step(0.0)
    assert payload.exists()
    np.testing.assert_allclose(predicted(directory, "personal"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DEVICES)
def test_an_erasure_leaves_no_weights_behind(copied: Path, name: str) -> None:
    directory = copied / name
    found = set(directory.rglob("*"))
    assert found == {*own_files(directory), *own_folders(directory)}
