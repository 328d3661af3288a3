"""DaFKD's server half: a round of every variant."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from methods.dafkd.dafkd_fleet import (
    CLASSES,
    CPU,
    SHAPE,
    VARIANTS,
    config_of,
    copied,
    make_device,
    make_server,
    run_round,
    states_equal,
    train,
    two_devices,
)
from methods.stale import run_stale_round
from support.fleets import RUN, SMALL, prepare, run_in_memory
from torch import Tensor
from torch.testing import assert_close

from fleetdistill.knowledge import (
    Discriminator,
    Generator,
    ModelParameters,
    Parts,
    Plan,
    WeightedPredictions,
)
from fleetdistill.methods.base import Answer, Ask, PartKind
from fleetdistill.methods.dafkd.device import DaFKDDevice
from fleetdistill.methods.dafkd.samples import distillation_samples, make_generator
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.model import SplitModel
from fleetdistill.training.onnx_export import export_onnx
from fleetdistill.training.parameters import load_parameters, model_parameters
from fleetdistill.training.portable_noise import portable_noise
from fleetdistill.wire.codec import encode
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.methods.cohort import DeviceAnswer
from fleetdistill_server.methods.dafkd.ensemble import (
    ensemble,
    importance_weights,
)
from fleetdistill_server.testing import FakeCohort, play


def answer_of(device: str, parts: Parts) -> DeviceAnswer:
    return DeviceAnswer(device, 1, encode(parts))


def answered(cohort: FakeCohort) -> list[tuple[str, str, Parts]]:
    """Step, device and parts of every answer."""
    return [(item.step, item.device, item.answer.parts) for item in cohort.asked if item.answer is not None]


def part_of(parts: Parts, name: str, kind: type[PartKind]) -> PartKind:
    result = parts[name]
    assert isinstance(result, kind)
    return result


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


def test_distillation_starts_at_mean_classifier_and_generator() -> None:
    server, devices = make_server(kd_epochs=0), two_devices()
    cohort = run_round(server, devices)
    generators = [part_of(parts, "generator", Generator).parameters for _, _, parts in answered(cohort)]
    classifiers = [part_of(parts, "parameters", ModelParameters) for _, _, parts in answered(cohort)]
    for module, sent in ((server.model, classifiers), (server.generator, generators)):
        for name, array in model_parameters(module).parameters.items():
            expected = np.mean([item.parameters[name] for item in sent], axis=0)
            np.testing.assert_allclose(array, expected, atol=1e-6)


def test_the_mean_can_weigh_devices_by_their_samples() -> None:
    server, devices = make_server(kd_epochs=0, aggregation="samples"), two_devices()
    cohort = run_round(server, devices)
    name = "stages.head.bias"
    first, second = (part_of(parts, "parameters", ModelParameters).parameters[name] for *_, parts in answered(cohort))
    expected = (40 * first + 25 * second) / 65
    np.testing.assert_allclose(model_parameters(server.model).parameters[name], expected, atol=1e-6)


def test_an_answer_to_an_earlier_round_counts_for_less() -> None:
    server = make_server(kd_epochs=0)
    cohort = run_stale_round(server, two_devices(), {"b": 0.5})
    name = "stages.head.bias"
    first, second = (part_of(parts, "parameters", ModelParameters).parameters[name] for *_, parts in answered(cohort))
    np.testing.assert_allclose(model_parameters(server.model).parameters[name], (2 * first + second) / 3, atol=1e-6)


def test_a_device_that_is_left_out_of_the_mean_does_not_teach() -> None:
    """One of five sends a generator far from those of the others."""
    honest, liar = {name: make_device(seed) for seed, name in enumerate("abcd", start=1)}, make_device(9)

    def lie(ask: Ask) -> Answer:
        answer = liar.handle(ask)
        sent = part_of(answer.parts, "generator", Generator)
        far = {name: 1000 * (1 + array) for name, array in sent.parameters.parameters.items()}
        generator = replace(sent, parameters=replace(sent.parameters, parameters=far))
        return replace(answer, parts={**answer.parts, "generator": generator})

    (cohort,) = play(make_server(), {**honest, "liar": lie})
    assert ("update-left-out", "liar") in [(event.kind, event.device) for event in cohort.events]
    assert cohort.figures["likelihood"].keys() == honest.keys()


def test_the_ensemble_is_that_of_the_devices_own_models() -> None:
    """The server hears each device with its classifier and its discriminator, whatever it heard before."""
    server, devices = make_server(), two_devices()
    cohort = run_round(server, devices)
    samples = server.samples(5)
    answers = [answer_of(device, parts) for _, device, parts in answered(cohort)]
    result = server.judged_ensemble(answers, samples, cohort)
    assert result is not None
    with torch.no_grad():
        heard = [half.ready()[0].eval() for half in devices.values()]
        verdicts = torch.stack([item.realness(samples) for item in heard])
        logits = torch.stack([half.local.model(samples) for half in devices.values()])
    assert_close(result[1], ensemble(importance_weights(verdicts), logits, 1.0, "probs"), atol=1e-6, rtol=0)


def teachers_of(**settings: Any) -> tuple[Tensor, Tensor]:
    """Samples and teacher of a first round."""
    server, caught = make_server(**settings), list[tuple[Tensor, Tensor]]()
    server.if_mature = lambda teacher, cohort: caught.append(teacher)  # type: ignore
    run_round(server, two_devices(**settings))
    return caught[0]


def test_exact_agrees_with_server_and_lagged_has_older_samples() -> None:
    samples, teacher = teachers_of()
    exact_samples, exact = teachers_of(**VARIANTS["exact"])
    lagged_samples, _ = teachers_of(**VARIANTS["lagged"])
    assert torch.equal(samples, exact_samples)
    assert_close(exact, teacher, atol=1e-6, rtol=0)
    assert not torch.equal(samples, lagged_samples)


def test_lagged_device_predicts_on_samples_of_received_generator() -> None:
    server, device = make_server(**VARIANTS["lagged"]), make_device(**VARIANTS["lagged"])
    sent = part_of(train(server, device), "predictions", WeightedPredictions)
    samples = server.samples(5)
    judged = device.ready()[0].eval()
    with torch.no_grad():
        expected = judged.realness(samples).sigmoid()[:, None] * judged.classify_generated(samples).softmax(1)
    np.testing.assert_allclose(sent.values, expected.numpy(), atol=1e-6)
    assert sent.noise_seed == 5


def test_no_correlation_is_plain_mean_on_server_and_device() -> None:
    _, plain = teachers_of(correlation=False)
    _, exact = teachers_of(correlation=False, **VARIANTS["exact"])
    _, weighted = teachers_of()
    assert_close(exact, plain, atol=1e-6, rtol=0)
    assert float((plain - weighted).abs().max()) > 1e-5


def test_daf_property_feature_level_distillation_keeps_extractor() -> None:
    server = make_server(**VARIANTS["feature level"], maturity_guard=False)
    assert isinstance(server.model, SplitModel)
    below, above = server.model.stages[:-1], server.model.stages[-1]
    before, head = copied(below), copied(above)
    teacher = torch.eye(10)[torch.arange(64) % 10].double()
    server.train_student(torch.rand(64, 32), teacher, torch.Generator().manual_seed(7))
    assert states_equal(copied(below), before)
    assert not states_equal(copied(above), head)


def test_distilled_student_nears_teacher_and_keeps_statistics() -> None:
    server = make_server(kd_epochs=20, kd_lr=0.01)
    samples, teacher = torch.rand(64, *SHAPE), torch.full((64, 10), 0.01).index_fill_(1, torch.tensor([3]), 0.91)
    before = copied(server.model)
    server.train_student(samples, teacher.double(), torch.Generator().manual_seed(7))
    assert float((server.model.eval()(samples).argmax(1) == 3).double().mean()) > 0.95
    assert torch.equal(server.model.state_dict()["stages.stem.1.running_mean"], before["stages.stem.1.running_mean"])


def test_distillation_that_does_not_stay_finite_is_undone() -> None:
    always: dict[str, Any] = {"kd_start_round": 1, "maturity_guard": False}
    averaging, distilling = make_server(kd_epochs=0, **always), make_server(kd_lr=1e30, kd_epochs=5, **always)
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
            "the ensemble predicts 4 of 10 classes for the generated samples, at least 5 are required; "
            "this round has no distillation",
        )
    ]
    assert cohort.figures["generated_classes"] == 4


def test_guard_is_silent_for_mature_generator_and_when_off() -> None:
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
        half.data = TensorData(half.data.inputs[:], torch.zeros_like(half.data.labels))
    cohort = run_round(server, devices)
    return copied(server.model), cohort.kinds


def test_where_the_guard_fires_the_mean_of_the_models_stays() -> None:
    guarded, events = round_of_one_class()
    mean, none = round_of_one_class(kd_epochs=0, maturity_guard=False)
    assert events == ["maturity-guard"]
    assert none == []
    assert states_equal(guarded, mean)
    assert not states_equal(round_of_one_class(maturity_guard=False)[0], mean)


def test_device_with_other_seed_or_nonfinite_answer_is_left_out() -> None:
    server, cohort = make_server(**VARIANTS["lagged"]), FakeCohort({})
    samples = server.samples(5)
    good = WeightedPredictions(noise_seed=5, values=np.full((64, 10), 0.05, np.float32))
    stale = WeightedPredictions(noise_seed=6, values=np.full((64, 10), 0.01, np.float32))
    answers = [answer_of("a", {"predictions": good}), answer_of("b", {"predictions": stale})]
    result = server.weighted_ensemble(answers, samples, 5, cohort)
    assert result is not None
    assert cohort.figures["likelihood"] == {"a": pytest.approx(0.5)}
    assert cohort.events[0].kind == "member-left-out"
    assert "its predictions are for samples of seed 6, the round's seed is 5" in cohort.events[0].text
    assert server.weighted_ensemble(answers[1:], samples, 5, cohort) is None


def test_where_all_importance_vanishes_no_figure_is_made_up() -> None:
    server, cohort = make_server(**VARIANTS["lagged"]), FakeCohort({})
    nowhere = WeightedPredictions(noise_seed=5, values=np.zeros((64, 10), np.float32))
    result = server.weighted_ensemble([answer_of("a", {"predictions": nowhere})], server.samples(5), 5, cohort)
    assert result is not None
    assert [len(item) for item in result] == [0, 0]
    assert cohort.figures == {"likelihood": {"a": 0.0}, "dropped_samples": 64}
    assert not server.if_mature(result, cohort)
    json.dumps(cohort.figures, allow_nan=False)


def test_model_not_finite_on_generated_samples_does_not_teach() -> None:
    server, cohort = make_server(), FakeCohort({})
    sent = model_parameters(server.model)
    huge = ModelParameters(
        parameters={name: np.full_like(array, 3e38) for name, array in sent.parameters.items()}, buffers=sent.buffers
    )
    judge = Discriminator(parameters=model_parameters(server.member.discriminator), shares_extractor=True)
    answers = [answer_of("a", {"parameters": huge, "discriminator": judge})]
    assert server.judged_ensemble(answers, server.samples(5), cohort) is None
    assert cohort.kinds == ["member-left-out"]


def test_soft_only_device_keeps_other_classifier_and_teaches() -> None:
    settings = VARIANTS["soft-only"]
    server = make_server(**settings)
    devices = {"a": make_device(1, **settings), "b": make_device(2, model="digits_cnn_small", **settings)}
    cohort = run_round(server, devices)
    sent = {item.device: item.parts for item in cohort.asked}
    assert "parameters" in sent["a"]
    assert "parameters" not in sent["b"]
    assert cohort.figures["likelihood"].keys() == {"a", "b"}
    assert server.requirements().same_architecture is False
    assert server.initial() is None
    asyncio.run(server.finish(end := FakeCohort(devices)))
    assert [(item.step, item.device) for item in end.asked] == [("deliver", "a")]
    assert states_equal(copied(devices["a"].local.model), copied(server.model))


def test_simulated_soft_only_devices_have_their_own_models(tmp_path: Path) -> None:
    """The server keeps a classifier of its own; whether all devices run it is a setting."""
    models = ("digits_mlp_small", "digits_linear")
    settings = {"upload_model": False, "discriminator_location": "device", "local_epochs": 1, "kd_samples": 64}
    wanted = replace(SMALL, method="dafkd", settings=settings, models=models, rounds=1)
    config, specs, _ = prepared = prepare(wanted, tmp_path / "work")
    assert [spec.model for spec in specs] == list(models)
    assert config.model.device == "digits_mlp_small"  # the larger one
    store = run_in_memory(prepared)
    profiles = [contract_pb2.DeviceProfile.FromString(row.profile) for row in store.devices.all(RUN)]
    assert [profile.model_name for profile in profiles] == list(models)
    assert len({profile.model_fingerprint for profile in profiles}) == 2
    assert {row.status for row in store.asks.uploads(RUN) if row.step == "train"} == {"used"}
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
