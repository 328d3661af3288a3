"""Whole runs of class statistics with two lying devices of ten: with the tests and without.

A fleet's devices are real device halves; a liar changes what it sends, or its labels. What must come out with the tests
is the merge of the honest devices alone, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from methods.classstats.class_statistics_fleet import CLASSES, CPU, SHAPE, Rounds, rows_of
from numpy.testing import assert_array_equal
from support.long import long_except

from fleetdistill.knowledge import Plan, SharedStatistics
from fleetdistill.methods.base import Answer, Ask, DeviceMethod, Local
from fleetdistill.methods.classstats.class_space import coordinates, leave_one_out
from fleetdistill.methods.classstats.config import ClassStatsConfig
from fleetdistill.methods.classstats.device import ClassStatsDevice
from fleetdistill.methods.classstats.exchange import class_variants
from fleetdistill.models import build_model
from fleetdistill.state.state_file import pack_state, unpack_state
from fleetdistill.training.local_training import TensorData, extract
from fleetdistill.training.model import check_local_model
from fleetdistill_server.config.run_config import ModelSection
from fleetdistill_server.methods.base import MethodContext
from fleetdistill_server.methods.classstats.server import ClassStatsServer

Lie = Callable[[SharedStatistics], SharedStatistics]

HONEST = {
    "c": [12, 9, 0, 0],
    "d": [0, 14, 8, 0],
    "e": [0, 0, 11, 10],
    "f": [9, 0, 0, 13],
    "g": [8, 0, 12, 0],
    "h": [0, 10, 0, 9],
    "i": [7, 8, 6, 0],
    "j": [0, 6, 9, 7],
}
LIARS = {"a": [10, 8, 0, 0], "b": [0, 0, 9, 12]}
KNOW_ALL = {"a": [6, 6, 6, 6], "b": [7, 6, 6, 7]}
"""Liars that have rows of every class."""


# --- lies


def scaled(part: Any, factor: float) -> Any:
    """Means so many times as long, within float16."""
    return replace(part, means=np.clip(factor * part.means.astype(np.float64), -6e4, 6e4).astype(part.means.dtype))


def widened(part: Any) -> Any:
    """A covariance 50 times as large."""
    steps = None if part.steps is None else (np.sqrt(50) * part.steps).astype(np.float16)
    return replace(part, variances=50 * part.variances, steps=steps)


def flipped(part: Any) -> Any:
    return replace(part, labels=[CLASSES - 1 - label for label in part.labels])


def swapped(part: Any) -> Any:
    """The means of its two largest classes change places."""
    first, second = np.argsort(-part.counts)[:2]
    means = part.means.copy()
    means[[first, second]] = means[[second, first]]
    return replace(part, means=means)


def boastful(part: Any) -> Any:
    """10^9 rows, of labels that are wrong."""
    counts = np.full_like(part.counts, 10**9 // len(part.labels))
    return replace(flipped(part), counts=counts, df=np.array(counts.sum() - len(counts), np.int32))


def claims_all(part: Any) -> Any:
    """Each class with the next one's mean."""
    return replace(part, means=np.roll(part.means, -1, axis=0))


@dataclass(frozen=True)
class Attack:
    lie: Lie
    liars: Mapping[str, list[int]]


ATTACKS = {
    "1 sends means x 1,000": Attack(lambda part: scaled(part, 1000), {"a": LIARS["a"]}),
    "2 send means x 1,000": Attack(lambda part: scaled(part, 1000), LIARS),
    "1 flips labels": Attack(flipped, {"a": LIARS["a"]}),
    "2 flip labels": Attack(flipped, LIARS),
    "2 swap their two classes": Attack(swapped, LIARS),
    "2 send a covariance x 50": Attack(widened, LIARS),
    "1 declares 10^9 rows": Attack(boastful, {"a": LIARS["a"]}),
    "2 declare 10^9 rows": Attack(boastful, LIARS),
    "2 claim all classes": Attack(claims_all, KNOW_ALL),
}


class Lying(DeviceMethod):
    """A device half that does all as it should but for what it sends of its classes."""

    def __init__(self, half: DeviceMethod, lie: Lie) -> None:
        super().__init__(half.config, half.local)
        self._half, self._lie = half, lie

    def handle(self, ask: Ask) -> Answer:
        answer = self._half.handle(ask)
        if ask.step != "summarise":
            return answer
        sent: Any = answer.parts["statistics"]
        return replace(answer, parts={"statistics": self._lie(sent)})


# --- fleets


def images_of(counts: list[int], seed: int) -> TensorData:
    rows = rows_of(counts, seed)
    return TensorData(rows.inputs / 1.2, rows.labels)


def device(counts: list[int], seed: int) -> ClassStatsDevice:
    torch.manual_seed(seed)
    model = build_model("digits_linear", classes=CLASSES)
    data = images_of(counts, seed)
    local = Local(model=model, taps=check_local_model(model), data=data, classes=CLASSES, torch_device=CPU)
    return ClassStatsDevice(config(), local)


def config(**settings: Any) -> ClassStatsConfig:
    return ClassStatsConfig.from_settings(settings).for_classes(CLASSES)


def server(**settings: Any) -> ClassStatsServer:
    models = ModelSection(extractor="digits_extractor", server="digits_server")
    context = MethodContext(classes=CLASSES, input_shape=SHAPE, models=models, torch_device=CPU, seed=3)
    return ClassStatsServer(config(**settings), context)


def played(attack: Attack, **settings: Any) -> Rounds:
    """The run up to the merge, and the devices' first lesson."""
    halves: dict[str, DeviceMethod] = {name: device(counts, seed) for seed, (name, counts) in enumerate(HONEST.items())}
    for seed, (name, counts) in enumerate(attack.liars.items()):
        halves[name] = Lying(device(counts, 100 + seed), attack.lie)
    return Rounds(server(**settings), dict(sorted(halves.items()))).play()


def merge_name(rounds: Rounds) -> int:
    name: int = rounds.server.merge_name
    return name


def accuracy(rounds: Rounds) -> float:
    model, unseen = rounds.server.global_model(), images_of([40] * CLASSES, 999)
    if model is None:
        return 0.0
    return float((extract(model, unseen.inputs).argmax(dim=1) == unseen.labels).double().mean())


every_attack = pytest.mark.parametrize(
    "name", long_except(ATTACKS, "2 send means x 1,000", "1 flips labels", "2 claim all classes")
)


def merged_again(rounds: Rounds, robust: str) -> Rounds:
    """The same devices' statistics, merged with another setting."""
    half = rounds.server
    half.config = replace(half.config, robust=robust)
    half.merge_parts(rounds)
    return rounds


def left_out(rounds: Rounds) -> list[str]:
    """Each once, though the round may say it after the merge again."""
    return list(dict.fromkeys(text.split(":")[0] for kind, text in rounds.events if kind == "summary-left-out"))


@every_attack
def test_with_two_liars_the_merge_is_that_of_the_honest_alone(name: str) -> None:
    attack = ATTACKS[name]
    rounds = played(attack)
    defended, right = merge_name(rounds), accuracy(rounds)
    assert left_out(rounds) == list(attack.liars)
    merged_again(rounds, "off")
    assert merge_name(rounds) != defended
    assert accuracy(rounds) <= right
    if "means x" in name or "10^9" in name:
        assert accuracy(rounds) <= 0.5 < 0.9 < right
    for liar in attack.liars:
        rounds.server.forget(liar, rounds)
    assert merge_name(rounds) == defended
    assert accuracy(rounds) == right


def test_without_a_liar_nothing_changes_to_the_bit() -> None:
    rounds = played(Attack(flipped, {}))
    names = [merge_name(merged_again(rounds, robust)) for robust in ("off", "gross", "strict")]
    assert len(set(names)) == 1
    assert not {"summary-left-out", "rows-capped"} & {kind for kind, _ in rounds.events}


# --- what the tests cannot see, and the operator's rows

SKEWED = {"c": [12, 9, 0, 0], "d": [0, 0, 11, 10], "e": [10, 0, 8, 0], "f": [0, 7, 0, 9]}
"""Two honest holders of each class."""
KNOW_MORE = {"x": [6, 6, 6, 6], "y": [7, 6, 6, 7], "z": [6, 7, 7, 6]}


def evaluation_file(folder: Path) -> str:
    """Five rows of each class as they should be, and after them as many of each as the liars have them."""
    rows, wrong = images_of([5] * CLASSES, 55), images_of([5] * CLASSES, 56)
    rows = TensorData(torch.cat([rows.inputs, wrong.inputs]), torch.cat([rows.labels, (wrong.labels + 1) % CLASSES]))
    np.savez(folder / "evaluation.npz", inputs=rows.inputs.numpy(), labels=rows.labels.numpy())
    return str(folder / "evaluation.npz")


def outvoted(evaluation: str = "", trusted_rows: int = 5) -> Rounds:
    """Three liars claim all classes of a fleet in which each has two honest holders."""
    halves: dict[str, DeviceMethod] = {name: device(counts, seed) for seed, (name, counts) in enumerate(SKEWED.items())}
    halves |= {name: Lying(device(counts, 100), claims_all) for name, counts in KNOW_MORE.items()}
    half = server()
    half.context = replace(half.context, evaluation_file=evaluation, trusted_rows=trusted_rows)
    return Rounds(half, dict(sorted(halves.items()))).play()


def test_three_liars_outvote_two_honest_but_not_operator_rows(tmp_path: Path) -> None:
    assert set(left_out(outvoted())) & set(SKEWED)
    cured = outvoted(evaluation_file(tmp_path))
    assert left_out(cured) == list(KNOW_MORE)
    whole = merge_name(cured)
    for liar in KNOW_MORE:
        cured.server.forget(liar, cured)
    assert merge_name(cured) == whole


def test_no_row_of_the_operators_is_trusted_where_he_wants_none(tmp_path: Path) -> None:
    """As in a simulation, whose evaluation data are the test set."""
    apart = outvoted(evaluation_file(tmp_path), trusted_rows=0)
    assert left_out(apart) == left_out(outvoted())


def test_trusted_centres_stay_with_run_without_operator_file(tmp_path: Path) -> None:
    """`devices forget` on a stopped run has no [evaluation] section to read."""
    cured = outvoted(evaluation_file(tmp_path))
    other = server()
    other.load_state_dict(unpack_state(pack_state(cured.server.state_dict())))
    cured.server.forget("f", cured)
    cured.events.clear()
    other.forget("f", cured)
    assert pack_state(other.state_dict()) == pack_state(cured.server.state_dict())
    assert left_out(cured) == list(KNOW_MORE)


def test_device_staying_left_out_is_event_in_each_of_its_rounds() -> None:
    """So that three rounds running make it a suspect, though its statistics are merged once."""
    rounds = played(ATTACKS["1 flips labels"])
    other = server()
    other.load_state_dict(unpack_state(pack_state(rounds.server.state_dict())))
    rounds.server = other
    for _ in range(2):
        rounds.events.clear()
        assert left_out(rounds.play()) == ["a"]
    rounds.events.clear()
    rounds.away = {"a"}
    assert left_out(rounds.play()) == []


# --- leave-one-out of who is left out


def shifted(part: Any) -> Any:
    """One class mean lies far off, and all are nearest to their own centres."""
    means = part.means.astype(np.float64)
    means[0] += 0.35
    return replace(part, means=means.astype(part.means.dtype))


def plans(rounds: Rounds) -> dict[str, dict[str, Any]]:
    parts = {device: sent["plan"] for step, device, sent in rounds.asked if step == "learn"}
    return {device: dict(plan.values) for device, plan in parts.items() if isinstance(plan, Plan)}


def test_who_is_left_out_is_told_that_its_rows_are_not_counted() -> None:
    """Its leave-one-out must not take out of the merge what is not in it."""
    rounds = played(ATTACKS["1 sends means x 1,000"])
    told = plans(rounds)
    assert {device for device, plan in told.items() if not plan["counted"]} == {"a"}
    assert told["a"]["left_out"] == [0, 1]
    assert all("left_out" not in plan for device, plan in told.items() if device != "a")
    half = rounds.halves["a"]._half
    own = half.own
    result = class_variants(own.space, own.rows, own.labels, (), CLASSES, own.moments, 15)
    counted = class_variants(own.space, own.rows, own.labels, (0, 1), CLASSES, own.moments, 15)
    assert [figure.sum for figure in half.figures] == [figure.sum for figure in result.figures]
    assert_array_equal(own.current_variants.personal.hits, result.personal.hits)
    space = own.space
    taken_out = leave_one_out(space, coordinates(space, own.rows), own.labels, (0, 1), CLASSES)
    left_in = leave_one_out(space, coordinates(space, own.rows), own.labels, (), CLASSES)
    assert counted.personal.space is not None
    assert not np.array_equal(taken_out, left_in)


def test_of_a_class_that_is_left_out_alone_the_others_count() -> None:
    rounds = played(Attack(shifted, {"a": LIARS["a"]}), robust="strict")
    plan = plans(rounds)["a"]
    assert (plan["counted"], plan["left_out"]) == (True, [0])
    half = rounds.halves["a"]._half
    assert half.own.plan.counts([0, 1]) == [1]
    again = device(LIARS["a"], 100)
    again.load_state_dict(unpack_state(pack_state(half.state_dict())))
    assert again.own.plan == half.own.plan
