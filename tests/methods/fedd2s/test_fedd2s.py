"""FedD2S: the oracles of the specification, and a whole run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from methods.fedd2s.fedd2s_fleet import (
    CLASSES,
    WIDTHS,
    changed,
    device_of,
    disturbed_server,
    make_config,
    make_context,
    make_device,
    make_fleet,
    make_server,
    run_round,
    state_of,
    tiny_model,
    triplets_of,
    uploaded,
)
from support.fleets import prepare, run_in_memory
from support.sizes import at_layer
from torch.testing import assert_close

from fleetdistill.knowledge import ModelParameters, Plan
from fleetdistill.methods.base import Ask
from fleetdistill.methods.fedd2s.config import FedD2SConfig
from fleetdistill.models import build_model
from fleetdistill.training.local_training import TensorData, TrainingReport, train_steps
from fleetdistill.training.losses import distillation_loss
from fleetdistill.training.model import SplitModel, parameter_count
from fleetdistill.training.parameters import model_parameters
from fleetdistill.wire.codec import encode
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.engine.export import export_server_model
from fleetdistill_server.methods.averaging import WeightedMean
from fleetdistill_server.methods.fedd2s.server import FedD2SServer, Triplets
from fleetdistill_server.methods.traffic import KnowledgeType, Sizes, round_bytes
from fleetdistill_server.testing import FakeCohort
from fleetdistill_server.training.trainer import Trainer

# --- layers, heads and the four soft labels


def test_d2s_4_head_on_body_is_the_whole_network() -> None:
    server = make_server(make_context("fedd2s_m1", input_shape=(3, 32, 32)))
    model = server.context.device_model().eval()
    x = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        whole = model(x)
        assert torch.equal(server.network(model.features(x, 1)), whole)  # type: ignore[operator]  # the global network reads H_1
        for layer in range(1, 7):
            assert torch.equal(server.head(layer)(model.features(x, layer)), whole)  # type: ignore[operator]


@pytest.mark.parametrize("layer", [2, 3, 4])
def test_d2s_5_a_copy_takes_the_step_of_the_distillation_loss(layer: int) -> None:
    """One full batch, SGD without momentum, no labels: theta - rate * dJ/dtheta, with J of eq. (9) written out."""
    how = {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 0.1, "batch_size": 64}
    server, device = disturbed_server(label_epochs=0, distill_epochs=1, **how), make_device(1)
    sent = triplets_of(server, device, layer)
    mine = copy.deepcopy(server.network)
    p_bc = mine[layer - 1 :](sent.at_layer).softmax(1).detach()
    loss = (p_bc * (p_bc.log() - mine(sent.first).log_softmax(1))).sum(1).mean()
    assert float(loss.detach()) > 1e-4
    gradients = torch.autograd.grad(loss, list(mine.parameters()))
    trained = server.clients_to_server(sent, server.soft_labels(server.head(layer), sent.at_layer), FakeCohort({}))
    assert trained is not None
    for after, before, gradient in zip(trained.parameters(), mine.parameters(), gradients, strict=True):
        assert_close(after, before - 0.1 * gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("distance", ["head", "mse"])
def test_d2s_5_at_layer_1_no_step_is_taken_towards_own_answer(distance: str) -> None:
    """p and q are equal there, but for rounding, and Adam's first step has the size of the rate for any gradient."""
    server, device = disturbed_server(label_epochs=0, distill_epochs=1, distance=distance), make_device(1)
    sent = triplets_of(server, device, 1)
    trained = server.clients_to_server(sent, server.soft_labels(server.head(1), sent.at_layer), FakeCohort({}))
    assert trained is not None
    assert not changed(trained, state_of(server.network))
    labels_too = disturbed_server(distill_epochs=1, label_epochs=1, distance=distance)
    labels_only = disturbed_server(distill_epochs=0, label_epochs=1, distance=distance)
    copies = [
        item.clients_to_server(sent, item.soft_labels(item.head(1), sent.at_layer), FakeCohort({}))
        for item in (labels_too, labels_only)
    ]
    assert copies[0] is not None
    assert copies[1] is not None
    assert not changed(copies[0], state_of(copies[1]))


def test_d2s_6_the_head_as_printed_runs_a_layer_twice_and_fails() -> None:
    server, device = make_server(), make_device()
    with pytest.raises(RuntimeError, match="shape"):
        server.network[1:](triplets_of(server, device, 3).at_layer)  # layers 3 to L on the output of layer 3


def test_d2s_7_the_gradient_reaches_the_student_only() -> None:
    p_logits = torch.tensor([[2.0, 0.0, -1.0]], requires_grad=True)
    q_logits = torch.zeros(1, 3, requires_grad=True)
    distillation_loss(q_logits, p_logits.softmax(1), 1.0).backward()
    assert q_logits.grad is not None
    assert_close(q_logits.grad[0], torch.tensor([-0.510461, 0.219138, 0.291323]), atol=1e-6, rtol=0)
    assert p_logits.grad is None

    server, device = make_server(), make_device()
    sent = triplets_of(server, device, 2)
    before = state_of(server.network)
    server.clients_to_server(sent, server.soft_labels(server.head(2), sent.at_layer), FakeCohort({}))
    assert not changed(server.network, before)  # p comes from the round's start, only the copy is trained


def test_d2s_8_the_mean_is_over_the_participants() -> None:
    mean = WeightedMean("gross")
    for device, values in {"a": [1.0, 2.0], "b": [3.0, 6.0]}.items():
        mean.add(device, ModelParameters(parameters={"w": np.float32(values)}), 1)  # type: ignore[arg-type, dict-item]
    np.testing.assert_array_equal(mean.result(FakeCohort({})).parameters["w"], [2.0, 4.0])

    server, fleet = make_server(participation_ratio=0.2, distill_epochs=0), make_fleet(10)
    start = copy.deepcopy(server)
    cohort = run_round(server, fleet)
    taking_part = [item.device for item in cohort.asked if item.step == "extract"]
    assert len(taking_part) == 2
    copies = []
    for device in taking_part:
        upload = uploaded(cohort, device)
        values = [torch.from_numpy(upload.features[name]) for name in ("a", "d")]  # type: ignore[misc]
        sent = Triplets(device, 4, upload.sample_ids, *values, torch.from_numpy(upload.labels.astype(np.int64)))  # type: ignore[arg-type, call-arg, union-attr]
        p_bc = start.soft_labels(start.head(4), sent.at_layer)
        copies.append(start.clients_to_server(sent, p_bc, cohort).state_dict())  # type: ignore[union-attr]
    for name, tensor in server.network.state_dict().items():
        assert_close(tensor, (copies[0][name] + copies[1][name]) / 2)


@pytest.mark.parametrize(
    ("model", "options", "counts", "sizes"),
    [
        (
            "fedd2s_m1",
            {"input_shape": (3, 32, 32), "classes": 10},
            [224, 1168, 4640, 16416, 528, 170],
            [2048, 1024, 512, 32, 16, 10],
        ),
        ("fedd2s_m2", {"input_shape": (1, 28, 28), "classes": 62}, 237_054, [236894, 227614, 153758, 6174, 2046, 0]),
        ("fedd2s_m2", {"input_shape": (3, 32, 32), "classes": 100}, 353_284, None),
        ("fedd2s_digits", {}, [80, 1168, 4160, 2080, 330], [128, 64, 64, 32, 10]),
    ],
)
def test_d2s_9_parameters_and_sizes_of_the_models(
    model: str, options: dict[str, Any], counts: list[int] | int, sizes: list[int] | None
) -> None:
    built = build_model(model, **options)
    assert isinstance(built, SplitModel)
    layers = [parameter_count(stage) for stage in built.stages]
    heads = [parameter_count(built.stages[depth:]) for depth in range(1, len(layers) + 1)]
    if isinstance(counts, list):
        assert layers == counts
        shapes = built.stage_shapes(options.get("input_shape", (1, 8, 8)))
        assert [int(np.prod(shape)) for shape in shapes.values()] == sizes
        assert heads[0] == sum(counts[1:])
    else:
        assert sum(layers) == counts
        assert sizes is None or heads == sizes
    if model == "fedd2s_m1":
        assert heads == [22922, 21754, 17114, 698, 170, 0]
        assert parameter_count(built) == 23_146


@pytest.mark.long
@pytest.mark.parametrize(
    ("layer", "mode", "up", "down"),
    [(6, "head", 6_588_800, 32_000), (3, "head", 8_195_200, 100_456), (3, "feature_grad", 8_195_200, 1_638_400)],
)
def test_d2s_10_bytes_of_a_round(layer: int, mode: str, up: int, down: int) -> None:
    rows = 800
    context = make_context("fedd2s_m1", input_shape=(3, 32, 32), classes=10)
    server = make_server(context, s2c_mode=mode, l_min=layer)
    data = TensorData(torch.rand(rows, 3, 32, 32), torch.arange(rows) % 10)
    device = device_of(context.device_model(), data, 10, make_config(warmup_epochs=0, s2c_mode=mode))
    ids = 8 * rows  # the specification counts them apart
    plan = {"plan": Plan(values={"layer": layer, "participation": 1})}
    knowledge = device.handle(Ask(round=1, step="extract", seed=1, parts=plan)).parts
    assert encode(knowledge).data_bytes == up + ids
    reply = server.reply(triplets_of(server, device, layer), 1.0, FakeCohort({}))
    assert encode(reply).data_bytes == down + ids


def test_at_layer_1_one_column_goes_up_and_layers_come_down() -> None:
    server, fleet = make_server(l_min=1, drop_every=1), make_fleet(2, drop_every=1)
    for number in range(1, 5):
        cohort = run_round(server, fleet, number)
    rows, elements = 20, 4
    upload = uploaded(cohort, "d0")
    (columns,) = {item.columns for item in cohort.asked if (item.step, item.device) == ("extract", "d0")}
    assert (*upload.features,) == ("a",) == columns
    assert encode({"knowledge": upload}).data_bytes == elements * rows * WIDTHS[0] + 4 * rows + 8 * rows
    head = parameter_count(tiny_model().stages[1:])
    down = encode(cohort.sent("d0", "learn")[0]).data_bytes
    assert down == elements * rows * CLASSES + 8 * rows + 4 * head


@pytest.mark.parametrize(("steps", "updates"), [("alternating", 28), ("joint", 14)])
def test_d2s_11_optimiser_steps_of_a_phase(steps: str, updates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """K = 800, B = 128: 7 batches; 28 updates for E = 4 in the paper's two steps a batch, half of them in one."""
    reports = []

    def counting(train: Callable[..., TrainingReport]) -> Callable[..., None]:
        return lambda *args, **how: reports.append(train(*args, **how).steps)

    settings: dict[str, Any] = {"steps": steps, "batch_size": 128, "warmup_epochs": 0, "local_epochs": 4}
    server, device = make_server(**settings), make_device(rows=800, **settings)
    monkeypatch.setattr("fleetdistill.training.local_training.train_steps", counting(train_steps))
    monkeypatch.setattr(Trainer, "train_steps", counting(Trainer.train_steps))
    run_round(server, {"d0": device})
    assert reports == [updates, updates]  # the server's phase, the device's


def test_d2s_12_the_factor_tau_squared() -> None:
    q_logits = torch.zeros(1, 3, requires_grad=True)
    p_bc = (torch.tensor([[2.0, 0.0, -1.0]]) / 3.0).softmax(1)
    distillation_loss(q_logits, p_bc, 3.0).backward()
    assert q_logits.grad is not None
    assert_close(q_logits.grad[0], torch.tensor([-0.594645, 0.181282, 0.413363]), atol=1e-6, rtol=0)


# --- a run


@pytest.mark.parametrize(
    ("settings", "knowledge_type"),
    [
        ({}, "float16"),
        ({"s2c_mode": "feature_grad"}, "uint8"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ({"s2c_mode": "feature_grad"}, "float16"),
                ({"distance": "mse"}, "float16"),
                ({"distance": "mse"}, "uint8"),
                ({"paper": True}, "float16"),
            )
        ),
    ],
)
def test_a_run_drops_its_layers_and_its_bytes_are_the_formulas(
    settings: dict[str, Any], knowledge_type: KnowledgeType, tmp_path: Path
) -> None:
    """Four rounds of two devices on `fedd2s_digits`; L = 5 and one layer drops a round, down to C2."""
    fleet = Simulation(
        method="fedd2s",
        models=("fedd2s_digits",),
        devices=2,
        rounds=4,
        train_limit=80,
        test_limit=20,
        torch_device="cpu",
        settings={"drop_every": 1, "teacher_guard": False, **settings},
        knowledge_type=knowledge_type,
    )
    prepared = prepare(fleet, tmp_path / "work")
    store = run_in_memory(prepared)
    cuts = [row.figures["cut_layer"] for row in store.runs.rounds(RUN)]
    assert cuts == [dict.fromkeys(("device-0", "device-1"), cut) for cut in ("F3", "F2", "F1", "C2")]
    model = build_model("fedd2s_digits")
    assert isinstance(model, SplitModel)
    first = model.stage_shapes((1, 8, 8))["C1"]
    config = FedD2SConfig(**settings).for_classes(10)
    rows = store.history.traffic(RUN)
    traffic = {(row.round, row.device, row.direction): row.tensor_bytes for row in rows}
    for spec in prepared[1]:
        rows = spec.rows  # type: ignore[assignment]
        for number, cut in enumerate(("F3", "F2", "F1", "C2"), start=1):
            start_sizes = Sizes(samples=rows, features=int(np.prod(first)), channels=first[0], classes=10)  # type: ignore[arg-type]
            sizes = at_layer(start_sizes, model, cut, (1, 8, 8))
            predicted = round_bytes(FedD2SServer.exchanges(config, sizes), knowledge_type)
            assert traffic[number, spec.name, "up"] == predicted["up"]
            start = parameter_count(model) if number == 1 and "paper" not in settings else 0
            assert traffic[number, spec.name, "down"] == predicted["down"] + 4 * start
    report = export_server_model(store, RUN, tmp_path / "network.onnx")  # it reads H_1, of which uploads hold samples
    assert report.max_difference < 1e-4
    store.close()


def test_model_parameters_of_a_head_keep_the_names_of_its_layers() -> None:
    head = make_server().head(2)
    assert sorted(model_parameters(head, "head").parameters) == ["c.0.bias", "c.0.weight", "d.bias", "d.weight"]
