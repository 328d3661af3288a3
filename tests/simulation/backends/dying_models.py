"""Device models whose first computations kill the worker process that does them."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.fleets import SMALL
from torch import Tensor

from fleetdistill.models import build_model

PARENT, DEATHS = "FLEETDISTILL_TESTS_PARENT", "FLEETDISTILL_TESTS_DEATHS"
"""Variables with the id of the process that survives, and a folder with a file for each death that is still due."""
_MODEL = "simulation.backends.dying_models:dying_mlp"
DYING = replace(SMALL, method="feddkc", devices=3, train_limit=90, models=(_MODEL,))
"""Devices of FedDKC keep their optimiser, so a state that is lost or used twice changes the result."""


def deaths(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> Path:
    """Makes the next trainings of other processes die, and returns the folder with a file for each one still due."""
    due = folder / "due"
    due.mkdir()
    for item in range(number):
        (due / str(item)).touch()
    monkeypatch.setenv(DEATHS, str(due))
    monkeypatch.setenv(PARENT, str(os.getpid()))
    return due


class _Dying(torch.autograd.Function):
    """Does nothing, but for a SIGKILL in the backward pass: in the middle of a training."""

    @staticmethod
    def forward(context: object, inputs: Tensor) -> Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(context: object, *gradients: Tensor) -> Tensor:
        due = sorted(Path(os.environ[DEATHS]).iterdir())
        if due and os.getpid() != int(os.environ[PARENT]):
            with contextlib.suppress(FileNotFoundError):  # another process dies for this file
                due[0].unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return gradients[0]


def dying_mlp(input_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    """A small built-in model that dies while it is trained, as often as there are files in the folder."""
    model = build_model("digits_mlp_small", input_shape=input_shape, classes=classes)
    model.register_forward_hook(lambda module, args, result: _Dying.apply(result))
    return model
