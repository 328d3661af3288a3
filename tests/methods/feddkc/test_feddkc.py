"""FedDKC's two halves: what they compute, by its specification's oracles and by hand."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from methods.feddkc.feddkc_fleet import (
    CLASSES,
    FEATURES,
    NOTHING,
    ask,
    make_device,
    make_knowledge,
    make_server,
    run_round,
)
from methods.stale import run_stale_round
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import CUT, RefinedKnowledge, SampleKnowledge
from fleetdistill.methods.feddkc.config import FedDKCConfig
from fleetdistill.methods.feddkc.device import FedDKCDevice
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import smallest_batch
from fleetdistill.wire.codec import encode
from fleetdistill_server.methods.feddkc.server import FedDKCServer, Upload
from fleetdistill_server.testing import FakeCohort, always
from fleetdistill_server.training.loop import batches


def test_round_takes_part_of_devices_and_keeps_others_knowledge() -> None:
    server, knowledge = make_server(), {f"d{i}": make_knowledge(i) for i in range(3)}
    run_round(server, knowledge)
    before = dict(server.knowledge)
    server.config = replace(server.config, participation_ratio=0.34)
    (taken,) = (item.device for item in run_round(server, knowledge).asked)
    assert [device for device in before if server.knowledge[device] is not before[device]] == [taken]


@pytest.mark.parametrize("settings", [{"server_learning_rate": 1e6}, {"server_learning_rate": 1e30}])
def test_non_finite_predictor_resumes_from_before_round(settings: dict[str, Any]) -> None:
    server, knowledge = make_server(**settings), {name: make_knowledge(i) for i, name in enumerate("ab")}
    before = copy.deepcopy(server.state_dict())
    cohort = run_round(server, knowledge)
    after = server.state_dict()
    for name, tensor in before["predictor"].items():
        assert torch.equal(after["predictor"][name], tensor)
    assert after["optimizer"] == before["optimizer"]
    assert "distillation-undone" in cohort.kinds
    for device in "ab":
        assert encode(server.message(device), np.float16)
    assert "distillation-undone" not in run_round(make_server(), knowledge).kinds


def test_an_answer_to_an_earlier_round_has_a_part_of_its_rows() -> None:
    """At a factor of 0.5, 6 of 12 rows are trained on, and all 12 get knowledge; at 0.01, one row."""
    for decay, rows in ((0.5, 6), (0.01, 1)):
        server = make_server()
        members = {device: always({"knowledge": make_knowledge(seed)}) for seed, device in enumerate("ab")}
        cohort = run_stale_round(server, members, {"b": decay})
        assert sum(cohort.figures["refined_rows"].values()) == 12 + rows
        assert [len(server.knowledge[device][0]) for device in "ab"] == [12, 12]


# --- the wire


@pytest.mark.parametrize(("shape", "up"), [((16, 16, 16), 16_428_000), ((16, 32, 32), 65_580_000)])
def test_dkc_17_bytes_of_an_upload_and_of_the_answer(shape: tuple[int, ...], up: int) -> None:
    rows, classes = 1000, 10
    knowledge = SampleKnowledge(
        sample_ids=np.arange(rows),
        features={CUT: np.zeros((rows, *shape), np.float32)},
        logits=np.zeros((rows, classes), np.float32),
        labels=np.zeros(rows, np.int32),
    )
    ids = 8 * rows  # the specification counts them apart
    assert encode({"knowledge": knowledge}).data_bytes == up + ids
    features = 2 * rows * (int(np.prod(shape)) + classes)
    assert encode({"knowledge": knowledge}, np.float16).data_bytes == features + 4 * rows + ids
    down = RefinedKnowledge(valid=True, sample_ids=knowledge.sample_ids, values=knowledge.logits)
    assert encode({"knowledge": down}).data_bytes == 40_000 + ids


# --- server half


@pytest.mark.parametrize("tau", [1.0, 2.0, 3.0])
def test_dkc_19_a_server_step_descends_equation_2(tau: float) -> None:
    """z_S = [1, 0, -1], label 0, target KKR([.7, .2, .1], T = .5), beta 1.5: the specification's row, its tau is 1."""
    server = make_server(
        server_beta=1.5, temperature=tau, momentum=0.0, weight_decay=0.0, server_learning_rate=0.1, refinement="kkr"
    )
    server.predictor = nn.Linear(FEATURES, CLASSES, bias=False)
    with torch.no_grad():
        server.predictor.weight.zero_()[:, 0] = torch.tensor([1.0, 0.0, -1.0])
    server.optimizer = torch.optim.SGD(server.predictor.parameters(), lr=0.1)
    features = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    target = torch.tensor([[0.5, 0.272727, 0.227273]])
    z = torch.tensor([1.0, 0.0, -1.0])
    # d(total)/dz = (softmax(z) - onehot) + beta * tau * (softmax(z / tau) - target), worked by hand from eq. (2)
    gradient = (z.softmax(0) - torch.tensor([1.0, 0.0, 0.0])) + 1.5 * tau * ((z / tau).softmax(0) - target[0])
    server.loss(features, torch.tensor([0]), target).backward()
    server.optimizer.step()
    assert_close(server.predictor.weight[:, 0], torch.tensor([1.0, 0.0, -1.0]) - 0.1 * gradient, atol=1e-6, rtol=0)


def test_knowledge_is_absent_in_round_1_then_server_logits() -> None:
    server = make_server(teacher_guard=False)  # two steps do not make a teacher
    knowledge = {"a": make_knowledge(1), "b": make_knowledge(2, rows=7)}
    first = run_round(server, knowledge)
    assert all(not parts["knowledge"].valid for device in "ab" for parts in first.sent(device))  # type: ignore[attr-defined]
    second = run_round(server, knowledge)
    sent = second.sent("b")[0]["knowledge"]
    assert sent.valid  # type: ignore[attr-defined]
    np.testing.assert_array_equal(sent.sample_ids, knowledge["b"].sample_ids)  # type: ignore[attr-defined]
    assert sent.values.shape == (7, CLASSES)  # type: ignore[attr-defined]


def test_the_answer_is_the_predictor_in_eval_mode_after_training() -> None:
    server = make_server(teacher_guard=False)
    knowledge = make_knowledge(1)
    run_round(server, {"a": knowledge})
    with torch.no_grad():
        expected = server.predictor.eval()(torch.from_numpy(knowledge.features[CUT]))
    sent = server.message("a")["knowledge"]
    np.testing.assert_allclose(sent.values, expected.numpy(), atol=1e-6)  # type: ignore[attr-defined]


def test_server_beta_0_ignores_what_the_devices_say() -> None:
    honest, lying = make_server(server_beta=0.0), make_server(server_beta=0.0)
    run_round(honest, {"a": make_knowledge(1)})
    run_round(lying, {"a": make_knowledge(1, right=False)})
    for one, other in zip(honest.predictor.parameters(), lying.predictor.parameters(), strict=True):
        assert torch.equal(one, other)
    listening = make_server(server_beta=0.5)
    run_round(listening, {"a": make_knowledge(1, right=False)})
    assert not torch.equal(next(iter(listening.predictor.parameters())), next(iter(honest.predictor.parameters())))


def test_none_is_the_devices_own_softmax() -> None:
    logits = torch.randn(5, CLASSES)
    refined = make_server(refinement="none", temperature=3.0).refine(logits)
    assert_close(refined.probabilities, (logits.double() / 3.0).softmax(1))


@pytest.mark.parametrize("refinement", ["kkr", "kkr_kernel", "skr"])
def test_refinement_makes_all_devices_knowledge_congruent(refinement: str) -> None:
    server = make_server(refinement=refinement)
    confident = server.refine(6 * torch.randn(50, CLASSES)).probabilities
    unsure = server.refine(0.3 * torch.randn(50, CLASSES)).probabilities
    both = torch.cat([confident, unsure])
    if refinement == "skr":
        entropies = -(both * both.clamp_min(1e-300).log2()).sum(1)
        assert float(entropies.max() - entropies.min()) < server.config.epsilon
    else:
        peaks = both.max(1).values
        assert float(peaks.max() - peaks.min()) < (1e-6 if refinement == "kkr" else server.config.epsilon)


def test_sequential_order_goes_by_device_and_mixed_does_not() -> None:
    sizes = [64, 64]
    generator = torch.Generator().manual_seed(0)
    sequential = list(batches(make_server(server_order="sequential").pools(sizes), 16, 1, generator))
    assert [bool((batch < 64).all()) for batch in sequential] == [True] * 4 + [False] * 4
    assert sorted(torch.cat(sequential).tolist()) == list(range(128))
    mixed = batches(make_server(server_order="mixed").pools(sizes), 16, 1, generator)
    assert any((batch < 64).any() and (batch >= 64).any() for batch in mixed)


def normalising_predictor(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))


@pytest.mark.parametrize(("batch_norm", "sizes"), [(False, [1, 4, 1]), (True, [4])])
def test_batch_of_one_row_is_left_out_only_with_batch_norm(batch_norm: bool, sizes: list[int]) -> None:
    """Device a has one row, b five, in batches of four: without batch-norm every row is trained on."""
    server = make_server(server_order="sequential", batch_size=4)
    if batch_norm:
        server.predictor = normalising_predictor((FEATURES,), CLASSES)
    smallest, generator = smallest_batch(server.predictor), torch.Generator().manual_seed(0)
    assert [len(batch) for batch in batches(server.pools([1, 5]), 4, smallest, generator)] == sizes


def test_a_device_of_one_row_is_trained_on_in_sequential_order() -> None:
    server = make_server(server_order="sequential")
    before = copy.deepcopy(server.predictor.state_dict())
    run_round(server, {"a": make_knowledge(1, rows=1)})
    assert not torch.equal(server.predictor.state_dict()["1.weight"], before["1.weight"])


def test_refined_rows_are_counted_by_tag() -> None:
    knowledge = make_knowledge(1)
    assert knowledge.logits is not None
    knowledge.logits[0] = 0.0  # a constant row cannot be refined
    cohort = run_round(make_server(), {"a": knowledge, "b": make_knowledge(2)})
    assert cohort.figures["refined_rows"] == {"degenerate": 1, "ok": 23}


def test_teacher_guard_fires_on_teacher_below_chance_and_device() -> None:
    server = make_server()
    cohort = FakeCohort({})
    bad = bad_upload(server, teacher_right=False)
    server.predict(bad, cohort)
    assert [(kind, device) for kind, device, _ in cohort.events] == [("teacher-guard", "a")]
    assert "the predictor has accuracy 0.000 on the rows of a, the device 1.000" in cohort.events[0][2]
    assert not server.message("a")["knowledge"].valid  # type: ignore[attr-defined]
    assert cohort.figures["teacher_accuracy"] == {"a": 0.0}


def test_teacher_guard_is_silent_for_good_teacher_and_when_off() -> None:
    server, cohort = make_server(), FakeCohort({})
    server.predict(bad_upload(server, teacher_right=True), cohort)
    assert cohort.events == []
    assert server.message("a")["knowledge"].valid  # type: ignore[attr-defined]
    off = make_server(teacher_guard=False)
    off.predict(bad_upload(off, teacher_right=False), cohort)
    assert cohort.events == []
    assert off.message("a")["knowledge"].valid  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("teacher", "own", "held"),
    [(3, 9, True), (3, 3, False), (4, 9, False), (0, 0, False), (2, 1, False), (2, 3, True)],
)
def test_teacher_must_beat_chance_or_be_no_worse_than_device(teacher: int, own: int, held: bool) -> None:
    """Right rows of nine, of three classes: 3 is chance. Exactly chance and worse than the device is held back."""
    server, cohort = make_server(), FakeCohort({})
    features = torch.randn(9, FEATURES, generator=torch.Generator().manual_seed(2))
    said = server.predictor.eval()(features).argmax(1).detach()
    rows = torch.arange(9)
    labels = torch.where(rows < teacher, said, (said + 1) % CLASSES)
    logits = functional.one_hot(torch.where(rows < own, labels, (labels + 1) % CLASSES), CLASSES).float()
    server.predict(Upload("a", rows, features, logits, labels), cohort)
    assert cohort.figures["teacher_accuracy"] == {"a": pytest.approx(teacher / 9)}
    assert cohort.kinds == ["teacher-guard"] * held
    assert server.message("a")["knowledge"].valid is not held  # type: ignore[attr-defined]


def bad_upload(server: FedDKCServer, *, teacher_right: bool) -> Upload:
    """Rows on which the device is right, and the server is right or wrong everywhere."""
    features = torch.randn(10, FEATURES)
    said = server.predictor.eval()(features).argmax(1).detach()
    labels = said if teacher_right else (said + 1) % CLASSES
    return Upload("a", torch.arange(10), features, functional.one_hot(labels, CLASSES).float(), labels)


def test_a_server_goes_on_from_its_state_bit_for_bit() -> None:
    one, other = make_server(), make_server()
    knowledge = {"a": make_knowledge(1), "b": make_knowledge(2)}
    run_round(one, knowledge)
    other.load_state_dict(unpack_state(pack_state(one.state_dict())))
    run_round(one, knowledge)
    run_round(other, knowledge)
    for mine, theirs in zip(one.predictor.parameters(), other.predictor.parameters(), strict=True):
        assert torch.equal(mine, theirs)


# --- device half


def test_round_1_is_plain_cross_entropy() -> None:
    """With nothing known, any beta gives the same weights as beta 0."""
    one, other = make_device(beta=0.0), make_device(beta=1.5)
    one.handle(ask(NOTHING))
    other.handle(ask(NOTHING))
    for mine, theirs in zip(one.local.model.parameters(), other.local.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_initial_zero_knowledge_uses_uniform_teacher_of_paper() -> None:
    plain, paper = make_device(), make_device(initial_zero_knowledge=True)
    plain.handle(ask(NOTHING))
    paper.handle(ask(NOTHING))

    def confidence(device: FedDKCDevice) -> float:
        with torch.no_grad():
            return float(device.local.model.eval()(device.local.data.inputs).softmax(1).max(1).values.mean())

    assert confidence(paper) < confidence(plain)


@pytest.mark.parametrize("restarted", [False, True])
def test_later_held_back_knowledge_gives_no_uniform_teacher(restarted: bool) -> None:
    """Nothing valid in round 1 is the paper's uniform teacher; in round 2 it is a guard, and the labels alone count."""
    device, labels_alone = make_device(initial_zero_knowledge=True), make_device(beta=0.0)
    device.handle(ask(NOTHING))
    labels_alone.local.model.load_state_dict(device.local.model.state_dict())
    state = pack_state(device.state_dict())
    labels_alone.load_state_dict(unpack_state(state))
    if restarted:
        weights, device = device.local.model.state_dict(), make_device(initial_zero_knowledge=True)
        device.local.model.load_state_dict(weights)
        device.load_state_dict(unpack_state(state))
    for item in (device, labels_alone):
        item.handle(ask(NOTHING, seed=2))
    for mine, theirs in zip(device.local.model.parameters(), labels_alone.local.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_device_loss_is_equation_1() -> None:
    """One full-batch step without momentum equals the gradient of eq. (1), computed apart."""
    device = make_device(rows=6, batch_size=6, local_epochs=1, momentum=0.0, weight_decay=0.0, learning_rate=0.1)
    reference = make_device(rows=6).local.model
    values = np.random.default_rng(0).normal(size=(6, CLASSES)).astype(np.float32)
    device.handle(ask(RefinedKnowledge(valid=True, sample_ids=np.arange(6), values=values)))

    inputs, labels = device.local.data.inputs, device.local.data.labels
    logits = reference.train()(inputs)
    teacher = torch.from_numpy(values / 3.0).softmax(1)
    divergence = (teacher * (teacher.log() - (logits / 3.0).log_softmax(1))).sum(1).mean()
    (functional.cross_entropy(logits, labels) + 1.5 * 9.0 * divergence).backward()
    for mine, theirs in zip(device.local.model.parameters(), reference.parameters(), strict=True):
        assert_close(mine, theirs - 0.1 * theirs.grad, atol=1e-6, rtol=1e-5)  # type: ignore[operator]


def test_rows_are_matched_by_sample_id_and_unknown_are_counted() -> None:
    device = make_device(rows=5)
    ids = np.array([3, 99, 1])  # 99 is not known here; 0, 2 and 4 have no teacher
    values = np.array([[9, 0, 0], [0, 9, 0], [0, 0, 9]], np.float32)
    teacher = device.teacher(RefinedKnowledge(valid=True, sample_ids=ids, values=values))
    assert teacher is not None
    assert teacher.valid.tolist() == [False, True, False, True, False]
    assert teacher.probs[3].argmax() == 0
    assert teacher.probs[1].argmax() == 2
    answer = device.handle(ask(RefinedKnowledge(valid=True, sample_ids=ids, values=values)))
    assert answer.notes == {"unknown_ids": 1}


def test_knowledge_in_eval_mode_and_sample_order_leaves_no_trace() -> None:
    device = make_device(rows=9)
    answer = device.handle(ask(NOTHING))
    knowledge = answer.parts["knowledge"]
    assert isinstance(knowledge, SampleKnowledge)
    model = device.local.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    again = device.knowledge()
    with torch.no_grad():
        features = model.eval().features(device.local.data.inputs)  # type: ignore[operator]
        logits = model(device.local.data.inputs)
    np.testing.assert_array_equal(knowledge.sample_ids, np.arange(9))
    np.testing.assert_allclose(knowledge.features[CUT], features.numpy(), atol=1e-6)
    np.testing.assert_allclose(knowledge.logits, logits.numpy(), atol=1e-6)  # type: ignore[arg-type]
    np.testing.assert_array_equal(again.logits, knowledge.logits)
    assert knowledge.labels is not None
    assert knowledge.labels.dtype == np.int32
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_features_and_logits_come_from_one_pass() -> None:
    device = make_device(rows=9)
    rows: list[int] = []
    extractor: nn.Module = device.local.model.extractor  # type: ignore[assignment]
    first = next(layer for layer in extractor.modules() if not list(layer.children()))
    first.register_forward_hook(lambda layer, given, made: rows.append(len(made)))
    device.knowledge()
    assert rows == [9]


def test_same_ask_gives_same_answer_and_momentum_is_kept() -> None:
    one, other = make_device(), make_device()
    first = [device.handle(ask(NOTHING, seed=4)).parts["knowledge"].logits for device in (one, other)]  # type: ignore[attr-defined]
    np.testing.assert_array_equal(*first)
    state = one.state_dict()
    fresh = make_device()
    fresh.local.model.load_state_dict(one.local.model.state_dict())
    without = fresh.handle(ask(NOTHING, seed=5)).parts["knowledge"].logits  # type: ignore[attr-defined]
    resumed = make_device()
    resumed.local.model.load_state_dict(other.local.model.state_dict())
    resumed.load_state_dict(state)
    with_state = resumed.handle(ask(NOTHING, seed=5)).parts["knowledge"].logits  # type: ignore[attr-defined]
    straight = other.handle(ask(NOTHING, seed=5)).parts["knowledge"].logits  # type: ignore[attr-defined]
    np.testing.assert_array_equal(with_state, straight)
    assert not np.array_equal(without, straight)


# --- configuration


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"refinement": "kd"}, "unknown refinement 'kd', expected one of none, kkr, kkr_kernel, skr"),
        ({"server_order": "random"}, "unknown server_order 'random'"),
        ({"kernel": "cos"}, "unknown kernel 'cos'"),
        ({"beta": -1.0}, "beta must be >= 0"),
        ({"server_beta": float("nan")}, "server_beta must be >= 0"),
        ({"beta": float("inf")}, "beta must be >= 0"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"epsilon": 0.0}, "epsilon must be > 0"),
        ({"momentum": 1.0}, "momentum must be >= 0 and < 1"),
        ({"local_epochs": 0}, "local_epochs must be >= 1"),
        ({"server_epochs": 0}, "server_epochs must be >= 1"),
        ({"batch_size": 0}, "batch_size must be >= 1"),
    ],
)
def test_a_setting_out_of_range_says_so(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        FedDKCConfig(**settings)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"target_peak": 0.1}, "target peak T=0.1 must be in (1/C, 1) = (0.1, 1)"),
        ({"target_entropy": 3.4}, "target entropy E=3.4 must be in (0, log2 C) = (0, 3.32193)"),
        ({"epsilon": 4.0}, "epsilon=4.0 must be < 2*min(E, log2 C - E)"),
    ],
)
def test_targets_are_checked_against_the_number_of_classes(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        FedDKCConfig(**settings).for_classes(10)
    assert sentence in str(error.value)


def test_dkc_18_the_defaults_for_ten_classes() -> None:
    config = FedDKCConfig().for_classes(10)
    assert config.target_peak == pytest.approx(0.55)
    assert config.target_entropy == pytest.approx(0.5 * 3.321928, abs=1e-6)


LOUD: dict[str, Any] = {
    "features": lambda one: {"features": {CUT: 1000 * one.features[CUT]}},
    "logits": lambda one: {"logits": 1000 * one.logits},
}


@pytest.mark.parametrize("column", LOUD)
def test_upload_many_times_as_large_as_others_is_left_out(column: str) -> None:
    honest = {f"d{i}": make_knowledge(i) for i in range(3)}
    loud = make_knowledge(9)
    quiet, disturbed, open_to_all = make_server(), make_server(), make_server(robust="off")
    run_round(quiet, honest)
    fleet = {**honest, "d9": replace(loud, **LOUD[column](loud))}
    cohort = run_round(disturbed, fleet)
    assert [device for kind, device, _ in cohort.events if kind == "upload-left-out"] == ["d9"]
    for name, tensor in quiet.predictor.state_dict().items():
        assert torch.equal(disturbed.predictor.state_dict()[name], tensor), name
    assert disturbed.message("d9") == {"knowledge": RefinedKnowledge(valid=False)}
    run_round(open_to_all, fleet)
    assert any(
        not torch.equal(open_to_all.predictor.state_dict()[name], tensor)
        for name, tensor in quiet.predictor.state_dict().items()
    )


def test_no_device_counts_more_than_three_times_median_of_rows() -> None:
    server = make_server()
    knowledge = {**{f"d{i}": make_knowledge(i, rows=12) for i in range(3)}, "d9": make_knowledge(9, rows=400)}
    cohort = run_round(server, knowledge)
    assert sum(cohort.figures["refined_rows"].values()) == 3 * 12 + 36
    assert len(server.knowledge["d9"][0]) == 400, "it is taught on all its rows"
    off = run_round(make_server(robust="off"), knowledge)
    assert sum(off.figures["refined_rows"].values()) == 3 * 12 + 400
