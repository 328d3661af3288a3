"""Baselines with class logits or a generator next to the average: numbers worked out by hand, and their limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from baselines.bed import make_config, make_device, make_fleet, make_rows, make_server, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from methods.tiny_context import CLASSES, tiny_context
from torch.testing import assert_close

from fleetdistill.errors import ConfigurationError, WireError
from fleetdistill.knowledge import Generator, NamedTensors, Plan
from fleetdistill.methods.base import Ask
from fleetdistill.models.discriminators import logits_of_features
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData
from fleetdistill.training.losses import distillation_loss, soft_cross_entropy
from fleetdistill.training.model import parameter_count
from fleetdistill.training.parameters import model_parameters
from fleetdistill_lab.baselines.fedftg import hard_loss, labels_by_share, mixed_teacher
from fleetdistill_lab.baselines.fedgen import class_shares, diversity, generate
from fleetdistill_server.methods import server_class
from fleetdistill_server.methods.traffic import Sizes
from fleetdistill_server.testing import always, play
from fleetdistill_server.training.trainer import Trainer

LOGITS, LABELS = torch.tensor([[2.0, 0, 0], [4.0, 0, 0], [0, 3.0, 0]]), torch.tensor([0, 0, 1])
HOSTILE = [
    np.zeros((2, CLASSES), np.float32),
    np.full((CLASSES, CLASSES), np.nan, np.float32),
    np.full((CLASSES, CLASSES), np.inf, np.float32),
]


def same_models(method: str, rounds: int = 3, changed: dict[str, Any] | None = None, **settings: Any) -> bool:
    """Whether a method with further settings ends with the same bits as FedAvg."""
    ended = []
    for name, own in (("fedavg", {}), (method, changed or {})):
        server, members = make_fleet(name, local_epochs=3, **settings, **own)
        play(server, members, rounds=rounds)
        ended.append(server.model.state_dict())
    return all(torch.equal(tensor, ended[1][name]) for name, tensor in ended[0].items())


def sent_logits(device: Any) -> list[list[float]]:
    """The class logits of a device that has seen three rows in a round."""
    device.begin(Ask(round=1, step="train", seed=0))
    device.count(LOGITS[:2], LABELS[:2])
    device.count(LOGITS[2:], LABELS[2:])
    return device.end(Ask(round=1, step="train", seed=0))["classes"].tensors["logits"].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("smoothing", "expected"),
    [(True, [[2.0, 0, 0], [0, 1.5, 0], [0, 0, 0]]), (False, [[3.0, 0, 0], [0, 3.0, 0], [0, 0, 0]])],
)
def test_class_logits_of_feddistill(smoothing: bool, expected: list[list[float]]) -> None:
    """With smoothing (2 + 4) / (1 + 2) and 3 / (1 + 1); without it the means."""
    assert sent_logits(make_device("feddistill", tiny_model(), make_rows(0), smoothing=smoothing)) == expected


@pytest.mark.parametrize(("window", "expected"), [("all", 12 / 5), ("round", 2.0)])
def test_window_of_feddistill(window: str, expected: float) -> None:
    """Over two equal rounds the smoothed row is (2 + 4 + 2 + 4) / (1 + 4), of one round it stays 2."""
    device = make_device("feddistill", tiny_model(), make_rows(0), window=window)
    sent_logits(device)
    assert sent_logits(device)[0] == pytest.approx([expected, 0, 0])


def test_repeated_round_counts_once() -> None:
    """A device whose answer was lost starts again from the state of before, which training must not change."""
    device = make_device("feddistill", tiny_model(), make_rows(0))
    before = device.state_dict()
    first = sent_logits(device)
    device.load_state_dict(before)
    assert sent_logits(device) == first


def table(rows: Any, counts: list[int]) -> Any:
    """A member that answers with a model, class logits and counts."""
    logits = NamedTensors(tensors={"logits": np.array(rows, np.float32)}, reveals=["logits"])
    held = NamedTensors(tensors={"counts": np.array(counts, np.int32)}, reveals=["counts"])
    return always({"parameters": model_parameters(tiny_model()), "classes": logits, "counts": held})


ONE, OTHER = [[2.0, 0, 0], [0, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 4.0, 0], [0, 0, 0]]


def test_smoothing_halves_rows_of_disjoint_devices() -> None:
    """The mean of a row and a row of zeros; without smoothing the row of the device that has the class."""
    for smoothing, expected in ((True, [[1, 0, 0], [0, 2, 0], [0, 0, 0]]), (False, [[2, 0, 0], [0, 4, 0], [0, 0, 0]])):
        server = make_server("feddistill", smoothing=smoothing)
        play(server, {"d0": table(ONE, [5, 0, 0]), "d1": table(OTHER, [0, 5, 0])})
        assert server.logits_cc.tolist() == expected


@pytest.mark.parametrize(("smoothing", "expected"), [(True, 0.5), (False, 0.0)])
def test_class_that_nobody_has_teaches_only_with_smoothing(smoothing: bool, expected: float) -> None:
    """A row of zeros is the uniform teacher: KL(1/3 || own), here for log-probabilities with this divergence."""
    device = make_device("feddistill", tiny_model(), make_rows(0), smoothing=smoothing)
    rows = NamedTensors(tensors={"logits": np.array(ONE, np.float32)})
    device.begin(Ask(round=2, step="train", seed=0, parts={"classes": rows}))
    inputs, labels = make_rows(0).inputs[:4], torch.full((4,), 2)
    logits = device.local.model(inputs)
    cross_entropy = torch.nn.functional.cross_entropy(logits, labels)
    uniform = (-np.log(3) - logits.log_softmax(1)).mean()
    assert_close(device.loss(inputs, labels) - cross_entropy, uniform * (expected > 0), atol=1e-6, rtol=0)


def test_feddistill_without_its_term_is_fedavg() -> None:
    assert same_models("feddistill", changed={"gamma": 0.0})


def test_first_round_of_feddistill_is_fedavg() -> None:
    assert same_models("feddistill", rounds=1)
    assert not same_models("feddistill", rounds=2)


def test_fd_leaves_a_device_out_of_its_own_teacher() -> None:
    """Mean of three rows 2, 4 and 9 without the first: 6.5; a class that only one device has teaches others only."""
    server = make_server("fd")
    members = {
        "d0": table([[2.0, 0, 0], [0, 7.0, 0], [0, 0, 0]], [1, 1, 0]),
        "d1": table([[4.0, 0, 0], [0, 0, 0], [0, 0, 0]], [1, 0, 0]),
        "d2": table([[9.0, 0, 0], [0, 0, 0], [0, 0, 0]], [1, 0, 0]),
    }
    first, second = play(server, members, rounds=2)
    assert first.sent("d0") == [{}]
    assert sent_row(second, "d0") == [[6.5, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert sent_row(second, "d1") == [[5.5, 0, 0], [0, 7.0, 0], [0, 0, 0]]
    server.forget("d2", None)
    (third,) = play(server, members)
    assert sent_row(third, "d0") == [[4.0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert sent_row(third, "d2") == [[3.0, 0, 0], [0, 7.0, 0], [0, 0, 0]]


def sent_row(cohort: Any, device: str) -> Any:
    return cohort.sent(device)[0]["classes"].tensors["logits"].tolist()


def test_fd_of_one_device_trains_alone() -> None:
    ended = []
    for method in ("fd", "no_transfer"):
        server, members = make_fleet(method, devices=1, local_epochs=2)
        play(server, members, rounds=3)
        ended.append(members["d0"].local.model.state_dict())
    for name, tensor in ended[0].items():
        assert torch.equal(tensor, ended[1][name])


@pytest.mark.parametrize("method", ["feddistill", "fd", "fedgen", "fedftg"])
def test_saved_state_continues_the_run(method: str) -> None:
    server, members = make_fleet(method, local_epochs=1)
    play(server, members, rounds=2)
    again, others = make_fleet(method, local_epochs=1)
    again.load_state_dict(unpack_state(pack_state(server.state_dict())))
    for name, member in members.items():
        others[name].local.model.load_state_dict(member.local.model.state_dict())
        others[name].load_state_dict(member.state_dict())
    for half, fleet in ((server, members), (again, others)):
        play(half, fleet, completed=2)
    for name in members:
        pairs = zip(model_of(members[name]), model_of(others[name]), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
    assert pack_state(server.state_dict()) == pack_state(again.state_dict())


def model_of(member: Any) -> Any:
    return member.local.model.parameters()


@pytest.mark.parametrize("bad", HOSTILE, ids=["shape", "nan", "infinity"])
@pytest.mark.parametrize("method", ["feddistill", "fd"])
def test_bad_class_logits_of_the_server_are_refused(method: str, bad: Any) -> None:
    device = make_device(method, tiny_model(), make_rows(0))
    parts = {**device.first_ask().parts, "classes": NamedTensors(tensors={"logits": bad})}
    with pytest.raises(WireError, match=r"the server's (tensors have the shapes|logits contain NaN)"):
        device.handle(Ask(round=2, step="train", seed=0, parts=parts))
    parts = {**parts, "classes": NamedTensors(tensors={})}
    with pytest.raises(WireError, match=r"the server's (tensors have the shapes|logits contain NaN)"):
        device.handle(Ask(round=2, step="train", seed=0, parts=parts))


def test_negative_counts_are_none() -> None:
    server = make_server("feddistill", smoothing=False)
    play(server, {"d0": table(ONE, [-5, 0, 0]), "d1": table(ONE, [0, 0, 0])})
    assert server.logits_cc.tolist() == [[0.0] * CLASSES] * CLASSES


def test_class_logits_of_26_classes_have_2704_bytes() -> None:
    (exchange,) = type(make_server("fd")).exchanges(None, Sizes(classes=26))
    assert exchange.nbytes("down", "float32") == 2_704
    assert exchange.nbytes("up", "float32") == 2_704 + 4 * 26


# --- FedGEN


def test_shares_of_classes_in_fedgen() -> None:
    """Of counts (30, 0), (10, 10), (0, 0) by class, each with 1 more."""
    shares = class_shares(torch.tensor([[30.0, 10, 0], [0, 10, 0]]) + 1)
    assert_close(shares.T, torch.tensor([[0.96875, 0.03125], [0.5, 0.5], [0.5, 0.5]]))


def test_diversity_falls_with_the_distance_of_samples() -> None:
    """Two pairs of four differ, by 1 in noise and by 3 / 3 in features: exp(-(1 + 1) / 4)."""
    noise, features = torch.tensor([[0.0, 0], [1, 1]]), torch.tensor([[0.0, 0, 0], [3, 0, 0]])
    assert float(diversity(noise, features)) == pytest.approx(0.606531, abs=1e-6)
    assert float(diversity(noise, torch.ones(2, 3))) == 1.0


def test_weights_of_fedgen_fall_to_a_floor() -> None:
    config = make_config("fedgen")
    falling = [config.falling(10.0, number) for number in (1, 51, 201, 9999)]
    assert falling == pytest.approx([10.0, 3.641697, 0.175879, 1e-4], abs=1e-6)
    assert config.falling(0.0, 9999) == 0.0


def test_fedgen_sends_the_bytes_of_the_authors_networks() -> None:
    """26,962 and 23,840 parameters; the statistics of batch-norm are 192 and 2,056 bytes."""
    name = "baselines.bed:letters_network"
    context = tiny_context(name, classes=26, input_shape=(1, 28, 28))
    server = server_class("fedgen")(make_config("fedgen"), context)
    assert [parameter_count(module) for module in server.networks().values()] == [26_962, 23_840]
    (exchange,) = server.run_exchanges()
    assert exchange.nbytes("up", "float32") == 107_952 + 192
    assert exchange.nbytes("down", "float32") == 203_208 + 192 + 2_056


def test_first_round_of_fedgen_is_fedavg() -> None:
    assert same_models("fedgen", rounds=1)
    assert not same_models("fedgen", rounds=2)


@pytest.mark.parametrize("nothing", [{"alpha": 0.0, "beta": 0.0}, {"generated_steps": 0}])
def test_fedgen_without_its_terms_is_fedavg(nothing: dict[str, Any]) -> None:
    assert same_models("fedgen", changed=nothing)


def told(device: Any, labels: Any = (1,), features: float = 0.5, number: int = 2) -> Ask:
    """An ask with a generator whose features are all this number, whatever the label and noise."""
    with torch.no_grad():
        for parameter in device.generator.parameters():
            parameter.zero_()
        device.generator[3].bias.fill_(features)
    generator = Generator(parameters=model_parameters(device.generator), noise_size=32)
    parts = {**device.first_ask().parts, "generator": generator, "plan": Plan(values={"labels": list(labels)})}
    return Ask(round=number, step="train", seed=0, parts=parts)


def test_loss_of_fedgen() -> None:
    """In the second round the weights are 0.98 alpha * 32 / 64 rows, and 0.98 beta."""
    device = make_device("fedgen", tiny_model(), make_rows(0), alpha=3.0, beta=2.0, generated_steps=1)
    device.begin(told(device))
    inputs, labels = make_rows(0).inputs, make_rows(0).labels
    with torch.no_grad():
        logits = device.local.model(inputs)
        of_features = device.local.model.stages[-1](torch.full((1, 8), 0.5))
        own = torch.nn.functional.cross_entropy(logits, labels)
        of_labels = torch.nn.functional.cross_entropy(of_features, torch.tensor([1]))
        towards = torch.nn.functional.kl_div(logits.log_softmax(1), of_features.softmax(1), reduction="sum") / 20
    assert_close(device.loss(inputs, labels), own + 0.98 * 3 * 32 / 64 * of_labels + 0.98 * 2 * towards)
    assert_close(device.loss(inputs, labels), own)  # the step after the last with these terms


def test_devices_do_not_train_the_generator() -> None:
    server, members = make_fleet("fedgen", local_epochs=2)
    play(server, members, rounds=2)
    (cohort,) = play(server, members, completed=2)
    sent = cohort.sent("d0")[0]["generator"].parameters.parameters  # type: ignore[attr-defined]
    for name, tensor in members["d0"].generator.named_parameters():
        assert np.array_equal(tensor.numpy(), sent[name])


def test_generator_learns_the_classes_of_the_devices() -> None:
    """A class that no device has is in no plan."""
    server, members = make_fleet("fedgen", local_epochs=20, generator_steps=300, generator_rate=0.01)
    for member in members.values():
        kept = member.local.data.labels != 2
        rows = TensorData(member.local.data.inputs[kept], member.local.data.labels[kept])
        member.local = replace(member.local, data=rows)
    _, second = play(server, members, rounds=2)
    assert second.sent("d0")[0]["plan"].values == {"labels": [0, 1]}  # type: ignore[attr-defined]
    labels = torch.tensor([0, 1] * 50)
    features = generate(server.generator.eval(), labels, torch.rand(100, 32), CLASSES)
    for member in members.values():
        assert (logits_of_features(member.local.model, features).argmax(1) == labels).float().mean() > 0.95


def test_optimiser_of_the_generator_is_kept() -> None:
    server, members = make_fleet("fedgen", generator_steps=5)
    play(server, members, rounds=3)
    state = server.state_dict()["optimizer"]
    assert state["state"][0]["step"] == 15
    assert state["param_groups"][0]["lr"] == pytest.approx(3e-4 * 0.98**2)


def test_labels_of_a_forgotten_device_are_not_drawn() -> None:
    server = make_server("fedgen", generator_steps=1)
    play(server, {"d0": table(ONE, [5, 0, 0]), "d1": table(ONE, [0, 0, 7])})
    assert server.message()["plan"].values == {"labels": [0, 2]}
    server.forget("d1", None)
    assert server.message()["plan"].values == {"labels": [0]}
    server.forget("d0", None)
    assert "generator" not in server.message()


@pytest.mark.parametrize("method", ["fedgen", "fedftg"])
def test_fleet_without_counts_trains_no_generator(method: str) -> None:
    server = make_server(method)
    before = [tensor.clone() for tensor in server.generator.parameters()]
    play(server, {"d0": table(ONE, [0, 0, 0]), "d1": table(ONE, [0, -1, 0])})
    assert "generator" not in server.message()
    assert all(torch.equal(*pair) for pair in zip(before, server.generator.parameters(), strict=True))


def test_generator_that_diverges_is_undone() -> None:
    server, members = make_fleet("fedgen", generator_rate=1e30)
    (cohort,) = play(server, members)
    assert cohort.kinds == ["generator-undone"]
    assert all(tensor.isfinite().all() for tensor in server.generator.state_dict().values())


@pytest.mark.parametrize("labels", [[], [3], [-1]])
def test_labels_outside_the_contract_are_refused(labels: list[int]) -> None:
    device = make_device("fedgen", tiny_model(), make_rows(0))
    with pytest.raises(WireError, match="plan's labels"):
        device.handle(told(device, labels))


def test_bad_generator_of_the_server_is_refused() -> None:
    device = make_device("fedgen", tiny_model(), make_rows(0))
    with pytest.raises(WireError, match="NaN or infinity"):
        device.handle(told(device, features=float("nan")))
    ask = told(device)
    wrong = Generator(parameters=model_parameters(tiny_model()), noise_size=32)
    with pytest.raises(WireError, match="names differ"):
        device.handle(replace(ask, parts={**ask.parts, "generator": wrong}))


# --- FedFTG

COUNTS = torch.tensor([[30.0, 10, 0], [0, 10, 20]])


def test_labels_of_fedftg_have_the_shares_of_the_counts() -> None:
    """30, 20 and 20 rows of 70: 12 labels are cut at 5.14 and 8.57."""
    labels = labels_by_share(COUNTS.sum(0), 12, torch.Generator().manual_seed(1))
    assert labels.bincount(minlength=3).tolist() == [5, 3, 4]
    assert labels.tolist() != sorted(labels.tolist())
    shares = labels_by_share(COUNTS.sum(0), 70, torch.Generator()).bincount(minlength=3) / 70
    assert shares.tolist() == pytest.approx([0.428571, 0.285714, 0.285714], abs=1e-6)


@given(counts=st.lists(st.integers(0, 10_000), min_size=1, max_size=20).filter(any), rows=st.integers(1, 300))
def test_labels_are_of_held_classes_only(counts: list[int], rows: int) -> None:
    drawn = labels_by_share(torch.tensor(counts, dtype=torch.float64), rows, torch.Generator()).bincount()
    assert int(drawn.sum()) == rows
    assert all(counts[label] for label, number in enumerate(drawn.tolist()) if number)


def test_shares_of_classes_in_fedftg() -> None:
    assert_close(class_shares(COUNTS).T, torch.tensor([[1.0, 0], [0.5, 0.5], [0, 1]]))
    assert class_shares(torch.zeros(2, 1)).tolist() == [[0.0], [0.0]]


def test_teacher_of_fedftg() -> None:
    """Teachers (2, 0, 0) and (0, 2, 0), each with half of the class's rows, against a uniform model."""
    logits, halves = torch.tensor([[[2.0, 0, 0]], [[0, 2.0, 0]]]), torch.full((2, 1), 0.5)
    teacher = mixed_teacher(logits, halves)
    assert teacher[0].tolist() == pytest.approx([0.446746, 0.446746, 0.106507], abs=1e-6)
    by_row = soft_cross_entropy(torch.zeros(1, 3), teacher, 1.0)
    assert float(by_row) == pytest.approx(1.098612, abs=1e-6)
    assert float(by_row / 3) == pytest.approx(0.366204, abs=1e-6)
    apart = [hard_loss(torch.zeros(1, 3), one, torch.tensor([1]), halves[0], 0.0) for one in logits]
    assert float(sum(apart)) == pytest.approx(-0.666667, abs=1e-6)


def test_labels_of_hard_inputs_are_weighted_by_row() -> None:
    """Cross-entropies log 3 of a row with share 1, and of one with share 0; (1 log 3 + 0) / 2."""
    teacher, shares = torch.zeros(2, 3), torch.tensor([1.0, 0.0])
    loss = hard_loss(torch.zeros(2, 3), teacher, torch.tensor([0, 1]), shares, 1.0)
    assert float(loss) == pytest.approx(np.log(3) / 2)


def test_fedftg_without_iterations_is_fedavg() -> None:
    assert same_models("fedftg", changed={"iterations": 0})
    assert not same_models("fedftg", rounds=1)


def test_fedftg_moves_the_mean_towards_the_devices() -> None:
    """On the rows of both devices, whose models are trained on them."""
    apart = []
    for iterations in (0, 30):
        server, members = make_fleet("fedftg", local_epochs=30, iterations=iterations)
        play(server, members)
        inputs = torch.cat([make_rows(number).inputs for number in range(2)])
        teacher = torch.stack([member.local.model(inputs).softmax(1) for member in members.values()]).mean(0)
        apart.append(distillation_loss(server.model(inputs), teacher, 1.0).item())
    assert apart[1] < apart[0]


@pytest.mark.parametrize("settings", [{"send_counts": False}, {}])
def test_counts_leave_devices_of_fedftg_unless_told(settings: dict[str, Any]) -> None:
    server, members = make_fleet("fedftg", iterations=1, **settings)
    (cohort,) = play(server, members)
    assert ("counts" in cohort.answers("d0")[0]) == server.config.send_counts
    assert ("counts" in server.columns(server.config)) == server.config.send_counts


def test_fedftg_undoes_a_model_that_diverges() -> None:
    """What is left is the mean."""
    server, members = make_fleet("fedftg", model_rate=1e30)
    (cohort,) = play(server, members)
    assert cohort.kinds == ["distillation-undone"]
    mean, others = make_fleet("fedavg")
    play(mean, others)
    assert all(torch.equal(*pair) for pair in zip(server.model.parameters(), mean.model.parameters(), strict=True))


def test_trainings_of_a_round_have_different_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resume points tell trainings apart by them."""
    seeds = list[int]()
    train = Trainer.train_steps

    def noting(*given: Any, **named: Any) -> Any:
        seeds.append(named["generator"].initial_seed())
        return train(*given, **named)

    monkeypatch.setattr(Trainer, "train_steps", noting)
    server, members = make_fleet("fedftg", iterations=3, model_steps=1)
    play(server, members)
    assert len(seeds) == len(set(seeds)) == 6


def test_fedftg_sends_four_bytes_for_each_class_more() -> None:
    (exchange,), (usual,) = (make_server(method).run_exchanges() for method in ("fedftg", "fedavg"))
    assert exchange.nbytes("up", "float32") == usual.nbytes("up", "float32") + 4 * CLASSES
    assert exchange.nbytes("down", "float32") == usual.nbytes("down", "float32")


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("feddistill", {"gamma": -1.0}),
        ("fd", {"window": "epoch"}),
        ("fedgen", {"generated_batch": 1}),
        ("fedgen", {"noise_dim": 5000}),
        ("fedftg", {"generator": "other"}),
        ("fedftg", {"model_rate": 0.0}),
    ],
)
def test_settings_out_of_range_are_refused(method: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(settings))):
        make_device(method, tiny_model(), make_rows(0), **settings)
