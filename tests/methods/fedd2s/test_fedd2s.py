"""FedD2S's two halves: what they compute, by its specification's oracles and by hand."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fleets import prepare, run_in_memory
from support.sizes import at_layer
from support.wire_samples import make_contract, make_profile
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from fleetdistill.errors import ConfigurationError, KnowledgeError, ModelError, QuorumNotReached, RefusedError
from fleetdistill.knowledge import ModelParameters, Plan, RefinedKnowledge, SampleKnowledge
from fleetdistill.methods.base import Ask, Local
from fleetdistill.methods.fedd2s.config import FedD2SConfig
from fleetdistill.methods.fedd2s.device import FedD2SDevice
from fleetdistill.models import build_model
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData, train_steps
from fleetdistill.training.losses import distillation_loss, feature_distance
from fleetdistill.training.model import SplitModel, check_local_model, parameter_count, split_sequential
from fleetdistill.training.parameters import model_parameters
from fleetdistill.wire.codec import decode, encode
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.engine.cohort import with_columns
from fleetdistill_server.engine.export import export_server_model
from fleetdistill_server.intake.admission import check_profile
from fleetdistill_server.intake.ingest import Ingest
from fleetdistill_server.methods.averaging import WeightedMean
from fleetdistill_server.methods.context import MethodContext
from fleetdistill_server.methods.fedd2s.schedule import distillation_layer, shallowest_layer
from fleetdistill_server.methods.fedd2s.server import FedD2SServer, Triplets
from fleetdistill_server.methods.traffic import KnowledgeType, Sizes, features_of, round_bytes
from fleetdistill_server.simulation.spec.plan import RUN
from fleetdistill_server.simulation.spec.settings import Simulation
from fleetdistill_server.store.memory_blobs import MemoryBlobs
from fleetdistill_server.testing import FakeCohort, always, play

CLASSES, INPUTS = 3, 6
WIDTHS = (8, 7, 5, CLASSES)
SETS = {"F1,F2,F3": 3, "F2,F3": 4, "C3,F1,F2,F3": 2, "C2,C3,F1,F2,F3": 1}


def tiny_model(input_shape: Sequence[int] = (INPUTS,), classes: int = CLASSES) -> SplitModel:
    """Four layers a, b, c, d; the last without ReLU."""
    stages, inputs = {}, INPUTS
    for name, outputs in zip("abcd", WIDTHS, strict=True):
        layer = nn.Linear(inputs, outputs)
        stages[name] = layer if name == "d" else nn.Sequential(layer, nn.ReLU())
        inputs = outputs
    return SplitModel(stages, cut="a")


def plain_model(input_shape: Sequence[int], classes: int) -> nn.Module:
    """A module that is no chain of stages."""
    return nn.Linear(INPUTS, classes)


def make_context(model: str = "test_fedd2s:tiny_model", **changes: Any) -> MethodContext:
    sys.modules["test_fedd2s"] = sys.modules[__name__]
    settings: dict[str, Any] = {
        "classes": CLASSES,
        "input_shape": (INPUTS,),
        "models": ModelSection(device=model),
        "torch_device": torch.device("cpu"),
        "seed": 3,
    }
    return MethodContext(**{**settings, **changes})


def make_config(**settings: Any) -> FedD2SConfig:
    defaults: dict[str, Any] = {"l_min": 1, "batch_size": 8, "teacher_guard": False}
    return FedD2SConfig(**{**defaults, **settings}).for_classes(CLASSES)


def make_server(context: MethodContext | None = None, **settings: Any) -> FedD2SServer:
    return FedD2SServer(make_config(**settings), context or make_context())


def make_device(seed: int = 0, rows: int = 20, config: FedD2SConfig | None = None, **settings: Any) -> FedD2SDevice:
    model = make_context().device_model()
    generator = torch.Generator().manual_seed(seed)
    data = TensorData(torch.randn(rows, INPUTS, generator=generator), torch.arange(rows) % CLASSES)
    return device_of(model, data, CLASSES, config or make_config(**settings))


def device_of(model: nn.Module, data: TensorData, classes: int, config: FedD2SConfig) -> FedD2SDevice:
    taps = check_local_model(model)
    local = Local(model=model, taps=taps, data=data, classes=classes, torch_device=torch.device("cpu"))
    return FedD2SDevice(config, local)


Members = dict[str, FedD2SDevice]


def run_round(
    server: FedD2SServer, members: Members, number: int = 1, silent: Collection[tuple[str, str]] = ()
) -> FakeCohort:
    """A round that needs every device; `silent` has the (step, device) of asks that get no answer."""
    (cohort,) = play(server, members, completed=number - 1, silent=silent, quorum=1.0)
    return cohort


def make_fleet(count: int = 2, **settings: Any) -> Members:
    return {f"d{i}": make_device(i, **settings) for i in range(count)}


def uploaded(cohort: FakeCohort, device: str) -> SampleKnowledge:
    (parts,) = cohort.answers(device, "extract")
    knowledge = parts["knowledge"]
    assert isinstance(knowledge, SampleKnowledge)
    return knowledge


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def changed(module: nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    """First letters of the stages that differ from `before`."""
    return {
        name.removeprefix("stages.").split(".")[0]
        for name, tensor in module.state_dict().items()
        if not torch.equal(tensor, before[name])
    }


# --- the schedule, eq. (6)


def test_d2s_1_the_unclamped_schedule() -> None:
    layers = [distillation_layer(z, 6, drop_every=3, l_min=0) for z in range(1, 20)]
    assert layers == [6, 6, 6, 5, 5, 5, 4, 4, 4, 3, 3, 3, 2, 2, 2, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("dropping_set", "first"), [("F1,F2,F3", 10), ("F2,F3", 7), ("C3,F1,F2,F3", 13), ("C2,C3,F1,F2,F3", 16)]
)
def test_d2s_2_the_clamped_schedule_of_the_papers_dropping_sets(dropping_set: str, first: int) -> None:
    lowest = shallowest_layer(build_model("fedd2s_m1"), l_min=None, dropping_set=dropping_set)  # type: ignore[arg-type]
    assert lowest == SETS[dropping_set]
    layers = [distillation_layer(z, 6, 3, lowest) for z in range(1, 20)]
    assert layers.index(lowest) + 1 == first
    assert layers[first - 1 :] == [lowest] * (20 - first)


def test_d2s_3_the_participation_that_first_uses_layer_3() -> None:
    firsts = [next(z for z in range(1, 100) if distillation_layer(z, 6, every, 3) == 3) for every in (3, 5, 7)]
    assert firsts == [10, 16, 22]
    server = make_server(participation_ratio=0.2)
    devices = {f"d{number:02d}": always({}) for number in range(50)}
    ratio = server.config.participation_ratio
    taken = [FakeCohort(devices, number=number).sample(ratio) for number in range(1, 101)]
    assert sum(map(len, taken)) / 50 == 20  # expected participations of a device: 7 * 3 + 1 = 22 is out of reach
    assert len({device for one in taken for device in one}) == 50


@given(drop_every=st.integers(1, 9), layers=st.integers(2, 12), l_min=st.integers(1, 12), first=st.integers(1, 200))
def test_the_layer_never_rises_and_stays_within_its_bounds(
    drop_every: int, layers: int, l_min: int, first: int
) -> None:
    l_min = min(l_min, layers)
    used = [distillation_layer(z, layers, drop_every, l_min) for z in range(first, first + 30)]
    assert all(before >= after for before, after in pairwise(used))
    assert all(l_min <= layer <= layers for layer in used)
    assert all(before - after <= 1 for before, after in pairwise(used))


def test_the_dropping_set_is_by_default_the_fully_connected_layers() -> None:
    for model, lowest in (("fedd2s_m1", 3), ("fedd2s_m2", 3), ("fedd2s_digits", 2), ("digits_mlp_large", 2)):
        assert shallowest_layer(build_model(model), l_min=None, dropping_set="") == lowest  # type: ignore[arg-type]
    assert shallowest_layer(tiny_model(), l_min=None, dropping_set="") == 1  # all are linear: one is always left
    convolutions = SplitModel({"a": nn.Conv2d(1, 1, 1), "b": nn.Conv2d(1, 1, 1), "c": nn.Flatten()}, cut=1)
    assert shallowest_layer(convolutions, l_min=None, dropping_set="") == 2


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dropping_set": "C3,F2"}, "dropping set ['C3', 'F2'] is not a suffix of the layer list"),
        ({"dropping_set": "F1,F2"}, "is not a suffix"),
        ({"l_min": 7}, "l_min 7 outside [1, 6]"),
        ({"l_min": 0}, "l_min 0 outside [1, 6]"),
    ],
)
def test_a_dropping_set_that_is_none_is_refused(settings: dict[str, Any], sentence: str) -> None:
    context = make_context("fedd2s_m1", input_shape=(3, 32, 32))
    with pytest.raises(ConfigurationError) as error:
        FedD2SServer(FedD2SConfig(**settings).for_classes(CLASSES), context)
    assert sentence in str(error.value)


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
def test_d2s_5_at_layer_1_no_step_is_taken_towards_the_copys_own_answer(distance: str) -> None:
    """p and q are equal there, but for rounding, and Adam's first step has the size of the rate for any gradient."""
    server, device = disturbed_server(label_epochs=0, distill_epochs=1, distance=distance), make_device(1)
    sent = triplets_of(server, device, 1)
    trained = server.clients_to_server(sent, server.soft_labels(server.head(1), sent.at_layer), FakeCohort({}))
    assert trained is not None
    assert not changed(trained, state_of(server.network))
    labels_too = disturbed_server(distill_epochs=1, label_epochs=1, distance=distance)
    labels_only = disturbed_server(distill_epochs=0, label_epochs=1, distance=distance)
    copies = [
        one.clients_to_server(sent, one.soft_labels(one.head(1), sent.at_layer), FakeCohort({}))
        for one in (labels_too, labels_only)
    ]
    assert copies[0] is not None
    assert copies[1] is not None
    assert not changed(copies[0], state_of(copies[1]))


def triplets_of(server: FedD2SServer, device: FedD2SDevice, layer: int, name: str = "d0") -> Triplets:
    columns = {key: torch.from_numpy(value) for key, value in device.columns_of(layer).items()}
    first, at_layer = columns[server.names[0]], columns[server.names[layer - 1]]
    return Triplets(name, layer, np.arange(len(first)), first, at_layer, device.local.data.labels)


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
    taking_part = [one.device for one in cohort.asked if one.step == "extract"]
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


def test_at_layer_1_one_column_travels_and_every_layer_above_comes_down() -> None:
    server, fleet = make_server(l_min=1, drop_every=1), make_fleet(2, drop_every=1)
    for number in range(1, 5):
        cohort = run_round(server, fleet, number)
    rows, elements = 20, 4
    upload = uploaded(cohort, "d0")
    (columns,) = {one.columns for one in cohort.asked if (one.step, one.device) == ("extract", "d0")}
    assert (*upload.features,) == ("a",) == columns
    assert encode({"knowledge": upload}).data_bytes == elements * rows * WIDTHS[0] + 4 * rows + 8 * rows
    head = parameter_count(tiny_model().stages[1:])
    down = encode(cohort.sent("d0", "learn")[0]).data_bytes
    assert down == elements * rows * CLASSES + 8 * rows + 4 * head


@pytest.mark.parametrize(("steps", "updates"), [("alternating", 28), ("joint", 14)])
def test_d2s_11_optimiser_steps_of_a_phase(steps: str, updates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """K = 800, B = 128: 7 batches; 28 updates for E = 4 in the paper's two steps a batch, half of them in one."""
    reports = []

    def counting(*args: Any, **how: Any) -> Any:
        reports.append(train_steps(*args, **how).steps)

    settings = {"steps": steps, "batch_size": 128, "warmup_epochs": 0, "local_epochs": 4}
    server, device = make_server(**settings), make_device(rows=800, **settings)  # type: ignore[arg-type]
    monkeypatch.setattr("fleetdistill.methods.fedd2s.device.train_steps", counting)
    monkeypatch.setattr("fleetdistill_server.methods.fedd2s.server.train_steps", counting)
    run_round(server, {"d0": device})
    assert reports == [updates, updates]  # the server's phase, the device's


def test_d2s_12_the_factor_tau_squared() -> None:
    q_logits = torch.zeros(1, 3, requires_grad=True)
    p_bc = (torch.tensor([[2.0, 0.0, -1.0]]) / 3.0).softmax(1)
    distillation_loss(q_logits, p_bc, 3.0).backward()
    assert q_logits.grad is not None
    assert_close(q_logits.grad[0], torch.tensor([-0.594645, 0.181282, 0.413363]), atol=1e-6, rtol=0)


# --- a round


def test_the_first_round_asks_for_the_last_layer_and_says_so() -> None:
    server = make_server()
    cohort = run_round(server, make_fleet())
    assert cohort.figures["cut_layer"] == {"d0": "d", "d1": "d"}
    columns = {one.device: one.columns for one in cohort.asked if one.step == "extract"}
    assert columns == {"d0": ("a", "d"), "d1": ("a", "d")}
    assert cohort.sent("d0", "extract")[0]["plan"].values == {"layer": 4, "participation": 1}  # type: ignore[attr-defined]
    (reply,) = cohort.sent("d0", "learn")
    assert set(reply) == {"plan", "teacher"}  # the head of the last layer is empty
    teacher = reply["teacher"]
    assert isinstance(teacher, RefinedKnowledge)
    assert_close(torch.from_numpy(teacher.values).sum(1), torch.ones(20))
    upload = uploaded(cohort, "d0")
    with torch.no_grad():
        t_bc = server.network.eval()(torch.from_numpy(upload.features["a"])).softmax(1)
    assert_close(torch.from_numpy(teacher.values), t_bc)  # after averaging, in eval mode


def test_layers_drop_with_a_devices_own_participations() -> None:
    server = make_server(drop_every=2, l_min=2)
    fleet = make_fleet(3, drop_every=2)
    layers = {name: [] for name in fleet}  # type: ignore[var-annotated]
    for number in range(1, 7):
        silent = {("extract", "d1")} if number in (1, 2) else {("learn", "d2")} if number == 3 else set()
        try:
            cohort = run_round(server, fleet, number, silent)
        except QuorumNotReached:
            continue  # rounds 1 and 2 fall short
        for device, cut in cohort.figures["cut_layer"].items():
            layers[device].append(cut)
    assert layers == {"d0": ["d", "d", "c", "c"], "d1": ["d", "d", "c", "c"], "d2": ["d", "d", "d", "c"]}
    assert server.participations == {"d0": 4, "d1": 4, "d2": 3}  # d2's failure in round 3 was taken back


def test_a_device_that_is_never_selected_has_no_count_and_is_not_asked() -> None:
    server = make_server(participation_ratio=0.34)
    cohort = run_round(server, make_fleet(3))
    (selected,) = {one.device for one in cohort.asked}
    assert server.participations == {selected: 1}
    assert set(cohort.figures["cut_layer"]) == {selected}


def test_a_round_that_falls_short_leaves_the_global_network_alone() -> None:
    server, fleet = make_server(), make_fleet()
    before = state_of(server.network)
    with pytest.raises(QuorumNotReached):
        run_round(server, fleet, silent={("extract", "d1")})
    assert not changed(server.network, before)
    assert server.participations == {}


@pytest.mark.parametrize("average", ["uniform", "samples"])
def test_with_one_participant_the_global_network_is_its_copy(average: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server(average=average)
    copies = []
    trained = server.clients_to_server

    def keep(*args: Any) -> Any:
        copies.append(trained(*args))
        return copies[-1]

    monkeypatch.setattr(server, "clients_to_server", keep)
    run_round(server, make_fleet(1))
    assert not changed(server.network, state_of(copies[0]))  # type: ignore[arg-type]


def test_samples_average_weighs_copies_by_their_rows() -> None:
    both = {
        average: make_server(average=average, warmup_epochs=0, distill_epochs=0) for average in ("uniform", "samples")
    }
    for server in both.values():
        fleet = {"d0": make_device(0, rows=30), "d1": make_device(1, rows=10)}
        run_round(server, fleet)
    fleets = [{name: make_device(i, rows=rows)} for i, (name, rows) in enumerate((("d0", 30), ("d1", 10)))]
    copies = []
    for fleet in fleets:
        alone = make_server(warmup_epochs=0, distill_epochs=0)
        run_round(alone, fleet)
        copies.append(alone.network.state_dict())
    for name in copies[0]:
        assert_close(both["uniform"].network.state_dict()[name], (copies[0][name] + copies[1][name]) / 2)
        assert_close(both["samples"].network.state_dict()[name], (3 * copies[0][name] + copies[1][name]) / 4)


def test_alternating_takes_a_step_on_each_loss_and_joint_one_on_their_sum() -> None:
    """One full batch, SGD without momentum: both worked out by hand for the server's copy."""
    for steps in ("joint", "alternating"):
        how = {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 0.1, "batch_size": 64, "local_epochs": 1}
        server, device = make_server(steps=steps, temperature=2.0, **how), make_device()  # type: ignore[arg-type]
        sent = triplets_of(server, device, 3)
        p_bc = server.soft_labels(server.head(3), sent.at_layer + 1)
        trained = server.clients_to_server(sent, p_bc, FakeCohort({}))
        mine = copy.deepcopy(server.network)
        terms = [
            lambda net: 4 * (p_bc * (p_bc.log() - (net(sent.first) / 2).log_softmax(1))).sum(1).mean(),  # noqa: B023
            lambda net: functional.cross_entropy(net(sent.first), sent.labels),  # noqa: B023
        ]
        for due in [terms] if steps == "joint" else [[terms[0]], [terms[1]]]:
            gradients = torch.autograd.grad(sum(term(mine) for term in due), list(mine.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(mine.parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient  # type: ignore[misc]
        for name, tensor in mine.state_dict().items():
            assert_close(trained.state_dict()[name], tensor, atol=1e-6, rtol=1e-5)  # type: ignore[union-attr]


# --- device half


def learn_ask(server: FedD2SServer, device: FedD2SDevice, layer: int) -> Ask:
    reply = server.reply(triplets_of(server, device, layer), 1.0, FakeCohort({}))
    return Ask(round=1, step="learn", seed=5, parts=decode(encode(reply)))


def disturbed_server(**settings: Any) -> FedD2SServer:
    """A global network that differs from the devices' model."""
    server = make_server(**settings)
    with torch.no_grad():
        for value in server.network.parameters():
            value.add_(0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(4)))
    return server


@pytest.mark.parametrize("settings", [{}, {"s2c_mode": "feature_grad"}, {"distance": "mse"}])
@pytest.mark.parametrize("layer", [2, 3])
def test_distillation_leaves_the_layers_above_the_cut_bit_identical(settings: dict[str, Any], layer: int) -> None:
    settings = {**settings, "label_epochs": 0, "weight_decay": 0.1, "warmup_epochs": 3}
    server, device = disturbed_server(**settings), make_device(**settings)
    extract_ask = Ask(round=1, step="extract", seed=1, parts={"plan": Plan(values={"layer": layer})})
    device.handle(extract_ask)  # the warm-up fills Adam's moments, so that a zero gradient would still move a layer
    before = state_of(device.local.model)
    device.handle(learn_ask(server, device, layer))
    assert changed(device.local.model, before) == set("abcd"[:layer])


@pytest.mark.parametrize("steps", ["joint", "alternating"])
def test_labels_train_dropped_layers_too(steps: str) -> None:
    settings = {"distill_epochs": 0, "label_epochs": 1, "steps": steps}
    server, device = disturbed_server(**settings), make_device(**settings)  # type: ignore[arg-type]
    before = state_of(device.local.model)
    device.handle(learn_ask(server, device, 2))
    assert changed(device.local.model, before) == set("abcd")


def test_the_device_descends_equation_12_through_the_frozen_head() -> None:
    how = {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 0.1, "batch_size": 64, "label_epochs": 0}
    settings = {**how, "distill_epochs": 1, "temperature": 2.0}
    server, device = disturbed_server(**settings), make_device(**settings)  # type: ignore[arg-type]
    ask = learn_ask(server, device, 2)
    mine = copy.deepcopy(device.model)
    t_bc = torch.from_numpy(np.array(ask.part("teacher", RefinedKnowledge).values))
    v_bc = server.head(2)(mine.features(device.local.data.inputs, 2)) / 2
    loss = 4 * (t_bc * (t_bc.log() - v_bc.log_softmax(1))).sum(1).mean()
    loss.backward()
    device.handle(ask)
    for (name, parameter), other in zip(device.model.named_parameters(), mine.parameters(), strict=True):
        expected = other if other.grad is None else other - 0.1 * other.grad
        assert_close(parameter, expected, atol=1e-6, rtol=1e-5)
        assert (other.grad is None) == (name.split(".")[1] in "cd")


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_feature_gradients_give_the_heads_first_step(layer: int) -> None:
    """One full batch, so that there is a first step only; the network at layer 1 differs from the devices' too."""
    how = {"optimizer": "sgd", "momentum": 0.0, "batch_size": 64, "distill_epochs": 1, "label_epochs": 0}
    models = []
    for mode in ("head", "feature_grad"):
        settings = {**how, "s2c_mode": mode, "temperature": 3.0}
        server, device = disturbed_server(**settings), make_device(**settings)  # type: ignore[arg-type]
        ask = learn_ask(server, device, layer)
        if layer == 1:  # with one head, t and v agree there: a teacher of another kind shows that gradients do
            ask = other_teacher(server, device, settings)
        assert ("head" in ask.parts) == (mode == "head")
        device.handle(ask)
        models.append(device.model)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert_close(one, other, atol=1e-6, rtol=1e-4)
    assert changed(models[0], state_of(make_device().model)) == set("abcd"[:layer])


def other_teacher(server: FedD2SServer, device: FedD2SDevice, settings: dict[str, Any]) -> Ask:
    sent = triplets_of(server, device, 1)
    t_bc = torch.full((len(sent.labels), CLASSES), 1 / CLASSES)
    reply = {"plan": server.plan("d0", 1), **server.knowledge(sent, t_bc)}
    return Ask(round=1, step="learn", seed=5, parts=decode(encode(reply)))


def test_the_ablation_brings_features_together_instead() -> None:
    settings = {"distance": "mse", "distill_epochs": 1, "label_epochs": 0, "batch_size": 64, "learning_rate": 1e-3}
    server, device = disturbed_server(**settings), make_device(**settings)  # type: ignore[arg-type]
    ask = learn_ask(server, device, 3)
    assert set(ask.parts) == {"plan", "features"}
    sent = triplets_of(server, device, 3)
    target = np.array(ask.part("features", SampleKnowledge).features["c"])
    with torch.no_grad():
        assert_close(torch.from_numpy(target), server.network[:2](sent.first))
    loss = server.distillation(copy.deepcopy(server.network), sent, torch.empty(0))
    assert_close(loss(torch.arange(20)), functional.mse_loss(server.network[:2](sent.first), sent.at_layer))  # type: ignore[misc]
    before = float(functional.mse_loss(sent.at_layer, torch.from_numpy(target)))
    device.handle(ask)
    after = functional.mse_loss(triplets_of(server, device, 3).at_layer, torch.from_numpy(target))
    assert float(after) < before
    nothing = learn_ask(server, device, 1).part("teacher", RefinedKnowledge)  # at layer 1 there is nothing between
    assert not nothing.valid


def test_feature_distance_counts_rows_without_a_target_as_zero() -> None:
    student, target = torch.ones(2, 2, 2), torch.full((2, 2, 2), torch.nan)
    target[0] = 3.0
    assert float(feature_distance(student, target, valid_b=torch.tensor([True, False]))) == 2.0  # 4 * 4 / 8
    with pytest.raises(KnowledgeError, match=r"\[2, 2, 2\] and their target \[2, 2\]"):
        feature_distance(student, target[0])


def test_rows_are_matched_by_sample_id_and_unknown_ids_are_counted() -> None:
    device = make_device(rows=5)
    values, valid, unknown = device.own_rows(np.array([3, 99, 1]), np.array([[1.0], [2.0], [3.0]], np.float16), (1,))
    assert valid.tolist() == [False, True, False, True, False]
    assert (values[3].item(), values[1].item(), unknown) == (1.0, 3.0, 1)
    teacher = RefinedKnowledge(valid=True, sample_ids=np.array([99]), values=np.float32([[1, 0, 0]]))  # type: ignore[arg-type]
    parts = {"plan": Plan(values={"layer": 4}), "teacher": teacher}
    assert device.handle(Ask(round=1, step="learn", seed=1, parts=parts)).notes == {"unknown_ids": 1}


def test_the_warm_up_comes_once_and_the_same_ask_gives_the_same_answer() -> None:
    ask = Ask(round=1, step="extract", seed=1, parts={"plan": Plan(values={"layer": 4, "participation": 1})})
    one, other = make_device(), make_device()
    first, again = (device.handle(ask).parts["knowledge"].features["a"] for device in (one, other))  # type: ignore[attr-defined]
    np.testing.assert_array_equal(first, again)
    cold = make_device(warmup_epochs=0).handle(ask).parts["knowledge"].features["a"]  # type: ignore[attr-defined]
    assert not np.array_equal(first, cold)
    second = one.handle(ask)
    np.testing.assert_array_equal(second.parts["knowledge"].features["a"], first)  # type: ignore[attr-defined]
    assert second.notes == {"participations_differ": 0}
    late = Ask(round=1, step="extract", seed=1, parts={"plan": Plan(values={"layer": 4, "participation": 3})})
    assert one.handle(late).notes == {"participations_differ": 1}


def test_both_halves_go_on_from_their_saved_state() -> None:
    server, fleet = make_server(), make_fleet()
    run_round(server, fleet)
    states = {name: unpack_state(pack_state(device.state_dict())) for name, device in fleet.items()}
    twin, twins = make_server(), make_fleet()
    twin.load_state_dict(unpack_state(pack_state(server.state_dict())))
    for name, device in twins.items():
        device.local.model.load_state_dict(fleet[name].local.model.state_dict())
        device.load_state_dict(states[name])
    for number in (2, 3):
        run_round(server, fleet, number)
        run_round(twin, twins, number)
    assert pack_state(server.state_dict()) == pack_state(twin.state_dict())
    assert not changed(fleet["d1"].model, state_of(twins["d1"].model))
    assert twins["d1"].participations == 3


# --- guards


def test_the_teacher_guard_fires_on_a_network_worse_than_chance_and_than_the_device() -> None:
    server, cohort = make_server(teacher_guard=True), FakeCohort({})
    sent = triplets_of(server, make_device(), 4)
    wrong = server.soft_labels(server.network, sent.first).argmin(1)
    sent = Triplets(sent.device, 4, sent.sample_ids, sent.first, sent.at_layer, wrong)
    reply = server.reply(sent, 0.9, cohort)
    assert [(kind, device) for kind, device, _ in cohort.events] == [("teacher-guard", "d0")]
    assert "the global network scores 0.000 on the rows of d0, its own layers 0.900" in cohort.events[0][2]
    assert set(reply) == {"plan", "teacher"}
    assert not reply["teacher"].valid  # type: ignore[attr-defined]
    assert cohort.figures["teacher_accuracy"] == {"d0": 0.0}
    device = make_device()
    assert device.distillation(Ask(round=1, step="learn", seed=1, parts=decode(encode(reply))), 4) == (None, 0)


def test_the_teacher_guard_stays_still_for_a_good_network_and_when_switched_off() -> None:
    server, cohort = make_server(teacher_guard=True), FakeCohort({})
    sent = triplets_of(server, make_device(), 4)
    scores = server.soft_labels(server.network, sent.first)
    good = Triplets("d0", 4, sent.sample_ids, sent.first, sent.at_layer, scores.argmax(1))
    bad = Triplets("d0", 4, sent.sample_ids, sent.first, sent.at_layer, scores.argmin(1))
    assert server.reply(good, 1.0, cohort)["teacher"].valid  # type: ignore[attr-defined]
    half = torch.where(torch.arange(20) % 2 == 0, scores.argmax(1), scores.argmin(1))  # 0.5, above chance
    middling = Triplets("d0", 4, sent.sample_ids, sent.first, sent.at_layer, half)
    assert server.reply(middling, 1.0, cohort)["teacher"].valid  # type: ignore[attr-defined]
    off = make_server(teacher_guard=False)
    assert off.reply(bad, 1.0, cohort)["teacher"].valid  # type: ignore[attr-defined]
    knows_no_better = server.reply(bad, 0.0, cohort)["teacher"]
    assert knows_no_better.valid  # type: ignore[attr-defined]
    assert cohort.events == []


@pytest.mark.parametrize(("right", "own", "held"), [(7, 1.0, True), (7, 7 / 21, False), (8, 1.0, False)])
def test_the_teacher_guard_takes_a_network_at_chance_for_none(right: int, own: float, held: bool) -> None:
    """7 of 21 rows of three classes are chance."""
    server, cohort = make_server(teacher_guard=True), FakeCohort({})
    sent = triplets_of(server, make_device(rows=21), 4)
    scores = server.soft_labels(server.network, sent.first)
    labels = torch.where(torch.arange(21) < right, scores.argmax(1), scores.argmin(1))
    reply = server.reply(Triplets("d0", 4, sent.sample_ids, sent.first, sent.at_layer, labels), own, cohort)
    assert reply["teacher"].valid is not held  # type: ignore[attr-defined]
    assert len(cohort.events) == held


def test_a_copy_that_diverges_is_left_out_of_the_mean_and_its_device_learns_from_its_labels() -> None:
    settings = {"warmup_epochs": 0, "distill_epochs": 0, "batch_size": 64}
    server, fleet = make_server(**settings), make_fleet(2, **settings)  # type: ignore[arg-type]
    fleet["d1"].columns_of = lambda layer: {  # type: ignore[method-assign]
        "a": np.full((20, WIDTHS[0]), 3e38, np.float32),
        "d": np.zeros((20, CLASSES), np.float32),
    }
    cohort = run_round(server, fleet)
    assert [(kind, device) for kind, device, _ in cohort.events] == [("copy-left-out", "d1")]
    assert not cohort.sent("d1", "learn")[0]["teacher"].valid  # type: ignore[attr-defined]
    alone = make_server(**settings)  # type: ignore[arg-type]
    run_round(alone, make_fleet(1, **settings))
    assert not changed(server.network, state_of(alone.network))
    assert server.participations == {"d0": 1, "d1": 1}
    calm = make_fleet(2, **settings)
    assert run_round(make_server(**settings), calm).events == []  # type: ignore[arg-type]


MODES = [{"distance": "mse"}, {"s2c_mode": "feature_grad"}, {}]


@pytest.mark.parametrize("settings", MODES)
def test_what_cannot_be_sent_is_held_back_and_the_run_goes_on(settings: dict[str, Any]) -> None:
    """Finite weights of such a size that features, gradients or soft labels do not fit the wire."""
    server, cohort = make_server(**settings), FakeCohort({})
    device = make_device(**settings)
    sent = triplets_of(server, device, 3)
    with torch.no_grad():
        for weight in server.network.parameters():
            weight.mul_(1e20)
    reply = server.reply(sent, 0.9, cohort)
    assert [(kind, name) for kind, name, _ in cohort.events] == [("knowledge-left-out", "d0")]
    assert "float16 goes up to 65504; learning_rate = 0.01 is probably too large" in cohort.events[0][2]
    assert set(reply) == {"plan", "teacher"}
    arrived = decode(encode(reply, np.float16))
    assert device.distillation(Ask(round=1, step="learn", seed=1, parts=arrived), 3) == (None, 0)


def test_features_beyond_float16_are_sent_in_a_float32_run() -> None:
    for knowledge_type, kinds in (("float16", ["knowledge-left-out"]), ("float32", [])):
        server, cohort = make_server(make_context(knowledge_type=knowledge_type), distance="mse"), FakeCohort({})
        sent = triplets_of(server, make_device(distance="mse"), 2)
        with torch.no_grad():
            for weight in server.network.parameters():
                weight.mul_(1e6)
        reply = server.reply(sent, 0.9, cohort)
        assert ([kind for kind, _, _ in cohort.events], "features" in reply) == (kinds, not kinds)
        encode(reply, knowledge_type)  # type: ignore[arg-type]


# --- what is declared, and how it is checked


def test_the_contract_names_the_first_layer_and_all_that_can_be_cut_at() -> None:
    server = make_server(l_min=3)
    assert features_of(server.run_exchanges()) == {"a": (8,), "c": (5,), "d": (3,)}
    assert list(features_of(make_server(l_min=1).run_exchanges())) == ["a", "b", "c", "d"]
    assert list(server.requirements().columns) == ["features", "labels"]
    initial = server.initial()
    assert initial is not None
    for name, tensor in server.network.state_dict().items():
        np.testing.assert_array_equal(initial.parameters[f"stages.{name}"], tensor.numpy())
    assert make_server(shared_initial=False).initial() is None


def test_an_ask_takes_exactly_the_columns_that_it_names() -> None:
    shapes = {"a": (8,), "c": (5,), "d": (3,)}
    contract = make_contract(
        features=[contract_pb2.NamedShape(name=name, shape=shape) for name, shape in shapes.items()],
        requirements=contract_pb2.Requirements(columns=["features", "labels"]),
    )
    expects = with_columns({"knowledge": "sample_knowledge"}, ["a", "d"])

    def send(**features: tuple[int, ...]) -> None:
        columns = {name: np.zeros((4, *shape), np.float32) for name, shape in features.items()}
        knowledge = SampleKnowledge(sample_ids=np.arange(4), features=columns, labels=np.zeros(4, np.int32))
        payload = encode({"knowledge": knowledge})
        Ingest("d1", payload.header(), contract, expects).start(MemoryBlobs().stage("key", payload.parts))

    send(a=(8,), d=(3,))
    with pytest.raises(RefusedError, match="lacks features/d, which feddkc needs"):
        send(a=(8,))
    with pytest.raises(RefusedError, match="'knowledge/features/c' is not part of the contract"):
        send(a=(8,), c=(5,), d=(3,))
    with pytest.raises(RefusedError, match=r"features/d has shape \[4, 5\], expected \[N, 3\]"):
        send(a=(8,), d=(5,))


def test_a_device_without_the_cuts_is_refused_at_check_in() -> None:
    contract = make_contract(
        features=[contract_pb2.NamedShape(name="a", shape=(8,))],
        requirements=contract_pb2.Requirements(columns=["features", "labels"]),
    )
    check_profile(contract, make_profile(features=[contract_pb2.NamedShape(name="a", shape=(8,))]))
    with pytest.raises(RefusedError, match="feature shape at cut 'a': the device has no such cut, run"):
        check_profile(contract, make_profile())
    kept_back = make_profile(
        features=[contract_pb2.NamedShape(name="a", shape=(8,))], allowed_columns=["features", "logits"]
    )
    with pytest.raises(RefusedError, match="the app keeps back labels"):
        check_profile(contract, kept_back)


def test_models_that_are_no_chain_of_stages_are_refused_with_advice() -> None:
    class OneCut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.extractor, self.last = nn.Linear(INPUTS, 4), nn.Linear(4, CLASSES)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.extractor(x)

        def predict(self, features: torch.Tensor) -> torch.Tensor:
            return self.last(features)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.predict(self.features(x))

    data = TensorData(torch.randn(4, INPUTS), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ModelError, match="OneCut has only one cut; build it as a SplitModel"):
        device_of(OneCut(), data, CLASSES, make_config())
    with pytest.raises(ConfigurationError, match=r"\[model\] device is a Linear"):
        make_server(make_context("test_fedd2s:plain_model"))
    device_of(split_sequential(nn.Sequential(nn.Linear(INPUTS, 4), nn.Linear(4, CLASSES)), 1), data, 3, make_config())


# --- configuration


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"drop_every": 0}, "drop_every must be >= 1"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"steps": "both"}, "unknown steps 'both', expected one of joint, alternating"),
        ({"s2c_mode": "grad"}, "unknown s2c_mode 'grad', expected one of head, feature_grad"),
        ({"distance": "l1"}, "unknown distance 'l1', expected one of head, mse"),
        ({"average": "median"}, "unknown average 'median', expected one of uniform, samples"),
        ({"distill_epochs": -1}, "distill_epochs must be >= 0"),
        ({"label_epochs": -1}, "label_epochs must be >= 0"),
        ({"distill_epochs": 0, "label_epochs": 0}, "nothing would be trained"),
        ({"s2c_mode": "feature_grad", "distill_epochs": 2}, "feature_grad allows distill_epochs = 1 only"),
        ({"s2c_mode": "feature_grad", "distance": "mse"}, "feature_grad is the gradient through the head"),
        ({"warmup_epochs": -1}, "warmup_epochs must be >= 0"),
        ({"participation_ratio": 0.0}, "participation_ratio must be in (0, 1]"),
        ({"participation_ratio": 1.5}, "participation_ratio must be in (0, 1]"),
        ({"l_min": 2, "dropping_set": "F3"}, "set one of them"),
        ({"learning_rate": 0.0}, "learning_rate must be > 0"),
        ({"batch_size": 0}, "batch_size must be >= 1"),
    ],
)
def test_a_setting_out_of_range_says_so(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        FedD2SConfig(**settings)
    assert sentence in str(error.value)


def test_the_defaults_are_the_specifications_and_paper_switches_ours_off() -> None:
    config = FedD2SConfig().for_classes(10)
    assert (config.local_epochs, config.distill_epochs, config.label_epochs) == (4, 2, 2)
    assert (config.optimizer, config.learning_rate, config.batch_size) == ("adam", 0.01, 128)
    assert (config.drop_every, config.temperature, config.warmup_epochs, config.steps) == (3, 1.0, 1, "joint")
    paper = FedD2SConfig.from_settings({"paper": True}).for_classes(10)
    assert (paper.steps, paper.warmup_epochs, paper.shared_initial, paper.teacher_guard) == (
        "alternating",
        0,
        False,
        False,
    )
    assert FedD2SConfig(s2c_mode="feature_grad").for_classes(10).distill_epochs == 1
    assert FedD2SConfig(local_epochs=1).for_classes(10).label_epochs == 1


def test_controls_match_the_passes_over_labels() -> None:
    config = FedD2SConfig().for_classes(10)
    assert [config.cross_entropy_epochs(number) for number in (1, 2, 3)] == [3, 2, 2]
    assert FedD2SConfig(warmup_epochs=0, label_epochs=3).cross_entropy_epochs(1) == 3


# --- a run


@pytest.mark.parametrize(
    ("settings", "knowledge_type"),
    [
        ({}, "float16"),
        ({"s2c_mode": "feature_grad"}, "float16"),
        ({"s2c_mode": "feature_grad"}, "uint8"),
        ({"distance": "mse"}, "float16"),
        ({"distance": "mse"}, "uint8"),
        ({"paper": True}, "float16"),
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
    cuts = [json.loads(row["figures"])["cut_layer"] for row in store.runs.rounds(RUN)]
    assert cuts == [dict.fromkeys(("device-0", "device-1"), cut) for cut in ("F3", "F2", "F1", "C2")]
    model = build_model("fedd2s_digits")
    assert isinstance(model, SplitModel)
    first = model.stage_shapes((1, 8, 8))["C1"]
    config = FedD2SConfig(**settings).for_classes(10)
    rows = store.history.traffic(RUN)
    traffic = {(row["round"], row["device"], row["direction"]): row["tensor_bytes"] for row in rows}
    for spec in prepared[1]:
        rows = len(np.load(spec.data_file)["labels"])  # type: ignore[assignment]
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
