"""Class statistics in detail: terms of the loss, what names the drawn rows, and what starts from where.

One small test for each thing that could be left out without a fleet learning visibly worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from support.class_statistics_fleet import CLASSES, Rounds, copied, equal, fleet, make_device, make_server, two_devices
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from fleetdistill.knowledge import Array, ClassStatistics, Kind, Parts, Plan, SoftPredictions
from fleetdistill.methods.base import Ask
from fleetdistill.methods.classstats.averaged import PERSONAL, AveragedDevice  # type: ignore[attr-defined]
from fleetdistill.methods.classstats.drawn_rows import DrawnRows
from fleetdistill.methods.classstats.gaussians import ClassSummary, draw, draw_classes, from_wire
from fleetdistill.models.combined import CombinedModel
from fleetdistill.seeds import derive_seed
from fleetdistill.training.local_training import extract

ROWS = 10


class Pupil:
    """A device that has the fleet's classes, and as many own rows, 40 in one mini-batch, as are drawn for a round.

    So every drawn row has its part in a round's one step, whatever their order: its loss can be worked out by hand.
    """

    def __init__(self, **settings: Any) -> None:
        terms = {"drawn_rows": ROWS, "batch_size": 64, "recognition_guard": False, **settings}
        self.half = make_device([20, 20, 0, 0], **terms)
        other = make_device([0, 9, 14, 8], seed=2, **terms)
        self.rounds = Rounds(make_server(**terms), {"a": self.half, "b": other}).play(2)
        _, _, first = next(one for one in self.rounds.asked if one[:2] == ("learn", "a"))
        plan, classes = first["plan"], first["classes"]
        assert isinstance(plan, Plan)
        assert isinstance(classes, ClassStatistics)
        self.plan: Mapping[str, Any] = plan.values
        self.classes = from_wire(classes)
        assert sorted(self.classes) == list(range(CLASSES))

    def lesson(self, **more: Any) -> dict[str, Kind]:
        return {"plan": Plan(values={**self.plan, **more})}

    def learn(self, parts: Parts) -> float:
        """Its loss, before the round's one step has changed a thing."""
        self.half.handle(Ask(round=3, step="learn", seed=5, parts=parts))
        assert self.half.trained is not None
        assert self.half.trained.steps == 1
        return self.half.trained.mean_loss

    def drawn(self, seed: int, *, nonnegative: bool = True) -> tuple[Tensor, Tensor]:
        rows, labels = draw_classes(self.classes, ROWS, seed, nonnegative=nonnegative)
        return torch.from_numpy(rows), torch.from_numpy(labels)

    def logits(self, features: Tensor) -> Tensor:
        taps = self.half.local.taps
        return extract(taps.predict, features.reshape(-1, 8, 4, 4), model=self.half.local.model).double()

    def own_loss(self) -> float:
        logits = extract(self.half.local.model, self.half.local.data.inputs[:]).double()
        return float(functional.cross_entropy(logits, self.half.local.data.labels))

    def drawn_loss(self, seed: int) -> float:
        rows, labels = self.drawn(seed)
        return float(functional.cross_entropy(self.logits(rows), labels))


def soft_of(seed: int) -> SoftPredictions:
    values = torch.randn(ROWS * CLASSES, CLASSES, generator=torch.Generator().manual_seed(1)).softmax(dim=1)
    return SoftPredictions(noise_seed=seed, values=values.numpy())


# --- 3.6 and 3.8: the loss of the general predictor


@pytest.mark.parametrize("weight", [0.0, 1.0, 2.5])
def test_drawn_rows_count_with_their_weight(weight: float) -> None:
    pupil = Pupil(drawn_weight=weight)
    expected = pupil.own_loss() + weight * pupil.drawn_loss(77)
    assert pupil.learn(pupil.lesson(draw_seed=77)) == pytest.approx(expected, rel=1e-5)


def test_rows_of_no_weight_teach_nothing() -> None:
    """A predictor without batch-norm: what was drawn then leaves no trace in it."""
    learned = []
    for seed in (77, 78):
        pupil = Pupil(drawn_weight=0.0)
        pupil.learn(pupil.lesson(draw_seed=seed))
        learned.append(copied(pupil.half.local.model))
    assert equal(*learned)


@pytest.mark.parametrize(("weight", "temperature"), [(1.0, 2.0), (3.0, 2.0), (1.0, 5.0), (0.0, 2.0)])
def test_agreement_adds_its_weight_times_the_softened_divergence(weight: float, temperature: float) -> None:
    """w τ² KL(mean ‖ softmax(z / τ)), the mean over the drawn rows."""
    pupil = Pupil(agreement_every=9, agreement_weight=weight, temperature=temperature)
    mean = soft_of(77)
    own = np.log(_softmax(pupil.logits(pupil.drawn(77)[0]).numpy() / temperature))
    divergence = float((mean.values * (np.log(mean.values) - own)).sum(axis=1).mean())
    expected = pupil.own_loss() + pupil.drawn_loss(77) + weight * temperature**2 * divergence
    assert divergence > 0.1
    assert pupil.learn({**pupil.lesson(draw_seed=77), "agreed": mean}) == pytest.approx(expected, rel=1e-5)


def test_soft_predictions_are_for_the_rows_of_their_seed_alone() -> None:
    pupil = Pupil(agreement_every=9, learning_rate=1e-12)  # so small that the model stays as it is
    both = pupil.own_loss() + pupil.drawn_loss(77)
    with_it = pupil.learn({**pupil.lesson(draw_seed=77), "agreed": soft_of(77)})
    assert with_it > both + 0.1
    of_others = pupil.own_loss() + pupil.drawn_loss(78)
    assert pupil.learn(pupil.lesson(draw_seed=78)) == pytest.approx(of_others, rel=1e-5)
    assert pupil.learn(pupil.lesson(draw_seed=77)) == pytest.approx(with_it, rel=1e-6)


def _softmax(logits: Array) -> Array:
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(exponents / exponents.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_a_device_tells_the_softened_predictions_of_its_general_predictor(temperature: float) -> None:
    pupil = Pupil(agreement_every=9, temperature=temperature, learning_rate=0.1)
    for _ in range(3):  # until the two predictors differ
        pupil.learn(pupil.lesson(draw_seed=77))
    sent = _predictions(pupil.half, pupil.lesson(draw_seed=78))
    assert sent.noise_seed == 78
    assert_allclose(sent.values, _softmax(pupil.logits(pupil.drawn(78)[0]).numpy() / temperature), atol=1e-5)


def _predictions(half: AveragedDevice, parts: Parts) -> SoftPredictions:
    sent = half.handle(Ask(round=3, step="agree", seed=5, parts=parts)).parts["predictions"]
    assert isinstance(sent, SoftPredictions)
    return sent


# --- 3.5: drawn rows


@pytest.mark.parametrize("nonnegative", [True, False])
def test_a_device_draws_below_zero_as_the_plan_says(nonnegative: bool) -> None:
    pupil = Pupil(agreement_every=9)
    rows, _ = pupil.drawn(78, nonnegative=nonnegative)
    assert bool((rows < 0).any()) != nonnegative
    sent = _predictions(pupil.half, pupil.lesson(draw_seed=78, nonnegative=nonnegative))
    assert_allclose(sent.values, _softmax(pupil.logits(rows).numpy() / 2), atol=1e-5)


def test_drawn_rows_come_in_shuffled_passes_each_row_once() -> None:
    def passes(seed: int) -> list[list[int]]:
        drawn = DrawnRows(torch.zeros(40, 3), torch.zeros(40), None, seed)
        taken = [*drawn.take(30), *drawn.take(50)]
        return [taken[:40], taken[40:]]

    first, second = passes(1)
    for one in (first, second):
        assert sorted(one) == list(range(40))
        assert one != list(range(40))
    assert first != second
    assert passes(1) == [first, second]
    assert passes(2)[0] != first


def test_every_class_is_drawn_from_a_seed_of_its_own_whatever_others_there_are() -> None:
    one = ClassSummary(count=9, mean=np.zeros(3), directions=np.eye(2, 3), variance=np.ones(3))
    rows, labels = draw_classes({4: one, 1: one}, 5, 9, nonnegative=False)
    assert labels.tolist() == [1] * 5 + [4] * 5
    for label in (1, 4):
        expected = draw(one, 5, derive_seed(9, "class", label), nonnegative=False)
        assert_allclose(rows[labels == label], expected, rtol=1e-6)
        assert_allclose(draw_classes({label: one}, 5, 9, nonnegative=False)[0], expected, rtol=1e-6)
    assert np.abs(rows[:5] - rows[5:]).min() > 0


# --- 3.2: summaries


def test_a_class_of_just_enough_samples_is_sent() -> None:
    half = make_device([5, 4, 6, 0], min_samples=5)
    answer = half.handle(Ask(round=1, step="summarise", seed=1, parts={"extractor": make_server().initial()}))
    sent = answer.parts["statistics"]
    assert isinstance(sent, ClassStatistics)
    assert sent.counts is not None
    assert list(zip(sent.labels, sent.counts.tolist(), strict=True)) == [(0, 5), (2, 6)]


# --- 3.7: the personal predictor


def logits_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return extract(model, inputs).double()


def personal_of(half: AveragedDevice) -> Tensor:
    """What the personal predictor alone says of own rows: the personal answer without the general predictor's part."""
    inputs = half.local.data.inputs[:]
    both = logits_of(half.variants()[PERSONAL], inputs)
    return both - logits_of(half.local.model, inputs).log_softmax(dim=1)


def test_the_personal_predictor_starts_as_the_general_one_is_and_goes_its_own_way() -> None:
    half = make_device([20, 20, 0, 0])
    assert PERSONAL not in half.variants()
    half.handle(Ask(round=1, step="summarise", seed=1, parts={"extractor": make_server().initial()}))
    general = logits_of(half.local.model, half.local.data.inputs[:]).log_softmax(dim=1)
    assert_close(personal_of(half), general, atol=1e-5, rtol=0)
    pupil = Pupil(learning_rate=0.1)
    pupil.learn(pupil.lesson(draw_seed=77))
    general = logits_of(pupil.half.local.model, pupil.half.local.data.inputs[:]).log_softmax(dim=1)
    assert float((personal_of(pupil.half) - general).abs().max()) > 0.01


def test_the_personal_predictor_sees_own_rows_alone() -> None:
    said = []
    for seed in (77, 78):
        pupil = Pupil(batch_size=8)
        before = personal_of(pupil.half)
        pupil.half.handle(Ask(round=3, step="learn", seed=5, parts=pupil.lesson(draw_seed=seed)))
        said.append((personal_of(pupil.half), copied(pupil.half.local.model)))
        assert float((said[-1][0] - before).abs().max()) > 1e-3
    assert_close(said[0][0], said[1][0], atol=1e-5, rtol=0)
    assert not equal(said[0][1], said[1][1])


class Says(nn.Module):
    """Gives fixed probabilities, as logits that any number was added to."""

    def __init__(self, probabilities: list[float], shift: float) -> None:
        super().__init__()
        self.logits = torch.tensor(probabilities).log() + shift

    def features(self, x: Tensor) -> Tensor:
        return x

    def predict(self, features: Tensor) -> Tensor:
        return self.logits.expand(len(features), -1)


def test_sta_10_two_answers_multiply() -> None:
    both = CombinedModel(Says([0.6, 0.4], shift=3.0), Says([0.3, 0.7], shift=-1.0), one_extractor=True)
    expected = torch.tensor([[0.3913043, 0.6086957]]).expand(2, -1)  # .18 and .28 of .46
    assert_close(both(torch.zeros(2, 1)).softmax(dim=1), expected, atol=1e-6, rtol=0)


# --- 3.3, 3.5, 3.9: the server


def plan_seeds(rounds: Rounds) -> set[int]:
    plans = [parts["plan"] for step, _, parts in rounds.asked if step == "learn"]
    return {plan.values["draw_seed"] for plan in plans if isinstance(plan, Plan)}  # type: ignore[misc]


def with_newcomer(rounds: Rounds) -> Rounds:
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3)
    return rounds


def test_another_merge_names_other_rows_in_the_same_round() -> None:
    """A round that is played again after a newcomer has come must not give old rows to new classes."""
    first, again, other = (fleet(recognition_guard=False).play(3) for _ in range(3))
    with_newcomer(other)
    (one,), (same,), (new,) = (plan_seeds(rounds.play()) for rounds in (first, again, other))
    assert one == same
    assert new != one


def test_soft_predictions_do_not_outlive_the_merge_that_they_are_about() -> None:
    rounds = fleet(agreement_every=2, recognition_guard=False).play(4)
    (agreed,) = plan_seeds(rounds)
    assert plan_seeds(rounds.play()) == {agreed}
    again = fleet(agreement_every=2, recognition_guard=False).play(4)
    with_newcomer(again).play()
    assert sorted(again.steps()) == [("learn", "a"), ("learn", "b"), ("learn", "c"), ("summarise", "c")]
    assert agreed not in plan_seeds(again)
    assert [device for step, device, parts in again.asked if "agreed" in parts] == []


def test_of_the_predictor_from_before_a_merge_nothing_stays() -> None:
    """So nothing stays of a device that is forgotten: weights that had seen its part come to the same as others."""
    rounds = with_newcomer(fleet(recognition_guard=False)).play(3)
    spoilt = make_server(recognition_guard=False)
    spoilt.load_state_dict(rounds.server.state_dict())
    with torch.no_grad():
        for parameter in spoilt.predictor.parameters():
            parameter.add_(1.0)
    before = copied(rounds.server.predictor)
    for server in (rounds.server, spoilt):
        server.forget("c", rounds)
    assert not equal(copied(rounds.server.predictor), before)
    assert equal(copied(spoilt.predictor), copied(rounds.server.predictor))


def test_the_servers_predictor_makes_its_epochs_each_over_new_rows() -> None:
    epochs_of = {}
    for epochs in (1, 3):
        server = make_server(server_epochs=epochs, recognition_guard=False, batch_size=64)
        rounds = Rounds(server, two_devices(recognition_guard=False, batch_size=64)).play()
        seen = list[Tensor]()
        hook = server.predictor.register_forward_pre_hook(lambda module, given: _note(seen, module, given[0]))  # noqa: B023
        rounds.play()
        hook.remove()
        epochs_of[epochs] = seen
    assert {epochs: len(seen) for epochs, seen in epochs_of.items()} == {1: 1, 3: 3}
    first, *later = epochs_of[3]
    assert all(len(one) == ROWS * CLASSES for one in (first, *later))
    assert all(set(_rows(first)).isdisjoint(_rows(one)) for one in later)


def _note(seen: list[Tensor], module: nn.Module, rows: Tensor) -> None:
    if module.training:
        seen.append(rows.detach().clone())


def _rows(batch: Tensor) -> list[bytes]:
    return [one.numpy().tobytes() for one in batch]
