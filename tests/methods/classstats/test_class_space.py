"""The answers of a class space, predictors on it, and spaces that cannot be."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from methods.classstats.class_statistics_fleet import CLASSES, SHAPE, Rounds
from methods.classstats.one_exchange_fleet import (
    device_on,
    devices,
    fleet,
    images_of,
    make_device,
    make_server,
    space_of,
)
from numpy.testing import assert_allclose
from torch import nn

from fleetdistill.errors import ConfigurationError, WireError
from fleetdistill.knowledge import (
    GENERAL,
    OWN,
    PERSONAL,
    Array,
    ClassSpace,
)
from fleetdistill.methods.base import Ask
from fleetdistill.methods.classstats.class_space import (
    TEMPERATURES,
    coordinates,
    leave_one_out,
    logits,
    make_space,
    shrinkage_rule,
)
from fleetdistill.methods.classstats.exchange import (
    LEAVE_ONE_OUT,
    OWN_KEPT,
    OWN_LEAVE_ONE_OUT,
    PERSONAL_LEAVE_ONE_OUT,
    SpacePlan,
    check_space,
    class_variants,
)
from fleetdistill.methods.classstats.shared_statistics import Moments, from_wire, merge, moments_of, to_wire
from fleetdistill.methods.classstats.space_model import ChosenPredictor, SpaceModel, make_predictor
from fleetdistill.methods.classstats.space_training import draw_images, draw_in_space
from fleetdistill.models import PREDICTORS
from fleetdistill.training.local_training import extract

# --- the answers


def test_personal_answer_weighs_classes_by_device_counts() -> None:
    played = fleet("ab", own_statistics_guard=False).play()
    half = played.halves["a"]
    inputs = images_of([3, 3, 3, 3], 9).inputs
    general, personal = (extract(half.variants()[name], inputs).double() for name in (GENERAL, PERSONAL))
    counts = np.array([20, 12, 3, 0]) + 0.5
    prior = torch.from_numpy(np.log(counts / counts.sum()))
    result = (personal - prior).log_softmax(dim=1)
    fits = [torch.allclose((general / item).log_softmax(dim=1), result, atol=1e-3) for item in (1, 1.5, 2, 3, 4, 6, 8)]
    assert sum(fits) == 1


def fleet_of_two_kinds() -> tuple[ClassSpace, Array, Array]:
    """A fleet whose class 0 lies elsewhere than the device's own rows of it."""
    generator = np.random.default_rng(0)
    labels = np.repeat([0, 1], 60)
    rows = generator.standard_normal((120, 4)) + np.array([[0, 0, 0, 0], [3, 0, 0, 0]])[labels]
    own = generator.standard_normal((40, 4)) + np.array([[0, 5, 0, 0], [0, 0, 5, 0]])[np.repeat([0, 1], 20)]
    return make_space(moments_of(rows, labels), 0.05), own, np.repeat([0, 1], 20)


def test_a_device_of_another_kind_keeps_its_own_statistics() -> None:
    space, rows, labels = fleet_of_two_kinds()
    result = class_variants(space, rows, labels, (), 2, moments_of(rows, labels))
    assert result.own_kept
    assert result.personal.space is not space
    figures = {figure.name: figure.sum / figure.count for figure in result.figures}
    assert figures[OWN_LEAVE_ONE_OUT] > figures[PERSONAL_LEAVE_ONE_OUT]
    assert figures[OWN_KEPT] == 1
    without = class_variants(space, rows, labels, (), 2, None)
    assert without.personal.space is space
    assert {figure.name for figure in without.figures} == {LEAVE_ONE_OUT, PERSONAL_LEAVE_ONE_OUT}


def test_device_of_one_class_has_no_own_statistics_to_keep() -> None:
    space, rows, _ = fleet_of_two_kinds()
    labels = np.zeros(40, int)
    result = class_variants(space, rows, labels, (0,), 2, moments_of(rows, labels))
    assert not result.own_kept
    assert OWN_LEAVE_ONE_OUT not in {figure.name for figure in result.figures}


def test_leave_one_out_predicts_the_accuracy_on_unseen_rows() -> None:
    """On noisy rows of 4 classes: within five points of the accuracy on 2,000 rows that nobody has."""
    generator = np.random.default_rng(4)
    centres = generator.standard_normal((4, 20)) * 0.6
    labels, unseen = np.repeat(np.arange(4), 40), np.repeat(np.arange(4), 500)
    rows, others = (generator.standard_normal((len(item), 20)) + centres[item] for item in (labels, unseen))
    parts = [moments_of(rows[start::2], labels[start::2]) for start in (0, 1)]
    merged = merge(parts)
    space = make_space(merged, shrinkage_rule(20, merged.df))
    result = class_variants(space, rows[::2], labels[::2], range(4), 4, None).figures[0]
    accuracy = (logits(space, coordinates(space, others), 4).argmax(axis=1) == unseen).mean()
    naive = (logits(space, coordinates(space, rows), 4).argmax(axis=1) == labels).mean()
    assert result.sum / result.count == pytest.approx(accuracy, abs=0.05)
    assert result.sum / result.count < naive


def moments_without(moments: Moments, row: Array, label: int) -> tuple[Array, Array]:
    """The means and the covariance without one row, from scratch; degrees of freedom as before."""
    own, count = moments.labels.index(label), int(moments.counts[moments.labels.index(label)])
    means = moments.means.copy()
    means[own] = (count * means[own] - row) / (count - 1)
    scatter = moments.df * moments.covariance
    scatter += count * np.outer(moments.means[own], moments.means[own])  # sum of the rows' outer products
    scatter -= np.outer(row, row) + (count - 1) * np.outer(means[own], means[own])
    return means, scatter / moments.df


def brute_force(
    moments: Moments, share: float, rows: Array, labels: Array, counted: Collection[int], classes: int
) -> Array:
    """Logits of the rows, each really left out: new means, a new covariance, shrunk as before, and its inverse."""
    added = np.diag(np.diag(moments.covariance)) * share + 1e-6 * np.diag(moments.covariance).mean() * np.eye(
        rows.shape[1]
    )
    result = np.full((len(rows), classes), -np.inf)
    for number, (row, label) in enumerate(zip(rows, labels, strict=True)):
        means, covariance = moments.means, moments.covariance
        if label in counted:
            means, covariance = moments_without(moments, row, int(label))
        away = row - means
        inverse = np.linalg.inv((1 - share) * covariance + added)
        result[number, list(moments.labels)] = -np.einsum("kd,de,ke->k", away, inverse, away) / 2
    return result


def hits_of(logits_nc: Array, labels: Array, prior: Array) -> Array:
    """Right answers with the prior and the temperature of the largest likelihood."""
    best, hits = -np.inf, np.zeros(0)
    for temperature in TEMPERATURES:
        scores = logits_nc / temperature + np.log(prior)
        normal = scores - np.log(np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
        likelihood = (normal - scores.max(axis=1, keepdims=True))[np.arange(len(labels)), labels].mean()
        if likelihood > best:
            best, hits = likelihood, scores.argmax(axis=1) == labels
    return hits


@pytest.mark.parametrize("seed", range(6))
def test_guard_and_leave_one_out_match_rows_really_left_out(seed: int) -> None:
    """Four classes in three dimensions, so that the space has all of them, and few rows of two classes."""
    generator = np.random.default_rng(seed)
    centres = generator.standard_normal((4, 3)) * 0.8
    labels, others = np.repeat([0, 1, 2, 3], [16, 9, 4, 3]), np.repeat([0, 1, 2, 3], 25)
    rows, away = (generator.standard_normal((len(item), 3)) + centres[item] for item in (labels, others))
    own = moments_of(rows, labels)
    merged = merge([own, moments_of(away, others)])
    counted, prior = (0, 1, 3), (np.array([16, 9, 4, 3]) + 0.5) / 34
    result = class_variants(make_space(merged, 0.1), rows, labels, counted, 4, own)
    figures = {figure.name: figure.sum for figure in result.figures}

    fleets = brute_force(merged, 0.1, rows, labels, counted, 4)
    local = brute_force(own, shrinkage_rule(3, own.df), rows, labels, (0, 1, 2, 3), 4)
    assert figures[LEAVE_ONE_OUT] == (fleets.argmax(axis=1) == labels).sum()
    assert figures[PERSONAL_LEAVE_ONE_OUT] == hits_of(fleets, labels, prior).sum()
    assert figures[OWN_LEAVE_ONE_OUT] == hits_of(local, labels, prior).sum()
    assert result.own_kept is bool(hits_of(local, labels, prior).sum() > hits_of(fleets, labels, prior).sum())
    assert_allclose(
        leave_one_out(make_space(merged, 0.1), coordinates(make_space(merged, 0.1), rows), labels, counted, 4),
        fleets,
        rtol=1e-6,
    )


def test_personal_model_of_own_statistics_has_no_fleet_predictor() -> None:
    """The predictor is trained in the fleet's space: it serves the general variant alone."""
    settings: dict[str, Any] = {"predictor": "trained", "predictor_steps": 20, "robust": "off"}
    halves = devices(**settings)
    rows = images_of([20, 20, 20, 20], 7)
    halves["odd"] = device_on(replace(rows, labels=(rows.labels + 1) % CLASSES), **settings)
    played = Rounds(make_server(**settings), halves).play()
    half = played.halves["odd"]
    assert half.own.current_variants.own_kept
    general, personal = half.variants()[GENERAL], half.variants()[PERSONAL]
    assert isinstance(general, SpaceModel)
    assert isinstance(personal, SpaceModel)
    assert isinstance(general.above.predictor, nn.Sequential)
    assert isinstance(personal.above.predictor, ChosenPredictor)
    assert personal.above.predictor.uses_closed
    made = half.own.current_variants
    half.own.variants = replace(made, personal=replace(made.personal, temperature=2.5))  # the chosen one may be 1
    tempered = half.variants()[PERSONAL]
    assert isinstance(tempered, SpaceModel)
    assert float(tempered.above.temperature) == 2.5
    half.own.variants = made
    unseen = images_of([10, 10, 10, 10], 9)
    right = extract(personal, unseen.inputs).argmax(dim=1) == (unseen.labels + 1) % CLASSES
    assert right.float().mean() > 0.9
    other = Rounds(make_server(**settings), devices(**settings)).play().halves["a"]  # 35 rows of 35 to 32 of its own
    assert not other.own.current_variants.own_kept
    of_fleet = other.variants()[PERSONAL]
    of_others = other.own.current_variants
    other.own.variants = replace(of_others, personal=replace(of_others.personal, temperature=2.5))
    predicted = other.variants()[PERSONAL]
    assert isinstance(predicted, SpaceModel)
    assert float(predicted.above.temperature) == 1, "a trained predictor has its own scale"
    other.own.variants = of_others
    expected = extract(personal, unseen.inputs), extract(of_fleet, unseen.inputs)
    changed, changed_too = copy.deepcopy(of_fleet), copy.deepcopy(personal)
    changed.load_state_dict(personal.state_dict())  # as a delivered model is that changes its predictor
    changed_too.load_state_dict(of_fleet.state_dict())
    torch.testing.assert_close((extract(changed, unseen.inputs), extract(changed_too, unseen.inputs)), expected)
    others = fleet("ab", own_statistics_guard=False, **settings).play().halves["a"]
    assert not others.own.current_variants.own_kept
    with_predictor = others.variants()[PERSONAL]
    assert isinstance(with_predictor, SpaceModel)
    assert isinstance(with_predictor.above.predictor, nn.Sequential)
    assert float(with_predictor.above.temperature) == 1


# --- a predictor of the device's own, and the app's own network


@pytest.mark.parametrize("name", PREDICTORS)
def test_predictors_of_the_table_read_coordinates(name: str) -> None:
    made = make_predictor(name, 3, 4)
    assert made(torch.rand(5, 3)).shape == (5, 4)
    assert sum(isinstance(module, nn.Linear) for module in made.modules()) == len(PREDICTORS[name]) + 1


def test_a_predictor_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown predictor 'tree', expected one of space_linear"):
        make_predictor("tree", 3, 4)
    with pytest.raises(ConfigurationError, match=r"returns \[2, 5\] for 2 rows of 3, expected \[2, 4\]"):
        make_predictor(lambda inputs, classes: nn.Linear(inputs, 5), 3, 4)


def test_drawn_rows_are_normal_around_centres_and_repeatable() -> None:
    space, _, _ = fleet_of_two_kinds()
    rows, labels = draw_in_space(space, 4000, seed=5)
    assert labels.tolist() == [0] * 4000 + [1] * 4000
    for label in (0, 1):
        of_class = rows[labels == label]
        assert_allclose(of_class.mean(axis=0), space.centres[label], atol=0.08)
        assert_allclose(of_class.std(axis=0), 1, atol=0.05)
    assert np.array_equal(draw_in_space(space, 4000, seed=5)[0], rows)


def test_trained_predictor_made_by_app_is_both_answers() -> None:
    settings = {"predictor": "trained", "predictor_steps": 60}
    played = fleet("ab", **settings)
    for half in played.halves.values():
        half.local = replace(half.local, predictor=lambda inputs, classes: nn.Sequential(nn.Linear(inputs, classes)))
    played.play()
    half = played.halves["a"]
    assert half.trained is not None
    assert half.trained.steps >= 60
    general = half.variants()[GENERAL]
    assert isinstance(general, SpaceModel)
    assert isinstance(general.above.predictor, nn.Sequential)
    rows = images_of([0, 0, 0, 10], 9)
    assert (extract(general, rows.inputs).argmax(dim=1) == 3).float().mean() > 0.8


@pytest.mark.long
def test_the_apps_network_is_kept_unless_it_is_to_be_taught() -> None:
    played = fleet("ab").play()
    assert OWN not in played.halves["a"].variants()
    taught = fleet("ab", own_network="taught", own_network_epochs=15, drawn_images=60).play()
    half = taught.halves["a"]
    assert half.variants()[OWN] is half.local.model
    unseen = images_of([10, 10, 10, 10], 9)
    result = extract(half.local.model, unseen.inputs).argmax(dim=1)
    assert (result == unseen.labels).float().mean() > 0.7  # with classes that it has few or no rows of


def test_drawn_images_are_seen_where_rows_of_the_classes_lie() -> None:
    played = fleet("abc").play()
    space, general = space_of(played), played.halves["a"].variants()[GENERAL]
    assert isinstance(general, SpaceModel)
    own = played.halves["a"].local.data.inputs
    images = draw_images(general.eval(), space, own, 40, seed=3)
    assert images.shape == (40, *SHAPE)
    assert 0 <= images.min() <= images.max() <= 1
    counts = extract(general, images).argmax(dim=1).bincount(minlength=CLASSES)
    assert (counts >= 4).all()
    assert len(draw_images(general, space, own, 0, seed=3)) == 0


# --- a hostile or broken server


def spaces() -> Mapping[str, dict[str, Any]]:
    nan = np.full((256, 3), np.nan, np.float16)
    return {
        "has shapes": {"directions": np.zeros((255, 3), np.float16)},
        "has shapes .* directions": {
            "directions": np.zeros((256, 4), np.float16),
            "origin": np.zeros(4, np.float16),
            "centres": np.zeros((4, 4), np.float16),
        },
        "has classes": {"labels": [0, 1, 2, 9]},
        "has classes .*1, 1": {"labels": [0, 1, 1, 2]},
        "not finite": {"directions": nan},
        "shrinkage 1,": {"shrinkage": np.array(1.0)},
        "outside -1,": {"outside": np.array(-1.0)},
        "df 0, expected": {"df": np.array(0)},
        "without samples": {"counts": np.array([0, 1, 2, 3], np.int32)},
    }


@pytest.mark.parametrize("says", spaces())
def test_impossible_space_is_wire_error_and_device_keeps_its_own(says: str) -> None:
    played = fleet("abc").play()
    half, good = played.halves["a"], space_of(played)
    check_space(good, 256, CLASSES)
    before = extract(half.variants()[GENERAL], images_of([2, 2, 2, 2], 9).inputs)
    plan = SpacePlan(merge=9, counted=True, draw_seed=1).to_wire()
    with pytest.raises(WireError, match=says):
        half.handle(Ask(round=2, step="learn", seed=1, parts={"space": replace(good, **spaces()[says]), "plan": plan}))
    assert torch.equal(extract(half.variants()[GENERAL], images_of([2, 2, 2, 2], 9).inputs), before)


@pytest.mark.parametrize("values", [{}, {"merge": "x", "counted": True, "draw_seed": 1}, {"merge": 1, "counted": 1}])
def test_a_plan_that_cannot_be_read_is_a_wire_error(values: dict[str, Any]) -> None:
    half = make_device([9, 9, 0, 0])
    plan = SpacePlan(merge=1, counted=True, draw_seed=1).to_wire()
    with pytest.raises(WireError, match="the plan's"):
        half.handle(Ask(round=1, step="learn", seed=1, parts={"plan": type(plan)(values=values)}))


# --- over the SDK: files, figures, consent, features of the app's own


@pytest.mark.parametrize("rows_each", [5, 8, 20])
def test_leave_one_out_of_few_directions_is_no_pessimist(rows_each: int) -> None:
    """Small devices send few directions; what these hold of a row, and no more, is taken out of the covariance."""
    generator, classes, size, devices_ = np.random.default_rng(6), 4, 60, 3
    centres = generator.standard_normal((classes, size))
    labels, unseen = np.repeat(np.arange(classes), rows_each), np.repeat(np.arange(classes), 400)
    parts = [generator.standard_normal((len(labels), size)) + centres[labels] for _ in range(devices_)]
    moments = [moments_of(rows, labels) for rows in parts]
    merged = merge(from_wire(to_wire(moment, 128, 15)) for moment in moments)
    space = make_space(merged, shrinkage_rule(size, merged.df))
    others = generator.standard_normal((len(unseen), size)) + centres[unseen]
    accuracy = (logits(space, coordinates(space, others), classes).argmax(axis=1) == unseen).mean()
    result = class_variants(space, parts[0], labels, range(classes), classes, moments[0], 15)
    assert result.figures[0].sum / result.figures[0].count > accuracy - 0.1
    assert not result.own_kept
