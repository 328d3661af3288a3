"""The worked examples run and show what they say."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.forked import ForkedProgram
from support.outside import EXAMPLES, fresh_process
from torch import nn

from fleetdistill.methods.base import Ask, Local
from fleetdistill.training import split_sequential
from fleetdistill.training.local_training import as_tensor_data
from fleetdistill.training.parameters import model_parameters


def run(name: str, folder: Path, *options: str) -> str:
    """What an example prints that is run as a script; its files go to `folder`/out."""
    program = ForkedProgram([EXAMPLES / f"{name}.py", *options, "--out", folder / "out"], folder / "log")
    program.start()
    try:
        assert program.ended() == 0, program.said
    finally:
        program.kill()
    return program.said


@pytest.mark.long
@pytest.mark.slow
def test_own_method_with_mu_0_is_fedavg_and_with_another_is_not(tmp_path: Path) -> None:
    shown = run("own_method", tmp_path, "--rounds", "1")
    rates = dict(re.findall(r"^(.+?) +global model ([\d.]+%)$", shown, flags=re.M))
    assert list(rates) == ["FedAvg", "FedProx, mu = 0", "FedProx, mu = 0.1", "FedProx, mu = 1"]
    assert rates["FedProx, mu = 0"] == rates["FedAvg"]
    assert rates["FedProx, mu = 1"] != rates["FedAvg"]


@pytest.mark.slow
@pytest.mark.long
def test_own_data_are_learned_by_devices_that_lack_a_class(tmp_path: Path) -> None:
    shown = run("own_data", tmp_path, "--rounds", "5")
    result = re.search(r"alone ([\d.]+)%, in the fleet ([\d.]+)%", shown)
    assert result is not None
    alone, fleet = map(float, result.groups())
    assert fleet > alone + 10
    assert sorted(np.load(tmp_path / "out" / "wine.npz").files) == ["classes", "inputs", "labels"]


@pytest.mark.long
@pytest.mark.slow
def test_own_models_train_in_a_fleet_over_grpc(tmp_path: Path) -> None:
    shown = run("own_model", tmp_path, "--rounds", "2", "--link", "grpc")
    assert re.findall(r"own_model:\w+", shown) == ["own_model:narrow", "own_model:wide"] * 2
    assert "mean accuracy" in shown


@pytest.fixture
def own_method(monkeypatch: pytest.MonkeyPatch):  # an example's module
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with fresh_process("own_method"):
        yield importlib.import_module("own_method")


def test_the_proximal_term_is_half_mu_times_the_squared_distance(own_method) -> None:
    model = nn.Linear(2, 1)
    start = [torch.zeros(1, 2), torch.zeros(1)]
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0]]))
        model.bias.fill_(2.0)
    term = own_method.proximal_term(model, start, 0.5)
    assert term.item() == pytest.approx(0.5 / 2 * (3**2 + 4**2 + 2**2))
    term.backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.5, 2.0]], "mu (w - w_t)"


def test_steps_of_own_method_descend_the_papers_objective(own_method) -> None:
    """Two steps of plain gradient descent by hand: the first starts at w_t, so only the second feels the term."""
    mu, rate = 0.7, 0.1
    x, y = torch.tensor([[1.0, -2.0]]), torch.tensor([1])
    model = split_sequential(nn.Sequential(nn.Identity(), nn.Linear(2, 2)), after=1)
    plain = {"batch_size": 1, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False}
    config = own_method.FedProxConfig(mu=mu, learning_rate=rate, local_epochs=2, **plain)
    w_t = [parameter.detach().clone() for parameter in model.parameters()]
    w = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    for _ in range(2):
        loss = nn.functional.cross_entropy(x @ w[0].T + w[1], y)
        gradients = torch.autograd.grad(loss, w)
        steps = [g + mu * (one - at) for g, one, at in zip(gradients, w, w_t, strict=True)]
        w = [(one - rate * step).detach().requires_grad_() for one, step in zip(w, steps, strict=True)]
    data = as_tensor_data((x.numpy(), y.numpy()), 2)
    half = own_method.FedProxDevice(config, Local(model=model, taps=model, data=data, classes=2, torch_device="cpu"))  # type: ignore[arg-type]
    half.train(Ask(round=1, step="train", seed=0, parts={"parameters": model_parameters(model)}))
    for result, expected in zip(model.parameters(), w, strict=True):
        torch.testing.assert_close(result, expected)
