"""FedDKD's device half: gradients for the server's steps."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from methods.feddkd.feddkd_fleet import (
    assert_same,
    distil,
    make_data,
    make_device,
    make_fleet,
    make_server,
    run_round,
    state_of,
    teach,
    tiny_model,
)
from torch import Tensor, nn
from torch.testing import assert_close

from fleetdistill.errors import (
    CannotAnswer,
)
from fleetdistill.knowledge import DistillationGradient
from fleetdistill.methods.base import Ask
from fleetdistill.methods.feddkd.device import distillation_gradient
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData, extract
from fleetdistill.training.losses import soft_cross_entropy, soft_targets
from fleetdistill.training.parameters import model_parameters
from fleetdistill.wire.codec import encode


def test_a_step_changes_nothing_of_the_device() -> None:
    for model in ("methods.feddkd.feddkd_fleet:tiny_model", "methods.feddkd.feddkd_fleet:norm_model"):
        device = make_device(model=model)
        device.handle(teach(server=make_server(model)))
        before = state_of(device.local.model)
        device.handle(distil(1, server=make_server(model)))
        assert_same(state_of(device.local.model), before)


def test_student_is_evaluated_with_sent_not_device_statistics() -> None:
    """Plain FedDKD: also the running statistics are the averaged ones, frozen (mistakes and ambiguities, 7)."""
    device = make_device(model="methods.feddkd.feddkd_fleet:norm_model", dkd_batch_size=20)
    server = make_server("methods.feddkd.feddkd_fleet:norm_model")
    device.handle(teach(server=server))
    student = copy.deepcopy(server.model).eval()
    sent = device.handle(distil(1, server=server)).parts["gradient"]
    loss = soft_cross_entropy(student(device.local.data.inputs), soft_targets(device.teacher_logits(), 1.0), 1.0)
    loss.backward()
    assert isinstance(sent, DistillationGradient)
    assert sent.loss == pytest.approx(float(loss.detach()), abs=1e-6)
    assert sent.batch_size == 20
    for name, parameter in student.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(sent.gradients[name], parameter.grad.numpy(), atol=1e-6)


def test_the_temperature_is_in_targets_student_and_factor() -> None:
    inputs, tau = make_data(0).inputs, 2.0
    model, teacher = tiny_model().eval(), tiny_model().eval()
    teacher_bc = soft_targets(teacher(inputs), tau)
    gradients, _ = distillation_gradient(model, model_parameters(model), inputs, teacher_bc, tau)
    below, last = model.below_last(inputs)
    student_bc = (last(below) / tau).softmax(1)
    closed = tau * (student_bc - teacher_bc).T @ below / len(inputs)
    assert_close(gradients["stages.head.weight"], closed.detach(), atol=1e-6, rtol=1e-4)


def test_parameter_without_effect_on_logits_has_gradient_zero() -> None:
    model = nn.Linear(2, 3)
    model.register_parameter("idle", nn.Parameter(torch.ones(2)))
    gradients, _ = distillation_gradient(model, model_parameters(model), torch.ones(1, 2), torch.full((1, 3), 1 / 3), 1)
    assert torch.equal(gradients["idle"], torch.zeros(2))


def test_each_step_draws_new_samples_and_repeated_step_the_same() -> None:
    device = make_device(rows=40, dkd_batch_size=5)
    device.handle(teach())
    start = device.state_dict()
    drawn = []
    for seed in (2, 3, 2):
        device.load_state_dict(start)
        sent = device.handle(distil(1, seed=seed)).parts["gradient"]
        drawn.append(sent.gradients["stages.head.bias"].tolist())  # type: ignore[attr-defined]
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize("rows", [64, 100])
def test_the_loss_of_every_step_is_of_the_same_rows(rows: int) -> None:
    """Another mini-batch at an equal model: the loss stays; of 64 rows it is the mean over all, worked out by hand."""
    device = make_device(rows=rows, dkd_batch_size=5, temperature=2.0)
    device.handle(teach())
    losses = [device.handle(distil(step, seed=step)).parts["gradient"].loss for step in (1, 2, 3)]  # type: ignore[attr-defined]
    assert losses[0] == losses[1] == losses[2]
    teacher_bc = soft_targets(device.teacher_logits(), 2.0)
    student = make_server().model.eval()
    own = 4 * -(teacher_bc * (student(device.local.data.inputs).detach() / 2).log_softmax(1)).sum(1)
    if rows == 64:
        assert losses[0] == pytest.approx(float(own.mean()), rel=1e-5)
    assert float(own.min()) < losses[0] < float(own.max())
    device.handle(teach(ask_round=2))
    assert device.handle(distil(1, ask_round=2)).parts["gradient"].loss != losses[0] or rows == 64  # type: ignore[attr-defined]


def test_the_guard_does_not_fire_on_which_rows_were_drawn() -> None:
    """Batches of two rows and a rate near 0: the model stays, and so must the loss; losses of batches double."""
    settings: dict[str, Any] = {"dkd_steps": 12, "dkd_lr": 1e-6, "dkd_batch_size": 2, "local_epochs": 20}
    server, fleet = make_server(**settings), make_fleet(2, **settings)
    run_round(server, fleet)
    assert fleet.events == []
    assert fleet.figures["distillation_steps"] == 12
    losses = list(fleet.figures["distillation_loss"].values())
    assert max(losses) < 1.01 * min(losses)


def test_a_batch_larger_than_the_data_is_clipped_and_said_once() -> None:
    device = make_device(rows=20, dkd_batch_size=64)
    device.handle(teach())
    first, second = device.handle(distil(1)), device.handle(distil(2))
    assert first.parts["gradient"].batch_size == second.parts["gradient"].batch_size == 20  # type: ignore[attr-defined]
    assert (first.notes, second.notes) == ({"dkd_batch_clipped_to": 20}, {})
    assert make_device(rows=20, dkd_batch_size=20).config.dkd_batch_size == 20


def test_teacher_is_computed_once_per_round_and_survives_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    from fleetdistill.training import local_training

    calls, real = [], local_training.extract

    def counting(*args: Any, **how: Any) -> Tensor:
        calls.append(1)
        return real(*args, **how)

    monkeypatch.setattr("fleetdistill.methods.feddkd.device.extract", counting)
    device = make_device(model="methods.feddkd.feddkd_fleet:norm_model")
    server = make_server("methods.feddkd.feddkd_fleet:norm_model")
    device.handle(teach(server=server))
    between = unpack_state(pack_state({"model": device.local.model.state_dict(), "method": device.state_dict()}))
    answers = [device.handle(distil(step, seed=step, server=server)) for step in (1, 2)]
    assert len(calls) == 1

    restarted = make_device(model="methods.feddkd.feddkd_fleet:norm_model")
    for step in (1, 2):
        restarted.local.model.load_state_dict(between["model"])
        restarted.load_state_dict(between["method"])
        again = restarted.handle(distil(step, seed=step, server=server))
        assert encode(again.parts).sha256 == encode(answers[step - 1].parts).sha256
        between = unpack_state(
            pack_state({"model": restarted.local.model.state_dict(), "method": restarted.state_dict()})
        )
        restarted = make_device(model="methods.feddkd.feddkd_fleet:norm_model")
    assert len(calls) == 2


def test_a_device_without_a_teacher_of_the_round_refuses() -> None:
    device = make_device()
    with pytest.raises(CannotAnswer, match="round 1 needs a teacher of that round, but it has not trained yet"):
        device.handle(distil(1))
    device.handle(teach(ask_round=1))
    device.handle(distil(1))
    with pytest.raises(CannotAnswer, match=r"round 2 needs a teacher .* its last local training was in round 1"):
        device.handle(distil(1, ask_round=2))
    device.handle(Ask(round=1, step="deliver", seed=1, parts={"parameters": make_server().shared_parameters()}))
    with pytest.raises(CannotAnswer, match="needs a teacher"):
        device.handle(distil(2))


def test_a_stale_step_is_refused() -> None:
    device = make_device()
    device.handle(teach())
    device.handle(distil(1))
    device.handle(distil(2))
    for step in (1, 2):
        with pytest.raises(CannotAnswer, match=f"distillation step {step} of round 1 is stale, step 2 was answered"):
            device.handle(distil(step))
    device.handle(teach(ask_round=2))
    device.handle(distil(1, ask_round=2))  # a new round begins at its first step


def test_the_local_rate_is_the_one_that_was_sent() -> None:
    moved = {}
    for rate in (0.0001, 0.01):
        device, server = make_device(), make_server()
        device.handle(teach(server=server, learning_rate=rate))
        moved[rate] = float(
            (
                device.local.model.state_dict()["stages.head.weight"] - server.model.state_dict()["stages.head.weight"]
            ).norm()
        )
    assert 20 < moved[0.01] / moved[0.0001] < 200


def test_the_end_result_becomes_the_devices_model() -> None:
    device, server = make_device(), make_server()
    device.handle(teach())
    device.handle(Ask(round=1, step="deliver", seed=1, parts={"parameters": server.shared_parameters()}))
    assert_same(state_of(device.local.model), state_of(server.model))


def test_logits_of_other_samples_are_computed_again() -> None:
    """The samples of a device may change between two steps of a round."""
    device, other = make_device(), make_device()
    device.teacher_logits()
    data = device.local.data
    changed = TensorData(data.inputs[:5] + 1, data.labels[:5], digest=b"other")
    other.local = replace(other.local, data=changed)
    other.load_state_dict(device.state_dict())
    assert torch.equal(other.teacher_logits(), extract(other.local.model, changed.inputs))
