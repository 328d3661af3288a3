"""What devices and the server learn from merged class statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from support.averaged_fleet import lesson_of, lessons
from support.class_statistics_fleet import (
    CLASSES,
    config_of,
    copied,
    equal,
    fleet,
    make_device,
    make_server,
    rows_of,
)
from torch import nn
from torch.testing import assert_close

from fleetdistill.errors import KnowledgeError, WireError
from fleetdistill.knowledge import (
    GENERAL,
    PERSONAL,
    ClassStatistics,
    Parts,
    Plan,
    SoftPredictions,
)
from fleetdistill.methods.base import Ask
from fleetdistill.methods.classstats.averaged import AveragedDevice
from fleetdistill.methods.classstats.drawn_rows import RoundPlan
from fleetdistill.methods.classstats.gaussians import (
    ClassSummary,
    draw_classes,
)
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import extract

# --- learning


def test_own_and_drawn_rows_go_through_the_predictor_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = fleet().play(2)
    half = rounds.halves["b"]
    sizes, predict = list[int](), half.local.taps.predict
    norm = next(one for one in half.local.model.predictor.modules() if isinstance(one, nn.BatchNorm2d))
    before = int(norm.num_batches_tracked)  # type: ignore[arg-type]
    monkeypatch.setattr(half.local.model, "predict", lambda features: sizes.append(len(features)) or predict(features))  # type: ignore[func-returns-value]
    rounds.play()
    assert sizes == [62]  # 31 own rows in one batch, and as many drawn ones
    assert int(norm.num_batches_tracked) == before + 1  # type: ignore[arg-type]


def test_a_device_learns_classes_that_it_has_never_seen() -> None:
    rounds = fleet(local_epochs=8, learning_rate=0.05).play(8)
    test = rows_of([25] * CLASSES, seed=9)
    for half in rounds.halves.values():
        answers = {GENERAL: half.local.model, **half.variants()}
        right = {name: extract(model, test.inputs).argmax(1) == test.labels for name, model in answers.items()}
        missing = half.local.data.labels.bincount(minlength=CLASSES)[test.labels] == 0
        assert float(right[GENERAL][missing].double().mean()) > 0.9
        assert float(right[GENERAL].double().mean()) > 0.9
        assert float(right[PERSONAL][~missing].double().mean()) > 0.9


def test_without_merged_classes_a_device_learns_from_its_own_rows() -> None:
    rounds = fleet(min_samples=50).play(3)
    assert rounds.server.classes == {}
    assert all(half.trained is not None and half.trained.samples_seen > 0 for half in rounds.halves.values())


def test_rows_are_new_in_every_round_and_the_same_on_every_device() -> None:
    rounds = fleet()
    seeds = []
    for _ in range(4):
        rounds.play()
        seeds.append({parts["plan"].values["draw_seed"] for step, _, parts in rounds.asked if step == "learn"})  # type: ignore[attr-defined]
    assert [len(one) for one in seeds] == [0, 1, 1, 1]
    assert len(set().union(*seeds)) == 3
    a, b = (half.draw(lesson_of(5)) for half in rounds.halves.values())
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])


def test_features_below_zero_are_drawn_only_where_the_extractor_gives_such() -> None:
    assert make_server().nonnegative
    signed = make_server(extractor=f"{__name__}:signed_extractor")
    assert not signed.nonnegative
    one = {0: ClassSummary(count=5, mean=np.zeros(6), directions=np.zeros((0, 6)), variance=np.ones(6))}
    rows, labels = draw_classes(one, 20, 3, nonnegative=False)
    assert rows.min() < 0
    assert set(labels) == {0}
    assert draw_classes(one, 20, 3, nonnegative=True)[0].min() == 0


def signed_extractor(input_shape: Sequence[int]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh())


def test_a_lesson_before_the_statistics_is_refused() -> None:
    half = make_device([20, 12, 3, 0])
    plan = Plan(values={"draw_seed": 1, "nonnegative": True})
    with pytest.raises(WireError, match="needs the fleet's class statistics, which are missing from this device"):
        half.handle(Ask(round=1, step="learn", seed=1, parts={"plan": plan}))


def spoilt_parts(parts: Parts, spoil: str) -> Parts:
    """A lesson of a server that is broken."""
    plan, classes, agreed = parts["plan"], parts["classes"], parts["agreed"]
    assert isinstance(plan, Plan)
    assert isinstance(classes, ClassStatistics)
    assert isinstance(agreed, SoftPredictions)
    assert classes.means is not None
    changes: dict[str, Parts] = {
        "features": {
            "classes": replace(classes, means=classes.means[:, :-1], directions=None, variances=None),
        },
        "label": {"classes": replace(classes, labels=[label + 3 for label in classes.labels])},
        "rows": {"agreed": replace(agreed, values=agreed.values[:3])},
        "columns": {"agreed": replace(agreed, values=agreed.values[:, :2])},
    }
    values = {name: value for name, value in plan.values.items() if name != spoil}
    return {**parts, **changes.get(spoil, {"plan": Plan(values=values)})}


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ("features", r"means of the fleet's classes have shape \[4, 127\], expected finite numbers of \[4, 128\]"),
        ("label", r"fleet's classes are \[3, 4, 5, 6\], expected distinct ones in \[0, 4\)"),
        ("rows", r"soft predictions on drawn rows are \[3, 4\], expected \[40, 4\]"),
        ("columns", r"soft predictions on drawn rows are \[40, 2\], expected \[40, 4\]"),
        *((name, f"the plan's {name} is None, expected") for name in RoundPlan.__annotations__),
    ],
)
def test_a_lesson_that_does_not_fit_is_refused_with_a_sentence(spoil: str, says: str) -> None:
    rounds = fleet(agreement_every=9, agreement_from="server", recognition_guard=False).play(2)
    parts = next(parts for step, device, parts in rounds.asked if (step, device) == ("learn", "a"))
    with pytest.raises(WireError, match=says):
        rounds.halves["a"].handle(Ask(round=3, step="learn", seed=1, parts=spoilt_parts(parts, spoil)))


def test_a_personal_predictor_that_diverges_is_as_before_and_the_device_learns_on() -> None:
    rounds = fleet(personal_extractor="own").play(2)
    half = rounds.halves["a"]
    assert half.personal is not None
    with torch.no_grad():
        for parameter in half.personal.predictor.parameters():
            parameter.fill_(1e30)  # finite, and what comes of it is not
    before, optimizer = copied(half.personal), pack_state(half.optimizers["personal"].state_dict())
    for _ in range(2):
        general = copied(half.local.model)
        rounds.play()
        assert rounds.declined == []
        assert rounds.notes_of["learn", "a"] == {"personal_undone": 1}
        assert rounds.notes_of["learn", "b"] == {"personal_undone": 0}
        assert equal(copied(half.personal), before)
        assert pack_state(half.optimizers["personal"].state_dict()) == optimizer
        assert not equal(copied(half.local.model), general)


def test_of_a_personal_training_that_fails_half_way_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    half = fleet().play(3).halves["a"]
    before = pack_state(half.state_dict())
    train = half._train

    def fail_at_the_end(model: nn.Module, name: str, *rest: Any) -> None:
        train(model, name, *rest)
        raise KnowledgeError("the loss is nan")

    monkeypatch.setattr(half, "_train", fail_at_the_end)
    assert half.learn_personal(half.features_of_data(), rate=0.01, seed=5)
    assert pack_state(half.state_dict()) == before


@pytest.mark.parametrize(
    "changes", [{"agreement_from": "devices"}, {"agreement_from": "server"}, {"personal_extractor": "own"}]
)
def test_both_halves_go_on_from_their_saved_state_as_if_nothing_had_been(changes: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"agreement_every": 2, "drawn_rows": 8, **changes}
    rounds = fleet(**settings).play(4)
    again = fleet(**settings)
    again.completed, again.round = rounds.completed, rounds.round
    again.server.load_state_dict(unpack_state(pack_state(rounds.server.state_dict())))
    for name, half in rounds.halves.items():
        saved = unpack_state(pack_state({"model": half.local.model.state_dict(), "method": half.state_dict()}))
        again.halves[name].local.model.load_state_dict(saved["model"])
        again.halves[name].load_state_dict(saved["method"])
    rounds.play(2)
    again.play(2)
    assert pack_state(again.server.state_dict()) == pack_state(rounds.server.state_dict())
    for name, half in rounds.halves.items():
        assert pack_state(half.state_dict()) == pack_state(again.halves[name].state_dict())
        assert equal(copied(half.local.model), copied(again.halves[name].local.model))


def test_the_personal_predictors_own_extractor_trains_and_the_fleets_stays() -> None:
    """Nor is a general answer changed by it, or what a device sends."""
    frozen, own = (fleet(personal_extractor=one).play(3) for one in ("frozen", "own"))
    for name, half in own.halves.items():
        other = frozen.halves[name]
        assert equal(copied(half.local.model), copied(other.local.model))
        assert half.personal is not None
        assert other.personal is not None
        fleets = copied(half.local.taps.extractor)
        assert equal(copied(other.personal.extractor), fleets)
        assert not equal(copied(half.personal.extractor), fleets)
        x = half.local.data.inputs[:3]
        general, personal = (one.eval()(x).log_softmax(dim=1) for one in (half.local.model, half.personal))
        answer = half.variants()[PERSONAL].eval()
        assert_close(answer(x), general + personal)


def test_the_learning_rate_drops_to_a_tenth_when_it_is_to() -> None:
    """Three rounds, the first the extractor's; rounds are counted as completed, however many fell short."""
    config = config_of(rate_drop_after=2, learning_rate=0.5)
    assert [config.local_rate(number) for number in (1, 2, 3)] == pytest.approx([0.5, 0.5, 0.05])
    assert config_of(learning_rate=0.5).local_rate(99) == 0.5
    early = config_of(rate_drop_after=1, extractor_rounds=3, learning_rate=0.5)  # while one extractor is trained, never
    assert [early.local_rate(number) for number in (2, 3, 4)] == pytest.approx([0.5, 0.5, 0.05])
    rounds = fleet(rate_drop_after=2, learning_rate=0.02)
    used = []
    for _ in range(3):
        rounds.play()
        optimizers = [one for half in rounds.halves.values() for one in half.optimizers.values()]
        used.append({group["lr"] for one in optimizers for group in one.param_groups})
    assert used == [{0.02}, {0.02}, {0.1 * 0.02}]


# --- agreement


def test_agreement_is_the_mean_and_holds_until_the_next_exchange() -> None:
    rounds = fleet(agreement_every=2, recognition_guard=False)
    exchanges = []
    for _ in range(6):
        rounds.play()
        exchanges.append(sorted({step for step, _ in rounds.steps()}))
        if "agree" in exchanges[-1]:
            sent = [parts["predictions"] for step, _, parts in rounds.answered if step == "agree"]
            assert all(isinstance(one, SoftPredictions) for one in sent)
            mean = np.mean([one.values.astype(np.float64) for one in sent], axis=0)  # type: ignore[attr-defined]
            told = [parts["agreed"] for step, _, parts in rounds.asked if step == "learn"]
            for one in told:
                assert_allclose(one.values, mean, atol=1e-3)  # type: ignore[attr-defined]
            seed = sent[0].noise_seed  # type: ignore[attr-defined]
        if len(exchanges) > 3:
            plans = [parts["plan"].values for step, _, parts in rounds.asked if step == "learn"]  # type: ignore[attr-defined]
            assert {plan["draw_seed"] for plan in plans} == {seed}
            ask = Ask(round=9, step="learn", seed=1, parts=rounds.asked[-1][2])
            drawn = rounds.halves["a"].drawn(RoundPlan.of(ask), 1)
            assert drawn is not None
            assert drawn.soft is not None
            assert drawn.soft.shape == (10 * 4, CLASSES)
    assert exchanges == [
        ["train"],
        ["learn", "summarise"],
        ["learn"],
        ["agree", "learn"],
        ["learn"],
        ["agree", "learn"],
    ]


def test_predictions_on_other_rows_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = fleet(agreement_every=1).play(2)
    agree = AveragedDevice.agree

    def on_other_rows(self: AveragedDevice, ask: Ask) -> Any:
        answer = agree(self, ask)
        sent = answer.parts["predictions"]
        assert isinstance(sent, SoftPredictions)
        changes = {"noise_seed": 1} if self is rounds.halves["a"] else {"values": sent.values[:3]}
        return replace(answer, parts={"predictions": replace(sent, **changes)})

    on_other_rows.answers_step = "agree"  # type: ignore[attr-defined]
    monkeypatch.setattr(AveragedDevice, "agree", on_other_rows)
    rounds.play()
    assert [kind for kind, _ in rounds.events if kind == "member-left-out"] == ["member-left-out"] * 2
    assert rounds.server.agreed is None


def test_the_servers_own_predictor_teaches_the_rows_that_hold_until_the_next_time() -> None:
    """Of the round of the merge already, and nothing goes up."""
    rounds = fleet(agreement_every=2, agreement_from="server", recognition_guard=False).play()
    seeds, told = list[Any](), list[list[str]]()
    for _ in range(5):
        rounds.play()
        assert not any(parts for step, _, parts in rounds.answered if step == "learn")
        told.append(lessons(rounds)[0][1])
        plan = rounds.asked[-1][2]["plan"]
        assert isinstance(plan, Plan)
        seeds.append(plan.values["draw_seed"])
        for half in rounds.halves.values():
            drawn = half.drawn(RoundPlan.of(Ask(round=9, step="learn", seed=1, parts={"plan": plan})), 1)
            assert drawn is not None
            assert drawn.soft is not None
            logits = extract(rounds.server.predictor, drawn.features)
            assert_close(drawn.soft, (logits / 2.0).softmax(dim=-1), rtol=0, atol=1e-3)
    assert told == [["agreed", "classes", "plan"], ["plan"], ["agreed", "plan"], ["plan"], ["agreed", "plan"]]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3] != seeds[4]
    assert set(rounds.server.answer_kinds()) == {"train", "summarise", "learn"}
    assert "logits" not in rounds.server.columns(rounds.server.config)


def test_the_server_draws_the_rows_that_devices_draw() -> None:
    rounds = fleet().play(2)
    rows, labels = rounds.server.own.draw(rounds.server.classes, 5)
    for half in rounds.halves.values():
        assert torch.equal(half.draw(lesson_of(5))[0], rows)
        assert torch.equal(half.draw(lesson_of(5))[1], labels)


def test_with_a_new_merge_the_server_teaches_anew() -> None:
    rounds = fleet(agreement_every=50, agreement_from="server", recognition_guard=False).play(3)
    assert lessons(rounds) == [("a", ["plan"]), ("b", ["plan"])]
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3, model="digits_linear")
    everything = ["agreed", "classes", "plan"]
    assert lessons(rounds.play()) == [("a", everything), ("b", everything), ("c", everything)]
    del rounds.halves["c"]
    rounds.server.forget("c", rounds)
    assert lessons(rounds.play()) == [("a", everything), ("b", everything)]
    assert lessons(rounds.play()) == [("a", ["plan"]), ("b", ["plan"])]


def test_without_a_merged_class_the_server_teaches_nothing() -> None:
    rounds = fleet(agreement_every=1, agreement_from="server", min_samples=50).play(3)
    assert lessons(rounds) == [("a", ["plan"]), ("b", ["plan"])]


def test_a_merge_made_in_a_round_of_agreement_goes_down_once() -> None:
    rounds = fleet(agreement_every=1).play(3)
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3, model="digits_linear")
    rounds.play()
    told = [(step, device) for step, device, parts in rounds.asked if "classes" in parts]
    assert told == [("agree", "a"), ("agree", "b"), ("agree", "c")]
