"""A private device without PyTorch: it computes the same rows as one with PyTorch, and needs no torch for its noise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.private_fleet import CLASSES, SIZE, PrivateFleet

from fleetdistill.compute import light_worker
from fleetdistill.knowledge import NetworkFile, PrivateRows
from fleetdistill.methods import config_of_contract
from fleetdistill.methods.base import Ask, Local
from fleetdistill.methods.classstats_private.device import ClassStatsPrivateDevice
from fleetdistill.models import build_model
from fleetdistill.privacy.accountant import mu_for
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import check_local_model
from fleetdistill.wire.codec import decode
from fleetdistill.wire.v1 import service_pb2

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def fleet():
    return PrivateFleet(epsilon=20.0)


def data():
    random = np.random.default_rng(0)
    return random.random((60, 1, 8, 8)).astype(np.float32), np.arange(60) % CLASSES


def extractor_of(fleet):
    parts = decode(fleet.store.blobs.open(fleet.contract.extractor_file))
    assert isinstance(parts["extractor"], NetworkFile)
    return parts


def test_both_compute_the_same_rows(fleet):
    light = light_worker(data())(fleet.contract)
    light.take_payload(fleet.contract.extractor_file, extractor_of(fleet))
    module = build_model("digits_linear", classes=CLASSES)
    tensors = TensorData(torch.from_numpy(data()[0]), torch.from_numpy(data()[1]))
    local = Local(
        model=module,
        taps=check_local_model(module),
        data=tensors,
        classes=CLASSES,
        torch_device=torch.device("cpu"),
    )
    half = ClassStatsPrivateDevice(config_of_contract(fleet.contract), local)
    result = light.answer(service_pb2.Ask(round=1, step="summarise"), {}, ()).answer.parts["statistics"]
    expected = half.handle(Ask(round=1, step="summarise", seed=1)).parts["statistics"]
    assert isinstance(result, PrivateRows)
    assert isinstance(expected, PrivateRows)
    assert result.rows == pytest.approx(expected.rows, abs=1e-3)
    assert np.array_equal(result.labels, expected.labels)


def test_a_release_loads_no_torch(fleet, tmp_path):
    inputs, labels = data()
    np.savez(tmp_path / "data.npz", inputs=inputs, labels=labels)
    (tmp_path / "contract.bin").write_bytes(fleet.contract.SerializeToString())
    (tmp_path / "extractor.onnx").write_bytes(extractor_of(fleet)["extractor"].onnx.tobytes())
    paths = os.pathsep.join(str(ROOT / name) for name in ("client_sdk", "server", "tests"))
    command = [sys.executable, str(ROOT / "tests/light/light_process.py"), "released", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not set(json.loads((tmp_path / "modules.json").read_text())) & {"torch", "onnx", "fleetdistill_server"}
    with np.load(tmp_path / "sums.npz") as sums:
        assert sums["sums"].shape == (CLASSES, SIZE)
        assert sums["mu"] == mu_for(20, 1e-5)
        assert sums["counts"].sum() == pytest.approx(60, abs=15), "nine deviations of the noise of three counts"
    assert len(json.loads((tmp_path / "privacy.json").read_text())["releases"]) == 1
