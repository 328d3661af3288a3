"""Baselines that exchange outputs for a proxy set: numbers worked out by hand, and their limits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from baselines.bed import make_device, make_fleet, make_rows, make_server, tiny_model
from methods.tiny_context import CLASSES
from torch import Tensor
from torch.testing import assert_close

from fleetdistill.errors import ConfigurationError, WireError
from fleetdistill.knowledge import ProxyKnowledge
from fleetdistill.methods.base import Ask
from fleetdistill.training.local_training import TensorData
from fleetdistill_lab.baselines.feddf import ensemble
from fleetdistill_lab.baselines.fedgems import fuse
from fleetdistill_lab.baselines.proxy import soft_loss
from fleetdistill_server.testing import always, play

PROXY = make_rows(9, rows=12)


def one_row_server(method: str, labels: int = 0, **settings: Any) -> Any:
    """A server with a proxy set of one row."""
    proxy = TensorData(PROXY.inputs[:1], torch.tensor([labels]))
    return make_server(method, proxy=proxy, **settings)


def send(*logits: list[float]) -> dict[str, Any]:
    """Members that send these logits of a proxy set of one row."""
    return {
        f"d{number}": always({"knowledge": ProxyKnowledge(valid=True, logits=np.array([row], np.float32))})
        for number, row in enumerate(logits)
    }


def device_of(method: str, **settings: Any) -> Any:
    device = make_device(method, tiny_model(), make_rows(0), **settings)
    return with_proxy(device)


def with_proxy(device: Any) -> Any:
    device.local = replace(device.local, proxy=PROXY, proxy_digest=b"p")
    return device


def proxy_fleet(method: str, **settings: Any) -> tuple[Any, dict[str, Any]]:
    server, members = make_fleet(method, proxy=PROXY, **settings)
    return server, {name: with_proxy(member) for name, member in members.items()}


def test_consensus_of_fedmd_is_the_mean_of_logits() -> None:
    server = one_row_server("fedmd")
    play(server, send([2.0, 0.0, -1.0], [0.0, 1.0, 2.0]))
    assert server.logits_pc.tolist() == [[1.0, 0.5, 0.5]]


def test_consensus_of_fedmd_may_be_the_mean_of_probabilities() -> None:
    server = one_row_server("fedmd", combine="mean_probs")
    rows = [[2.0, 0.0, -1.0], [0.0, 1.0, 2.0]]
    play(server, send(*rows))
    assert_close(server.logits_pc.softmax(1), torch.tensor(rows).softmax(1).mean(0, keepdim=True))


@pytest.mark.parametrize(("loss", "expected"), [("mae_logits", 1.0), ("mse_logits", 1.166667)])
def test_digest_loss_of_fedmd(loss: str, expected: float) -> None:
    device = device_of("fedmd", digest_loss=loss)
    own, consensus = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([[1.0, 0.5, 0.5]])
    assert float(device.proxy_loss(own, torch.tensor([0]), consensus)) == pytest.approx(expected, abs=1e-6)


def test_digest_loss_of_fedmd_may_be_kl_with_temperature() -> None:
    device = device_of("fedmd", digest_loss="kl", temperature=3.0)
    own, consensus = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[3.0, 2.0, 1.0]])
    assert float(device.proxy_loss(own, torch.tensor([0]), consensus)) == pytest.approx(1.309222, abs=1e-6)


def test_fedmd_starts_on_the_proxy_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    server, members = proxy_fleet("fedmd", start_epochs=2)
    seen = list[str]()
    half = type(members["d0"])
    monkeypatch.setattr(half, "start", noting(seen, "labels", half.start))
    monkeypatch.setattr(half, "proxy_loss", noting(seen, "consensus", half.proxy_loss))
    play(server, members, rounds=2)
    assert seen == ["labels", "labels", "consensus", "consensus"]


def test_fedmd_starts_once_also_a_device_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start is the labels of the proxy set and then the device's own rows; a round is consensus and own rows."""
    server, members = proxy_fleet("fedmd")
    play(server, {"d0": members["d0"]})
    seen, late = list[str](), {"d1": members["d1"]}
    half = type(late["d1"])
    for name, what in (("proxy_labels", "labels"), ("proxy_loss", "consensus"), ("loss", "own")):
        monkeypatch.setattr(half, name, noting(seen, what, getattr(half, name)))
    play(server, late, completed=1)
    assert [what for what, _ in itertools.groupby(seen)] == ["labels", "own", "consensus", "own"]
    seen.clear()
    again = device_of("fedmd")
    again.load_state_dict(late["d1"].state_dict())
    play(server, {"d1": again}, completed=2)
    assert [what for what, _ in itertools.groupby(seen)] == ["consensus", "own"]


def test_fedmd_does_not_start_again_without_a_consensus(monkeypatch: pytest.MonkeyPatch) -> None:
    server, members = proxy_fleet("fedmd")
    play(server, members)
    server.logits_pc = None
    monkeypatch.delattr("fleetdistill_lab.baselines.proxy.ProxyDevice.proxy_labels")
    play(server, members, completed=1)


def noting(seen: list[Any], what: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which also notes each call, or what it is called with."""

    def wrapped(*given: Any, **named: Any) -> Any:
        seen.append(what(*given) if callable(what) else what)
        return function(*given, **named)

    return wrapped


def test_order_of_devices_does_not_change_the_consensus() -> None:
    rows = [[2.0, 0.0, -1.0], [0.0, 1.0, 2.0], [0.3, 0.1, 5.0]]
    one, other = one_row_server("fedmd"), one_row_server("fedmd")
    play(one, send(*rows))
    play(other, send(*reversed(rows)))
    assert_close(one.logits_pc, other.logits_pc)


def logs(*probs: list[float]) -> list[list[float]]:
    return [np.log(row).tolist() for row in probs]


def test_dsfl_sharpens_the_mean_prediction() -> None:
    server = one_row_server("dsfl")
    play(server, send(*logs([0.6, 0.3, 0.1], [0.4, 0.5, 0.1])))
    (mean,), (sharp,) = server.config.era_temperature * server.logits_pc, server.logits_pc.softmax(1)
    assert mean.tolist() == pytest.approx([0.5, 0.4, 0.1], abs=1e-6)
    assert float(-(mean * mean.log()).sum()) == pytest.approx(0.943348, abs=1e-5)
    assert sharp.tolist() == pytest.approx([0.721399, 0.265388, 0.013213], abs=1e-5)
    assert float(-(sharp * sharp.log()).sum()) == pytest.approx(0.644802, abs=1e-5)


def test_dsfl_leaves_a_uniform_prediction_uniform() -> None:
    server = one_row_server("dsfl")
    play(server, send([0.0, 0.0, 0.0]))
    assert server.logits_pc.softmax(1)[0].tolist() == pytest.approx([1 / 3] * 3)


def test_sharpened_certainty_is_not_certain() -> None:
    """A one-hot prediction of ten classes at T = 0.1."""
    certain = torch.zeros(1, 10)
    certain[0, 3] = 1.0
    assert float((certain / 0.1).softmax(1).max()) == pytest.approx(0.999592, abs=1e-6)


def test_dsfl_trains_a_server_model_on_its_predictions() -> None:
    server, members = proxy_fleet("dsfl", local_epochs=3, learning_rate=0.1)
    play(server, members, rounds=3)
    teacher = server.logits_pc.softmax(1)
    before = soft_loss(make_server("dsfl", proxy=PROXY).model(PROXY.inputs), server.logits_pc)
    after = soft_loss(server.model(PROXY.inputs), server.logits_pc)
    assert after.item() < before.item()
    assert teacher.shape == (12, CLASSES)


def test_teachers_of_feddf() -> None:
    logits = torch.tensor([[[4.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]])
    of_logits, of_probs = ensemble(logits, "mean_logits")[0], ensemble(logits, "mean_probs")[0]
    assert of_logits.tolist() == pytest.approx([0.736125, 0.164252, 0.099624], abs=1e-6)
    assert of_probs.tolist() == pytest.approx([0.588302, 0.296893, 0.114805], abs=1e-6)
    uniform = torch.zeros(1, 3)
    assert divergence(uniform, of_logits) == pytest.approx(0.346632, abs=1e-6)
    assert divergence(uniform, of_probs) == pytest.approx(0.177470, abs=1e-6)
    of_each = soft_loss(torch.zeros(2, 3), logits[:, 0])  # the mean of their losses, which FedDF does not offer
    assert float(of_each) == pytest.approx(0.522287, abs=1e-6)


def divergence(own: Tensor, teacher: Tensor) -> float:
    return soft_loss(own, teacher.log()[None]).item()


def test_feddf_without_steps_is_fedavg() -> None:
    ended = []
    runs: list[tuple[str, dict[str, Any]]] = [("fedavg", {}), ("feddf", {"distil_steps": 0})]
    for name, settings in runs:
        server, members = make_fleet(name, proxy=PROXY, weighting="uniform", **settings)
        play(server, members, rounds=2)
        ended.append(server.model.state_dict())
    for name, tensor in ended[0].items():
        assert torch.equal(tensor, ended[1][name])


def test_feddf_of_one_device_leaves_its_model() -> None:
    """Teacher and student are the same model, so that every gradient is 0."""
    server, members = make_fleet("feddf", proxy=PROXY, devices=1, distil_steps=5)
    play(server, members)
    for own, tensor in zip(members["d0"].local.model.parameters(), server.model.parameters(), strict=True):
        assert_close(own, tensor, atol=2e-3, rtol=0)


@pytest.mark.parametrize("steps", [1, 7])
def test_feddf_takes_exactly_its_steps(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[float]()
    rate = lambda optimizer, *_: optimizer.param_groups[0]["lr"]  # noqa: E731
    monkeypatch.setattr(torch.optim.Adam, "step", noting(taken, rate, torch.optim.Adam.step))
    server, members = make_fleet("feddf", proxy=PROXY, distil_steps=steps, distil_rate=0.5, batch_size=5)
    play(server, members)
    expected = [0.25 * (1 + np.cos(np.pi * number / steps)) for number in range(steps)]
    assert taken == pytest.approx(expected)


def test_feddf_moves_towards_its_teachers() -> None:
    moved = []
    for steps in (0, 200):
        server, members = make_fleet("feddf", proxy=PROXY, local_epochs=30, distil_steps=steps, distil_rate=0.01)
        play(server, members)
        own = torch.stack([member.local.model(PROXY.inputs) for member in members.values()])
        moved.append(divergence_of(server.model(PROXY.inputs), ensemble(own, "mean_logits")))
    assert moved[1] < moved[0] / 2


def divergence_of(own: Tensor, teacher: Tensor) -> float:
    return soft_loss(own, teacher.log()).item()


def test_fedgems_trusts_the_devices_that_are_right() -> None:
    logits = torch.tensor([[[4.0, 0.0, 0.0]], [[1.0, 0.0, 0.0]], [[0.0, 3.0, 0.0]]])
    fused, known = fuse(logits, torch.tensor([0]))
    assert fused[0].tolist() == pytest.approx([3.538481, 0.0, 0.0], abs=1e-5)
    assert known.tolist() == [True]
    shifted, _ = fuse(logits + torch.tensor([1.0, 0.0, 0.0])[:, None, None], torch.tensor([0]))
    assert (shifted - fused)[0].tolist() == pytest.approx([0.846160] * 3, abs=1e-6), "the weight of the first device"


@pytest.mark.parametrize(
    ("logits", "entropy"), [([4.0, 0, 0], 0.177324), ([1.0, 0, 0], 0.975328), ([3.0, 0, 0], 0.366594)]
)
def test_weight_in_fedgems_is_one_over_the_entropy(logits: list[float], entropy: float) -> None:
    """Next to uniform probabilities, whose entropy is log 3; a 1 more in all logits changes the mean by the weight."""
    rows = torch.tensor([[logits], [[0.0, 0, 0]]])
    one_more = rows + torch.tensor([1.0, 0.0])[:, None, None]
    weight = (fuse(one_more, torch.tensor([0]))[0] - fuse(rows, torch.tensor([0]))[0])[0, 1].item()
    assert np.log(3) * (1 - weight) / weight == pytest.approx(entropy, abs=1e-5)


def test_row_that_no_device_gets_right_has_no_teacher() -> None:
    fused, known = fuse(torch.tensor([[[0.0, 3.0, 0.0]], [[0.0, 0.0, 1.0]]]), torch.tensor([0]))
    assert (fused.tolist(), known.tolist()) == ([[0.0, 0.0, 0.0]], [False])


def test_certain_device_does_not_make_the_mean_infinite() -> None:
    fused, _ = fuse(torch.tensor([[[1e4, 0.0, 0.0]], [[1.0, 0.0, 0.0]]]), torch.tensor([0]))
    assert torch.isfinite(fused).all()


def test_fedgems_keeps_a_pooled_row_while_its_model_is_wrong() -> None:
    server, members = proxy_fleet("fedgems", local_epochs=5, server_epochs=40, learning_rate=0.2)
    play(server, members, rounds=2)
    state = server.state_dict()
    assert state["pooled"].all(), "the model has been right on every row"
    with torch.no_grad():
        for parameter in server.model.parameters():
            parameter.zero_()
        server.model.stages[-1].bias.copy_(torch.tensor([-1e3, -1e3, 1e3]))  # class 2 whatever the input
    server.config = type(server.config).from_settings({"learning_rate": 1e-12, "server_epochs": 1, "robust": "off"})
    play(server, members)
    wrong = PROXY.labels != 2
    assert torch.equal(server.state_dict()["pool"][wrong], state["pool"][wrong])


@pytest.mark.parametrize("method", ["fedmd", "dsfl", "fedgems"])
@pytest.mark.parametrize(
    "bad", [np.zeros((11, CLASSES)), np.full((12, CLASSES), np.nan), None], ids=["shape", "nan", "none"]
)
def test_bad_logits_of_the_server_are_refused(method: str, bad: Any) -> None:
    device = device_of(method)
    sent = ProxyKnowledge(valid=True, proxy_digest=b"p", logits=bad)
    with pytest.raises(WireError, match="finite numbers"):
        device.handle(Ask(round=2, step="train", seed=0, parts={"knowledge": sent}))


@pytest.mark.parametrize("method", ["fedmd", "dsfl", "fedgems"])
def test_device_without_the_proxy_set_says_so(method: str) -> None:
    device = make_device(method, tiny_model(), make_rows(0))
    with pytest.raises(WireError, match="proxy set"):
        device.handle(device.first_ask())


def test_logits_too_large_for_the_wire_are_withheld() -> None:
    server = one_row_server("fedmd")
    server.load_state_dict({"logits": torch.tensor([[1e9, 0.0, 0.0]])})
    (cohort,) = play(server, send([1.0, 0.0, 0.0]), knowledge_type="float16")
    assert [event.kind for event in cohort.events] == ["knowledge-left-out"]
    assert not cohort.asked[0].parts["knowledge"].valid  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedmd", {"digest_loss": "cosine"}),
        ("fedmd", {"start_epochs": 0}),
        ("dsfl", {"era_temperature": 0.0}),
        ("fedgems", {"label_share": 1.1}),
        ("feddf", {"teacher": "median"}),
        ("feddf", {"distil_steps": -1}),
    ],
)
def test_settings_out_of_range_are_refused(method: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        make_device(method, tiny_model(), make_rows(0), **settings)
