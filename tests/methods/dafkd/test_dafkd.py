"""DaFKD's two halves: what they compute, by its specification's oracles and by hand, and small runs of its variants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fleets import RUN, SMALL, assert_no_upload_lost, prepare, run_in_memory
from torch import Tensor, nn
from torch.testing import assert_close

from fleetdistill.errors import ConfigurationError, KnowledgeError
from fleetdistill.knowledge import (
    Discriminator,
    Generator,
    Kind,
    ModelParameters,
    Parts,
    Plan,
    WeightedPredictions,
    Weights,
)
from fleetdistill.methods.base import Ask, Local, PartKind
from fleetdistill.methods.dafkd.config import DaFKDConfig
from fleetdistill.methods.dafkd.device import DaFKDDevice
from fleetdistill.methods.dafkd.losses import adversarial_loss, generator_loss, gradient_penalty, weighted_predictions
from fleetdistill.methods.dafkd.samples import distillation_samples, make_generator
from fleetdistill.methods.dafkd.training import AdversarialTraining, adam
from fleetdistill.models import GENERATORS, build_generator, build_model
from fleetdistill.models.discriminators import JudgedClassifier, OwnNetwork
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.losses import distillation_loss
from fleetdistill.training.model import SplitModel, check_local_model, parameter_count
from fleetdistill.training.onnx_export import export_onnx
from fleetdistill.training.parameters import load_parameters, model_parameters
from fleetdistill.training.portable_noise import portable_noise, splitmix64
from fleetdistill.wire.codec import encode
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.methods.cohort import DeviceAnswer
from fleetdistill_server.methods.context import MethodContext
from fleetdistill_server.methods.dafkd.ensemble import (
    classes_needed,
    effective_devices,
    ensemble,
    ensemble_of_weighted,
    equal_weights,
    importance_weights,
)
from fleetdistill_server.methods.dafkd.server import DaFKDServer
from fleetdistill_server.methods.traffic import Sizes, round_bytes
from fleetdistill_server.simulation.spec.settings import Simulation
from fleetdistill_server.testing import FakeCohort, play

CLASSES, SHAPE = 10, (1, 8, 8)
CPU = torch.device("cpu")
QUICK = {"local_epochs": 1, "kd_samples": 64, "kd_epochs": 1, "generator": "digits_generator", "kd_start_round": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "server": {},
    "no sharing": {"sharing": False},
    "no correlation": {"correlation": False},
    "logits": {"ensemble_space": "logits"},
    "lagged": {"discriminator_location": "device"},
    "exact": {"discriminator_location": "device", "sync": "exact"},
    "soft-only": {"discriminator_location": "device", "upload_model": False},
    "feature level": {"generator_level": "feature", "generator": "feature_generator"},
    "labels": {"label_condition": True},
    "penalty": {"gradient_penalty": 0.3},
    "paper": {"paper": True},
}
PROBS = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]], dtype=torch.float64)
VERDICTS = torch.tensor([[2.0], [0.0], [-1.0]], dtype=torch.float64)


def config_of(**settings: Any) -> DaFKDConfig:
    return DaFKDConfig.from_settings({**QUICK, **settings}).for_classes(CLASSES)


def make_server(model: str = "digits_mlp_small", **settings: Any) -> DaFKDServer:
    context = MethodContext(
        classes=CLASSES, input_shape=SHAPE, models=ModelSection(device=model), torch_device=CPU, seed=3
    )
    return DaFKDServer(config_of(**settings), context)


def make_device(seed: int = 1, rows: int = 40, model: str = "digits_mlp_small", **settings: Any) -> DaFKDDevice:
    torch.manual_seed(seed)
    module = build_model(model)
    data = TensorData(torch.rand(rows, *SHAPE), (torch.arange(rows) * seed) % CLASSES)
    local = Local(model=module, taps=check_local_model(module), data=data, classes=CLASSES, torch_device=CPU)
    return DaFKDDevice(config_of(**settings), local)


def answer_of(device: str, parts: Parts) -> DeviceAnswer:
    return DeviceAnswer(device, 1, encode(parts))


def answered(cohort: FakeCohort) -> list[tuple[str, str, Parts]]:
    """Step, device and parts of every answer."""
    return [(one.step, one.device, one.answer.parts) for one in cohort.asked if one.answer is not None]


def part_of(parts: Parts, name: str, kind: type[PartKind]) -> PartKind:
    found = parts[name]
    assert isinstance(found, kind)
    return found


def run_round(server: DaFKDServer, devices: Mapping[str, DaFKDDevice], completed: int = 0) -> FakeCohort:
    (cohort,) = play(server, devices, completed=completed)
    return cohort


def two_devices(**settings: Any) -> dict[str, DaFKDDevice]:
    return {"a": make_device(1, **settings), "b": make_device(3, rows=25, **settings)}


def states_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


# --- importance and the ensemble


def test_daf_1_importance_is_the_discriminators_share() -> None:
    assert_close(VERDICTS.sigmoid()[:, 0], torch.tensor([0.880797, 0.5, 0.268941]).double(), atol=1e-6, rtol=0)
    weights = importance_weights(VERDICTS)
    assert_close(weights[:, 0], torch.tensor([0.533901, 0.303078, 0.163021]).double(), atol=1e-6, rtol=0)
    assert_close(weights.sum(0), torch.ones(1).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_daf_2_importance_of_hopeless_samples_is_finite(dtype: torch.dtype) -> None:
    """The quotient of eq. (7) is 0 / 0 in both types; its share in exact numbers is 1 : e^-100 : e^-200."""
    verdicts = torch.tensor([[-800.0], [-900.0], [-1000.0]], dtype=dtype)
    naive = verdicts.sigmoid() / verdicts.sigmoid().sum(0)
    assert bool(naive.isnan().all())
    weights = importance_weights(verdicts)[:, 0]
    assert weights[0] == 1
    assert_close(weights[1:].log(), torch.tensor([-100.0, -200.0]).double(), atol=1e-9, rtol=0)


@given(logit=st.floats(-50, 50), devices=st.integers(1, 9))
def test_daf_3_equal_discriminators_count_alike(logit: float, devices: int) -> None:
    weights = importance_weights(torch.full((devices, 2), logit))
    assert_close(weights, torch.full((devices, 2), 1 / devices).double())
    assert_close(weights, equal_weights(devices, 2))


def test_daf_13_without_correlation_eight_devices_have_an_eighth_each() -> None:
    assert equal_weights(8, 1)[:, 0].tolist() == [0.125] * 8


def test_daf_4_the_teacher_is_the_weighted_mean() -> None:
    logits = PROBS.log()[:, None]
    teacher = ensemble(importance_weights(VERDICTS), logits, 1.0, "probs")
    assert_close(teacher[0], torch.tensor([0.452945, 0.398149, 0.148906]).double(), atol=1e-6, rtol=0)
    uniform = torch.zeros(1, 3, dtype=torch.float64)
    assert float(distillation_loss(uniform, teacher, 1.0)) == pytest.approx(0.089637, abs=1e-6)
    plain = ensemble(equal_weights(3, 1), logits, 1.0, "probs")
    assert_close(plain[0], torch.tensor([0.366667, 0.433333, 0.2]).double(), atol=1e-6, rtol=0)
    assert float(distillation_loss(uniform, plain, 1.0)) == pytest.approx(0.046473, abs=1e-6)


def test_daf_5_the_sum_of_weighted_predictions_is_the_same_teacher() -> None:
    weighted = [weighted_predictions(VERDICTS[k], PROBS[k : k + 1]) for k in range(3)]
    for k in range(3):
        assert_close(weighted[k].sum(1), VERDICTS[k].sigmoid(), atol=1e-12, rtol=0)
    teacher, usable = ensemble_of_weighted(torch.stack(weighted).sum(0))
    expected = ensemble(importance_weights(VERDICTS), PROBS.log()[:, None], 1.0, "probs")
    assert_close(teacher, expected, atol=1e-12, rtol=0)
    assert usable.tolist() == [True]


def test_daf_6_averaging_probabilities_and_logits_differ() -> None:
    logits = torch.tensor([[[4.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]])
    half = equal_weights(2, 1)
    expected = {
        ("probs", 1.0): [0.588302, 0.296893, 0.114805],
        ("logits", 1.0): [0.736125, 0.164252, 0.099624],
        ("logits", 20.0): [0.353035, 0.327526, 0.319439],
    }
    for (space, temperature), row in expected.items():
        teacher = ensemble(half, logits, temperature, space)
        assert_close(teacher[0], torch.tensor(row).double(), atol=1e-6, rtol=0)


def test_vanished_importance_drops_a_sample_and_keeps_the_others() -> None:
    sums = torch.tensor([[0.2, 0.6], [0.0, 0.0], [1e-40, 0.0]], dtype=torch.float64)
    teacher, usable = ensemble_of_weighted(sums)
    assert usable.tolist() == [True, False, False]
    assert_close(teacher[0], torch.tensor([0.25, 0.75]).double())
    assert bool(teacher.isfinite().all())


def test_weighted_predictions_are_floored_so_that_float32_keeps_them() -> None:
    weighted = weighted_predictions(torch.tensor([-500.0]), torch.tensor([[0.5, 0.5]]))
    assert weighted.float().sum().item() == pytest.approx(1e-12)
    assert_close(weighted_predictions(None, PROBS), PROBS)


@given(seed=st.integers(0, 2**32 - 1), devices=st.integers(1, 6), samples=st.integers(1, 5))
def test_effective_devices_lie_between_one_and_all(seed: int, devices: int, samples: int) -> None:
    verdicts = 5 * torch.randn(devices, samples, generator=torch.Generator().manual_seed(seed))
    assert 1 - 1e-9 <= effective_devices(importance_weights(verdicts)) <= devices + 1e-9
    assert effective_devices(equal_weights(devices, samples)) == pytest.approx(devices)


@pytest.mark.parametrize(("classes", "seen", "mature"), [(10, 5, True), (10, 4, False), (3, 2, True), (3, 1, False)])
def test_with_few_classes_half_of_them_must_be_seen(classes: int, seen: int, mature: bool) -> None:
    assert (seen >= classes_needed(torch.eye(classes)[torch.arange(20) % seen])) is mature


def test_with_many_classes_half_of_those_in_view_must_be_seen() -> None:
    """104 classes: 20 in view, each with 0.05 - 84 * 0.0005 / 20 on average, need 10; two need five all the same."""
    spread = torch.full((1280, 104), 0.0005, dtype=torch.float64)
    spread[:, :20] = (1 - 84 * 0.0005) / 20
    assert classes_needed(spread) == 10
    sure = torch.eye(104, dtype=torch.float64)
    assert classes_needed(sure[torch.arange(1280) % 2]) == 5
    assert classes_needed(sure[torch.arange(1040) % 104]) == 52
    assert classes_needed(torch.empty(0, 104)) == 52


def test_the_guard_opens_at_104_classes_for_a_generator_that_covers_what_the_ensemble_has_in_view() -> None:
    """17 best classes of 34 in view, as measured in round 5 of a fleet with 104 classes; half of all would be 52."""
    context = MethodContext(
        classes=104, input_shape=SHAPE, models=ModelSection(device="digits_mlp_small"), torch_device=CPU, seed=3
    )
    server = DaFKDServer(DaFKDConfig.from_settings(QUICK).for_classes(104), context)
    teacher = torch.full((340, 104), 0.1 / 70, dtype=torch.float64)
    teacher[:, :34] = 0.9 / 34
    teacher[torch.arange(340), torch.arange(340) % 17] += 0.001
    teacher /= teacher.sum(1, keepdim=True)
    cohort = FakeCohort({})
    assert server.if_mature((torch.rand(340, *SHAPE), teacher), cohort)
    teacher[:, 0] += 0.01  # one class is the best of every sample
    assert not server.if_mature((torch.rand(340, *SHAPE), teacher), cohort)
    assert cohort.events[0].kind == "maturity-guard"


# --- losses


@pytest.mark.parametrize(("kind", "slope"), [("minimax", -0.017986), ("nonsaturating", -0.982014)])
def test_daf_7_the_generators_gradient(kind: str, slope: float) -> None:
    verdict = torch.tensor([-4.0], requires_grad=True)
    generator_loss(verdict, kind).backward()
    assert verdict.grad is not None
    assert verdict.grad.item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("kind", ["minimax", "nonsaturating"])
def test_daf_7_a_generator_step_raises_what_the_discriminator_says_of_its_samples(kind: str) -> None:
    torch.manual_seed(0)
    generator, noise = build_generator("digits_generator"), torch.randn(32, 100)
    judge = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
    before = float(judge(generator(noise)).detach().sigmoid().mean())
    generator_loss(judge(generator(noise))[:, 0], kind).backward(inputs=list(generator.parameters()))
    torch.optim.SGD(generator.parameters(), lr=0.01).step()
    assert float(judge(generator(noise)).detach().sigmoid().mean()) > before
    assert all(parameter.grad is None for parameter in judge.parameters())


def test_daf_8_the_adversarial_loss_is_one_mean_over_real_and_generated() -> None:
    real, fake = torch.tensor([2.0, 1.0]), torch.tensor([-1.0, 0.0])
    assert float(adversarial_loss(real, fake)) == pytest.approx(0.361650, abs=1e-6)
    sum_of_means = adversarial_loss(real, torch.empty(0)) + adversarial_loss(torch.empty(0), fake)
    assert float(sum_of_means) == pytest.approx(0.723299, abs=1e-6)


def test_daf_9_the_generators_optimum_is_not_the_mean_of_the_devices() -> None:
    """Two devices over two points; with best discriminators the sum of ln 2 - L_adv is the sum of Jensen-Shannon."""

    def objective(first: int) -> float:
        fake = torch.tensor([first, 10_000 - first])
        total = 0.0
        for real in (torch.tensor([9_000, 1_000]), torch.tensor([2_000, 8_000])):
            best = (real.double() / fake).log()  # logit of p / (p + q)
            total += np.log(2) - float(adversarial_loss(best.repeat_interleave(real), best.repeat_interleave(fake)))
        return total

    found = min(range(5_600, 5_740), key=objective)
    assert found == 5_666
    assert objective(5_666) == pytest.approx(0.14861310, abs=1e-8)
    assert objective(5_500) == pytest.approx(0.14885051, abs=1e-8)


def test_daf_10_the_best_discriminator_is_p_over_p_plus_q() -> None:
    real, fake = torch.tensor([6, 1]), torch.tensor([3, 3])
    best = torch.tensor([2 / 3, 0.25], dtype=torch.float64)
    logits = best.logit().requires_grad_()
    adversarial_loss(logits.repeat_interleave(real), logits.repeat_interleave(fake)).backward()
    assert logits.grad is not None
    assert_close(logits.grad, torch.zeros(2).double(), atol=1e-15, rtol=0)


def test_the_gradient_penalty_of_a_line_is_known() -> None:
    """f = sigmoid(3 x1 + 4 x2) has the slope 5 f (1 - f); at x = 0 that is 1.25, the penalty 0.0625."""
    weights = torch.tensor([3.0, 4.0])
    zeros = torch.zeros(2, 1, 2, 1)
    penalty = gradient_penalty(lambda x: x.flatten(1) @ weights, zeros, zeros, torch.tensor([0.2, 0.9]))
    assert penalty.detach().item() == pytest.approx(0.0625)


def test_daf_property_a_student_that_equals_its_only_teacher_learns_nothing() -> None:
    logits = torch.randn(6, 4, dtype=torch.float64)
    teacher = ensemble(importance_weights(torch.randn(1, 6)), logits[None], 2.0, "probs")
    student = logits.clone().requires_grad_()
    loss = distillation_loss(student, teacher, 2.0)
    loss.backward()
    assert abs(loss.detach().item()) < 1e-12
    assert student.grad is not None
    assert float(student.grad.abs().max()) < 1e-12


# --- portable noise


def test_daf_11_splitmix64() -> None:
    assert [hex(one) for one in splitmix64(12345, 3).tolist()] == [
        "0x22118258a9d111a0",
        "0x346edce5f713f8ed",
        "0x1e9a57bc80e6721d",
    ]


def test_daf_11_portable_noise() -> None:
    expected = [[0.5625435, 1.9279937, 0.9228022], [1.8429871, -0.6061906, 0.9957380]]
    noise = portable_noise(12345, 2, 3)
    assert noise.dtype == np.float32
    np.testing.assert_allclose(noise, expected, atol=1e-6)
    many = portable_noise(7, 200, 100)
    assert (round(float(many.mean()), 4), round(float(many.std()), 4)) == (-0.0085, 1.0094)


@given(seed=st.integers(0, 2**64 - 1), rows=st.integers(0, 5), more=st.integers(0, 5), size=st.integers(1, 5))
def test_noise_of_fewer_rows_is_the_beginning_of_more(seed: int, rows: int, more: int, size: int) -> None:
    few, many = portable_noise(seed, rows, size), portable_noise(seed, rows + more, size)
    np.testing.assert_array_equal(few, many[:rows])
    assert np.isfinite(many).all()


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_outside_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(ConfigurationError, match=r"must be in \[0, 2\*\*64\)"):
        portable_noise(seed, 1, 1)


# --- models


def test_the_papers_classifier_has_eleven_layers_and_256_features() -> None:
    model = build_model("dafkd_resnet11", input_shape=(1, 28, 28), classes=10)
    chain = [part for name, part in model.named_modules() if isinstance(part, nn.Conv2d) and "shortcut" not in name]
    assert len(chain) + 1 == 11  # and the linear layer
    assert check_local_model(model, torch.rand(2, 1, 28, 28), 10).features(torch.rand(2, 1, 28, 28)).shape == (2, 256)
    # Worked by hand, 3 channels: stem 464, blocks 4,928 + 24,192 + 95,488, head 257 * 10.
    assert parameter_count(build_model("dafkd_resnet11")) == 464 + 4_928 + 24_192 + 95_488 + 2_570
    # The authors' second blocks: 4,544 + 17,792 + 70,400.
    assert parameter_count(build_model("dafkd_resnet20")) == 127_642 + 4_544 + 17_792 + 70_400


def test_the_image_generator_has_the_167k_parameters_of_the_prototype() -> None:
    count = parameter_count(build_generator("dafkd_generator", shape=(1, 28, 28)))
    # Linear 101 * 1568, two batch-norms 64 + 32, transposed convolutions 32 * 16 * 16 and 16 * 16 + 1.
    assert count == 158_368 + 96 + 8_192 + 257
    assert round(count / 1000) == 167


def test_paper_has_the_papers_generator_two_embeddings_batch_norm_and_leaky_relu() -> None:
    config = DaFKDConfig.from_settings({"paper": True}).for_classes(10)
    generator = make_generator(config, (1, 28, 28), 10)
    assert (generator.noise_embedding.in_features, generator.label_embedding.in_features) == (100, 10)
    kinds = [type(module) for module in generator.body]
    assert kinds == [nn.Linear, nn.BatchNorm1d, nn.LeakyReLU, nn.Linear, nn.Sigmoid, nn.Unflatten]
    # Embeddings 101 * 128 and 11 * 128, hidden layer 257 * 256 with 2 * 256 of batch-norm, image 257 * 784.
    assert parameter_count(generator) == 12_928 + 1_408 + 65_792 + 512 + 201_488
    features = DaFKDConfig.from_settings({"paper": True, "generator_level": "feature"}).for_classes(10)
    assert (features.generator, features.label_condition) == ("feature_generator", True)
    assert DaFKDConfig().for_classes(10).generator == "dafkd_generator"


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("classes", [0, 7])
def test_every_generator_makes_samples_of_its_shape_and_range(name: str, classes: int) -> None:
    shape = (48,) if name == "feature_generator" else (2, 8, 12)
    generator = build_generator(name, shape=shape, noise_dim=5, classes=classes)
    labels = torch.arange(6) % 7 if classes else None
    made = generator(10 * torch.randn(6, 5), labels)
    assert made.shape == (6, *shape)
    low, high = {"dafkd_generator_tanh": (-1, 1), "feature_generator": (0, float("inf"))}.get(name, (0, 1))
    assert low <= made.min().item() < low + 0.5
    assert made.max().item() <= high
    made.sum().backward()
    assert all(parameter.grad is not None for parameter in generator.parameters())
    if classes:
        with pytest.raises(ConfigurationError, match="give one for each sample"):
            generator(torch.randn(6, 5))


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("dafkd_generator", {"shape": (1, 9, 8)}, "multiples of 4 for this generator"),
        ("digits_generator", {"noise_dim": 0}, "noise_dim must be >= 1, got 0"),
        ("feature_generator", {"classes": 1}, "classes is 1"),
        ("os:system", {}, "unknown generator 'os:system', expected one of dafkd_generator"),
    ],
)
def test_a_generator_that_cannot_be_is_refused(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        build_generator(name, **options)


class OwnSplit(nn.Module):
    """A model that is no chain of stages but brings its taps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.extractor = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU())
        self.top = nn.Linear(12, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return self.extractor(x)

    def predict(self, features: Tensor) -> Tensor:
        return self.top(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.predict(self.features(x))


@pytest.mark.parametrize("make", [OwnSplit, lambda: build_model("resnet4", input_shape=SHAPE)])
@pytest.mark.parametrize("sharing", [True, False])
def test_a_classifier_is_judged_wherever_it_is_split(make: Any, sharing: bool) -> None:
    classifier, x = make().eval(), torch.rand(3, *SHAPE)
    size = 12 if isinstance(classifier, OwnSplit) else 16
    judged = JudgedClassifier(classifier, (size,), sharing=sharing, feature_level=False).eval()
    assert judged.features(x).shape == (3, size)
    assert_close(judged.answer(x), classifier(x))
    assert judged.judge(x).shape == (3,)
    if sharing:
        assert parameter_count(judged.discriminator) == size + 1
    else:  # all layers but the last, which becomes one number
        assert parameter_count(judged.discriminator) == parameter_count(classifier) - (size + 1) * (CLASSES - 1)
        assert isinstance(judged.discriminator, OwnNetwork)


# --- the device


def asked(server: DaFKDServer, device: DaFKDDevice) -> Parts:
    return server.message("a", FakeCohort({"a": device}), 5)


def train(server: DaFKDServer, device: DaFKDDevice, seed: int = 4) -> Parts:
    torch.manual_seed(seed)
    return device.handle(Ask(round=1, step="train", seed=seed, parts=asked(server, device))).parts


def test_daf_property_a_discriminator_goes_on_from_where_it_was_and_never_comes_from_the_server() -> None:
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


def test_state_of_before_the_first_round_has_no_discriminator_and_takes_one_back() -> None:
    server, device = make_server(), make_device()
    fresh = unpack_state(pack_state(device.state_dict()))
    train(server, device)
    device.load_state_dict(fresh)
    assert device.state_dict() == {"discriminator": None, "optimizer": None}


def test_the_first_discriminator_is_decided_by_the_asks_seed_alone() -> None:
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
def test_daf_property_a_generator_step_changes_nothing_but_the_generator(name: str) -> None:
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
    against = adversarial_loss(judged.judge(x), judged.judge(fake))
    assert_close(training.joint_loss(x, labels, fake), own + 0.7 * against)


def test_sharing_trains_the_extractor_for_the_discriminator_too_and_no_sharing_does_not() -> None:
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


def test_a_last_batch_of_one_sample_trains_models_without_batch_norm() -> None:
    local = make_device(rows=33).local
    model = OwnSplit()
    device = DaFKDDevice(config_of(), replace(local, model=model, taps=check_local_model(model)))
    losses = [float(one.detach()) for one in training_of(device).losses(0, torch.tensor([0]))]
    assert len(losses) == 1
    assert np.isfinite(losses).all()


def test_a_generator_that_diverges_is_an_error_that_names_its_rate() -> None:
    device = make_device()
    training = training_of(device)
    with torch.no_grad():
        next(device.generator.parameters()).fill_(float("nan"))
    with pytest.raises(KnowledgeError, match=r"the generator's loss is nan; its learning rate \(generator_lr\)"):
        training.step_generator(4)


def test_the_generators_optimiser_is_fresh_and_has_the_weight_decay_that_is_stated() -> None:
    device = make_device(adversarial_weight_decay=0.25)
    optimizer = adam(device.config, device.generator, 0.5)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.5, 0.25)
    assert not optimizer.state


# --- the server


@pytest.mark.parametrize("name", VARIANTS)
def test_a_round_of_every_variant(name: str) -> None:
    settings = {**VARIANTS[name], "local_epochs": 1}
    server, devices = make_server(**settings), two_devices(**settings)
    before = copied(server.model)
    cohort = run_round(server, devices)
    assert not states_equal(copied(server.model), before) or cohort.events
    for step, device, parts in answered(cohort):
        kinds = {part.name: part.WhichOneof("kind") for part in encode(parts).parts.parts}
        assert kinds == server.answer_kinds()[step], device
    assert 1 <= cohort.figures["effective_devices"] <= 2 + 1e-9
    assert cohort.figures["likelihood"].keys() == {"a", "b"}


def test_the_start_of_distillation_is_the_mean_of_classifiers_and_generators() -> None:
    server, devices = make_server(kd_epochs=0), two_devices()
    cohort = run_round(server, devices)
    generators = [part_of(parts, "generator", Generator).parameters for _, _, parts in answered(cohort)]
    classifiers = [part_of(parts, "parameters", ModelParameters) for _, _, parts in answered(cohort)]
    for module, sent in ((server.model, classifiers), (server.generator, generators)):
        for name, array in model_parameters(module).parameters.items():
            expected = np.mean([one.parameters[name] for one in sent], axis=0)
            np.testing.assert_allclose(array, expected, atol=1e-6)


def test_the_mean_can_weigh_devices_by_their_samples() -> None:
    server, devices = make_server(kd_epochs=0, aggregation="samples"), two_devices()
    cohort = run_round(server, devices)
    name = "stages.head.bias"
    first, second = (part_of(parts, "parameters", ModelParameters).parameters[name] for *_, parts in answered(cohort))
    expected = (40 * first + 25 * second) / 65
    np.testing.assert_allclose(model_parameters(server.model).parameters[name], expected, atol=1e-6)


def test_the_ensemble_is_that_of_the_devices_own_models() -> None:
    """The server hears each device with its classifier and its discriminator, whatever it heard before."""
    server, devices = make_server(), two_devices()
    cohort = run_round(server, devices)
    samples = server.samples(5)
    answers = [answer_of(device, parts) for _, device, parts in answered(cohort)]
    found = server.judged_ensemble(answers, samples, cohort)
    assert found is not None
    with torch.no_grad():
        heard = [half.ready()[0].eval() for half in devices.values()]
        verdicts = torch.stack([one.judge(samples) for one in heard])
        logits = torch.stack([half.local.model(samples) for half in devices.values()])
    assert_close(found[1], ensemble(importance_weights(verdicts), logits, 1.0, "probs"), atol=1e-6, rtol=0)


def teachers_of(**settings: Any) -> tuple[Tensor, Tensor]:
    """Samples and teacher of a first round."""
    server, caught = make_server(**settings), list[tuple[Tensor, Tensor]]()
    server.if_mature = lambda teacher, cohort: caught.append(teacher)  # type: ignore
    run_round(server, two_devices(**settings))
    return caught[0]


def test_exact_agrees_with_the_servers_own_computation_and_lagged_has_the_older_samples() -> None:
    samples, teacher = teachers_of()
    exact_samples, exact = teachers_of(**VARIANTS["exact"])
    lagged_samples, _ = teachers_of(**VARIANTS["lagged"])
    assert torch.equal(samples, exact_samples)
    assert_close(exact, teacher, atol=1e-6, rtol=0)
    assert not torch.equal(samples, lagged_samples)


def test_a_lagged_device_predicts_with_what_it_learned_on_samples_of_the_generator_that_it_was_sent() -> None:
    server, device = make_server(**VARIANTS["lagged"]), make_device(**VARIANTS["lagged"])
    sent = part_of(train(server, device), "predictions", WeightedPredictions)
    samples = server.samples(5)
    judged = device.ready()[0].eval()
    with torch.no_grad():
        expected = judged.judge(samples).sigmoid()[:, None] * judged.answer(samples).softmax(1)
    np.testing.assert_allclose(sent.values, expected.numpy(), atol=1e-6)
    assert sent.noise_seed == 5


def test_no_correlation_is_the_plain_mean_on_the_server_and_on_the_device() -> None:
    _, plain = teachers_of(correlation=False)
    _, exact = teachers_of(correlation=False, **VARIANTS["exact"])
    _, weighted = teachers_of()
    assert_close(exact, plain, atol=1e-6, rtol=0)
    assert float((plain - weighted).abs().max()) > 1e-5


def test_daf_property_at_feature_level_distillation_leaves_the_extractor_alone() -> None:
    server = make_server(**VARIANTS["feature level"], maturity_guard=False)
    assert isinstance(server.model, SplitModel)
    below, above = server.model.stages[:-1], server.model.stages[-1]
    before, head = copied(below), copied(above)
    teacher = torch.eye(10)[torch.arange(64) % 10].double()
    server.train_student(torch.rand(64, 32), teacher, torch.Generator().manual_seed(7))
    assert states_equal(copied(below), before)
    assert not states_equal(copied(above), head)


def test_distillation_brings_the_student_to_its_teacher_and_leaves_statistics_alone() -> None:
    server = make_server(kd_epochs=20, kd_lr=0.01)
    samples, teacher = torch.rand(64, *SHAPE), torch.full((64, 10), 0.01).index_fill_(1, torch.tensor([3]), 0.91)
    before = copied(server.model)
    server.train_student(samples, teacher.double(), torch.Generator().manual_seed(7))
    assert float((server.model.eval()(samples).argmax(1) == 3).double().mean()) > 0.95
    assert torch.equal(server.model.state_dict()["stages.stem.1.running_mean"], before["stages.stem.1.running_mean"])


def test_distillation_that_does_not_stay_finite_is_undone() -> None:
    always = {"kd_start_round": 1, "maturity_guard": False}
    averaging, distilling = make_server(kd_epochs=0, **always), make_server(kd_lr=1e30, kd_epochs=5, **always)  # type: ignore[arg-type]
    run_round(averaging, two_devices())
    cohort = run_round(distilling, two_devices())
    assert states_equal(copied(distilling.model), copied(averaging.model))
    assert cohort.kinds == ["distillation-undone"]


def test_distillation_starts_in_its_round() -> None:
    server, devices = make_server(kd_start_round=3), two_devices()
    assert "effective_devices" not in run_round(server, devices, completed=1).figures
    assert "effective_devices" in run_round(server, devices, completed=2).figures


def one_class_teacher(classes: int) -> tuple[Tensor, Tensor]:
    return torch.rand(20, *SHAPE), torch.eye(10).double()[torch.arange(20) % classes]


def test_the_guard_holds_an_immature_generator_back_and_says_so() -> None:
    cohort = FakeCohort({})
    assert not make_server().if_mature(one_class_teacher(4), cohort)
    assert cohort.events == [
        (
            "maturity-guard",
            "",
            "the ensemble sees 4 of 10 classes in the generated samples, 5 are needed; nothing is distilled from them",
        )
    ]
    assert cohort.figures["generated_classes"] == 4


def test_the_guard_stays_still_for_a_mature_generator_and_when_switched_off() -> None:
    cohort = FakeCohort({})
    assert make_server().if_mature(one_class_teacher(5), cohort)
    assert make_server(maturity_guard=False).if_mature(one_class_teacher(1), cohort)
    assert cohort.events == []


def round_of_one_class(**settings: Any) -> tuple[dict[str, Tensor], list[str]]:
    """The model after a round in which every device knows class 0 only, and the kinds of events."""
    server, devices = make_server(learning_rate=1e-4, **settings), two_devices(learning_rate=1e-4)
    with torch.no_grad():
        server.model.get_parameter("stages.head.bias")[0] += 5
    for half in devices.values():
        half.data = TensorData(half.data.inputs, torch.zeros_like(half.data.labels))
    cohort = run_round(server, devices)
    return copied(server.model), cohort.kinds


def test_where_the_guard_fires_the_mean_of_the_models_stays() -> None:
    guarded, events = round_of_one_class()
    mean, none = round_of_one_class(kd_epochs=0, maturity_guard=False)
    assert events == ["maturity-guard"]
    assert none == []
    assert states_equal(guarded, mean)
    assert not states_equal(round_of_one_class(maturity_guard=False)[0], mean)


def test_a_device_with_another_seed_or_without_finite_answers_does_not_teach() -> None:
    server, cohort = make_server(**VARIANTS["lagged"]), FakeCohort({})
    samples = server.samples(5)
    good = WeightedPredictions(noise_seed=5, values=np.full((64, 10), 0.05, np.float32))
    stale = WeightedPredictions(noise_seed=6, values=np.full((64, 10), 0.01, np.float32))
    answers = [answer_of("a", {"predictions": good}), answer_of("b", {"predictions": stale})]
    found = server.weighted_ensemble(answers, samples, 5, cohort)
    assert found is not None
    assert cohort.figures["likelihood"] == {"a": pytest.approx(0.5)}
    assert cohort.events[0].kind == "member-left-out"
    assert "predicts on samples of seed 6, the round's is 5" in cohort.events[0].text
    assert server.weighted_ensemble(answers[1:], samples, 5, cohort) is None


def test_where_all_importance_vanishes_no_figure_is_made_up() -> None:
    server, cohort = make_server(**VARIANTS["lagged"]), FakeCohort({})
    nowhere = WeightedPredictions(noise_seed=5, values=np.zeros((64, 10), np.float32))
    found = server.weighted_ensemble([answer_of("a", {"predictions": nowhere})], server.samples(5), 5, cohort)
    assert found is not None
    assert [len(one) for one in found] == [0, 0]
    assert cohort.figures == {"likelihood": {"a": 0.0}, "dropped_samples": 64}
    assert not server.if_mature(found, cohort)
    json.dumps(cohort.figures, allow_nan=False)


def test_a_model_that_is_not_finite_on_generated_samples_does_not_teach() -> None:
    server, cohort = make_server(), FakeCohort({})
    sent = model_parameters(server.model)
    huge = ModelParameters(
        parameters={name: np.full_like(array, 3e38) for name, array in sent.parameters.items()}, buffers=sent.buffers
    )
    judge = Discriminator(parameters=model_parameters(server.member.discriminator), shares_extractor=True)
    answers = [answer_of("a", {"parameters": huge, "discriminator": judge})]
    assert server.judged_ensemble(answers, server.samples(5), cohort) is None
    assert cohort.kinds == ["member-left-out"]


def test_soft_only_lets_a_device_keep_another_classifier_and_teach_with_it() -> None:
    settings = VARIANTS["soft-only"]
    server = make_server(**settings)
    devices = {"a": make_device(1, **settings), "b": make_device(2, model="digits_cnn_small", **settings)}
    cohort = run_round(server, devices)
    sent = {one.device: one.parts for one in cohort.asked}
    assert "parameters" in sent["a"]
    assert "parameters" not in sent["b"]
    assert cohort.figures["likelihood"].keys() == {"a", "b"}
    assert server.requirements().same_architecture is False
    assert server.initial() is None
    asyncio.run(server.finish(end := FakeCohort(devices)))
    assert [(one.step, one.device) for one in end.asked] == [("deliver", "a")]
    assert states_equal(copied(devices["a"].local.model), copied(server.model))


def test_a_simulation_of_soft_only_devices_gives_each_its_own_model(tmp_path: Path) -> None:
    """The server keeps a classifier of its own; whether all devices run it is a setting."""
    models = ("digits_mlp_small", "digits_linear")
    settings = {"upload_model": False, "discriminator_location": "device", "local_epochs": 1, "kd_samples": 64}
    wanted = replace(SMALL, method="dafkd", settings=settings, models=models, rounds=1)
    config, specs, _ = prepared = prepare(wanted, tmp_path / "work")
    assert [spec.model for spec in specs] == list(models)
    assert config.model.device == "digits_mlp_small"  # the larger one
    store = run_in_memory(prepared)
    profiles = [contract_pb2.DeviceProfile.FromString(row["profile"]) for row in store.devices.all(RUN)]
    assert [one.model_name for one in profiles] == list(models)
    assert len({one.model_fingerprint for one in profiles}) == 2
    assert {row["status"] for row in store.asks.uploads(RUN) if row["step"] == "train"} == {"used"}
    store.close()


def test_the_step_that_ends_a_round_follows_the_settings() -> None:
    assert DaFKDDevice.metrics_steps(config_of()) == ("train",)
    assert DaFKDDevice.metrics_steps(config_of(**VARIANTS["exact"])) == ("predict",)


def test_the_same_samples_on_both_sides_by_the_seed_alone() -> None:
    server, device = make_server(label_condition=True), make_device(label_condition=True)
    load_parameters(device.generator, model_parameters(server.generator))
    ask = Ask(round=1, step="predict", seed=0, parts={"plan": Plan(values={"noise_seed": 99})})
    assert torch.equal(device.samples(ask), server.samples(99))
    assert not torch.equal(server.samples(98), server.samples(99))
    generator = make_generator(config_of(label_condition=True), SHAPE, CLASSES).eval()
    noise = torch.from_numpy(portable_noise(99, 12, 100))
    expected = generator(noise, torch.arange(12) % CLASSES)
    assert_close(distillation_samples(generator, 99, 12, CPU), expected.detach())


def test_server_state_comes_back() -> None:
    server, devices = make_server(), two_devices()
    run_round(server, devices)
    other = make_server()
    other.load_state_dict(unpack_state(pack_state(server.state_dict())))
    assert states_equal(copied(other.model), copied(server.model))
    assert states_equal(copied(other.generator), copied(server.generator))


def test_the_global_model_exports(tmp_path: Path) -> None:
    server = make_server()
    model, shape = server.export()
    report = export_onnx(model, tmp_path / "global.onnx", torch.rand(5, *shape), {"method": "dafkd"})
    assert report.max_difference < 1e-4


# --- settings


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"generator_level": "feature", "sharing": False}, "feature-level generator needs sharing"),
        ({"discriminator_location": "cloud"}, "unknown discriminator_location 'cloud', expected one of server, device"),
        ({"upload_model": False}, "upload_model=false needs device-side importance and ensemble_space='probs'"),
        (
            {"upload_model": False, "discriminator_location": "device", "ensemble_space": "logits"},
            "upload_model=false needs device-side importance and ensemble_space='probs'",
        ),
        ({"discriminator_location": "device", "ensemble_space": "logits"}, "use ensemble_space='probs'"),
        ({"sync": "later"}, "unknown sync 'later', expected one of lagged, exact"),
        ({"generator_level": "pixel"}, "unknown generator_level"),
        ({"generator_loss": "hinge"}, "unknown generator_loss"),
        ({"aggregation": "median"}, "unknown aggregation"),
        ({"generator": "os:system"}, "unknown generator 'os:system'"),
        ({"noise_dim": 0}, "noise_dim must be >= 1 and < 4097, got 0"),
        ({"kd_samples": 100_001}, "kd_samples must be >= 1 and < 100001, got 100001"),
        ({"kd_samples": 0}, "kd_samples must be >= 1"),
        ({"kd_start_round": 0}, "kd_start_round must be >= 1"),
        ({"kd_epochs": -1}, "kd_epochs must be >= 0"),
        ({"kd_lr": 0.0}, "kd_lr must be > 0"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"lambda_adv": -1.0}, "lambda_adv must be >= 0"),
        ({"lambda_adv": float("nan")}, "lambda_adv must be >= 0"),
        ({"lambda_adv": float("inf")}, "lambda_adv must be >= 0"),
        ({"gan_stop_round": -1}, "gan_stop_round must be >= 0"),
        ({"participation_ratio": 0.0}, r"participation_ratio must be in \(0, 1\]"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion'"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        DaFKDConfig(**settings)


def test_paper_switches_every_deviation_off() -> None:
    ours, paper = DaFKDConfig().for_classes(10), DaFKDConfig.from_settings({"paper": True}).for_classes(10)
    assert (paper.generator_loss, paper.kd_start_round, paper.maturity_guard) == ("minimax", 1, False)
    assert (paper.freeze_batch_norm, paper.local_epochs, paper.kd_lr) == (False, 20, 0.01)
    assert (paper.weight_decay, paper.adversarial_weight_decay) == (1e-3, 1e-3)
    assert (ours.generator_loss, ours.kd_start_round, ours.maturity_guard) == ("nonsaturating", 3, True)
    assert paper.for_classes(10) == paper


def test_the_defaults_follow_the_level() -> None:
    assert (DaFKDConfig().for_classes(9).generator, DaFKDConfig().for_classes(9).label_condition) == (
        "dafkd_generator",
        False,
    )
    feature = DaFKDConfig(generator_level="feature").for_classes(9)
    assert (feature.generator, feature.label_condition) == ("feature_generator", True)


# --- bytes


def model_of(count: int) -> ModelParameters:
    return ModelParameters(parameters={"w": np.zeros(count, np.float32)})


def test_daf_12_bytes_of_every_message() -> None:
    classifier = model_of(300_000)
    generator = Generator(parameters=model_of(120_000), noise_size=100)
    head = Discriminator(parameters=model_of(256 + 1), shares_extractor=True)
    whole = Discriminator(parameters=classifier, shares_extractor=False)
    predictions = WeightedPredictions(noise_seed=2**64 - 1, values=np.zeros((1280, 10), np.float32))
    plan = Plan(values={"noise_seed": 2**63 - 1, "adversarial": True})
    both: dict[str, Kind] = {"parameters": classifier, "generator": generator}
    assert encode({**both, "discriminator": head}, np.float16).data_bytes == 1_681_028
    assert encode({**both, "plan": plan}, np.float16).data_bytes == 1_680_000  # the plan is in the header
    assert encode({**both, "predictions": predictions}, np.float16).data_bytes == 1_731_200
    assert encode({"generator": generator, "predictions": predictions}, np.float16).data_bytes == 531_200
    assert encode({**both, "discriminator": whole}, np.float16).data_bytes == 2_880_000


def state_bytes(module: nn.Module) -> int:
    """4 bytes a parameter, and what batch-norm adds: its statistics and its counters."""
    return sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())


FLEET = Simulation(
    method="dafkd",
    devices=2,
    rounds=2,
    train_limit=80,
    test_limit=20,
    alpha=10.0,
    models=("digits_mlp_small",),
    torch_device="cpu",
)


def test_features_below_0_are_refused_at_feature_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """The feature generator ends in a ReLU, so a cut behind a tanh would get a useless one in silence."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh())
    monkeypatch.setattr(
        MethodContext,
        "device_model",
        lambda self: SplitModel({"body": body, "last": nn.Linear(8, CLASSES)}, cut="body"),
    )
    with pytest.raises(ConfigurationError, match=r"features of SplitModel reach -0\.\d+ and the generator"):
        make_server(**VARIANTS["feature level"])
    assert make_server(**VARIANTS["server"])


@pytest.mark.parametrize("name", ["server", "no sharing", "lagged", "exact", "soft-only", "feature level"])
def test_daf_12_a_run_sends_what_the_formula_says(name: str, tmp_path: Path) -> None:
    settings = {**QUICK, **VARIANTS[name]}
    store = run_in_memory(prepare(replace(FLEET, settings=settings), tmp_path / "work"))
    assert_no_upload_lost(store)
    server = make_server(**VARIANTS[name])
    parts = (server.model, server.generator, server.member.discriminator)
    model, generator, discriminator = (Weights.of(model_parameters(part)) for part in parts)
    sizes = Sizes(classes=CLASSES, embedding=32, model=model, generator=generator, discriminator=discriminator)
    predicted = round_bytes(DaFKDServer.exchanges(DaFKDConfig(**settings).for_classes(CLASSES), sizes), "float16")
    up, down, w = predicted["up"], predicted["down"], state_bytes(server.model)
    rows = {
        (one["direction"], one["round"]): one["tensor_bytes"]
        for one in store.history.traffic(RUN)
        if one["device"] == "device-0" and one["round"] > 0
    }
    assert (rows["up", 1], rows["up", 2]) == (up, up)
    assert rows["down", 1] in (down, down + w)  # and the first weights, where the method gives them
    assert rows["down", 2] == down + w  # and the end result
    assert not store.history.events(RUN, "refused")
    store.close()


def test_over_the_wire_a_replayed_seed_fits(tmp_path: Path) -> None:
    """A noise seed is 63 bits of the run's seed tree: it must survive plan, answer and back."""
    settings = {**QUICK, **VARIANTS["lagged"], "maturity_guard": False}
    store = run_in_memory(prepare(replace(FLEET, rounds=1, settings=settings), tmp_path / "work"))
    assert not store.history.events(RUN, "member-left-out")
    store.close()
