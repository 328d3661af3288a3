"""FedDKD's two halves: what they compute, by its specification's oracles and by hand."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fleets import outcome, prepare, run_in_memory
from support.wire_samples import make_contract, make_profile
from torch import Tensor, nn
from torch.testing import assert_close

from fleetdistill import Step
from fleetdistill.errors import (
    CannotAnswer,
    ConfigurationError,
    KnowledgeError,
    ModelError,
    QuorumNotReached,
    RefusedError,
)
from fleetdistill.knowledge import DistillationGradient, Kind, ModelParameters, Parts, Plan, Weights
from fleetdistill.methods.base import Ask, Local
from fleetdistill.methods.fedavg import FedAvgConfig
from fleetdistill.methods.feddkd.config import FedDKDConfig
from fleetdistill.methods.feddkd.device import FedDKDDevice, distillation_gradient
from fleetdistill.models import build_model
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.losses import activation_divergence, distillation_loss, soft_cross_entropy, soft_targets
from fleetdistill.training.model import SplitModel, check_local_model, parameter_count
from fleetdistill.training.onnx_export import export_onnx
from fleetdistill.training.parameters import batch_norm_names, load_parameters, model_parameters
from fleetdistill.wire.codec import encode
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.engine.export import export_server_model
from fleetdistill_server.intake.admission import check_profile
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.methods.averaging import WeightedMean
from fleetdistill_server.methods.context import MethodContext
from fleetdistill_server.methods.fedavg import FedAvgServer
from fleetdistill_server.methods.feddkd import FedDKDServer, Gradients, descend, limited
from fleetdistill_server.methods.traffic import Sizes, declared_parts, round_bytes
from fleetdistill_server.simulation.links.links import DriveDevices
from fleetdistill_server.simulation.links.memory_link import MemoryLink
from fleetdistill_server.simulation.spec.device import make_device as make_simulated_device
from fleetdistill_server.simulation.spec.plan import RUN
from fleetdistill_server.simulation.spec.settings import Simulation
from fleetdistill_server.store.store import Store
from fleetdistill_server.testing import FakeCohort

CLASSES, INPUTS, HIDDEN = 3, 6, 8


def tiny_model(input_shape: Sequence[int] = (INPUTS,), classes: int = CLASSES) -> SplitModel:
    """Two layers and dropout, no batch-norm."""
    layers = {"body": nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Dropout(0.2))}
    return SplitModel({**layers, "head": nn.Linear(HIDDEN, classes)}, cut="body")


def norm_model(input_shape: Sequence[int] = (INPUTS,), classes: int = CLASSES) -> SplitModel:
    """The same with batch-norm that no name tells of."""
    body = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU())
    return SplitModel({"body": body, "head": nn.Linear(HIDDEN, classes)}, cut="body")


def scalar_model(input_shape: Sequence[int] = (1,), classes: int = CLASSES) -> nn.Module:
    """Three weights and nothing else."""
    return nn.Linear(1, classes, bias=False)


def make_context(model: str = "test_feddkd:tiny_model", **changes: Any) -> MethodContext:
    sys.modules["test_feddkd"] = sys.modules[__name__]
    settings: dict[str, Any] = {
        "classes": CLASSES,
        "input_shape": (INPUTS,),
        "models": ModelSection(device=model),
        "torch_device": torch.device("cpu"),
        "seed": 3,
    }
    return MethodContext(**{**settings, **changes})


def make_config(**settings: Any) -> FedDKDConfig:
    return FedDKDConfig.from_settings({"batch_size": 8, "local_epochs": 2, **settings}).for_classes(CLASSES)


def make_server(model: str = "test_feddkd:tiny_model", **settings: Any) -> FedDKDServer:
    return FedDKDServer(make_config(**settings), make_context(model))


def make_data(seed: int, rows: int = 20) -> TensorData:
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(rows) + seed) % CLASSES
    return TensorData(torch.randn(rows, INPUTS, generator=generator) + labels[:, None], labels)


def make_device(seed: int = 0, rows: int = 20, model: str = "test_feddkd:tiny_model", **settings: Any) -> FedDKDDevice:
    module = make_context(model).device_model()
    local = Local(
        model=module,
        taps=check_local_model(module),
        data=make_data(seed, rows),
        classes=CLASSES,
        torch_device=torch.device("cpu"),
    )
    return FedDKDDevice(make_config(**settings), local)


Handle = Callable[[Ask], Any]


def fleet_of(members: Mapping[str, Handle], completed: int = 0, silent: Collection[tuple[int, str]] = ()) -> FakeCohort:
    """A round's cohort; `silent` has the (number of the ask in the round, device) that get no answer."""
    return FakeCohort(members, completed=completed, silent=silent)


def asked(cohort: FakeCohort) -> list[tuple[str, tuple[str, ...]]]:
    """Step and devices of each ask of the round."""
    asks = groupby(cohort.asked, key=lambda one: (one.number, one.step))
    return [(step, tuple(one.device for one in group)) for (_, step), group in asks]


def sent(cohort: FakeCohort) -> list[Parts]:
    """What each ask of the round brought, the same to all its devices."""
    return [next(group).parts for _, group in groupby(cohort.asked, key=lambda one: one.number)]


def answers(cohort: FakeCohort) -> list[dict[str, Parts]]:
    """For each ask of the round what each device answered."""
    asks = groupby(cohort.asked, key=lambda one: one.number)
    return [{one.device: one.answer.parts for one in group if one.answer is not None} for _, group in asks]


def run_round(server: FedDKDServer, fleet: FakeCohort) -> FakeCohort:
    asyncio.run(server.round(fleet))
    return fleet


def make_fleet(
    count: int = 2, completed: int = 0, model: str = "test_feddkd:tiny_model", **settings: Any
) -> FakeCohort:
    devices = {f"d{i}": make_device(i, model=model, **settings) for i in range(count)}
    return fleet_of({name: device.handle for name, device in devices.items()}, completed)


def mean_of(fleet: FakeCohort) -> ModelParameters:
    """What the server starts the distillation from: the mean of the models that were sent, of equal weights."""
    mean = WeightedMean("gross")
    for device, parts in answers(fleet)[0].items():
        mean.add(device, parts["parameters"], 20)  # type: ignore[arg-type]
    return mean.result(fleet)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def scripted(
    weight: float = 0.0, gradient: float = 0.0, samples: int = 1, losses: Sequence[float] = (), fall: float = 0.9
) -> Handle:
    """A device whose three weights, gradient and losses a test made up; without losses they fall step by step."""

    def handle(ask: Ask) -> Any:
        if ask.step == "train":
            sent: Kind = ModelParameters(parameters={"weight": np.full((CLASSES, 1), weight, np.float32)})
            return SimpleNamespace(parts={"parameters": sent}, samples=samples)
        step = int(ask.part("plan", Plan).values["dkd_step"])  # type: ignore[arg-type]
        loss = losses[step - 1] if losses else fall**step
        gradients = {"weight": np.full((CLASSES, 1), gradient, np.float32)}
        sent = DistillationGradient(gradients=gradients, batch_size=1, loss=loss)
        return SimpleNamespace(parts={"gradient": sent}, samples=samples)

    return handle


def scalar_server(**settings: Any) -> FedDKDServer:
    return FedDKDServer(make_config(**settings), make_context("test_feddkd:scalar_model", input_shape=(1,)))


def weight_of(server: FedDKDServer) -> float:
    values = server.model.state_dict()["weight"]
    assert torch.equal(values, values[0].expand_as(values))
    return float(values[0])


def teach(ask_round: int = 1, server: FedDKDServer | None = None, learning_rate: float = 0.02) -> Ask:
    parts: Parts = {
        "parameters": (server or make_server()).shared_parameters(),
        "plan": Plan(values={"learning_rate": learning_rate}),
    }
    return Ask(round=ask_round, step="train", seed=1, parts=parts)


def distil(
    step: int, ask_round: int = 1, seed: int = 2, server: FedDKDServer | None = None, model: nn.Module | None = None
) -> Ask:
    student = model_parameters(model) if model is not None else (server or make_server()).shared_parameters()
    parts: Parts = {"parameters": student, "plan": Plan(values={"dkd_step": step})}
    return Ask(round=ask_round, step="distil", seed=seed, parts=parts)


# --- oracles


def test_dkd_1_the_start_is_the_sample_weighted_mean() -> None:
    server = scalar_server(dkd_steps=0)
    devices = {"a": scripted(1, samples=100), "b": scripted(2, samples=300), "c": scripted(4, samples=600)}
    run_round(server, fleet_of(devices))
    assert weight_of(server) == pytest.approx(3.1, abs=1e-6)  # .1 * 1 + .3 * 2 + .6 * 4


def test_dkd_2_a_student_that_is_its_teacher_stays_where_it_is() -> None:
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.normal(size=(8, 4)))
    model = nn.Linear(4, 3, bias=False).double()
    model.load_state_dict({"weight": torch.from_numpy(rng.normal(size=(4, 3)).T.copy())})
    teacher_bc = soft_targets(model(inputs), 1.0)
    gradients, loss = distillation_gradient(model, model_parameters(model), inputs, teacher_bc, 1.0)
    assert float(gradients["weight"].abs().max()) < 1e-12
    assert loss == pytest.approx(0.70774533, abs=1e-8)
    assert loss == pytest.approx(float(-(teacher_bc * teacher_bc.log()).sum(1).mean()), abs=1e-12)


def test_dkd_2_one_device_keeps_its_model_through_the_steps() -> None:
    """With one device w = w_k, whatever J and gamma are; through float32 the gradients are 1e-7, not 0."""
    device = make_device()
    server, fleet = make_server(dkd_steps=5, dkd_lr=1.0), fleet_of({"d": device.handle})
    run_round(server, fleet)
    assert fleet.figures["distillation_steps"] == 5
    for name, tensor in device.local.model.state_dict().items():
        assert_close(server.model.state_dict()[name], tensor, atol=5e-6, rtol=0)


def test_dkd_3_loss_and_gradient_of_one_sample() -> None:
    teacher = soft_targets(torch.tensor([[2.0, 1.0, 0.0]]), 1.0)
    assert_close(teacher[0], torch.tensor([0.665241, 0.244728, 0.090031]), atol=1e-6, rtol=0)
    student = torch.zeros(1, 3, requires_grad=True)
    loss = soft_cross_entropy(student, teacher, 1.0)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(1.098612, abs=1e-6)
    assert float(distillation_loss(student.detach(), teacher, 1.0)) == pytest.approx(0.266217, abs=1e-6)
    assert student.grad is not None
    assert_close(student.grad[0], torch.tensor([-0.331908, 0.088605, 0.243303]), atol=1e-6, rtol=0)


def test_dkd_4_closed_form_and_finite_differences_agree() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(8, 4, dtype=torch.float64)
    model, teacher = (nn.Linear(4, 3, bias=False).double() for _ in range(2))
    teacher_bc = soft_targets(teacher(inputs), 1.0)
    gradients, _ = distillation_gradient(model, model_parameters(model), inputs, teacher_bc, 1.0)
    closed = (soft_targets(model(inputs), 1.0) - teacher_bc).T @ inputs / 8
    assert_close(gradients["weight"], closed, atol=1e-12, rtol=0)

    def loss_at(row: int, column: int, change: float) -> float:
        moved = model.weight.detach().clone()
        moved[row, column] += change
        return float(soft_cross_entropy(inputs @ moved.T, teacher_bc, 1.0))

    for row in range(3):
        for column in range(4):
            slope = (loss_at(row, column, 1e-6) - loss_at(row, column, -1e-6)) / 2e-6
            assert abs(slope - float(gradients["weight"][row, column])) < 1e-8


def descended(
    model: nn.Linear, gradient_of: Sequence[Callable[[Tensor], Tensor]], weights: Sequence[float], steps: int
) -> Tensor:
    """The server's steps, with the devices' gradients given as functions of the weight."""
    for _ in range(steps):
        mean = WeightedMean("off")
        for number, (gradient, weight) in enumerate(zip(gradient_of, weights, strict=True)):
            sent = ModelParameters(parameters={"weight": gradient(model.weight.detach()).numpy()})
            mean.add(f"d{number}", sent, weight)
        descend(model, mean.result(fleet_of({})).parameters, 0.1)
    return model.weight.detach()


def test_dkd_5_linear_models_with_squared_loss_reach_the_weighted_mean() -> None:
    torch.manual_seed(1)
    inputs = torch.cat([torch.randn(50, 3), torch.ones(50, 1)], 1).double()
    targets = [torch.randn(2, 4, dtype=torch.float64) for _ in range(3)]
    weights = [0.2, 0.3, 0.5]
    model = nn.Linear(4, 2, bias=False).double()
    curvature = 2 * inputs.T @ inputs / 50

    def pull_to(target: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda weight: (weight - target) @ curvature

    pulls = [pull_to(target) for target in targets]
    mean = torch.stack([q * t for q, t in zip(weights, targets, strict=True)]).sum(0)
    assert_close(descended(model, pulls, weights, 3000), mean, atol=1e-12, rtol=0)
    at_mean = torch.stack([q * pull(mean) for q, pull in zip(weights, pulls, strict=True)]).sum(0)
    assert float(at_mean.abs().max()) < 1e-12


def test_dkd_6_unlike_curvatures_are_where_the_steps_beat_the_mean() -> None:
    curvatures, own = [1.0, 3.0], [0.0, 1.0]
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 0.5)  # the parameter average
    pulls = [lambda w, h=h, t=t: h * (w - t) for h, t in zip(curvatures, own, strict=True)]

    def l2(w: float) -> float:
        return sum(0.5 * h * (t - w) ** 2 for h, t in zip(curvatures, own, strict=True))

    assert l2(float(model.weight.detach())) == pytest.approx(0.5)
    reached = float(descended(model, pulls, [1, 1], 500))
    assert reached == pytest.approx(0.75, abs=1e-12)
    assert l2(reached) == pytest.approx(0.375)


@pytest.mark.parametrize(("weighting", "step"), [("uniform", 0.2), ("samples", 0.25)])
def test_dkd_7_a_step_takes_the_mean_not_the_sum(weighting: str, step: float) -> None:
    server = scalar_server(dkd_steps=1, dkd_lr=0.1, dkd_weighting=weighting)
    counts = zip("abc", (1, 2, 3), (100, 300, 600), strict=True)
    run_round(server, fleet_of({name: scripted(0, gradient, samples) for name, gradient, samples in counts}))
    assert weight_of(server) == pytest.approx(-step, abs=1e-7)


def test_dkd_8_the_schedules_of_both_rates() -> None:
    config = FedDKDConfig(dkd_lr=0.2, dkd_lr_round_decay=0.98)
    assert [round(config.dkd_rate(t, 1), 6) for t in (1, 2, 11)] == [0.2, 0.196, 0.163415]
    digits = FedDKDConfig(dkd_lr=0.01, dkd_lr_round_decay=0.98, dkd_lr_step_decay=0.97)
    assert digits.dkd_rate(3, 4) == pytest.approx(0.008765311, abs=1e-9)
    local = FedDKDConfig(learning_rate=0.1, learning_rate_round_decay=0.98)
    assert [local.local_rate(t) for t in (1, 2)] == pytest.approx([0.1, 0.098])

    server = scalar_server(dkd_steps=2, dkd_lr=0.2, dkd_lr_round_decay=0.98, dkd_lr_step_decay=0.97)
    fleet = run_round(server, fleet_of({"a": scripted(0, 1)}, completed=2))
    assert weight_of(server) == pytest.approx(-0.2 * 0.98**2 * (1 + 0.97), abs=1e-6)
    assert sent(fleet)[0]["plan"].values == {"learning_rate": 0.02}  # type: ignore[attr-defined]
    decaying = scalar_server(dkd_steps=0, learning_rate_round_decay=0.99)
    fleet = run_round(decaying, fleet_of({"a": scripted(0, 1)}, completed=2))
    assert sent(fleet)[0]["plan"].values == {"learning_rate": 0.02 * 0.99**2}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rounds", "steps", "start", "exchanges"),
    [(98, 10, 1, 1078), (271, 3, 1, 1084), (60, 10, 1, 660), (87, 3, 1, 348), (274, 3, 31, 1006), (110, 3, 31, 350)],
)
def test_dkd_9_exchanges_of_the_papers_runs(rounds: int, steps: int, start: int, exchanges: int) -> None:
    config = FedDKDConfig(dkd_steps=steps, dkd_start_round=start)
    assert sum(1 + config.steps_in(number) for number in range(1, rounds + 1)) == exchanges


def test_dkd_10_the_entropy_term_of_feddkd_max() -> None:
    even, uneven = torch.zeros(1, 4), torch.tensor([[2.0, 0.0, 0.0, 0.0]])
    assert float(activation_divergence(even)) == pytest.approx(0, abs=1e-6)
    assert float(activation_divergence(even, reverse_elementwise=True)) == pytest.approx(0, abs=1e-6)
    assert float(activation_divergence(uneven)) == pytest.approx(0.468011, abs=1e-6)
    reverse = float(activation_divergence(uneven, reverse_elementwise=True))
    assert reverse == pytest.approx(0.113615, abs=1e-6)
    assert 4 * reverse == pytest.approx(0.454459, abs=1e-6)
    rows = torch.cat([even, uneven])
    assert float(activation_divergence(rows)) == pytest.approx(0.468011 / 2, abs=1e-6)  # the mean over samples


SIZES = {
    # W trainable, Wb running statistics, integer counters, J, bytes of all 1 + J exchanges without Wb
    "feddkd_femnist": ((1, 28, 28), 26, 200_666, 0, 0, 10, 17_658_608),
    "feddkd_vgg9": ((3, 32, 32), 10, 3_491_530, 0, 0, 3, 111_728_960),
    "feddkd_five_digits": ((3, 28, 28), 10, 14_213_578 + 5_632, 5_632, 5, 10, 1_251_290_480),
}


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("feddkd_femnist", "plain"),
        ("feddkd_vgg9", "plain"),
        ("feddkd_five_digits", "plain"),
        ("feddkd_five_digits", "bn"),
    ],
)
def test_dkd_11_parameters_and_bytes_of_the_papers_networks(name: str, variant: str) -> None:
    shape, classes, trainable, statistics, counters, steps, total = SIZES[name]
    model = build_model(name)
    assert parameter_count(model) == trainable
    norms = batch_norm_names(model)
    private = norms if variant == "bn" else frozenset[str]()
    shared = model_parameters(model, without=private)
    gradient = DistillationGradient(gradients=shared.parameters, batch_size=64, loss=1.0)
    model_bytes = encode({"parameters": shared}).data_bytes
    gradient_bytes = encode({"gradient": gradient}, np.float16).data_bytes  # gradients keep float32
    if variant == "bn":
        assert model_bytes == gradient_bytes == 4 * 14_213_578
        return
    buffers = 4 * statistics + 8 * counters
    assert (model_bytes, gradient_bytes) == (4 * trainable + buffers, 4 * trainable)
    # Beside the formula, the steps' models carry the running statistics that the student is evaluated with.
    assert 2 * model_bytes + steps * (model_bytes + gradient_bytes) == total + (2 + steps) * buffers
    model.eval()
    with torch.no_grad():
        assert model(torch.zeros(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize(
    ("fraction", "present", "taken"), [(0.25, 20, 5), (0.75, 20, 15), (0.29, 100, 29), (0.01, 20, 1)]
)
def test_dkd_12_devices_of_a_round(fraction: float, present: int, taken: int) -> None:
    server = scalar_server(participation_ratio=fraction, dkd_steps=1)
    fleet = run_round(server, fleet_of({f"d{number:03d}": scripted() for number in range(present)}))
    (train, first), (step, again) = asked(fleet)
    assert (train, step) == ("train", "distil")
    assert len(first) == taken
    assert again == first


# --- a round


def test_a_round_is_one_training_and_j_steps_for_those_that_answered() -> None:
    server, fleet = make_server(dkd_steps=2), make_fleet(3, dkd_steps=2)
    fleet.silent = frozenset({(2, "d1")})  # type: ignore[assignment]
    run_round(server, fleet)
    everyone = ("d0", "d1", "d2")
    assert asked(fleet) == [("train", everyone), ("distil", everyone), ("distil", everyone)]
    assert [sorted(one) for one in answers(fleet)] == [["d0", "d1", "d2"], ["d0", "d2"], ["d0", "d1", "d2"]]
    assert fleet.figures["distillation_steps"] == 2
    assert fleet.events == []


def test_each_step_sends_the_model_of_the_step_before() -> None:
    server = scalar_server(dkd_steps=3, dkd_lr=0.1)
    fleet = run_round(server, fleet_of({"a": scripted(2, 1)}))
    weights = [float(one["parameters"].parameters["weight"][0, 0]) for one in sent(fleet)[1:]]  # type: ignore[attr-defined]
    assert weights == pytest.approx([2.0, 1.9, 1.8])
    assert weight_of(server) == pytest.approx(1.7)


def test_distillation_lowers_the_distance_to_the_teachers_that_averaging_leaves() -> None:
    losses = {}
    for steps in (0, 20):
        devices = {f"d{i}": make_device(i, local_epochs=20) for i in range(3)}
        server = make_server(local_epochs=20, dkd_steps=steps)
        run_round(server, fleet_of({name: device.handle for name, device in devices.items()}))
        losses[steps] = 0.0
        for device in devices.values():
            teacher_bc = soft_targets(device.teacher_logits(), 1.0)
            server.model.eval()
            with torch.no_grad():
                losses[steps] += float(distillation_loss(server.model(device.local.data.inputs), teacher_bc, 1.0))
    assert losses[20] < 0.9 * losses[0]


@pytest.mark.parametrize("settings", [{"dkd_steps": 0}, {"dkd_start_round": 2}])
def test_without_steps_or_before_the_start_round_it_is_fedavg(settings: dict[str, Any]) -> None:
    server, fleet = make_server(**settings), make_fleet(2, **settings)
    run_round(server, fleet)
    assert [step for step, _ in asked(fleet)] == ["train"]
    for name, array in mean_of(fleet).parameters.items():
        np.testing.assert_array_equal(server.model.state_dict()[name].numpy(), array)


def test_the_start_round_counts_completed_rounds() -> None:
    for completed, steps in ((0, 0), (1, 0), (2, 3), (3, 3)):
        fleet = run_round(scalar_server(dkd_start_round=3), fleet_of({"a": scripted()}, completed))
        assert fleet.figures["distillation_steps"] == steps


def test_a_step_without_quorum_keeps_the_last_model() -> None:
    server = scalar_server(dkd_steps=3, dkd_lr=0.1)
    members = {name: scripted(0, 1) for name in "abc"}
    fleet = run_round(server, fleet_of(members, silent=frozenset({(3, "a"), (3, "b")})))
    assert [step for step, _ in asked(fleet)] == ["train", "distil", "distil"]
    assert weight_of(server) == pytest.approx(-0.1)
    assert fleet.kinds == ["distillation-stopped"]
    assert fleet.figures["distillation_steps"] == 1


def test_training_without_quorum_closes_the_round() -> None:
    with pytest.raises(QuorumNotReached):
        run_round(scalar_server(), fleet_of({"a": scripted(), "b": scripted()}, silent=frozenset({(1, "a")})))


@given(gradients=st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=6), gone=st.integers(0, 5))
def test_a_missing_reply_leaves_the_mean_of_the_others(gradients: list[float], gone: int) -> None:
    gone %= len(gradients)
    server = scalar_server(dkd_steps=1, dkd_lr=0.1, robust="off")
    fleet = fleet_of({f"d{i}": scripted(0, value) for i, value in enumerate(gradients)})
    fleet.silent = frozenset({(2, f"d{gone}")})  # type: ignore[assignment]
    run_round(server, fleet)
    others = [value for number, value in enumerate(gradients) if number != gone]
    assert weight_of(server) == pytest.approx(-0.1 * sum(others) / len(others), abs=1e-5)


# --- the guard


def test_the_guard_undoes_the_step_that_raised_the_loss_and_ends_the_steps() -> None:
    server = scalar_server(dkd_steps=5, dkd_lr=0.1, divergence_factor=1.5)
    fleet = run_round(server, fleet_of({name: scripted(0, 1, losses=[1.0, 0.9, 1.4, 9, 9]) for name in "ab"}))
    assert weight_of(server) == pytest.approx(-0.1)  # the second of two steps is undone: 1.4 > 1.5 * 0.9
    assert [step for step, _ in asked(fleet)] == ["train", "distil", "distil", "distil"]
    assert fleet.kinds == ["divergence-guard"]
    assert "distillation step 2" in fleet.events[0][2]
    assert "distillation rate too large" in fleet.events[0][2]
    assert fleet.figures["distillation_steps"] == 1


def test_the_guard_stays_still_while_the_loss_does_not_rise_much() -> None:
    server = scalar_server(dkd_steps=4, dkd_lr=0.1, divergence_factor=1.5)
    fleet = run_round(server, fleet_of({"a": scripted(0, 1, losses=[1.0, 1.4, 2.0, 0.1])}))
    assert weight_of(server) == pytest.approx(-0.4)
    assert fleet.events == []


def test_the_guard_compares_the_devices_that_answered_both_steps() -> None:
    """The device with the small loss disappears: the mean rises, but no device's loss does."""
    small, large = scripted(0, 1, losses=[0.01, 0.01]), scripted(0, 1, losses=[3.0, 3.0])
    fleet = fleet_of({"a": small, "b": large, "c": small}, silent=frozenset({(3, "a")}))
    run_round(scalar_server(dkd_steps=2), fleet)
    assert fleet.events == []


def test_a_rate_that_is_far_too_large_is_caught_on_real_models() -> None:
    settings: dict[str, Any] = {"dkd_steps": 5, "dkd_lr": 300.0, "local_epochs": 10}
    server, fleet = make_server(**settings), make_fleet(3, **settings)
    run_round(server, fleet)
    assert fleet.kinds == ["divergence-guard"]
    np.testing.assert_array_equal(
        server.model.state_dict()["stages.head.weight"], mean_of(fleet).parameters["stages.head.weight"]
    )
    unguarded, fleet = make_server(**settings, paper=True), make_fleet(3, **settings)
    run_round(unguarded, fleet)
    assert fleet.events == []
    assert fleet.figures["distillation_steps"] == 5
    assert fleet.figures["distillation_loss"]["5"] > 2 * fleet.figures["distillation_loss"]["1"]


@pytest.mark.parametrize("model", ["tiny_model", "norm_model"])
def test_the_guard_stays_still_at_the_default_rate(model: str) -> None:
    path = f"test_feddkd:{model}"
    server, fleet = make_server(path, dkd_steps=8), make_fleet(3, model=path, dkd_steps=8)
    run_round(server, fleet)
    assert fleet.events == []
    assert fleet.figures["distillation_steps"] == 8


@pytest.mark.parametrize("guard", [True, False])
def test_a_model_that_has_left_the_numbers_is_stepped_back_from(guard: bool) -> None:
    settings: dict[str, Any] = {"dkd_steps": 3, "dkd_lr": 1e30, "divergence_guard": guard}
    server, fleet = make_server(**settings), make_fleet(2, **settings)
    run_round(server, fleet)
    left_out = ["gradient-left-out", "gradient-left-out"]
    assert fleet.kinds == [*left_out, "divergence-guard" if guard else "distillation-undone"]
    assert fleet.figures["distillation_steps"] == 0
    mean = make_server(**settings)
    load_parameters(mean.model, mean_of(fleet))
    assert_same(state_of(server.model), state_of(mean.model))
    json.dumps(fleet.figures, allow_nan=False)


@pytest.mark.parametrize("guard", [True, False])
def test_the_last_step_too_is_taken_back_where_weights_are_not_finite(guard: bool) -> None:
    server = scalar_server(dkd_steps=2, dkd_lr=1e38, divergence_guard=guard, dkd_lr_step_decay=0.5)
    fleet = run_round(server, fleet_of({"a": scripted(0, 1), "b": scripted(0, 1)}))
    assert weight_of(server) == pytest.approx(-1.5e38)
    assert (fleet.kinds, fleet.figures["distillation_steps"]) == ([], 2)
    server = scalar_server(dkd_steps=2, dkd_lr=2e38, divergence_guard=guard, dkd_lr_step_decay=1.0)
    fleet = run_round(server, fleet_of({"a": scripted(0, 1), "b": scripted(0, 1)}))
    assert weight_of(server) == pytest.approx(-2e38)
    assert (fleet.kinds, fleet.figures["distillation_steps"]) == (["distillation-undone"], 1)
    assert re.fullmatch(
        r"distillation step 2 is undone: \w+ is not finite after training; "
        r"this step's dkd_lr = 2e\+38 is probably too large; lower it or set dkd_max_norm",
        fleet.events[0][2],
    )


@given(
    before=st.dictionaries(st.sampled_from("abc"), st.floats(0, 1e6)),
    now=st.dictionaries(st.sampled_from("abc"), st.floats(0, math.inf)),
)
def test_a_step_never_hides_that_a_loss_became_infinite(before: dict[str, float], now: dict[str, float]) -> None:
    rise = Gradients(WeightedMean("off"), now).rise_since(Gradients(WeightedMean("off"), before))
    both = before.keys() & now.keys()
    assert not math.isnan(rise)
    if any(math.isinf(now[device]) for device in both):
        assert rise == math.inf
    elif not any(now[device] for device in both):
        assert rise == 0


def test_losses_of_zero_that_become_infinite_undo_the_step() -> None:
    lost = scripted(0, 1, losses=[0.0, math.inf])
    fleet = run_round(
        scalar_server(dkd_steps=2, dkd_lr=0.1), fleet_of({"a": lost, "b": scripted(0, 1, losses=[0.0, 0.0])})
    )
    assert fleet.kinds == ["gradient-left-out", "divergence-guard"]
    assert fleet.figures["distillation_steps"] == 0


def test_a_gradient_without_a_finite_loss_is_left_out_of_the_mean_and_of_the_figures() -> None:
    odd, even = scripted(0, 5, losses=[math.inf]), scripted(0, 1, losses=[1.0])
    server = scalar_server(dkd_steps=1, dkd_lr=0.1)
    fleet = run_round(server, fleet_of({"a": odd, "b": even, "c": even}))
    assert weight_of(server) == pytest.approx(-0.1)
    assert [(kind, device) for kind, device, _ in fleet.events] == [("gradient-left-out", "a")]
    assert fleet.figures["distillation_loss"] == {"1": 1.0}


@given(finite=st.integers(0, 9), count=st.integers(1, 9))
def test_finite_gradients_short_of_the_quorum_move_nothing(finite: int, count: int) -> None:
    finite = min(finite, count)
    bad, good = scripted(0, 1, losses=[math.inf]), scripted(0, 1, losses=[1.0])
    members = {f"d{number}": good if number < finite else bad for number in range(count)}
    server = scalar_server(dkd_steps=1, dkd_lr=0.1)
    fleet = run_round(server, fleet_of(members))
    enough = finite * 3 >= 2 * count
    assert weight_of(server) == pytest.approx(-0.1 if enough else 0.0)
    assert ("distillation-stopped" in fleet.kinds) != enough
    assert fleet.figures["distillation_steps"] == int(enough)


@pytest.mark.parametrize("odd", [math.inf, math.nan])
def test_a_device_that_never_has_a_finite_loss_does_not_switch_the_guard_off(odd: float) -> None:
    never, risen = scripted(0, 9, losses=[odd] * 3), scripted(0, 1, losses=[1.0, 9.0, 9.0])
    server = scalar_server(dkd_steps=3, dkd_lr=0.1)
    fleet = run_round(server, fleet_of({"a": never, "b": risen, "c": risen}))
    assert weight_of(server) == 0.0
    assert fleet.kinds == ["gradient-left-out", "gradient-left-out", "divergence-guard"]
    calm = run_round(scalar_server(dkd_steps=3), fleet_of({"a": never, "b": scripted(), "c": scripted()}))
    assert (set(calm.kinds), calm.figures["distillation_steps"]) == ({"gradient-left-out"}, 3)


def test_a_loss_that_becomes_infinite_is_a_rise() -> None:
    lost = scripted(0, 1, losses=[1.0, math.inf])
    server = scalar_server(dkd_steps=3, dkd_lr=0.1)
    fleet = run_round(server, fleet_of({"a": lost, "b": scripted(0, 1), "c": scripted(0, 1)}))
    assert weight_of(server) == 0.0
    assert fleet.kinds == ["gradient-left-out", "divergence-guard"]


@given(values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8), longest=st.floats(1e-3, 1e3))
def test_the_limit_shortens_and_never_turns_a_gradient(values: list[float], longest: float) -> None:
    whole = {"a": np.array(values[:1], np.float32), "b": np.array(values[1:], np.float32)}
    norm = math.sqrt(sum(value**2 for value in values))
    short = limited(whole, longest)
    joined = np.concatenate([short["a"], short["b"]]).astype(np.float64)
    assert np.linalg.norm(joined) <= max(min(norm, longest) * (1 + 1e-5), 1e-30)
    if norm > 1e-20:
        np.testing.assert_allclose(joined, np.array(values) * min(1, longest / norm), rtol=1e-5, atol=1e-6)
    assert limited(whole, None) is whole


def test_the_limit_on_the_norm_bounds_the_step() -> None:
    server = scalar_server(dkd_steps=1, dkd_lr=0.1, dkd_max_norm=1.0)
    run_round(server, fleet_of({"a": scripted(0, 10)}))
    assert weight_of(server) == pytest.approx(-0.1 / math.sqrt(CLASSES), abs=1e-6)


# --- the device


def test_a_step_changes_nothing_of_the_device() -> None:
    for model in ("test_feddkd:tiny_model", "test_feddkd:norm_model"):
        device = make_device(model=model)
        device.handle(teach(server=make_server(model)))
        before = state_of(device.local.model)
        device.handle(distil(1, server=make_server(model)))
        assert_same(state_of(device.local.model), before)


def test_the_student_is_evaluated_with_what_was_sent_not_with_the_devices_statistics() -> None:
    """Plain FedDKD: also the running statistics are the averaged ones, frozen (mistakes and ambiguities, 7)."""
    device = make_device(model="test_feddkd:norm_model", dkd_batch_size=20)
    server = make_server("test_feddkd:norm_model")
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


def test_a_parameter_without_a_part_in_the_logits_has_gradient_zero() -> None:
    model = nn.Linear(2, 3)
    model.register_parameter("idle", nn.Parameter(torch.ones(2)))
    gradients, _ = distillation_gradient(model, model_parameters(model), torch.ones(1, 2), torch.full((1, 3), 1 / 3), 1)
    assert torch.equal(gradients["idle"], torch.zeros(2))


def test_each_step_draws_other_samples_and_a_repeated_one_the_same() -> None:
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


def test_the_teacher_is_computed_once_a_round_and_survives_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    from fleetdistill.training import local_training

    calls, real = [], local_training.extract

    def counting(*args: Any, **how: Any) -> Tensor:
        calls.append(1)
        return real(*args, **how)

    monkeypatch.setattr("fleetdistill.methods.feddkd.device.extract", counting)
    device = make_device(model="test_feddkd:norm_model")
    server = make_server("test_feddkd:norm_model")
    device.handle(teach(server=server))
    between = unpack_state(pack_state({"model": device.local.model.state_dict(), "method": device.state_dict()}))
    answers = [device.handle(distil(step, seed=step, server=server)) for step in (1, 2)]
    assert len(calls) == 1

    restarted = make_device(model="test_feddkd:norm_model")
    for step in (1, 2):
        restarted.local.model.load_state_dict(between["model"])
        restarted.load_state_dict(between["method"])
        again = restarted.handle(distil(step, seed=step, server=server))
        assert encode(again.parts).sha256 == encode(answers[step - 1].parts).sha256
        between = unpack_state(
            pack_state({"model": restarted.local.model.state_dict(), "method": restarted.state_dict()})
        )
        restarted = make_device(model="test_feddkd:norm_model")
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
def test_max_is_cross_entropy_plus_beta_times_the_term_of_its_form(form: str, elementwise: bool) -> None:
    device = make_device(variant="max", fedmax_beta=3.0, fedmax_form=form)
    model, data = device.local.model.eval(), device.local.data
    term = activation_divergence(model.embedding(data.inputs), reverse_elementwise=elementwise)  # type: ignore[operator]
    expected = nn.functional.cross_entropy(model(data.inputs), data.labels) + 3.0 * term
    assert_close(device.loss(data.inputs, data.labels), expected)


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
    path = "test_feddkd:norm_model"
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
    for parts in [*sent(fleet), *(one for by_device in answers(fleet) for one in by_device.values())]:
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


def test_bn_gives_the_next_round_the_shared_weights_and_keeps_its_own_batch_norm() -> None:
    path = "test_feddkd:norm_model"
    server, device = make_server(path, variant="bn"), make_device(model=path, variant="bn")
    device.handle(teach(server=server))
    own = {name: state_of(device.local.model)[name] for name in batch_norm_names(server.model)}
    device.handle(Ask(round=1, step="deliver", seed=1, parts={"parameters": server.shared_parameters()}))
    assert_same({name: state_of(device.local.model)[name] for name in own}, own)
    assert torch.equal(
        device.local.model.state_dict()["stages.head.weight"], server.model.state_dict()["stages.head.weight"]
    )


def test_bn_evaluates_the_student_with_the_devices_own_statistics() -> None:
    path = "test_feddkd:norm_model"
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
    personal = make_server("test_feddkd:norm_model", variant="bn")
    assert personal.global_model() is None
    assert personal.export() is None
    assert make_server().global_model() is not None


def test_variants_that_a_model_cannot_have_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="variant 'bn' needs at least one batch-norm layer"):
        make_server(variant="bn")
    with pytest.raises(ConfigurationError, match="variant 'max' needs a penultimate activation"):
        scalar_server(variant="max")
    with pytest.raises(ConfigurationError, match="dkd_student_mode 'train' needs dkd_batch_size >= 2"):
        make_server("test_feddkd:norm_model", dkd_student_mode="train", dkd_batch_size=1)


def tapless_model(input_shape: Sequence[int] = (INPUTS,), classes: int = CLASSES) -> nn.Module:
    """The tensors of `tiny_model` in an app's own module, which offers a cut and no embedding."""

    class Tapless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.extractor, self.predictor = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, classes)

        def features(self, x: Tensor) -> Tensor:
            return self.extractor(x)

        def predict(self, h: Tensor) -> Tensor:
            return self.predictor(h)

        def forward(self, x: Tensor) -> Tensor:
            return self.predict(self.features(x))

    return Tapless()


def test_max_tells_an_app_at_once_that_its_model_lacks_embedding() -> None:
    with pytest.raises(ModelError, match=r"FedDKD needs what the last layer reads, and Tapless has no embedding\(x\)"):
        make_device(model="test_feddkd:tapless_model", variant="max")
    make_device(model="test_feddkd:tapless_model")


@pytest.mark.parametrize(("model", "variant"), [("tiny_model", "plain"), ("norm_model", "plain"), ("norm_model", "bn")])
def test_a_student_in_train_mode_differs_and_leaves_everything_as_it_was(model: str, variant: str) -> None:
    path = f"test_feddkd:{model}"
    settings = {"model": path, "variant": variant}
    server, gradients = make_server(path, variant=variant), []
    for mode in ("eval", "train", "train"):
        device = make_device(**settings, dkd_student_mode=mode)  # type: ignore[arg-type]
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
    assert make_server("test_feddkd:norm_model").config.dkd_lr == 0.01
    assert make_server("test_feddkd:norm_model", dkd_lr=0.3).config.dkd_lr == 0.3


# --- settings, contract and checks


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dkd_steps": -1}, "dkd_steps must be >= 0, got -1"),
        ({"dkd_lr": 0.0}, "dkd_lr must be > 0"),
        ({"dkd_lr": math.inf}, "dkd_lr must be > 0"),
        ({"dkd_lr_round_decay": 0.0}, "dkd_lr_round_decay must be in (0, 1]"),
        ({"dkd_lr_step_decay": 1.1}, "dkd_lr_step_decay must be in (0, 1]"),
        ({"learning_rate_round_decay": 2.0}, "learning_rate_round_decay must be in (0, 1]"),
        ({"dkd_batch_size": 0}, "dkd_batch_size must be >= 1"),
        ({"dkd_start_round": 0}, "dkd_start_round must be >= 1"),
        ({"dkd_weighting": "x"}, "unknown dkd_weighting 'x'"),
        ({"dkd_max_norm": 0.0}, "dkd_max_norm must be > 0"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"temperature": math.nan}, "temperature must be > 0"),
        ({"participation_ratio": 0.0}, "participation_ratio must be in (0, 1]"),
        ({"dkd_student_mode": "x"}, "unknown dkd_student_mode 'x'"),
        ({"variant": "x"}, "unknown variant 'x'"),
        ({"fedmax_beta": -0.1}, "fedmax_beta must be >= 0"),
        ({"fedmax_form": "x"}, "unknown fedmax_form 'x'"),
        ({"divergence_factor": 1.0}, "divergence_factor must be > 1"),
        ({"local_epochs": 0}, "local_epochs must be >= 1"),
    ],
)
def test_a_setting_out_of_range_says_so(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        FedDKDConfig(**settings)
    assert sentence in str(error.value)


def test_paper_switches_ours_off_at_once() -> None:
    paper = FedDKDConfig.from_settings({"paper": True}).for_classes(10)
    assert (paper.divergence_guard, paper.dkd_max_norm, paper.temperature) == (False, None, 1.0)
    assert (paper.dkd_weighting, paper.fedmax_form, paper.nesterov) == ("uniform", "a_to_u", False)
    assert FedDKDConfig().for_classes(10).divergence_guard
    assert make_server("test_feddkd:norm_model", paper=True).config.dkd_lr == 0.1


def contract_of(server: FedDKDServer) -> contract_pb2.Contract:
    uploads = [
        contract_pb2.PartShapes(
            part=part, tensors=[contract_pb2.NamedShape(name=name, shape=shape) for name, shape in one.declared.items()]
        )
        for part, one in declared_parts(server.run_exchanges()).items()
    ]
    contract: contract_pb2.Contract = make_contract(
        method="feddkd", requirements=server.requirements(), features=[], model_fingerprint="m", uploads=uploads
    )
    return contract


@pytest.mark.parametrize("lacking", ["parameters", "gradients"])
def test_an_app_that_keeps_something_back_is_refused_at_check_in(lacking: str) -> None:
    contract = contract_of(make_server())
    allowed = [column for column in ("parameters", "gradients") if column != lacking]
    with pytest.raises(RefusedError, match=lacking):
        check_profile(contract, make_profile(model_fingerprint="m", allowed_columns=allowed))
    check_profile(contract, make_profile(model_fingerprint="m", allowed_columns=["parameters", "gradients"]))


def test_another_architecture_is_refused_and_no_steps_need_no_gradients() -> None:
    profile = make_profile(model_fingerprint="other", allowed_columns=["parameters", "gradients"])
    with pytest.raises(RefusedError, match="model"):
        check_profile(contract_of(make_server()), profile)
    assert list(make_server(dkd_steps=0).requirements().columns) == ["parameters"]


def gradient_of(server: FedDKDServer, **changes: Any) -> DistillationGradient:
    values = {"gradients": server.shared_parameters().parameters, "batch_size": 4, "loss": 0.5}
    return DistillationGradient(**{**values, **changes})


def test_a_gradient_that_does_not_fit_is_refused_whole() -> None:
    server = make_server("test_feddkd:norm_model", variant="bn")
    contract, good = contract_of(server), dict(server.shared_parameters().parameters)
    expects = dict(server.answer_kinds()["distil"])

    def take(sent: DistillationGradient) -> None:
        Ingest("d1", encode({"gradient": sent}).header(), contract, expects)

    take(gradient_of(server))
    take(gradient_of(server, loss=math.inf))  # a diverged model says so
    name = "stages.head.weight"
    for gradients, sentence in (
        ({key: value for key, value in good.items() if key != name}, f"lacks gradients/{name}"),
        ({**good, "stages.body.1.weight": np.zeros(HIDDEN, np.float32)}, "not part of the contract"),
        ({**good, name: good[name].T.copy()}, r"has shape \[8, 3\], expected \[3, 8\]"),
        ({**good, name: good[name].astype(np.int64)}, "is int64, expected float32"),
    ):
        with pytest.raises(RefusedError, match=sentence):
            take(gradient_of(server, gradients=gradients))
    for changes in ({"batch_size": 0}, {"loss": math.nan}, {"loss": -0.1}):
        with pytest.raises(RefusedError, match="must be >= 1 and >= 0"):
            take(gradient_of(server, **changes))


# --- whole runs


def small(**changes: Any) -> Simulation:
    settings: dict[str, Any] = {
        "method": "feddkd",
        "models": ("cdkt_digits_small",),
        "devices": 3,
        "rounds": 2,
        "train_limit": 90,
        "test_limit": 20,
        "torch_device": "cpu",
    }
    return Simulation(**{**settings, **changes})


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("cdkt_digits_small", {"dkd_steps": 2}),
        ("digits_cnn_small", {"dkd_steps": 2}),
        ("digits_cnn_small", {"dkd_steps": 2, "variant": "bn"}),
        ("cdkt_digits_small", {"dkd_steps": 3, "dkd_start_round": 2, "variant": "max"}),
    ],
)
def test_the_bytes_of_a_run_are_the_formulas(model: str, settings: dict[str, Any], tmp_path: Path) -> None:
    fleet = small(models=(model,), settings={**settings, "divergence_guard": False}, devices=2)
    store = run_in_memory(prepare(fleet, tmp_path / "work"))
    built = build_model(model)
    private = batch_norm_names(built) if settings.get("variant") == "bn" else frozenset[str]()
    sizes = Sizes(model=Weights.of(model_parameters(built, without=private)))
    whole = 4 * sizes.model.parameters + sizes.model.buffer_bytes
    initial = sum(one.nbytes for one in built.state_dict().values())
    rows = {(row["round"], row["device"], row["direction"]): row["tensor_bytes"] for row in store.history.traffic(RUN)}
    assert len(rows) == 8
    for (number, _, direction), measured in rows.items():
        steps = settings["dkd_steps"] if number >= settings.get("dkd_start_round", 1) else 0
        predicted = round_bytes(FedDKDServer.exchanges(FedDKDConfig(dkd_steps=steps), sizes), "float16")
        extra = (initial if number == 1 else 0) + (whole if number == 2 else 0)  # the start, and the end result
        assert measured == predicted[direction] + (extra if direction == "down" else 0)
    figures = [json.loads(row["figures"]) for row in store.runs.rounds(RUN)]
    assert [one["distillation_steps"] for one in figures] == [
        settings["dkd_steps"] if number >= settings.get("dkd_start_round", 1) else 0 for number in (1, 2)
    ]
    store.close()


def test_without_steps_a_run_ends_in_fedavgs_model(tmp_path: Path) -> None:
    ours = {"dkd_steps": 0, "local_epochs": 2}  # the rest are the defaults of both
    checkpoints = []
    for method, settings in (("feddkd", ours), ("fedavg", {})):
        store = run_in_memory(prepare(small(method=method, settings=settings), tmp_path / method))
        row = store.runs.get(RUN)
        assert row is not None
        checkpoints.append(unpack_state(store.blobs.get_state(row["checkpoint"]))["model"])
        store.close()
    assert_same(*checkpoints)
    assert FedAvgServer.needs(FedAvgConfig()).same_architecture


def test_the_order_of_the_replies_does_not_change_the_result(tmp_path: Path) -> None:
    outcomes = []
    for order in (1, -1):
        config, specs, _ = prepare(small(rounds=1), tmp_path / str(order))
        store = Store.in_memory()
        api = DeviceApi(store)
        devices = [make_simulated_device(spec, MemoryLink(api)) for spec in specs][::order]
        asyncio.run(Engine(store, config, DriveDevices(devices, lambda: None)).run())
        for device in devices:
            while device.step(0.0) is not Step.FINISHED:
                pass
            device.close()
        outcomes.append(outcome(store))
        store.close()
    assert outcomes[0] == outcomes[1]


def test_devices_and_the_server_export_the_global_model(tmp_path: Path) -> None:
    prepared = prepare(small(rounds=1), tmp_path / "work")
    store = run_in_memory(prepared)
    server = export_server_model(store, RUN, tmp_path / "server.onnx")
    assert server.max_difference < 1e-4
    row = store.runs.get(RUN)
    assert row is not None
    state = unpack_state(store.blobs.get_state(row["checkpoint"]))["model"]
    model = build_model("cdkt_digits_small")
    model.load_state_dict(state)
    with np.load(prepared[1][0].data_file) as data:
        inputs = data["inputs"][:8]
    import onnxruntime

    model.eval()
    with torch.no_grad():
        expected = model(torch.from_numpy(inputs)).numpy()
    for spec in prepared[1]:  # what the app uses is the end result, not the device's last local model
        session = onnxruntime.InferenceSession(str(Path(spec.state_dir) / "model.onnx"))
        np.testing.assert_allclose(session.run(None, {"input": inputs})[0], expected, atol=1e-4)
    store.close()


@pytest.mark.parametrize("name", ["feddkd_femnist", "feddkd_vgg9"])
def test_the_papers_networks_export(name: str, tmp_path: Path) -> None:
    model = build_model(name)
    report = export_onnx(model, tmp_path / "model.onnx", torch.rand(2, *SIZES[name][0]), {})
    assert report.max_difference < 1e-4


def test_models_say_when_images_are_too_small() -> None:
    for name, shape in (("feddkd_femnist", (1, 8, 8)), ("feddkd_vgg9", (3, 4, 4)), ("feddkd_five_digits", (3, 2, 2))):
        with pytest.raises(ConfigurationError, match="height and width must be at least"):
            build_model(name, input_shape=shape)
