"""FedD2S's server half: a round, and its guards."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from methods.fedd2s.fedd2s_fleet import (
    CLASSES,
    WIDTHS,
    changed,
    make_context,
    make_device,
    make_fleet,
    make_server,
    run_round,
    state_of,
    triplets_of,
    uploaded,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from fleetdistill.errors import QuorumNotReached
from fleetdistill.knowledge import RefinedKnowledge
from fleetdistill.methods.base import Ask
from fleetdistill.wire.codec import decode, encode
from fleetdistill_server.engine.forgetting import BetweenRounds
from fleetdistill_server.methods.cohort import Cohort
from fleetdistill_server.methods.fedd2s.server import Triplets
from fleetdistill_server.testing import FakeCohort

# --- a round


def test_the_first_round_asks_for_the_last_layer_and_says_so() -> None:
    server = make_server()
    cohort = run_round(server, make_fleet())
    assert cohort.figures["cut_layer"] == {"d0": "d", "d1": "d"}
    columns = {item.device: item.columns for item in cohort.asked if item.step == "extract"}
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


def test_a_forgotten_device_begins_at_the_last_layer_again() -> None:
    server, fleet = make_server(drop_every=1, l_min=2), make_fleet(drop_every=1)
    run_round(server, fleet)
    server.forget("d0", BetweenRounds(1))
    assert run_round(server, fleet).figures["cut_layer"] == {"d0": "d", "d1": "c"}
    assert server.state_dict()["participations"] == {"d0": 1, "d1": 2}


def test_device_never_selected_has_no_count_and_is_not_asked() -> None:
    server = make_server(participation_ratio=0.34)
    cohort = run_round(server, make_fleet(3))
    (selected,) = {item.device for item in cohort.asked}
    assert server.participations == {selected: 1}
    assert set(cohort.figures["cut_layer"]) == {selected}


def test_round_that_falls_short_keeps_global_network() -> None:
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


def test_alternating_steps_on_each_loss_and_joint_on_their_sum() -> None:
    """One full batch, SGD without momentum: both worked out by hand for the server's copy."""
    for steps in ("joint", "alternating"):
        how: dict[str, Any] = {
            "optimizer": "sgd",
            "momentum": 0.0,
            "learning_rate": 0.1,
            "batch_size": 64,
            "local_epochs": 1,
        }
        server, device = make_server(steps=steps, temperature=2.0, **how), make_device()
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


# --- guards


def test_teacher_guard_fires_on_network_below_chance_and_device() -> None:
    server, cohort = make_server(teacher_guard=True), FakeCohort({})
    sent = triplets_of(server, make_device(), 4)
    wrong = server.soft_labels(server.network, sent.first).argmin(1)
    sent = Triplets(sent.device, 4, sent.sample_ids, sent.first, sent.at_layer, wrong)
    reply = server.reply(sent, 0.9, cohort)
    assert [(kind, device) for kind, device, _ in cohort.events] == [("teacher-guard", "d0")]
    assert "the global network has accuracy 0.000 on the rows of d0, its own layers 0.900" in cohort.events[0][2]
    assert set(reply) == {"plan", "teacher"}
    assert not reply["teacher"].valid  # type: ignore[attr-defined]
    assert cohort.figures["teacher_accuracy"] == {"d0": 0.0}
    device = make_device()
    assert device.distillation(Ask(round=1, step="learn", seed=1, parts=decode(encode(reply))), 4) == (None, 0)


def test_teacher_guard_is_silent_for_good_network_and_when_off() -> None:
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


def test_diverging_copy_is_left_out_and_its_device_uses_labels() -> None:
    settings: dict[str, Any] = {"warmup_epochs": 0, "distill_epochs": 0, "batch_size": 64}
    server, fleet = make_server(**settings), make_fleet(2, **settings)
    fleet["d1"].columns_of = lambda layer: {  # type: ignore[method-assign]
        "a": np.full((20, WIDTHS[0]), 3e38, np.float32),
        "d": np.zeros((20, CLASSES), np.float32),
    }
    cohort = run_round(server, fleet)
    assert [(kind, device) for kind, device, _ in cohort.events] == [("copy-left-out", "d1")]
    assert not cohort.sent("d1", "learn")[0]["teacher"].valid  # type: ignore[attr-defined]
    alone = make_server(**settings)
    run_round(alone, make_fleet(1, **settings))
    assert not changed(server.network, state_of(alone.network))
    assert server.participations == {"d0": 1, "d1": 1}
    calm = make_fleet(2, **settings)
    assert run_round(make_server(**settings), calm).events == []


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
    assert "the limit of float16 is 65504; learning_rate = 0.01 is probably too large" in cohort.events[0][2]
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


def test_copy_does_not_depend_on_copies_trained_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are trained as answers arrive, in any order, so dropout must draw the same for a device."""
    copies: list[dict[str, Any]] = []
    for fleet in (make_fleet(2), {"d1": make_device(1)}):
        server = make_server()
        server.network[0] = nn.Sequential(server.network[0], nn.Dropout(0.5))
        train = server.clients_to_server

        def keep(sent: Triplets, p_bc: Tensor, cohort: Cohort, train: Any = train) -> nn.Module:
            trained: nn.Module = train(sent, p_bc, cohort)
            copies.append(trained.state_dict())
            return trained

        monkeypatch.setattr(server, "clients_to_server", keep)
        run_round(server, fleet)
    assert len(copies) == 3
    assert all(torch.equal(value, copies[2][name]) for name, value in copies[1].items())
