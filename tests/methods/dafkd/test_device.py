"""DaFKD's device half: adversarial training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from methods.dafkd.dafkd_fleet import (
    SHAPE,
    VARIANTS,
    OwnSplit,
    asked,
    config_of,
    copied,
    make_device,
    make_server,
    run_round,
    states_equal,
    train,
    two_devices,
)
from torch import Tensor, nn
from torch.testing import assert_close

from fleetdistill.errors import KnowledgeError
from fleetdistill.knowledge import (
    Discriminator,
)
from fleetdistill.methods.dafkd.device import DaFKDDevice
from fleetdistill.methods.dafkd.training import AdversarialTraining, adam, adversarial_loss
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.model import check_local_model
from fleetdistill.training.parameters import model_parameters
from fleetdistill.wire.codec import encode


def test_daf_property_discriminator_continues_on_device_only() -> None:
    server, device = make_server(), make_device()
    sent = train(server, device)["discriminator"]
    assert isinstance(sent, Discriminator)
    assert sent.shares_extractor
    saved = unpack_state(pack_state(device.state_dict()))
    back = make_device(seed=9)  # another process: other first weights
    back.load_state_dict(saved)
    judged, optimizer = back.ready()
    kept = model_parameters(judged.discriminator)
    assert all(np.array_equal(kept.parameters[name], sent.parameters.parameters[name]) for name in kept.parameters)
    assert optimizer.state_dict()["state"][0]["step"] > 0
    assert not any(isinstance(kind, Discriminator) for kind in asked(server, device).values())


def test_restoring_state_before_first_round_drops_discriminator() -> None:
    server, device = make_server(), make_device()
    fresh = unpack_state(pack_state(device.state_dict()))
    train(server, device)
    device.load_state_dict(fresh)
    assert device.state_dict() == {"discriminator": None, "optimizer": None}


def test_first_discriminator_depends_on_seed_of_ask_alone() -> None:
    one, other, third = (make_device(seed=seed) for seed in (1, 1, 1))
    server = make_server()
    first, second, differs = train(server, one), train(server, other), train(server, third, seed=5)
    assert encode(first).sha256 == encode(second).sha256 != encode(differs).sha256


def training_of(device: DaFKDDevice, *, adversarial: bool = True) -> AdversarialTraining:
    judged, optimizer = device.ready()
    return AdversarialTraining(
        device.config, judged, optimizer, device.generator, device.data, seed=2, adversarial=adversarial
    )


@pytest.mark.parametrize("name", ["server", "no sharing", "feature level"])
def test_daf_property_generator_step_changes_only_generator(name: str) -> None:
    device = make_device(**VARIANTS[name])
    training = training_of(device)
    judged, _ = device.ready()
    judged.train()
    before, generator = copied(judged), copied(device.generator)
    training.step_generator(8)
    assert states_equal(copied(judged), before)
    assert all(parameter.grad is None for parameter in judged.parameters())
    assert not states_equal(copied(device.generator), generator)


@pytest.mark.parametrize(("freeze", "moves"), [(True, False), (False, True)])
@pytest.mark.parametrize("name", ["server", "no sharing"])
def test_generated_samples_do_not_enter_batch_norm_statistics(name: str, freeze: bool, moves: bool) -> None:
    device = make_device(**VARIANTS[name], freeze_batch_norm=freeze)
    training = training_of(device)
    judged, _ = device.ready()
    judged.train()
    norms = [part for part in judged.modules() if isinstance(part, nn.BatchNorm2d)]
    before = [norm.running_mean.clone() for norm in norms if norm.running_mean is not None]
    training.discriminator_loss(torch.zeros(4), torch.rand(4, *SHAPE), torch.rand(4, *SHAPE))
    after = [norm.running_mean for norm in norms if norm.running_mean is not None]
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True)) is moves
    assert all(norm.training for norm in norms)


def test_the_joint_loss_is_equation_9() -> None:
    device = make_device(model="digits_linear", lambda_adv=0.7)
    training, (judged, _) = training_of(device), device.ready()
    judged.eval()
    x, labels, fake = torch.rand(5, *SHAPE), torch.arange(5), torch.rand(6, *SHAPE)
    own = nn.functional.cross_entropy(device.local.model(x), labels)
    against = adversarial_loss(judged.realness(x), judged.realness(fake))
    assert_close(training.joint_loss(x, labels, fake), own + 0.7 * against)


def test_extractor_learns_from_discriminator_only_with_sharing() -> None:
    def extractor_after(**settings: Any) -> dict[str, Tensor]:
        device, server = make_device(**settings), make_server(**settings)
        train(server, device)
        return copied(device.local.taps.extractor)

    assert not states_equal(extractor_after(lambda_adv=0.0), extractor_after(lambda_adv=5.0))
    apart = {"sharing": False}
    assert states_equal(extractor_after(lambda_adv=0.0, **apart), extractor_after(lambda_adv=5.0, **apart))


@pytest.mark.parametrize(("settings", "completed", "trains"), [
    ({}, 0, True),
    ({"gan_stop_round": 1}, 0, True),
    ({"gan_stop_round": 1}, 1, False),
    ({"gan_stop_epoch": 0}, 0, False),
])  # fmt: skip
def test_generator_and_discriminator_stop_when_told(settings: dict[str, Any], completed: int, trains: bool) -> None:
    server, devices = make_server(**settings), two_devices(**settings)
    before = copied(server.generator)
    run_round(server, devices, completed)
    assert states_equal(copied(server.generator), before) is not trains


def test_last_batch_of_one_sample_trains_without_batch_norm() -> None:
    local = make_device(rows=33).local
    model = OwnSplit()
    device = DaFKDDevice(config_of(), replace(local, model=model, taps=check_local_model(model)))
    losses = [float(loss.detach()) for loss in training_of(device).losses(0, torch.tensor([0]))]
    assert len(losses) == 1
    assert np.isfinite(losses).all()


def test_diverging_generator_is_error_naming_its_rate() -> None:
    device = make_device()
    training = training_of(device)
    with torch.no_grad():
        next(device.generator.parameters()).fill_(float("nan"))
    with pytest.raises(KnowledgeError, match=r"the generator's loss is nan; its learning rate \(generator_lr\)"):
        training.step_generator(4)


def test_generator_optimiser_is_fresh_with_stated_weight_decay() -> None:
    device = make_device(adversarial_weight_decay=0.25)
    optimizer = adam(device.config, device.generator, 0.5)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.5, 0.25)
    assert not optimizer.state
