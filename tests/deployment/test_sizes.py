"""A device whose model accepts inputs of any size: predictions and files do too, if the app wants that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.hostile_server import CLASSES, LyingLink, ask, device_at, terms
from torch import nn

from fleetdistill import Deployment, Device, Predictor
from fleetdistill.errors import DataError
from fleetdistill.training.model import split_sequential

IMAGES = np.random.default_rng(0).random((12, 1, 6, 6)).astype(np.float32)
LARGER = np.random.default_rng(1).random((3, 1, 9, 14)).astype(np.float32)


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return split_sequential(nn.Sequential(*layers, nn.Linear(5, CLASSES)), 3)


def delivered(state_dir: Path, deployment: Deployment) -> Device:
    answer = terms()
    answer.contract.input_shape[:] = IMAGES.shape[1:]
    device, _ = device_at(
        LyingLink(ask(), terms=answer),
        state_dir,
        model=convolutional,
        data=(IMAGES, np.arange(12) % CLASSES),
        export="round",
        deployment=deployment,
    )
    device.step(0)
    return device


def test_with_dynamic_size_inputs_may_have_any_size(tmp_path: Path) -> None:
    with delivered(tmp_path, Deployment(dynamic_size=True)) as device:
        predictor = Predictor(tmp_path)
        for inputs in (IMAGES, LARGER):
            logits = device.predict(inputs)
            assert logits.shape == (len(inputs), CLASSES)
            np.testing.assert_allclose(predictor.predict(inputs), logits, atol=1e-5)
        with pytest.raises(DataError, match=r"expected \[samples, 1, any, any\]"):
            device.predict(np.repeat(LARGER, 3, axis=1))


def test_by_default_inputs_have_the_runs_size(tmp_path: Path) -> None:
    with delivered(tmp_path, Deployment()) as device:
        for predict in (device.predict, Predictor(tmp_path).predict):
            with pytest.raises(DataError, match=r"shape \[3, 1, 9, 14\], expected \[samples, 1, 6, 6\]"):
                predict(LARGER)
