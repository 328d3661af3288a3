"""FedDKD: the oracles of the specification, and whole runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from methods.feddkd.feddkd_fleet import (
    asked,
    assert_same,
    fleet_of,
    make_device,
    make_server,
    run_round,
    scalar_server,
    scripted,
    sent,
    small,
    weight_of,
)
from support.driving import DriveDevices
from support.fleets import outcome, prepare, run_in_memory
from torch import Tensor, nn
from torch.testing import assert_close

from fleetdistill import Step
from fleetdistill.errors import (
    ConfigurationError,
)
from fleetdistill.knowledge import DistillationGradient, ModelParameters, Weights
from fleetdistill.methods.fedavg.config import FedAvgConfig
from fleetdistill.methods.feddkd.config import FedDKDConfig
from fleetdistill.methods.feddkd.device import distillation_gradient
from fleetdistill.models import build_model
from fleetdistill.state.state_file import unpack_state
from fleetdistill.training.losses import activation_divergence, distillation_loss, soft_cross_entropy, soft_targets
from fleetdistill.training.model import parameter_count
from fleetdistill.training.onnx_export import export_onnx
from fleetdistill.training.parameters import batch_norm_names, model_parameters
from fleetdistill.wire.codec import encode
from fleetdistill_lab.simulation.report.final_models import FinalModels
from fleetdistill_lab.simulation.spec.arrays import load_arrays
from fleetdistill_lab.simulation.spec.device import make_device as make_simulated_device
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.engine.export import export_server_model
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.methods.averaging import WeightedMean
from fleetdistill_server.methods.fedavg import FedAvgServer
from fleetdistill_server.methods.feddkd import FedDKDServer, descend
from fleetdistill_server.methods.traffic import Sizes, round_bytes
from fleetdistill_server.store.store import Store

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


def test_dkd_5_linear_models_of_squared_loss_reach_weighted_mean() -> None:
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


def test_dkd_6_steps_beat_mean_where_curvatures_differ() -> None:
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


# --- whole runs


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
    initial = sum(item.nbytes for item in built.state_dict().values())
    rows = {(row.round, row.device, row.direction): row.tensor_bytes for row in store.history.traffic(RUN)}
    assert len(rows) == 8
    for (number, _, direction), measured in rows.items():
        steps = settings["dkd_steps"] if number >= settings.get("dkd_start_round", 1) else 0
        predicted = round_bytes(FedDKDServer.exchanges(FedDKDConfig(dkd_steps=steps), sizes), "float16")
        extra = (initial if number == 1 else 0) + (whole if number == 2 else 0)  # the start, and the end result
        assert measured == predicted[direction] + (extra if direction == "down" else 0)
    figures = [row.figures for row in store.runs.rounds(RUN)]
    assert [figure["distillation_steps"] for figure in figures] == [
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
        checkpoints.append(unpack_state(store.blobs.get_state(row.checkpoint))["model"])
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
    state = unpack_state(store.blobs.get_state(row.checkpoint))["model"]
    model = build_model("cdkt_digits_small")
    model.load_state_dict(state)
    inputs = load_arrays(prepared[1][0].data_file)[0][:8]
    import onnxruntime

    model.eval()
    with torch.no_grad():
        expected = model(torch.from_numpy(inputs)).numpy()
    models = FinalModels(store, prepared[0])
    for spec in prepared[1]:  # what the app uses is the end result, not the device's last local model
        exported = models.export(spec, tmp_path, ())
        assert exported is not None
        session = onnxruntime.InferenceSession(str(tmp_path / exported.file))
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
