"""Who holds which merge: lost answers, guards, newcomers, leavers and forgotten devices."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from support.averaged_fleet import devices_of, lesson_of, lessons
from support.class_statistics_fleet import (
    Rounds,
    copied,
    equal,
    fleet,
    make_device,
)
from support.driving import DriveDevices
from support.fleets import RUN, RUNS, prepare

from fleetdistill.device import Step
from fleetdistill.errors import ConfigurationError, QuorumNotReached
from fleetdistill.knowledge import (
    ClassStatistics,
)
from fleetdistill.methods.classstats.gaussians import (
    ClassSummary,
    from_wire,
    to_wire,
)
from fleetdistill.methods.classstats.kept_statistics import unpacked
from fleetdistill.state.state_file import unpack_state
from fleetdistill.wire.codec import decode, encode
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.engine.forgetting import ask_to_forget
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.methods.classstats.own_predictor import least_recognised
from fleetdistill_server.store.store import Store
from fleetdistill_server.views import runs as views

# --- who holds what, after rounds that fell short and answers that were lost


def newcomer_falls_short() -> Rounds:
    """The merge with a newcomer's part, for which every device has a receipt, is taken back."""
    rounds = fleet(recognition_guard=False).play(3)
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3, model="digits_linear")
    rounds.fall_short()
    rounds.away = {"c"}
    return rounds


def test_after_a_round_that_fell_short_all_draw_from_one_merge() -> None:
    rounds = newcomer_falls_short()
    assert rounds.halves["a"].classes[3].count != rounds.server.classes[3].count
    rounds.play()
    assert rounds.declined == []
    (seed,) = {parts["plan"].values["draw_seed"] for _, _, parts in rounds.asked}  # type: ignore[attr-defined]
    rows, _ = rounds.server.own.draw(rounds.server.classes, seed)
    for name in ("a", "b"):
        assert torch.equal(rounds.halves[name].draw(lesson_of(seed))[0], rows)
    assert lessons(rounds.play()) == [("a", ["plan"]), ("b", ["plan"])]


def test_devices_ahead_of_a_server_from_a_backup_learn_nothing_from_another_merge_and_are_told_anew() -> None:
    rounds = newcomer_falls_short()
    rounds.round -= 1  # as if the round had never been
    rounds.fall_short()
    assert [(step, device) for step, device, _ in rounds.declined] == [("learn", "a"), ("learn", "b")]
    assert all("refers to class statistics" in text for _, _, text in rounds.declined)
    rounds.play()
    assert rounds.declined == []
    assert lessons(rounds) == [("a", ["classes", "plan"]), ("b", ["classes", "plan"])]


def test_who_does_not_answer_is_told_all_again() -> None:
    rounds = fleet(agreement_every=50, agreement_from="server")
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3, model="digits_linear")
    rounds.play(3)
    rounds.deaf = {("learn", "b")}
    rounds.play()
    rounds.deaf = set()
    assert lessons(rounds.play()) == [("a", ["plan"]), ("b", ["agreed", "classes", "plan"]), ("c", ["plan"])]


def test_a_newcomer_that_does_not_answer_is_waited_for_less_and_less() -> None:
    rounds = fleet().play(2)
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3, model="digits_linear")
    rounds.deaf = {("summarise", "c")}
    asked = [("summarise", "c") in rounds.play().steps() for _ in range(11)]
    assert [number for number, was in enumerate(asked) if was] == [0, 2, 5, 10]
    rounds.deaf, rounds.away = set(), {"a", "b"}  # nobody is left who could complete a round
    for _ in range(9):
        rounds.fall_short()
    rounds.play()
    assert "c" in rounds.server.parts
    assert rounds.server.state_dict()["silent"] == {}


def test_who_was_not_waited_for_in_the_round_of_the_summaries_is_asked_in_the_next() -> None:
    rounds = fleet()
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3)
    rounds.play()
    rounds.deaf = {("summarise", "c")}
    rounds.play()
    rounds.deaf = set()
    rounds.play()
    assert [step for step, device in rounds.steps() if device == "c"] == ["summarise", "learn"]


def with_older_state(rounds: Rounds) -> Rounds:
    """A device goes on from a state directory of before the extractor was frozen."""
    rounds.halves["a"] = make_device([20, 12, 3, 0], seed=1)
    return rounds


def test_a_device_of_an_older_state_is_asked_for_its_summary_again_and_learns() -> None:
    rounds = fleet()
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3)
    classes = with_older_state(rounds.play(2)).server.classes
    steps = []
    for _ in range(6):
        rounds.play()
        steps.append([step for step, device in rounds.steps() if device == "a"])
    assert steps == [["learn"]] * 3 + [["summarise", "learn"]] + [["learn"]] * 2
    assert rounds.declined == []
    assert rounds.server.state_dict()["silent"] == {}
    assert rounds.server.classes is classes  # what it sent first stays
    rounds.deaf = {("summarise", "a"), ("learn", "a")}
    asked = [("summarise", "a") in rounds.play().steps() for _ in range(14)]
    assert [number for number, was in enumerate(asked) if was] == [3, 6, 11]


def test_a_fleet_too_small_to_go_on_without_a_device_of_an_older_state_goes_on() -> None:
    rounds = with_older_state(fleet().play(2))
    for expected in (["learn"], ["learn"], ["learn", "summarise"]):
        rounds.fall_short()
        assert sorted({step for step, _ in rounds.steps()}) == expected
    assert rounds.declined == []
    assert [step for step, device, _ in rounds.answered if step == "learn"] == ["learn"] * 2


def test_a_round_in_which_nobody_has_a_summary_falls_short() -> None:
    rounds = fleet().play(3)
    rounds.away = {"a", "b"}
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3, model="digits_linear")
    rounds.deaf = {("summarise", "c")}
    with pytest.raises(QuorumNotReached, match=r"step 'learn': 0 devices answered, the quorum is 1"):
        rounds.play()


# --- guards, newcomers and leavers


def alike(label: int) -> ClassSummary:
    return ClassSummary(count=10, mean=np.ones(128), directions=np.zeros((8, 128)), variance=np.full(128, 0.1))


def parts_of(**parts: dict[int, ClassSummary]) -> dict[str, ClassStatistics]:
    return {device: to_wire(classes) for device, classes in parts.items()}


def test_classes_that_nobody_can_tell_apart_are_left_out() -> None:
    rounds = fleet()
    rounds.server.parts = parts_of(a={label: alike(label) for label in range(4)}, b={})
    rounds.server.merge_parts(rounds)
    left_out = [text for kind, text in rounds.events if kind == "recognition-guard"]
    assert len(left_out) >= 2
    assert len(rounds.server.classes) == 4 - len(left_out)
    off = fleet(recognition_guard=False)
    off.server.parts = rounds.server.parts
    off.server.merge_parts(off)
    assert len(off.server.classes) == 4


def test_what_must_be_recognised_does_not_rise_with_each_class_that_goes() -> None:
    """Half of each of four classes; three alone would need two thirds, which these do not have."""
    rounds = fleet()
    rounds.server.own.recognition = lambda classes, seed: {label: 0.4 if label == 1 else 0.6 for label in classes}
    rounds.server.parts = parts_of(a={label: alike(label) for label in range(4)})
    rounds.server.merge_parts(rounds)
    assert sorted(rounds.server.classes) == [0, 2, 3]
    (text,) = [text for kind, text in rounds.events if kind == "recognition-guard"]
    assert "at least 0.500 is required" in text
    assert "raise server_epochs" in text


def test_of_a_class_that_is_left_out_nothing_is_in_the_variance_of_the_others_or_in_the_predictor() -> None:
    parts = {label: replace(alike(label), variance=np.full(128, 0.1 + label)) for label in range(4)}
    rounds, without = fleet(), fleet()
    rounds.server.own.recognition = lambda classes, seed: {label: float(label != 1) for label in classes}
    rounds.server.parts = parts_of(a=parts)
    rounds.server.merge_parts(rounds)
    without.server.own.recognition = rounds.server.own.recognition
    without.server.parts = parts_of(a={label: parts[label] for label in (0, 2, 3)})
    without.server.merge_parts(without)
    assert [kind for kind, _ in rounds.events] == ["class-of-one-device", "recognition-guard"]
    assert sorted(rounds.server.classes) == [0, 2, 3]
    assert rounds.server.version == without.server.version  # named by what is in it
    assert equal(copied(rounds.server.predictor), copied(without.server.predictor))


@pytest.mark.parametrize("guard", [True, False])
def test_a_class_that_training_does_not_survive_is_left_out_alone(guard: bool) -> None:
    """Of two devices: there is no third that would tell which of them is on another scale."""
    rounds, without = (fleet(recognition_guard=guard, server_epochs=40) for _ in range(2))
    means = {label: np.where(np.arange(128) // 32 == label, 1.0, 0.0) for label in range(4)}
    honest = {label: replace(alike(label), mean=means[label]) for label in (1, 2, 3)}
    far = replace(alike(0), mean=np.full(128, 1e15), variance=np.full(128, 1e20))
    for one, parts in ((rounds, parts_of(a={0: far}, b=honest)), (without, parts_of(b=honest))):
        one.server.context = replace(one.server.context, knowledge_type="float32")
        one.server.parts = parts
        one.server.merge_parts(one)
    left_out = [text for kind, text in rounds.events if kind == "class-left-out"]
    assert len(left_out) == 1
    assert left_out[0].startswith("class 0 is left out: the server's own predictor cannot be trained on rows")
    assert sorted(rounds.server.classes) == sorted(without.server.classes) == [1, 2, 3]
    assert rounds.server.version == without.server.version
    assert equal(copied(rounds.server.predictor), copied(without.server.predictor))


def test_twice_chance_is_asked_for_and_of_two_classes_half_way_from_chance_to_all() -> None:
    assert [least_recognised(classes) for classes in (1, 2, 3, 4, 10)] == [0, 0.75, 2 / 3, 0.5, 0.2]


@pytest.mark.parametrize("classes", [2, 3])
def test_of_few_classes_that_look_alike_not_all_stay(classes: int) -> None:
    """Rates of classes that are all alike come to 1 together: no two reach three quarters, no three two thirds."""
    rounds = fleet()
    rounds.server.parts = parts_of(a={label: alike(label) for label in range(classes)})
    rounds.server.merge_parts(rounds)
    assert len(rounds.server.classes) <= 1


def test_a_class_that_is_alone_stays_though_the_server_does_not_know_it() -> None:
    rounds = fleet(server_epochs=1, learning_rate=1e-9)
    rounds.server.parts = parts_of(a={3: alike(3)})
    rounds.server.merge_parts(rounds)
    assert rounds.figures["recognition"]["3"] < 1
    assert sorted(rounds.server.classes) == [3]


def test_a_device_on_another_scale_reaches_no_class_of_the_others() -> None:
    """Its variance would be part of every class's by way of the pooled one, and it claims most of the samples."""
    honest = {name: {label: alike(label) for label in range(1, 4)} for name in ("a", "b")}
    hostile = replace(alike(0), count=2**31 - 1, variance=np.full(128, 60000.0))
    rounds, without = fleet(recognition_guard=False), fleet(recognition_guard=False)
    without.server.parts = parts_of(**honest)
    without.server.merge_parts(without)
    rounds.server.parts = parts_of(**honest, c={0: hostile})
    rounds.server.merge_parts(rounds)
    assert sorted(rounds.server.classes) == [1, 2, 3]
    for label, one in rounds.server.classes.items():
        assert_allclose(one.diagonal, without.server.classes[label].diagonal, rtol=1e-12)
    assert [kind for kind, _ in rounds.events] == ["rows-capped", "summary-left-out"]
    assert "c" in rounds.server.parts  # kept apart: where the others come to be as long, it counts

    del rounds.server.parts["b"]  # no majority any more that says who is right
    rounds.server.merge_parts(rounds)
    assert 0 in rounds.server.classes


def test_devices_of_up_to_four_times_the_median_length_are_all_merged() -> None:
    rounds = fleet(recognition_guard=False)
    far = {"a": 1.0, "b": 2.0, "c": 7.9}
    rounds.server.parts = parts_of(**{name: {0: replace(alike(0), mean=np.full(128, far[name]))} for name in far})
    rounds.server.merge_parts(rounds)
    assert rounds.server.classes[0].count == 30
    assert rounds.events == []


def test_a_class_whose_merge_does_not_fit_the_wire_is_left_out_alone() -> None:
    rounds = fleet(recognition_guard=False)
    long = np.zeros((8, 128))
    long[0] = 65504
    far = {sign: replace(alike(0), mean=np.full(128, sign * 65504.0), directions=long) for sign in (1, -1)}
    rounds.server.parts = parts_of(a={0: far[1], 1: alike(1)}, b={0: far[-1], 1: alike(1)})
    rounds.server.merge_parts(rounds)
    assert sorted(rounds.server.classes) == [1]
    assert [kind for kind, _ in rounds.events] == ["class-left-out"]
    encode({"classes": to_wire(rounds.server.classes)}, np.float16)


def test_a_newcomer_sends_its_summary_then_and_everybody_gets_the_new_merge() -> None:
    rounds = fleet(recognition_guard=False).play(3)
    before = rounds.server.classes[3].count
    rounds.halves["c"] = make_device([6, 6, 6, 30], seed=3, model="digits_linear")
    rounds.quorums.clear()
    rounds.play()
    assert [step for step in rounds.steps() if step[0] == "summarise"] == [("summarise", "c")]
    assert dict(rounds.quorums) == {"summarise": 0.0, "learn": None}
    assert rounds.server.classes[3].count == before + 30
    assert all("classes" in parts for step, _, parts in rounds.asked if step == "learn")
    assert equal(copied(rounds.halves["c"].local.taps.extractor), copied(rounds.server.extractor))
    rounds.play()
    assert not any("classes" in parts for _, _, parts in rounds.asked)


def test_who_leaves_stays_in_the_merge() -> None:
    rounds = fleet(recognition_guard=False).play(2)
    classes = rounds.server.classes
    rounds.away = {"b"}
    rounds.play(2)
    assert rounds.server.classes is classes
    assert rounds.steps() == [("learn", "a")]


def files_with(directory: Path, wanted: bytes) -> list[Path]:
    """Files of a store that hold these bytes, the database's and its log among them."""
    return [file for file in sorted(directory.rglob("*")) if file.is_file() and wanted in file.read_bytes()]


class Forgetting:
    """A run on the disk whose first device is to be forgotten while it is under way."""

    def __init__(self, directory: Path, rounds: int) -> None:
        wanted = replace(RUNS["classstats averaged"], devices=3, rounds=rounds, train_limit=300, alpha=10.0)
        config, specs, work = prepare(wanted, directory / "work")
        terms = config.run.model_copy(update={"min_devices": 2})  # those that are left are enough
        self.prepared = config.model_copy(update={"run": terms}), specs, work
        self.directory = directory / "store"
        self.store = Store.open(self.directory)
        self.device = self.prepared[1][0].name
        self.sent: list[bytes] = []

    def run(self, ask_in_round: int) -> None:
        with ExitStack() as stack:
            devices = devices_of(self.prepared, stack, DeviceApi(self.store))
            waker = DriveDevices(devices, lambda: self._look(ask_in_round))
            asyncio.run(Engine(self.store, self.prepared[0], waker).run())

    def _look(self, ask_in_round: int) -> None:
        """Keeps what the device's part looks like in an upload and in a checkpoint; then asks to forget it."""
        if not self.sent:
            for row in self.store.asks.uploads(RUN):
                if row["device"] == self.device and row["step"] == "summarise":
                    part = decode(self.store.blobs.open(row["sha256"]))["statistics"]
                    assert isinstance(part, ClassStatistics)
                    assert part.means is not None
                    self.sent = [part.means[0].tobytes(), part.means[1].tobytes()]
        now = self.store.runs.open_round(RUN)
        known = self.store.devices.get(RUN, self.device)
        if now is not None and now["round"] == ask_in_round and known is not None and not known["forget_asked_at"]:
            assert all(len(files_with(self.directory, one)) > 1 for one in self.sent)
            assert not ask_to_forget(self.store, RUN, self.device, served=True)

    def state(self) -> dict[str, Any]:
        row = self.store.runs.get(RUN)
        assert row is not None
        state: dict[str, Any] = unpack_state(self.store.blobs.get_state(row["checkpoint"]))
        return state


def test_a_forgotten_part_is_nowhere_in_the_store_and_the_others_get_the_merge_without_it(tmp_path: Path) -> None:
    run = Forgetting(tmp_path, rounds=5)
    run.run(ask_in_round=3)
    state, others = run.state(), [spec.name for spec in run.prepared[1][1:]]
    assert sorted(state["parts"]) == sorted(state["held"]) == others
    parts = [from_wire(unpacked(part)) for part in state["parts"].values()]
    for label, one in from_wire(unpacked(state["classes"])).items():
        assert one.count == sum(part[label].count for part in parts if label in part)
    assert {tuple(held) for held in state["held"].values()} == {(state["version"], -1)}
    asked = {(row["round"], row["device"]) for row in run.store.asks.uploads(RUN) if row["step"] == "learn"}
    assert {device for number, device in asked if number > 3} == set(others)
    assert len(run.sent) == 2
    assert [files_with(run.directory, one) for one in run.sent] == [[], []]
    assert [row["device"] for row in run.store.history.events(RUN, "forgotten")] == [run.device]
    run.store.close()


def test_a_forgotten_device_is_told_so_and_again_when_it_comes_back(tmp_path: Path) -> None:
    run = Forgetting(tmp_path, rounds=4)
    run.run(ask_in_round=3)
    said: list[str] = []
    with ExitStack() as stack:
        device = devices_of(run.prepared, stack, DeviceApi(run.store))[0]
        device._guard.on_event = lambda event: said.append(f"{event.kind}: {event.text}")
        assert run.store.asks.of_step(RUN, 4, 1)
        assert run.store.asks.next_open(RUN, run.device) is None
        run.store.runs.end(RUN, "running", "")  # as if the others were still at it
        assert device.step(0.0) is Step.FINISHED
        assert sorted(device.models) == ["general", "personal"]
    assert said[-1].startswith(
        f"finished: the operator removed {run.device} from run '{RUN}' and requested its deletion"
    )
    row = next(row for row in views.devices(run.store, RUN).lists["devices"] if row["device"] == run.device)
    assert str(row["forgotten"]).startswith("20")
    assert {one["forgotten"] for one in views.devices(run.store, RUN).lists["devices"]} == {None, row["forgotten"]}
    assert ask_to_forget(run.store, RUN, run.device, served=True)
    run.store.close()


def test_a_device_of_a_finished_run_is_forgotten_at_once(tmp_path: Path) -> None:
    run = Forgetting(tmp_path, rounds=2)
    run.run(ask_in_round=99)
    before = run.state()
    assert all(files_with(run.directory, one) for one in run.sent)
    assert ask_to_forget(run.store, RUN, run.device, served=False)
    state = run.state()
    assert sorted(state["parts"]) == sorted({*before["parts"]} - {run.device})
    assert state["version"] != before["version"]
    assert [files_with(run.directory, one) for one in run.sent] == [[], []]
    assert ask_to_forget(run.store, RUN, run.device, served=False)
    assert len(run.store.history.events(RUN, "forgotten")) == 1
    with pytest.raises(ConfigurationError, match="run 'simulation' has no device 'nobody'"):
        ask_to_forget(run.store, RUN, "nobody", served=False)
    run.store.close()
