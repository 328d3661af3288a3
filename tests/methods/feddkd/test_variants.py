"""FedDKD_MAX and FedDKD_BN."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods.feddkd.feddkd_fleet import (
    Handle,
    answers,
    assert_same,
    distil,
    fleet_of,
    make_device,
    make_server,
    run_round,
    scalar_server,
    sent,
    state_of,
    teach,
)
from torch import Tensor, nn
from torch.testing import assert_close

from fleetdistill.errors import (
    ConfigurationError,
    KnowledgeError,
    ModelError,
)
from fleetdistill.methods.base import Ask
from fleetdistill.methods.feddkd.device import FedDKDDevice
from fleetdistill.training.losses import activation_divergence, soft_cross_entropy, soft_targets
from fleetdistill.training.parameters import batch_norm_names
from fleetdistill.wire.codec import encode

# --- FedDKD_MAX


def test_max_adds_the_entropy_term_to_local_training_only() -> None:
    plain, zero, strong = (
        make_device(),
        make_device(variant="max", fedmax_beta=0.0),
        make_device(variant="max", fedmax_beta=5.0),
    )
    for device in (plain, zero, strong):
        torch.manual_seed(4)
        device.handle(teach())
    assert_same(state_of(plain.local.model), state_of(zero.local.model))
    inputs = plain.local.data.inputs

    def divergence(device: FedDKDDevice) -> float:
        return float(activation_divergence(device.local.model.eval().embedding(inputs)).detach())  # type: ignore[operator]

    assert divergence(strong) < 0.8 * divergence(plain)


@pytest.mark.parametrize(("form", "elementwise"), [("a_to_u", False), ("u_to_a_elementwise", True)])
def test_max_is_cross_entropy_plus_beta_times_term_of_form(form: str, elementwise: bool) -> None:
    device = make_device(variant="max", fedmax_beta=3.0, fedmax_form=form)
    model, data = device.local.model.eval(), device.local.data
    term = activation_divergence(model.embedding(data.inputs), reverse_elementwise=elementwise)  # type: ignore[operator]
    expected = nn.functional.cross_entropy(model(data.inputs), data.labels) + 3.0 * term
    assert_close(device.loss(data.inputs[:], data.labels), expected)


@given(batch=st.integers(1, 5), entries=st.integers(2, 9), seed=st.integers(0, 999), shift=st.floats(-20, 20))
def test_the_entropy_term_is_bounded_and_blind_to_a_shift(batch: int, entries: int, seed: int, shift: float) -> None:
    activations = 3 * torch.randn(batch, entries, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    value = float(activation_divergence(activations))
    assert 0 <= value + 1e-12 <= math.log(entries) + 1e-9
    assert float(activation_divergence(activations + shift)) == pytest.approx(value, abs=1e-9)


def test_activations_must_be_rows_of_numbers() -> None:
    with pytest.raises(KnowledgeError, match=r"activations have shape \[2, 3, 4\]"):
        activation_divergence(torch.zeros(2, 3, 4))


# --- FedDKD_BN


def test_bn_keeps_batch_norm_on_the_device_through_a_round() -> None:
    path = "methods.feddkd.feddkd_fleet:norm_model"
    server = make_server(path, variant="bn", dkd_steps=4, dkd_lr=0.05)
    devices = {f"d{i}": make_device(i, model=path, variant="bn") for i in range(2)}
    norms = batch_norm_names(server.model)
    assert len(norms) == 5
    at_start = state_of(server.model)
    after_training: dict[str, dict[str, Tensor]] = {}

    def watched(name: str) -> Handle:
        def handle(ask: Ask) -> Any:
            answer = devices[name].handle(ask)
            if ask.step == "train":
                after_training[name] = state_of(devices[name].local.model)
            return answer

        return handle

    fleet = run_round(server, fleet_of({name: watched(name) for name in devices}))
    for parts in [*sent(fleet), *(item for by_device in answers(fleet) for item in by_device.values())]:
        slots = {slot.path.split("/")[-1] for slot in encode(parts).slots}
        assert slots
        assert not slots & norms
    for name, device in devices.items():
        assert_same(state_of(device.local.model), after_training[name])  # bit-identical after the J steps
        assert any(not torch.equal(after_training[name][norm], at_start[norm]) for norm in norms)
    first, second = after_training.values()
    assert not torch.equal(first["stages.body.1.running_mean"], second["stages.body.1.running_mean"])
    assert_same({n: server.model.state_dict()[n] for n in norms}, {n: at_start[n] for n in norms})
    assert fleet.figures["distillation_steps"] == 4


def test_bn_next_round_gets_shared_weights_and_own_batch_norm() -> None:
    path = "methods.feddkd.feddkd_fleet:norm_model"
    server, device = make_server(path, variant="bn"), make_device(model=path, variant="bn")
    device.handle(teach(server=server))
    own = {name: state_of(device.local.model)[name] for name in batch_norm_names(server.model)}
    device.handle(Ask(round=1, step="deliver", seed=1, parts={"parameters": server.shared_parameters()}))
    assert_same({name: state_of(device.local.model)[name] for name in own}, own)
    assert torch.equal(
        device.local.model.state_dict()["stages.head.weight"], server.model.state_dict()["stages.head.weight"]
    )


def test_bn_evaluates_student_with_statistics_of_device() -> None:
    path = "methods.feddkd.feddkd_fleet:norm_model"
    server = make_server(path, variant="bn")
    device = make_device(model=path, variant="bn", dkd_batch_size=20)
    device.handle(teach(server=server))
    student = copy.deepcopy(device.local.model).eval()
    shared = {
        name: tensor for name, tensor in server.model.state_dict().items() if name not in batch_norm_names(student)
    }
    student.load_state_dict(shared, strict=False)
    sent = device.handle(distil(1, server=server)).parts["gradient"]
    with torch.no_grad():
        loss = soft_cross_entropy(student(device.local.data.inputs), soft_targets(device.teacher_logits(), 1.0), 1.0)
    assert sent.loss == pytest.approx(float(loss), abs=1e-6)  # type: ignore[attr-defined]


def test_bn_has_no_global_model_and_plain_has() -> None:
    personal = make_server("methods.feddkd.feddkd_fleet:norm_model", variant="bn")
    assert personal.global_model() is None
    assert personal.export() is None
    assert make_server().global_model() is not None


def test_variants_that_a_model_cannot_have_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="variant 'bn' needs a model with at least one batch-norm layer"):
        make_server(variant="bn")
    with pytest.raises(ConfigurationError, match="variant 'max' needs a model with embedding"):
        scalar_server(variant="max")
    with pytest.raises(ConfigurationError, match="dkd_student_mode 'train' needs dkd_batch_size >= 2"):
        make_server("methods.feddkd.feddkd_fleet:norm_model", dkd_student_mode="train", dkd_batch_size=1)


def test_max_tells_an_app_at_once_that_its_model_lacks_embedding() -> None:
    with pytest.raises(
        ModelError, match=r"FedDKD needs the input of the last layer, and Tapless has no embedding\(x\)"
    ):
        make_device(model="methods.feddkd.feddkd_fleet:tapless_model", variant="max")
    make_device(model="methods.feddkd.feddkd_fleet:tapless_model")


@pytest.mark.parametrize(("model", "variant"), [("tiny_model", "plain"), ("norm_model", "plain"), ("norm_model", "bn")])
def test_student_in_train_mode_differs_and_changes_no_state(model: str, variant: str) -> None:
    path = f"methods.feddkd.feddkd_fleet:{model}"
    settings: dict[str, Any] = {"model": path, "variant": variant}
    server, gradients = make_server(path, variant=variant), []
    for mode in ("eval", "train", "train"):
        device = make_device(**settings, dkd_student_mode=mode)
        device.handle(teach(server=server))
        before, modes = state_of(device.local.model), [part.training for part in device.local.model.modules()]
        torch.manual_seed(2)
        answer = device.handle(distil(1, server=server))
        assert_same(state_of(device.local.model), before)
        assert [part.training for part in device.local.model.modules()] == modes
        gradients.append(answer.parts["gradient"].gradients["stages.head.weight"])  # type: ignore[attr-defined]
    assert np.abs(gradients[0] - gradients[1]).max() > 1e-4
    np.testing.assert_array_equal(gradients[1], gradients[2])


def test_gamma_is_smaller_with_batch_norm_unless_it_is_given() -> None:
    assert make_server().config.dkd_lr == 0.1
    assert make_server("methods.feddkd.feddkd_fleet:norm_model").config.dkd_lr == 0.01
    assert make_server("methods.feddkd.feddkd_fleet:norm_model", dkd_lr=0.3).config.dkd_lr == 0.3
