"""Pictures from features and from gradients."""

from __future__ import annotations

import pytest
import torch
from audit.conftest import run_of

from fleetdistill.knowledge import DistillationGradient
from fleetdistill.methods.feddkd.device import distillation_gradient, mini_batch
from fleetdistill.training.parameters import model_parameters
from fleetdistill_lab.audit.audit import Audit, Recorded, record_run
from fleetdistill_lab.audit.networks import Step, steps_of
from fleetdistill_lab.audit.pictures import decode, fit_decoder, invert, psnr, reconstruct, reidentified, standardise
from fleetdistill_lab.audit.public_set import PublicSet, split_public
from fleetdistill_lab.audit.record import Record
from fleetdistill_lab.simulation.data.datasets import load_dataset
from fleetdistill_server.engine.contract import build_method


def test_a_decoder_reads_images_from_all_their_pixels(public: PublicSet) -> None:
    known, own = public.attacker.inputs, public.fleet.train_images[:50]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    features = known.flatten(1)[:, order]
    decoder = fit_decoder(standardise(features, by=features), known)
    pictures = decode(decoder, standardise(own.flatten(1)[:, order], by=features))
    assert reidentified(pictures, own, public.decoys.inputs) > 0.9
    assert float(psnr(pictures, own).mean()) > 20


@pytest.mark.long
def test_a_decoder_of_feature_maps_gives_larger_images() -> None:
    """Blocks of four pixels with uniform values, whose variance is 1 / 12, from maps with one number a block."""
    maps = torch.rand(3000, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.interpolate(maps[:, :1], scale_factor=2)
    decoder = fit_decoder(standardise(maps, by=maps), images)
    made = decode(decoder, standardise(maps, by=maps))
    assert made.shape == images.shape
    assert float((made - images).square().mean()) < 1 / 24


def test_the_gradient_of_one_row_gives_its_picture(public: PublicSet) -> None:
    config = run_of("feddkd", "digits_linear", dkd_batch_size=1)
    method, image = build_method(config), public.fleet.train_images[:1]
    student, teacher = method.context.device_model().eval(), method.context.device_model().eval()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.3)
    probs = teacher(image).detach().softmax(1)
    gradients, loss = distillation_gradient(student, model_parameters(student), image, probs, 1.0)
    arrays = {name: gradient.numpy() for name, gradient in gradients.items()}
    sent = DistillationGradient(gradients=arrays, batch_size=1, loss=loss)
    recorded = Recorded(Record(), {}, method, config)
    step = Step("gradient", sent, model_parameters(student), model_parameters(teacher), 0)
    made, unrelated = invert(recorded, step, public.attacker.inputs.mean(dim=0)), public.decoys.inputs
    assert reidentified(made, image, unrelated) == 1


@pytest.mark.parametrize("rows", [1, 6])
def test_the_rows_of_a_gradient_are_those_of_the_devices_batch(rows: int) -> None:
    """The audit knows which rows a gradient is of from the ask's seed, as the device draws them."""
    config = run_of("feddkd", "digits_linear", dkd_batch_size=rows, dkd_steps=1)
    wanted = Audit(config=config, data=load_dataset("digits"), devices=2, rows=80, rounds=1)
    recorded = record_run(wanted, split_public(wanted.data, 80, 0))
    (step,) = steps_of(recorded.record.of("device-0"))
    own = recorded.rows["device-0"].inputs
    batch = own[mini_batch(len(own), rows, step.seed)]
    teacher, student = (recorded.method.context.device_model().eval() for _ in range(2))
    teacher.load_state_dict({name: torch.from_numpy(one) for name, one in _arrays(step.teacher).items()})
    probs = teacher(batch).detach().softmax(1)
    gradients, _ = distillation_gradient(student, step.student, batch, probs, 1.0)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, torch.from_numpy(step.gradient.gradients[name]), atol=1e-6)


def _arrays(weights):
    return {**weights.parameters, **weights.buffers}


@pytest.mark.long
def test_class_means_give_pictures_of_the_class() -> None:
    wanted = Audit(config=run_of("classstats"), data=load_dataset("digits"), devices=2, rows=200)
    public = split_public(wanted.data, 200, 0)
    (result,) = reconstruct(record_run(wanted, public), public, {"public rows": public.attacker.inputs})
    assert result.compared == "nearest own row"
    assert result.figures()["psnr"] > 12
