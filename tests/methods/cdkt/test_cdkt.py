"""CDKT-FL's two halves: what they compute, by the specification's oracles (CDK-n) and by hand."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from methods.cdkt.cdkt_fleet import CLASSES, INPUTS, PROXY, WIDTH, made_up, make_proxy, make_server, tiny_model
from support.fleets import prepare, run_in_memory
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from fleetdistill.errors import ConfigurationError, RefusedError, WireError
from fleetdistill.knowledge import EMBEDDING, ProxyKnowledge
from fleetdistill.methods.base import Ask, Local
from fleetdistill.methods.cdkt.config import CDKTConfig
from fleetdistill.methods.cdkt.device import CDKTDevice
from fleetdistill.methods.cdkt.transfer import Distance, Knowledge, proxy_batches, with_labels
from fleetdistill.methods.local import make_local_optimizer
from fleetdistill.models import build_model
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData, train_epochs
from fleetdistill.training.losses import distillation_loss, euclidean_distance, js_divergence
from fleetdistill.training.model import parameter_count
from fleetdistill.training.parameters import model_parameters
from fleetdistill.wire.codec import encode
from fleetdistill_lab.simulation.report.metrics import c_per
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_lab.simulation.spec.settings import Simulation
from fleetdistill_server.engine.export import export_server_model
from fleetdistill_server.engine.forgetting import BetweenRounds
from fleetdistill_server.methods.averaging import TensorMean
from fleetdistill_server.methods.cdkt import CDKTServer
from fleetdistill_server.methods.traffic import Sizes, features_of, round_bytes
from fleetdistill_server.store.store import Store
from fleetdistill_server.testing import FakeCohort, Member, always, play

VARIANTS = ("full", "rep", "repfull")
every_variant = pytest.mark.parametrize("knowledge", VARIANTS)


def make_device(rows: int = 20, **settings: Any) -> CDKTDevice:
    torch.manual_seed(5)
    data = TensorData(torch.randn(rows, INPUTS), torch.arange(rows) % CLASSES)
    model, where = tiny_model(), torch.device("cpu")
    local = Local(model=model, taps=model, data=data, classes=CLASSES, torch_device=where, proxy=make_proxy())
    return CDKTDevice(CDKTConfig(**settings).for_classes(CLASSES), local)


NOTHING = ProxyKnowledge(valid=False)
COLUMNS = {"full": "logits", "rep": "embeddings", "repfull": "logits embeddings"}


def ask(knowledge: ProxyKnowledge, seed: int = 1) -> Ask:
    return Ask(round=1, step="train", seed=seed, parts={"knowledge": knowledge})


def run_round(
    server: CDKTServer,
    knowledge: Mapping[str, ProxyKnowledge],
    completed: int = 0,
    samples: Mapping[str, int] | None = None,
    devices: Sequence[str] = (),
) -> FakeCohort:
    """A round in which devices answer with knowledge that a test made; those without knowledge do not answer."""
    members: dict[str, Member] = dict.fromkeys(devices, lambda ask: None)
    members |= {device: always({"knowledge": one}, (samples or {}).get(device, 1)) for device, one in knowledge.items()}
    (cohort,) = play(server, members, completed=completed, quorum=0.01)
    return cohort


def test_round_takes_and_averages_over_part_of_devices() -> None:
    knowledge = {f"d{number:02d}": made_up(number) for number in range(50)}
    cohort = run_round(make_server(participation_ratio=0.2), knowledge)
    assert len(cohort.asked) == 10
    plain = make_server(participation_ratio=0.2, label_average=False, robust="off")
    mean = collective(plain, knowledge).outcomes_pc
    assert mean is not None
    said = torch.stack(
        [torch.from_numpy(knowledge[device].logits).double() for device in (item.device for item in cohort.asked)]
    )
    assert_close(mean.double(), (said / 3).softmax(-1).mean(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 40])
@pytest.mark.parametrize("rate", [1e6, 1e30])
@pytest.mark.parametrize("knowledge", ["full", "repfull"])
def test_non_finite_global_model_resumes_from_before_round(rate: float, knowledge: str, steps: int) -> None:
    """After one step no loss has been infinite yet; only what the model says shows it."""
    settings = {"min_server_steps": steps, "global_epochs": 1, "batch_size": PROXY}
    server = make_server(server_learning_rate=rate, knowledge=knowledge, **settings)
    before = copy.deepcopy(server.model.state_dict())
    sent = {"a": made_up(columns=COLUMNS[knowledge])}
    cohort = run_round(server, sent)
    for name, tensor in before.items():
        assert torch.equal(server.model.state_dict()[name], tensor)
    assert cohort.events[0][0] == "distillation-undone"
    assert "the global model is rolled back to its state before the round" in cohort.events[0][2]
    assert encode({"knowledge": server.knowledge()}, np.float16)
    calm = run_round(make_server(knowledge=knowledge), sent)
    assert "distillation-undone" not in [kind for kind, _, _ in calm.events]


def test_knowledge_of_first_model_not_fit_to_send_is_held_back() -> None:
    """It was never trained, as every round was undone: its knowledge is made for the second round."""
    server = make_server(knowledge="full", server_learning_rate=1e30)
    with torch.no_grad():
        for parameter in server.model.parameters():
            parameter.mul_(1e5)
    sent = {"a": made_up(columns=COLUMNS["full"])}
    run_round(server, sent)
    cohort = run_round(server, sent, completed=1)
    assert not cohort.sent("a")[0]["knowledge"].valid  # type: ignore[attr-defined]
    assert "knowledge-left-out" in cohort.kinds


def collective(server: CDKTServer, knowledge: Mapping[str, ProxyKnowledge], **cohort: Any) -> Knowledge:
    """What the server would learn towards."""
    result: list[Knowledge] = []
    server.transfer = lambda knowledge, generator: result.append(knowledge)  # type: ignore[method-assign]
    run_round(server, knowledge, **cohort)
    return result[0]


def weights(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


# --- distances


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_cdk_1_js_is_symmetric_and_bounded_by_ln_2() -> None:
    p, q = row(0.7, 0.2, 0.1), row(0.1, 0.2, 0.7)
    assert float(js_divergence(q.log(), p)) == pytest.approx(0.253102, abs=1e-6)
    assert float(js_divergence(p.log(), q)) == pytest.approx(0.253102, abs=1e-6)
    assert float(js_divergence(row(800.0, 0.0), row(0.0, 1.0))) == pytest.approx(math.log(2), abs=1e-6)
    assert float(js_divergence(p.log(), p)) == pytest.approx(0, abs=1e-12)


def test_cdk_2_js_is_the_true_one_and_not_the_reversed() -> None:
    p, q = row(1 - 1e-6, 1e-6), row(1e-6, 1 - 1e-6)
    assert float(js_divergence(q.log(), p)) == pytest.approx(0.693132, abs=1e-6)


def test_cdk_3_kl_with_its_temperature() -> None:
    p, q = row(0.7, 0.2, 0.1), row(0.1, 0.2, 0.7)
    assert float(distillation_loss(q.log(), p, 1.0)) == pytest.approx(1.167546, abs=1e-6)
    teacher, student = row(2, 1, 0), row(0, 0, 0)
    for temperature, expected in ((3.0, 0.324315), (1.0, 0.266217)):
        distance = Distance("kl", temperature, "logits")
        assert float(distance.between_outcomes(teacher, student)) == pytest.approx(expected, abs=1e-6)


def test_cdk_4_the_teacher_is_the_first_argument() -> None:
    t, s = row(0.5, 0.4, 0.1), row(0.2, 0.3, 0.5)
    distance = Distance("kl", 1.0, "probs")
    assert float(distance.between_outcomes(t, s.log())) == pytest.approx(0.412274, abs=1e-6)
    assert float(distance.between_outcomes(s, t.log())) == pytest.approx(0.535156, abs=1e-6)


def test_cdk_5_both_reductions_of_norm2() -> None:
    teacher = torch.zeros(20, 4, dtype=torch.float64)
    student = torch.full_like(teacher, 0.3)  # rows of norm 0.6
    rows, batch = (Distance("norm2", outcome_space="logits", norm2_reduction=item) for item in ("mean_l2", "frobenius"))
    assert float(rows.between_outcomes(teacher, student)) == pytest.approx(0.6)
    assert float(batch.between_outcomes(teacher, student)) == pytest.approx(2.683282, abs=1e-6)
    ratio = batch.between_embeddings(teacher, student) / rows.between_embeddings(teacher, student)
    assert float(ratio) == pytest.approx(4.472136, abs=1e-6)


def test_cdk_6_labels_correct_collective_outcomes() -> None:
    assert_close(with_labels(row(0.6, 0.3, 0.1), torch.tensor([2])), row(0.3, 0.15, 0.55))


@given(st.integers(0, 2**32 - 1), st.integers(2, 8), st.floats(0.01, 1), st.integers(0, 7))
def test_cdk_6_the_true_class_wins_whatever_the_outcomes(seed: int, classes: int, scale: float, label: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, classes, generator=generator, dtype=torch.float64) / scale
    corrected = with_labels(scores.softmax(1).clamp_min(1e-12), torch.tensor([label % classes]))
    assert int(corrected.argmax()) == label % classes


def test_cdk_7_logits_hide_the_label_and_probabilities_do_not() -> None:
    logits, label = row(6, 1, 0), torch.tensor([2])
    hidden = with_labels(Distance("kl", 3.0, "logits").outcomes(logits), label)
    assert_close((hidden / 3).softmax(1), row(0.534989, 0.232505, 0.232505), atol=1e-6, rtol=0)
    seen = with_labels(Distance("norm2", 3.0, "probs").outcomes(logits), label)
    assert_close(seen, row(0.495434, 0.003338, 0.501228), atol=1e-6, rtol=0)


def test_cdk_8_the_mean_is_over_the_devices_that_answered() -> None:
    mean = TensorMean("gross")
    for said in ([0.8, 0.2], [0.6, 0.4], [0.1, 0.9]):
        mean.add(torch.tensor([said]))
    assert_close(mean.result(), row(0.5, 0.5), atol=1e-6, rtol=0)


def test_cdk_8_absent_devices_do_not_count_in_a_round() -> None:
    cohort = {device: made_up(seed, columns="logits") for seed, device in enumerate("abc")}
    server = make_server(outcome_space="logits", label_average=False)
    expected = np.mean([item.logits for item in cohort.values()], axis=0)  # type: ignore[arg-type]
    registered = [*"abc", *(f"device-{number:02d}" for number in range(12))]  # 15, of which three answered
    assert_close(collective(server, cohort, devices=registered).outcomes_pc, torch.from_numpy(expected))


def test_cdk_9_c_per() -> None:
    for generic, specific, expected in ((75.37, 96.74, 86.055), (40.59, 77.91, 59.25), (11.69, 32.76, 22.225)):
        assert c_per(generic, specific) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "classes", "parameters"),
    [("cdkt_fmnist", 10, 834_922), ("cdkt_cifar", 10, 581_866), ("cdkt_cifar", 100, 587_716)],
)
def test_cdk_10_the_papers_networks(name: str, classes: int, parameters: int) -> None:
    assert parameter_count(build_model(name, classes=classes)) == parameters


@pytest.mark.parametrize(("name", "shape"), [("fmnist", (1, 28, 28)), ("cifar", (3, 32, 32)), ("digits", (1, 8, 8))])
def test_large_and_small_networks_keep_one_embedding_size(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(2, *shape)
    large, small = build_model(f"cdkt_{name}").eval(), build_model(f"cdkt_{name}_small").eval()
    assert large.embedding(x).shape == small.embedding(x).shape == (2, 512 if name == "fmnist" else 64)  # type: ignore[operator]
    for model in (large, small):
        logits, embedding = model.with_embedding(x)  # type: ignore[operator]
        assert_close(logits, model(x))
        assert_close(embedding, model.embedding(x))  # type: ignore[operator]
        assert float(embedding.detach().min()) >= 0


@pytest.mark.parametrize(
    ("samples", "classes", "width", "up"),
    [
        (330, 10, 512, {"full": 13_200, "rep": 675_840, "repfull": 689_040}),
        (4200, 10, 64, {"full": 168_000, "rep": 1_075_200, "repfull": 1_243_200}),
        (4200, 100, 64, {"full": 1_680_000, "rep": 1_075_200, "repfull": 2_755_200}),
    ],
)
def test_cdk_11_bytes_do_not_depend_on_the_model(samples: int, classes: int, width: int, up: dict[str, int]) -> None:
    both = {"logits": np.zeros((samples, classes)), "embeddings": np.zeros((samples, width))}
    for variant, expected in up.items():
        columns = {name: both[name] for name in COLUMNS[variant].split()}
        sent = ProxyKnowledge(valid=True, proxy_digest=b"d" * 32, **columns)
        assert encode({"knowledge": sent}).data_bytes == expected
        assert encode({"knowledge": sent}, np.float16).data_bytes == expected // 2


@pytest.mark.parametrize(
    ("name", "classes", "expected"),
    [("cdkt_fmnist", 10, 3_339_688), ("cdkt_cifar", 10, 2_327_464), ("cdkt_cifar", 100, 2_350_864)],
)
def test_cdk_11_bytes_of_fedavg_beside_it(name: str, classes: int, expected: int) -> None:
    assert encode({"parameters": model_parameters(build_model(name, classes=classes))}).data_bytes == expected


def test_cdk_12_gradient_of_kl() -> None:
    student = row(1, 2, 0.5).requires_grad_()
    Distance("kl", 3.0, "logits").between_outcomes(row(2, 1, 0), student).backward()
    assert_close(student.grad, row(-0.419995, 0.327433, 0.092561), atol=1e-6, rtol=0)


@pytest.mark.parametrize("metric", ["kl", "js", "norm2"])
@pytest.mark.parametrize("space", ["probs", "logits"])
def test_cdk_13_every_distance_is_0_with_gradient_0_at_equality(metric: str, space: str) -> None:
    distance = Distance(metric, 3.0, space)
    logits = torch.randn(4, 3, dtype=torch.float64).requires_grad_()
    for value in (
        distance.between_outcomes(distance.outcomes(logits).detach(), logits),
        distance.between_embeddings(logits.detach(), logits),
    ):
        assert float(value.detach()) == pytest.approx(0, abs=1e-9)
        (gradient,) = torch.autograd.grad(value, logits)
        assert_close(gradient, torch.zeros_like(gradient), atol=1e-9, rtol=0)


def test_cdk_13_alpha_0_is_local_training_bit_for_bit() -> None:
    device = make_device(alpha=0.0)
    device.local.model.stages.relu = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.ReLU())  # type: ignore[method-assign]  # sees each pass that is made
    alone = copy.deepcopy(device.local.model)
    device.handle(ask(made_up(columns="logits")))
    train_epochs(
        alone,
        device.local.data,
        epochs=device.config.local_epochs,
        batch_size=device.config.batch_size,
        optimizer=make_local_optimizer(device.config, alone.parameters()),
        loss=lambda logits_bc, labels_b, rows_b: functional.cross_entropy(logits_bc, labels_b),
        generator=torch.Generator().manual_seed(1),
        device="cpu",
    )
    assert torch.equal(weights(device.local.model), weights(alone))
    assert torch.equal(device.local.model.stages.relu[0].running_mean, alone.stages.relu[0].running_mean)  # type: ignore[arg-type, index, union-attr]
    moved = make_device(alpha=0.3)
    moved.handle(ask(made_up(columns="logits")))
    assert not torch.equal(weights(moved.local.model), weights(alone))


def test_cdk_13_beta_0_trains_server_on_proxy_labels_alone() -> None:
    one, other, listening = make_server(beta=0.0), make_server(beta=0.0), make_server()
    alone = copy.deepcopy(one.model)
    for server, seed in ((one, 1), (other, 2), (listening, 1)):
        run_round(server, {"a": made_up(seed, columns="logits")})
    proxy, config = make_proxy(), one.config
    train_epochs(
        alone,
        proxy,
        epochs=config.server_epochs(len(proxy)),
        batch_size=config.batch_size,
        optimizer=torch.optim.SGD(alone.parameters(), lr=config.server_learning_rate),
        loss=lambda logits_bc, labels_b, rows_b: functional.cross_entropy(logits_bc, labels_b),
        generator=FakeCohort({}).generator("transfer"),
        device="cpu",
    )
    assert torch.equal(weights(one.model), weights(other.model))
    assert torch.equal(weights(one.model), weights(alone))
    assert not torch.equal(weights(listening.model), weights(alone))


@given(st.integers(0, 2**32 - 1), st.sampled_from(["kl", "js", "norm2"]), st.sampled_from(["probs", "logits"]))
def test_permuting_proxy_set_with_its_knowledge_changes_no_loss(seed: int, metric: str, space: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda width: torch.randn(9, width, generator=generator, dtype=torch.float64)  # noqa: E731
    distance, logits, embeddings = Distance(metric, 3.0, space), draw(4), draw(6)
    knowledge = Knowledge(distance.outcomes(draw(4)), draw(6))
    order = torch.randperm(9, generator=generator)
    moved = Knowledge(knowledge.outcomes_pc[order], knowledge.embeddings_pf[order])  # type: ignore[index]
    rows = torch.arange(9)
    before = distance.regulariser(knowledge, rows, logits, embeddings)
    assert_close(distance.regulariser(moved, rows, logits[order], embeddings[order]), before)


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 50))
def test_js_stays_within_0_and_ln_2_and_its_gradient_is_finite(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    student = (scale * torch.randn(5, 4, generator=generator)).requires_grad_()
    teacher = (scale * torch.randn(5, 4, generator=generator)).softmax(1)
    value = js_divergence(student, teacher)
    value.backward()
    assert -1e-6 <= float(value.detach()) <= math.log(2) + 1e-6
    assert bool(student.grad.isfinite().all())  # type: ignore[union-attr]


def test_the_norm_is_of_each_row() -> None:
    student, teacher = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.zeros(2, 2)
    assert float(euclidean_distance(student, teacher)) == pytest.approx(2.5)  # (5 + 0) / 2


# --- settings


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"knowledge": "all"}, "unknown knowledge 'all', expected one of full, rep, repfull"),
        ({"server_metric": "l2"}, "unknown server_metric 'l2'"),
        ({"device_metric": "mse"}, "unknown device_metric 'mse'"),
        ({"outcome_space": "odds"}, "unknown outcome_space"),
        ({"norm2_reduction": "sum"}, "unknown norm2_reduction"),
        ({"device_knowledge": "none"}, "unknown device_knowledge"),
        ({"aggregation": "median"}, "unknown aggregation"),
        ({"alpha": -0.1}, "alpha must be >= 0"),
        ({"beta": float("inf")}, "beta must be >= 0"),
        ({"beta": float("nan")}, "beta must be >= 0"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"server_learning_rate": 0.0}, "server_learning_rate must be > 0"),
        ({"global_epochs": 0}, "global_epochs must be >= 1"),
        ({"min_server_steps": 0}, "min_server_steps must be >= 1"),
        ({"control_weight": -1.0}, "control_weight must be >= 0"),
        ({"local_epochs": 0}, "local_epochs must be >= 1"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        CDKTConfig(**settings)


def test_paper_switches_off_every_deviation_and_leaves_variant() -> None:
    paper = CDKTConfig.from_settings({"paper": True, "knowledge": "rep", "alpha": 0.1, "momentum": 0.9}).for_classes(10)
    assert (paper.outcome_space, paper.norm2_reduction, paper.teacher_guard) == ("logits", "frobenius", False)
    assert (paper.device_metric, paper.joint_pass, paper.server_epochs(80)) == ("norm2", False, 2)
    assert (paper.knowledge, paper.alpha, paper.momentum) == ("rep", 0.1, 0.9)
    ours = CDKTConfig().for_classes(10)
    assert (ours.outcome_space, ours.norm2_reduction, ours.teacher_guard) == ("probs", "mean_l2", True)


@pytest.mark.parametrize(("samples", "epochs"), [(80, 10), (4200, 2), (7, 40), (21, 20), (399, 2)])
def test_the_server_takes_at_least_40_steps(samples: int, epochs: int) -> None:
    config = CDKTConfig()
    assert config.server_epochs(samples) == epochs  # max(2, ceil(40 / ceil(P / 20)))
    steps_of_a_pass = math.ceil(samples / config.batch_size)
    assert epochs * steps_of_a_pass >= 40
    assert epochs == 2 or (epochs - 1) * steps_of_a_pass < 40


def test_a_proxy_set_smaller_than_a_batch_makes_one_step_a_pass() -> None:
    """P = 5, R = 2, least steps 1 as in the paper: two passes of one step, not ceil(20 / 5) = 4."""
    assert CDKTConfig(min_server_steps=1).server_epochs(5) == 2


@pytest.mark.parametrize(
    ("knowledge", "device_knowledge", "up", "down"),
    [
        ("full", "auto", (True, False), (True, False)),
        ("rep", "auto", (False, True), (True, True)),
        ("repfull", "auto", (True, True), (True, True)),
        ("full", "both", (True, False), (True, True)),
        ("rep", "outcome", (False, True), (True, False)),
        ("repfull", "embedding", (True, True), (False, True)),
    ],
)
def test_what_travels_follows_the_variant(
    knowledge: str, device_knowledge: str, up: tuple[bool, bool], down: tuple[bool, bool]
) -> None:
    config = CDKTConfig(knowledge=knowledge, device_knowledge=device_knowledge)
    assert (config.up, config.down) == (up, down)
    silent = dataclasses.replace(config, exchange=False)
    assert silent.up == silent.down == (False, False)


# --- device half


@every_variant
def test_an_upload_has_the_columns_of_its_variant_and_no_others(knowledge: str) -> None:
    device = make_device(knowledge=knowledge)
    sent = device.handle(ask(NOTHING)).parts["knowledge"]
    assert isinstance(sent, ProxyKnowledge)
    there = {name for name in ("logits", "embeddings") if getattr(sent, name) is not None}
    assert there == set(COLUMNS[knowledge].split())  # Rep uploads contain no logits
    with torch.no_grad():
        logits, embedding = device.local.model.eval().with_embedding(make_proxy().inputs)  # type: ignore[operator]
    if sent.logits is not None:
        assert_close(torch.from_numpy(sent.logits), logits)
    if sent.embeddings is not None:
        assert_close(torch.from_numpy(sent.embeddings), embedding)


def test_logits_and_embeddings_come_from_one_pass() -> None:
    device = make_device(knowledge="repfull")
    passes: list[int] = []
    stages: Any = device.local.model.stages
    stages[0].register_forward_hook(lambda layer, given, made: passes.append(len(made)))
    device.handle(ask(NOTHING))
    assert passes[-2:] != [len(make_proxy())] * 2


def test_round_1_is_local_training_whatever_alpha() -> None:
    one, other = make_device(alpha=0.0), make_device(alpha=3.0)
    one.handle(ask(NOTHING))
    other.handle(ask(NOTHING))
    assert torch.equal(weights(one.local.model), weights(other.local.model))


@pytest.mark.parametrize("metric", ["kl", "js", "norm2"])
@every_variant
def test_the_device_descends_equation_8(knowledge: str, metric: str) -> None:
    """One full-batch step equals the gradient of CE + alpha * R_n, computed apart."""
    settings = {"knowledge": knowledge, "device_metric": metric, "batch_size": 50, "local_epochs": 1}
    device = make_device(rows=6, learning_rate=0.1, **settings)
    reference = copy.deepcopy(device.local.model)
    sent = made_up(columns="logits" if knowledge == "full" else "logits embeddings")
    device.handle(ask(sent))

    data, proxy = device.local.data, make_proxy()
    logits, embeddings = reference.with_embedding(proxy.inputs)  # type: ignore[operator]
    theirs, theirs_h = (None if item is None else torch.from_numpy(item) for item in (sent.logits, sent.embeddings))
    assert theirs is not None
    scale = 3.0 if metric == "kl" else 1.0
    target = (functional.one_hot(proxy.labels, CLASSES) + (theirs / scale).softmax(1)) / 2
    total = by_hand(metric, target, (logits / scale).softmax(1))
    if theirs_h is not None:
        heads = (
            (theirs_h, embeddings) if metric == "norm2" else [(h / scale).softmax(1) for h in (theirs_h, embeddings)]
        )
        total = total + by_hand(metric, *heads)
    (functional.cross_entropy(reference(data.inputs), data.labels) + 0.3 * total).backward()
    for mine, theirs_w in zip(device.local.model.parameters(), reference.parameters(), strict=True):
        assert_close(mine, theirs_w - 0.1 * theirs_w.grad, atol=2e-6, rtol=1e-5)  # type: ignore[operator]


def by_hand(metric: str, t: Tensor, s: Tensor) -> Tensor:
    if metric == "norm2":
        return ((t - s) ** 2).sum(1).sqrt().mean()
    if metric == "kl":
        return 9.0 * (t * (t / s).log()).sum(1).mean()
    m = (t + s) / 2
    return 0.5 * ((t * (t / m).log()).sum(1) + (s * (s / m).log()).sum(1)).mean()


@pytest.mark.parametrize("knowledge", COLUMNS)
def test_own_and_proxy_rows_pass_model_together_or_in_turn(knowledge: str) -> None:
    """The tiny model has no batch-norm, so both train alike; what differs is what a pass of the model sees."""
    trained = {}
    for joint in (True, False):
        device, sizes = make_device(rows=20, knowledge=knowledge, joint_pass=joint, batch_size=10), list[int]()
        device.local.model.stages[0].register_forward_pre_hook(lambda _, x, sizes=sizes: sizes.append(len(x[0])))  # type: ignore[index, union-attr]
        received = made_up(columns="logits embeddings" if knowledge != "full" else "logits")
        device.train_towards(device.regulariser(received), 1)
        assert set(sizes) == ({10 + PROXY} if joint else {10, PROXY})
        trained[joint] = torch.nn.utils.parameters_to_vector(device.local.model.parameters()).detach()
    assert_close(trained[True], trained[False])


def test_a_separate_pass_never_shows_batch_norm_a_single_row() -> None:
    batches = proxy_batches(7, 3, torch.Generator().manual_seed(0), smallest=2)
    assert {len(next(batches)) for _ in range(20)} == {3}
    few = proxy_batches(1, 3, torch.Generator().manual_seed(0), smallest=2)
    assert next(few).tolist() == next(few).tolist() == [0]


def test_label_average_can_be_switched_off() -> None:
    corrected, plain = make_device(), make_device(label_average=False)
    for device in (corrected, plain):
        device.handle(ask(made_up(columns="logits")))
    assert not torch.equal(weights(corrected.local.model), weights(plain.local.model))


def test_control_trains_on_proxy_labels_and_sends_nothing() -> None:
    device = make_device(exchange=False, local_epochs=40)
    answer = device.handle(ask(NOTHING))
    sent = answer.parts["knowledge"]
    assert sent == ProxyKnowledge(valid=False, proxy_digest=b"")
    assert encode(answer.parts).data_bytes == 0
    proxy, silent = make_proxy(), make_device(exchange=False, local_epochs=40, control_weight=0.0)
    silent.handle(ask(NOTHING))

    def loss(one: CDKTDevice) -> float:
        with torch.no_grad():
            return float(functional.cross_entropy(one.local.model.eval()(proxy.inputs), proxy.labels))

    assert loss(device) < loss(silent) - 0.1


def test_knowledge_about_other_rows_stops_the_device() -> None:
    with pytest.raises(WireError, match="the server's logits belong to another proxy set"):
        make_device().handle(ask(made_up(rows=PROXY - 1, columns="logits")))
    foreign = dataclasses.replace(made_up(columns="logits"), proxy_digest=b"x" * 32)
    with pytest.raises(WireError, match="belong to another proxy set"):
        make_device().handle(ask(foreign))


def test_a_device_without_its_proxy_set_says_so() -> None:
    device = make_device()
    device.local = dataclasses.replace(device.local, proxy=None)
    with pytest.raises(WireError, match="CDKT-FL needs a proxy set, but the server sent none"):
        device.handle(ask(NOTHING))


def test_proxy_batches_are_endless_and_show_all_rows_then_repeat() -> None:
    batches = proxy_batches(7, 3, torch.Generator().manual_seed(0))
    passes = [torch.cat([next(batches) for _ in range(3)]).tolist() for _ in range(4)]
    assert all(sorted(item) == list(range(7)) for item in passes)
    assert len({tuple(item) for item in passes}) > 1


# --- server half


def test_knowledge_is_absent_in_round_1_then_from_global_model() -> None:
    server = make_server(knowledge="repfull")
    uploads = {device: made_up(seed) for seed, device in enumerate("ab")}
    first = run_round(server, uploads)
    assert all(not parts["knowledge"].valid for device in "ab" for parts in first.sent(device))  # type: ignore[attr-defined]
    with torch.no_grad():
        logits, embeddings = copy.deepcopy(server.model).eval().with_embedding(make_proxy().inputs)  # type: ignore[operator]
    second = run_round(server, uploads, completed=1)
    sent = second.sent("b")[0]["knowledge"]
    assert isinstance(sent, ProxyKnowledge)
    assert sent.valid
    np.testing.assert_allclose(sent.logits, logits.numpy(), atol=1e-6)  # type: ignore[arg-type]
    np.testing.assert_allclose(sent.embeddings, embeddings.numpy(), atol=1e-6)  # type: ignore[arg-type]


def test_collective_knowledge_is_mean_corrected_by_labels() -> None:
    uploads = {device: made_up(seed) for seed, device in enumerate("abc")}
    result = collective(make_server(knowledge="repfull"), uploads)
    softened = [torch.from_numpy(upload.logits / 3.0).softmax(1) for upload in uploads.values()]  # type: ignore[operator]
    truth = functional.one_hot(make_proxy().labels, CLASSES)
    assert_close(result.outcomes_pc, (torch.stack(softened).mean(0) + truth) / 2)
    heads = torch.stack([torch.from_numpy(upload.embeddings) for upload in uploads.values()])
    assert_close(result.embeddings_pf, heads.mean(0))


def test_samples_weigh_the_average_where_that_is_asked_for() -> None:
    uploads = {device: made_up(seed, columns="logits") for seed, device in enumerate("ab")}
    settings = {"outcome_space": "logits", "label_average": False}
    first, second = (torch.from_numpy(upload.logits) for upload in uploads.values())
    weighted = collective(make_server(aggregation="samples", **settings), uploads, samples={"a": 3, "b": 1})
    assert_close(weighted.outcomes_pc, (3 * first + second) / 4)
    uniform = collective(make_server(**settings), uploads, samples={"a": 3, "b": 1})
    assert_close(uniform.outcomes_pc, (first + second) / 2)


@every_variant
def test_the_server_moves_towards_what_the_devices_say(knowledge: str) -> None:
    uploads = {"a": made_up(1, columns=COLUMNS[knowledge])}
    near, far = make_server(knowledge=knowledge, beta=2.0), make_server(knowledge=knowledge, beta=0.0)
    target = collective(make_server(knowledge=knowledge), uploads)
    for server in (near, far):
        run_round(server, uploads)

    def distance(server: CDKTServer) -> float:
        with torch.no_grad():
            said = server.model.eval().with_embedding(make_proxy().inputs)  # type: ignore[operator]
        return float(server.config.distance("kl").regulariser(target, torch.arange(PROXY), *said))

    assert distance(near) < distance(far)


@every_variant
def test_requirements_are_declared_as_data(knowledge: str) -> None:
    server = make_server(knowledge=knowledge)
    needs = server.requirements()
    assert needs.proxy_set
    assert set(needs.columns) == {"full": {"logits"}, "rep": {"features"}, "repfull": {"features", "logits"}}[knowledge]
    assert features_of(server.run_exchanges()) == ({} if knowledge == "full" else {EMBEDDING: (WIDTH,)})
    assert list(make_server(knowledge=knowledge, exchange=False).requirements().columns) == []


def wrong_server(server: CDKTServer) -> CDKTServer:
    """One whose model answers the next class on every proxy row."""

    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return 9.0 * functional.one_hot((make_proxy().labels[: len(x)] + 1) % CLASSES, CLASSES).float()

    server.model = Wrong()
    return server


def test_teacher_guard_fires_on_model_below_chance_and_device() -> None:
    server, cohort = wrong_server(make_server()), FakeCohort({}, completed=1)
    server.hold_back_if_poor({"a": 0.9, "b": 0.0, "c": None}, cohort)
    assert [(kind, device) for kind, device, _ in cohort.events] == [("teacher-guard", "a"), ("teacher-guard", "c")]
    assert "the global model has accuracy 0.000 on the proxy set, a has 0.900" in cohort.events[0][2]
    payload = server.message(cohort)
    assert [payload(device)["knowledge"].valid for device in "abc"] == [False, True, False]  # type: ignore[misc, operator, union-attr]
    assert cohort.figures["teacher_accuracy"] == {"a": 0.0, "b": 0.0, "c": 0.0}


def test_teacher_guard_is_silent_for_good_model_and_when_off() -> None:
    good, off = make_server(), wrong_server(make_server(teacher_guard=False))
    cohort = run_round(good, {"a": made_up(columns="logits")})
    off.hold_back_if_poor({"a": 1.0}, cohort)
    assert cohort.events == []
    assert good.held_back == off.held_back == set()


def test_held_back_device_gets_knowledge_once_teacher_is_better() -> None:
    server = make_server()
    good, cohort = server.model, FakeCohort({}, completed=1)
    wrong_server(server).hold_back_if_poor({"a": 0.9, "b": 0.9}, cohort)
    server.model = good
    run_round(server, {"a": made_up(columns="logits")}, completed=2)
    assert server.held_back == {"b"}  # b has not answered since


def test_held_back_mark_of_forgotten_device_is_not_kept() -> None:
    server = make_server()
    server.held_back = {"a", "b"}
    server.forget("b", BetweenRounds(0))
    assert server.state_dict()["held_back"] == ["a"]


@every_variant
def test_a_server_goes_on_from_its_state_bit_for_bit(knowledge: str) -> None:
    one, other = make_server(knowledge=knowledge), make_server(knowledge=knowledge)
    uploads = {device: made_up(seed, columns=COLUMNS[knowledge]) for seed, device in enumerate("ab")}
    run_round(one, uploads)
    one.held_back = {"b"}
    other.load_state_dict(unpack_state(pack_state(one.state_dict())))
    assert other.held_back == {"b"}
    for server in (one, other):
        run_round(server, uploads, completed=1)
    assert torch.equal(weights(one.model), weights(other.model))


# --- whole runs


def small_fleet(tmp_path: Path, models: tuple[str, ...], **settings: Any) -> Store:
    wanted = Simulation(
        method="cdkt",
        settings=settings,
        models=models,
        devices=2,
        rounds=2,
        train_limit=300,
        test_limit=50,
        torch_device="cpu",
    )
    return run_in_memory(prepare(wanted, tmp_path / "work"))


@pytest.mark.parametrize(("knowledge", "numbers"), [("full", 10), ("rep", 64), ("repfull", 74)])
def test_the_bytes_of_a_run_are_the_formulas(tmp_path: Path, knowledge: str, numbers: int) -> None:
    """P = 80 and F = 64 at float16: 2 P (C + F) up; the same down, L beside H for rep; the proxy set once."""
    exchanges = CDKTServer.exchanges(CDKTConfig(knowledge=knowledge), Sizes(proxy_samples=80, classes=10, embedding=64))
    predicted = round_bytes(exchanges, "float16")
    assert predicted["up"] == 2 * 80 * numbers
    store = small_fleet(tmp_path, ("cdkt_digits", "cdkt_digits_small"), knowledge=knowledge)
    rows = store.history.traffic(RUN)
    traffic = {(row.round, row.direction, row.device): row.tensor_bytes for row in rows}
    proxy_set = 80 * (4 * 64 + 4)
    for device in ("device-0", "device-1"):
        assert [traffic[number, "up", device] for number in (1, 2)] == [predicted["up"]] * 2
        assert [traffic[number, "down", device] for number in (1, 2)] == [proxy_set, predicted["down"]]


def test_the_control_exchanges_no_byte_but_the_proxy_set(tmp_path: Path) -> None:
    store = small_fleet(tmp_path, ("cdkt_digits",), exchange=False)
    up = [item.tensor_bytes for item in store.history.traffic(RUN) if item.direction == "up"]
    assert up == [0, 0, 0, 0]
    assert len(store.asks.uploads(RUN)) == 4


def test_embeddings_of_another_size_are_refused_at_check_in(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"has \[32\], run .* has \[64\]; .* or set knowledge = 'full' for"):
        small_fleet(tmp_path, ("digits_mlp_large", "digits_mlp_small"), knowledge="rep")


def test_run_with_server_diverging_every_round_still_ends(tmp_path: Path) -> None:
    store = small_fleet(tmp_path, ("cdkt_digits",), server_learning_rate=1e6, teacher_guard=False)
    assert [row.round for row in store.history.events(RUN, "distillation-undone")] == [1, 2]
    assert len(store.asks.uploads(RUN)) == 4


def test_models_of_any_embedding_size_take_part_in_full(tmp_path: Path) -> None:
    store = small_fleet(tmp_path, ("digits_mlp_large", "digits_mlp_small"), knowledge="full")
    assert len(store.asks.uploads(RUN)) == 4


def test_global_model_is_exported_and_agrees_on_proxy_set(tmp_path: Path) -> None:
    store = small_fleet(tmp_path, ("cdkt_digits",))
    report = export_server_model(store, RUN, tmp_path / "global.onnx")
    assert report.path.exists()
    assert report.max_difference < 1e-4
