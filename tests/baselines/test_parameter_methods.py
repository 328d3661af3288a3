"""Baselines that exchange parameters: numbers worked out by hand on two quadratic losses, and their limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from baselines.bed import (
    make_config,
    make_device,
    make_fleet,
    make_rows,
    make_server,
    norm_model,
    quadratic_fleet,
    weights_of,
)
from methods.tiny_context import CLASSES
from torch import nn
from torch.testing import assert_close

from fleetdistill.errors import ConfigurationError, ModelError, WireError
from fleetdistill.knowledge import ModelParameters
from fleetdistill.methods.base import Ask
from fleetdistill.training.losses import activation_divergence, distillation_loss
from fleetdistill.training.model import SplitModel
from fleetdistill.training.parameters import batch_norm_names
from fleetdistill_lab.baselines.fedprox import squared_distance
from fleetdistill_lab.baselines.moon import contrastive_loss
from fleetdistill_server.testing import always, play


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize(("steps", "expected"), [(1, 0.3), (5, 1.22853)])
def test_fedavg_averages_by_samples(steps: int, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    server, members = quadratic_fleet("fedavg", monkeypatch, local_epochs=steps)
    play(server, members)
    assert weights_of(server, members)[-1] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("weighting", "expected"), [("samples", [3.25, 4.25, 5.25]), ("uniform", [2.5, 3.5, 4.5])])
def test_fedavg_weights_a_vector(weighting: str, expected: list[float]) -> None:
    """(1, 2, 3) of 10 samples and (4, 5, 6) of 30."""
    server = make_server("fedavg", "baselines.bed:three_weights", weighting=weighting)
    sent = [{"w": np.array(row, np.float32)} for row in ([1, 2, 3], [4, 5, 6])]
    one, other = ({"parameters": ModelParameters(parameters=weights)} for weights in sent)
    play(server, {"d0": always(one, samples=10), "d1": always(other, samples=30)})
    assert server.model.w.tolist() == pytest.approx(expected)


def test_fedavg_with_uniform_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    server, members = quadratic_fleet("fedavg", monkeypatch, weighting="uniform")
    play(server, members)
    assert weights_of(server, members)[-1] == pytest.approx(0.2)


def test_fedavg_with_a_falling_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    server, members = quadratic_fleet("fedavg", monkeypatch, centres=(4.0, 4.0), learning_rate_round_decay=0.5)
    play(server, members, rounds=2)
    assert weights_of(server, members)[-1] == pytest.approx(0.4 + 0.05 * 3.6)


@pytest.mark.parametrize(("mu", "local", "mean"), [(0.0, [0.0, 1.63804], 1.22853), (1.0, [0.0, 1.34464], 1.00848)])
def test_fedprox_stays_closer(mu: float, local: list[float], mean: float, monkeypatch: pytest.MonkeyPatch) -> None:
    server, members = quadratic_fleet("fedprox", monkeypatch, local_epochs=5, mu=mu)
    play(server, members)
    assert weights_of(server, members) == pytest.approx([*local, mean], abs=1e-5)


def test_fedprox_has_its_fixed_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """With c = 4, w_t = 0 and mu = 1 the local optimum is 2."""
    server, members = quadratic_fleet("fedprox", monkeypatch, local_epochs=1, mu=1.0, learning_rate=0.5)
    play(server, members)
    assert weights_of(server, members)[1] == pytest.approx(2.0)


def test_proximal_term_is_a_sum_over_all_weights() -> None:
    model = nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0, 3.0, 0.0]]))
    assert squared_distance(model, {"weight": torch.zeros(1, 4)}).item() / 2 == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("method", "nothing"),
    [("fedprox", {"mu": 0.0}), ("fedmax", {"beta": 0.0}), ("moon", {"mu": 0.0}), ("fedbn", {"weighting": "samples"})],
)
def test_without_its_term_a_method_is_fedavg(method: str, nothing: dict[str, Any]) -> None:
    ended = []
    for name, settings in (("fedavg", {}), (method, nothing)):
        server, members = make_fleet(name, local_epochs=3, **settings)
        play(server, members, rounds=3)
        ended.append(state_of(server.networks()["model"]))
    for name, tensor in ended[0].items():
        assert torch.equal(tensor, ended[1][name])


P_1234 = [0.032059, 0.087144, 0.236883, 0.643914]
"""Softmax of the activations 1, 2, 3 and 4."""


@pytest.mark.parametrize(
    ("form", "term", "gradient"),
    [
        ("a_to_u", 0.438757, [-0.079911, -0.130076, -0.116701, 0.326688]),
        ("u_to_a_elementwise", 0.138474, [(p - 0.25) / 4 for p in P_1234]),
    ],
)
def test_term_of_fedmax(form: str, term: float, gradient: list[float]) -> None:
    """Of activations 1, 2, 3 and 4 below a last layer of zeros, whose cross-entropy is log 3."""
    head = nn.Linear(4, CLASSES)
    head.load_state_dict({name: torch.zeros_like(one) for name, one in head.state_dict().items()})
    model = SplitModel({"body": nn.Identity(), "head": head}, cut="body")
    device = make_device("fedmax", model, make_rows(0), form=form, beta=1.0)
    activations = torch.tensor([[1.0, 2.0, 3.0, 4.0]], requires_grad=True)
    loss = device.loss(activations, torch.tensor([0]))
    loss.backward()
    assert loss.item() - np.log(3) == pytest.approx(term, abs=1e-6)
    assert activations.grad is not None
    assert activations.grad[0].tolist() == pytest.approx(gradient, abs=1e-6)


def test_reverse_term_of_fedmax_is_a_mean_over_numbers() -> None:
    """KL(U || p) is 0.553895, its gradient p - U; with 512 numbers a beta of 1000 is one of 1.953125 for each row."""
    activations = torch.tensor([[1.0, 2.0, 3.0, 4.0]], requires_grad=True)
    whole = 4 * activation_divergence(activations, reverse_elementwise=True)
    whole.backward()
    assert whole.item() == pytest.approx(0.553895, abs=1e-6)
    assert activations.grad is not None
    assert activations.grad[0].tolist() == pytest.approx([-0.217941, -0.162856, -0.013117, 0.393914], abs=1e-6)
    many, uniform = torch.randn(3, 512), torch.full((3, 512), 1 / 512)
    assert_close(
        1000 * activation_divergence(many, reverse_elementwise=True), 1.953125 * distillation_loss(many, uniform, 1.0)
    )


def test_first_round_of_scaffold_is_fedavg_with_equal_weights() -> None:
    ended = []
    for name in ("fedavg", "scaffold"):
        server, members = make_fleet(name, local_epochs=2, weighting="uniform")
        play(server, members)
        ended.append(state_of(server.networks()["model"]))
    for name, tensor in ended[0].items():
        assert_close(tensor, ended[1][name])


def test_scaffold_corrects_local_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    server, members = quadratic_fleet("scaffold", monkeypatch, local_epochs=2)
    play(server, members)
    assert weights_of(server, members) == pytest.approx([0.0, 0.76, 0.38], abs=1e-6)
    assert controls_of(server, members) == pytest.approx([0.0, -3.8, -1.9], abs=1e-5)
    play(server, members)
    assert weights_of(server, members) == pytest.approx([0.6688, 0.7068, 0.6878], abs=1e-6)
    assert controls_of(server, members) == pytest.approx([0.456, -3.534, -1.539], abs=1e-5)


def controls_of(server: Any, members: dict[str, Any]) -> list[float]:
    return [*(float(half.state_dict()["control"]["w"]) for half in members.values()), float(server.accumulated["w"])]


def test_scaffold_weights_a_missing_device_in_its_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the second of two devices answers, so that c is half of its control."""
    server, members = quadratic_fleet("scaffold", monkeypatch, local_epochs=2)
    play(server, members, silent=[("train", "d0")], quorum=0.5)
    assert controls_of(server, members) == pytest.approx([0.0, -3.8, -1.9], abs=1e-5)


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_scaffold_refuses_momentum(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="plain SGD"):
        make_config("scaffold", **settings)


def test_scaffold_checks_controls_of_a_hostile_server() -> None:
    server, members = make_fleet("scaffold")
    device = members["d0"]
    before = state_of(device.local.model)
    bad = ModelParameters(parameters={name: tensor.numpy() * float("nan") for name, tensor in before.items()})
    with pytest.raises(WireError, match="NaN"):
        device.handle(Ask(round=1, step="train", seed=0, parts={**server.message(), "control": bad}))


def test_feddyn_reaches_the_optimum_of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 1 / 2 reaches the local optimum (c + g + w_t) / 2 of alpha = 1 exactly."""
    server, members = quadratic_fleet("feddyn", monkeypatch, alpha=1.0, learning_rate=0.5)
    expected = {1: ([0.0, 2.0, 2.0], [0.0, -2.0, -1.0]), 2: ([1.0, 2.0, 2.0], [1.0, -2.0, -0.5])}
    for number in (1, 2):
        play(server, members)
        assert weights_of(server, members) == pytest.approx(expected[number][0])
        assert gradients_of(server, members) == pytest.approx(expected[number][1])
    play(server, members, rounds=4)
    assert weights_of(server, members) == pytest.approx([1.9375, 2.0, 2.0])
    assert gradients_of(server, members) == pytest.approx([1.9375, -2.0, -0.03125])
    play(server, members, rounds=30)
    assert weights_of(server, members) == pytest.approx([2.0, 2.0, 2.0])
    assert gradients_of(server, members) == pytest.approx([2.0, -2.0, 0.0], abs=1e-6)


def gradients_of(server: Any, members: dict[str, Any]) -> list[float]:
    own = [float(member.state_dict()["gradient"]["w"]) for member in members.values()]
    return [*own, float(server.accumulated["w"])]


def test_feddyn_with_a_missing_device(monkeypatch: pytest.MonkeyPatch) -> None:
    server, members = quadratic_fleet("feddyn", monkeypatch, alpha=1.0, learning_rate=0.5)
    play(server, members, silent=[("train", "d0")], quorum=0.5)
    assert weights_of(server, members)[1:] == pytest.approx([2.0, 3.0])
    assert gradients_of(server, members)[-1] == pytest.approx(-1.0)


def test_contrast_of_moon() -> None:
    own, other, previous = (torch.tensor([row]) for row in ([1.0, 0.0], [1.0, 1.0], [0.0, 1.0]))
    assert float(contrastive_loss(own, other, previous, 0.5)) == pytest.approx(0.217622, abs=1e-6)
    assert float(contrastive_loss(own, other, other, 0.5)) == pytest.approx(0.693147, abs=1e-6)


def test_contrast_of_moon_is_a_mean_over_rows() -> None:
    """Cosines of 0.9 and 0.1 in one row, and of 0.1 and 0.9 in the other; their means first would give log 2."""
    own = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    near, far = [0.9, (1 - 0.9**2) ** 0.5], [0.1, (1 - 0.1**2) ** 0.5]
    near_far, far_near = torch.tensor([near, far]), torch.tensor([far, near])
    assert float(contrastive_loss(own, near_far, far_near, 0.5)) == pytest.approx(0.983901, abs=1e-5)
    assert float(contrastive_loss(own[:1], near_far[:1], far_near[:1], 0.5)) == pytest.approx(0.183901, abs=1e-5)


def test_contrast_of_moon_is_constant_at_first() -> None:
    """The device's last model is then the global one, whatever the model in training is."""
    own = torch.randn(5, 4, requires_grad=True)
    other = torch.randn(5, 4)
    contrastive_loss(own, other, other, 0.5).backward()
    assert_close(own.grad, torch.zeros(5, 4))


def test_moon_remembers_its_last_model_when_its_answer_counts() -> None:
    server, members = make_fleet("moon", local_epochs=1)
    device = members["d0"]
    assert device.state_dict() == {}
    play(server, members)
    saved = device.state_dict()
    for name, tensor in device.local.model.state_dict().items():
        assert torch.equal(saved["last"][name], tensor)
    device.load_state_dict({})
    assert device.state_dict() == {}


@pytest.mark.parametrize("method", ["fedmax", "moon"])
def test_model_without_embedding_is_refused(method: str) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.extractor, self.head = nn.Linear(6, 4), nn.Linear(4, CLASSES)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.extractor(x)  # type: ignore[no-any-return]

        def predict(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(x)  # type: ignore[no-any-return]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.predict(self.features(x))

    with pytest.raises(ModelError, match=r"embedding\(x\)"):
        make_device(method, Plain(), make_rows(0))


def test_fedbn_shares_all_but_batch_norm() -> None:
    server, members = make_fleet("fedbn", "norm_model", local_epochs=2)
    play(server, members, rounds=2)
    own = batch_norm_names(norm_model())
    assert len(own) == 5
    sent = server.message()["parameters"]
    assert not own & {*sent.parameters, *sent.buffers}
    for member in members.values():
        member.handle(Ask(round=3, step="deliver", seed=0, parts={"parameters": sent}))
    first, second = (state_of(member.local.model) for member in members.values())
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]) == (name not in own or name.endswith("num_batches_tracked"))


def test_fedbn_has_a_global_model_without_batch_norm_only() -> None:
    assert make_fleet("fedbn", "norm_model")[0].global_model() is None
    assert make_fleet("fedbn")[0].global_model() is not None


def test_devices_without_transfer_are_alone() -> None:
    """A device's model is bit-equal whether another one is there or not, and no tensor is exchanged."""
    _, alone = make_fleet("no_transfer", devices=1)
    server, together = make_fleet("no_transfer", devices=3)
    play(make_fleet("no_transfer", devices=1)[0], alone, rounds=2)
    cohorts = play(server, together, rounds=2)
    for name, tensor in alone["d0"].local.model.state_dict().items():
        assert torch.equal(tensor, together["d0"].local.model.state_dict()[name])
    assert [one.answer.parts for cohort in cohorts for one in cohort.asked if one.answer] == [{}] * 6


def test_fedbn_sends_the_bytes_of_the_authors_network() -> None:
    """14,213,578 shared numbers; FedAvg adds 5,632 trained ones, 5,632 statistics and 5 counters of batch-norm."""
    server = make_server("fedbn", "baselines.bed:digits_network")
    (exchange,) = server.run_exchanges()
    assert exchange.nbytes("up", "float32") == exchange.nbytes("down", "float32") == 56_854_312
    own = [server.model.state_dict()[name] for name in server.own_tensors()]
    assert sum(tensor.numel() for tensor in own) == 5_632 + 5_632 + 5
    (exchange,) = make_server("fedavg", "baselines.bed:digits_network").run_exchanges()
    assert exchange.nbytes("up", "float32") == exchange.nbytes("down", "float32") == 56_899_408


def test_a_forgotten_device_no_longer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """SCAFFOLD's c is then that of the remaining device."""
    server, members = quadratic_fleet("scaffold", monkeypatch, local_epochs=2)
    play(server, members)
    server.forget("d0", None)
    assert server.state_dict()["devices"] == ["d1"]


@pytest.mark.parametrize("method", ["fedavg", "no_transfer"])
def test_local_rate_falls_from_round_to_round(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone at c = 4: 0.4 after the first round, and half a step more after the second."""
    server, members = quadratic_fleet(method, monkeypatch, centres=(4.0, 4.0), learning_rate_round_decay=0.5)
    play(server, members, rounds=2)
    for member in members.values():
        assert member.local.model.w.item() == pytest.approx(0.4 + 0.05 * 3.6)
