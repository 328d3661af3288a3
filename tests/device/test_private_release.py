"""What a device of a private run sends: noise of its own, once, and nothing else that depends on its rows."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from device.sdk_fleet import Fleet as OpenFleet
from device.sdk_fleet import tiny_data, tiny_model
from support.forked import Forked
from support.private_fleet import (
    CLASSES,
    RUN,
    SIZE,
    PrivateFleet,
    RecordingLink,
    RowsWorker,
    make_device,
    received,
    take_a_step,
)

from fleetdistill import Splits, Step
from fleetdistill.compute import light_worker
from fleetdistill.device import private
from fleetdistill.errors import CannotAnswer, ConfigurationError, KnowledgeError
from fleetdistill.knowledge import ClassSpace, ClassSums, Metric, Metrics, ModelParameters, Plan
from fleetdistill.methods.base import Answer
from fleetdistill.models import build_model
from fleetdistill.privacy.accountant import discrete_mu_for, mu_for
from fleetdistill.state import failpoints
from fleetdistill.state.files import Files
from fleetdistill.state.format import sealed_json
from fleetdistill.state.secure_sessions import ENDED
from fleetdistill.testing import EventLog
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.intake.memory_link import MemoryLink
from fleetdistill_server.store.store import Store


@pytest.fixture
def fleet():
    return PrivateFleet()


def check_in_and_answer(device, fleet, name="d"):
    device.step(0)
    fleet.ask(name)
    assert device.step(0) in (Step.ANSWERED, Step.DECLINED)


def ledger(directory):
    return json.loads((directory / "privacy.json").read_text())["releases"]


# --- one release


@pytest.mark.parametrize("exact", [True, False])
def test_release_has_noise_of_the_runs_epsilon_and_is_recorded(tmp_path, exact):
    fleet = PrivateFleet(exact=exact)
    with make_device(MemoryLink(fleet.api), tmp_path) as device:
        check_in_and_answer(device, fleet)
    (sent,) = received(fleet.store)
    assert sent.discrete is exact
    assert sent.mu == (discrete_mu_for if exact else mu_for)(1, 1e-5)
    assert abs(sent.counts - 10).max() > 0, "30 rows of 3 classes"
    (entry,) = ledger(tmp_path)
    assert (entry["mu"], entry["exact"], entry["run"]) == (sent.mu, exact, RUN)
    assert entry["epsilon"] == pytest.approx(1, rel=1e-6)


def test_devices_with_same_rows_and_seed_send_different_noise(fleet, tmp_path):
    for name in ("d", "e"):
        with make_device(MemoryLink(fleet.api), tmp_path / name, device_id=name) as device:
            check_in_and_answer(device, fleet, name)
    first, second = received(fleet.store)
    assert (first.sums != second.sums).mean() > 0.9  # noise on a grid is equal by chance in 1 of 3,600 numbers


def test_every_further_ask_of_the_run_gets_the_same_noise(fleet, tmp_path):
    """A server that lost an answer, or whose round fell short, asks again; the average of many must tell no more."""
    for _ in range(3):
        with make_device(MemoryLink(fleet.api), tmp_path) as device:
            check_in_and_answer(device, fleet)
    first, *others = received(fleet.store)
    assert len(others) == 2
    assert all(np.array_equal(other.sums, first.sums) for other in others)
    assert len(ledger(tmp_path)) == 1


def test_the_smaller_epsilon_of_run_and_app_decides(fleet, tmp_path):
    with make_device(MemoryLink(fleet.api), tmp_path, privacy=(0.25, 1e-6)) as device:
        check_in_and_answer(device, fleet)
    (sent,) = received(fleet.store)
    assert sent.mu == mu_for(0.25, 1e-6)


# --- the budget


def test_other_rows_are_second_release_declined_beyond_budget(fleet, tmp_path):
    link, events, rows = RecordingLink(fleet.api), EventLog(), [30]
    worker = lambda contract: RowsWorker(contract, rows[0])  # noqa: E731
    with make_device(link, tmp_path, worker=worker, on_event=events.append) as device:
        check_in_and_answer(device, fleet)
        rows[0] = 31
        device.replace_data()
        check_in_and_answer(device, fleet)
    assert len(received(fleet.store)) == 1
    (declined,) = [message for call, message in link.sent if call == "decline"]
    assert declined.reason == "privacy budget used up"
    assert "privacy budget used up" in [event.text for event in events][-1]


def test_data_replaced_after_the_release_are_an_event_each_time(fleet, tmp_path):
    """Before the release there is none: it is made of the new data."""
    events, rows = EventLog(), [30]
    worker = lambda contract: RowsWorker(contract, rows[0])  # noqa: E731
    with make_device(MemoryLink(fleet.api), tmp_path, worker=worker, on_event=events.append) as device:
        device.step(0)
        rows[0] = 31
        device.replace_data()
        check_in_and_answer(device, fleet)
        assert "not-released" not in events.kinds()
        device.replace_data()
        for _ in range(3):
            device.step(0)
        (told,) = [event for event in events if event.kind == "not-released"]
    assert told.values == {"run": RUN}
    assert told.text.startswith("run 'private' has this device's release or its part of a sum, which is final: the")
    assert len(received(fleet.store)) == 1


@pytest.mark.parametrize("is_in_sum", [True, False])
def test_a_part_of_a_secure_sum_is_final_as_a_release_is(tmp_path, is_in_sum):
    """A sum that failed is made again, of the new data."""
    sums = [{"run": RUN, "sid": "00", "outcome": "", "is_in_sum": is_in_sum, "is_charged": False}]
    Files(tmp_path).save(ENDED, sealed_json({"sums": sums}))
    assert private.has_released(Files(tmp_path), RUN) is is_in_sum
    assert not private.has_released(Files(tmp_path), "another")


def test_other_arrays_after_a_restart_are_an_event_once(fleet, tmp_path):
    inputs, labels = np.random.default_rng(0).random((30, 1, 8, 8)).astype(np.float32), np.arange(30) % CLASSES
    told: list[int] = []
    for data in ((inputs, labels), (inputs, labels), (inputs[::-1], labels), (inputs[::-1], labels)):
        events, model = EventLog(), lambda: build_model("digits_linear", classes=CLASSES)
        given = {"worker": None, "model": model, "data": data, "on_event": events.append}
        with make_device(MemoryLink(fleet.api), tmp_path, **given) as device:
            if not told:
                check_in_and_answer(device, fleet)
            device.step(0)
        told.append(events.kinds().count("not-released"))
    assert told == [0, 0, 1, 0]


def test_a_larger_budget_allows_a_release_of_other_rows(fleet, tmp_path):
    for rows in (30, 31):
        worker = partial(RowsWorker, rows=rows)
        with make_device(MemoryLink(fleet.api), tmp_path, worker=worker, privacy=(1.5, 1e-5)) as device:
            check_in_and_answer(device, fleet)
    assert len(received(fleet.store)) == 2
    assert ledger(tmp_path)[-1]["epsilon"] == pytest.approx(1.4651699604, abs=1e-9)


def test_device_with_budget_takes_part_in_no_run_without_privacy(tmp_path):
    """Not even its profile is sent: an answer without noise would exceed any budget."""
    link = RecordingLink(OpenFleet().api)
    arguments = {"worker": None, "model": tiny_model, "data": tiny_data(), "privacy": (1.0, 1e-5)}
    with make_device(link, tmp_path, **arguments) as device, pytest.raises(ConfigurationError, match="is not private"):
        device.step(0)
    assert link.sent == []


@pytest.mark.parametrize("given", [1.0, (1.0,), (1, 2, 3), ("1", "2"), (0, 1e-5), (1, 0)])
def test_an_impossible_budget_is_refused(tmp_path, given):
    with pytest.raises(ConfigurationError, match="privacy is"):
        make_device("127.0.0.1:1", tmp_path, privacy=given)


# --- nothing else leaves


def images(rows: int, seed: int) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    return random.random((rows, 1, 8, 8)).astype(np.float32), random.integers(0, CLASSES, rows)


def space() -> ClassSpace:
    random = np.random.default_rng(0)
    return ClassSpace(
        labels=[0, 1, 2],
        counts=np.full(3, 50, np.int32),
        directions=random.normal(size=(SIZE, 2)),
        origin=np.zeros(2),
        centres=random.normal(size=(3, 2)),
        df=np.array(147, np.int64),
        shrinkage=np.array(0.0),
        outside=np.array(6.0),
    )


LEARN = {"plan": Plan(values={"merge": 7, "counted": True, "draw_seed": 3}), "space": space()}
CONSTANT = ClassSums(
    counts=np.zeros(CLASSES, np.float32),
    sums=np.zeros((CLASSES, SIZE), np.float32),
    second_moment=np.zeros(SIZE * (SIZE + 1) // 2, np.float32),
    mu=0.25,
    discrete=False,
)
BACKENDS = {
    "torch": lambda data, test, validation: {
        "model": partial(build_model, "digits_linear", classes=CLASSES),
        "data": data,
        "test_data": test,
        "validation_data": validation,
        "worker": None,
    },
    "light": lambda data, test, validation: {
        "worker": light_worker(Splits(data, test_data=test, validation_data=validation)),
    },
}


def everything_sent(backend, seed, rows, directory):
    """All messages of a device that checks in, answers both steps, and declines a step that it does not know."""
    fleet = PrivateFleet()
    link = RecordingLink(fleet.api)
    given = BACKENDS[backend](images(rows, seed), images(9, seed + 1), images(7, seed + 2))
    with make_device(link, directory, **given) as device:
        device.step(0)
        for step, parts in (("summarise", {}), ("learn", LEARN), ("learn", {"plan": LEARN["plan"]}), ("train", {})):
            fleet.ask(step=step, parts=parts)
            assert device.step(0) in (Step.ANSWERED, Step.DECLINED)
    return link.sent


@pytest.mark.parametrize("backend", BACKENDS)
def test_given_noisy_sums_no_message_bit_depends_on_the_rows(backend, tmp_path, monkeypatch):
    """The mechanism's output is held fixed; then all that is sent must be equal for any data, test and validation."""
    monkeypatch.setattr(private, "noisy_sums", lambda rows, units, used: CONSTANT)
    first = everything_sent(backend, 1, 40, tmp_path / "first")
    second = everything_sent(backend, 2, 17, tmp_path / "second")
    assert [call for call, _ in first].count("upload") == 3
    assert [call for call, _ in first].count("decline") == 1
    assert first == second


def test_without_noise_held_fixed_the_messages_differ(tmp_path):
    """The test above would see a difference."""
    assert everything_sent("light", 1, 40, tmp_path / "a") != everything_sent("light", 1, 40, tmp_path / "b")


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_fields_that_tell_about_rows_are_empty(backend, tmp_path):
    sent = everything_sent(backend, 1, 40, tmp_path)
    profile = next(message for call, message in sent if call == "check_in")
    assert (profile.samples, profile.data_version) == (1, b"")
    headers = [message for call, message in sent if call == "upload"]
    assert [header.samples for header in headers] == [1] * 3
    kinds = [[part.WhichOneof("kind") for part in header.payload.parts.parts] for header in headers]
    assert kinds == [["class_sums"], [], []]
    assert [message.reason for call, message in sent if call == "decline"] == [private.DECLINED]


OTHERS = {
    "metrics": Metrics(metrics=[Metric(name="accuracy", split="test", sum=1.0, count=2)]),
    "parameters": ModelParameters(parameters={"w": np.zeros(1, np.float32)}),
    "sums": replace(CONSTANT),
}


@pytest.mark.parametrize("name", OTHERS)
def test_anything_but_rows_is_not_sent_whatever_method_answers(fleet, tmp_path, monkeypatch, name):
    def answer(self, ask, parts, allow):
        result = given(self, ask, parts, allow)
        return replace(result, answer=Answer(parts={**result.answer.parts, name: OTHERS[name]}, samples=30))

    given, link, events = RowsWorker.answer, RecordingLink(fleet.api), EventLog()
    monkeypatch.setattr(RowsWorker, "answer", answer)
    with make_device(link, tmp_path, on_event=events.append) as device:
        check_in_and_answer(device, fleet)
    assert received(fleet.store) == []
    assert [message.reason for call, message in link.sent if call == "decline"] == [private.DECLINED]
    assert "which a private run must not send" in [event.text for event in events][-1], "the app learns the reason"


@pytest.mark.parametrize("error", [KnowledgeError("row 3 of class 2"), CannotAnswer("17 rows"), MemoryError()])
def test_a_decline_has_one_fixed_reason(fleet, tmp_path, monkeypatch, error):
    def fail(*given):
        raise error if not isinstance(error, MemoryError) else CannotAnswer("out of memory at row 3")

    link = RecordingLink(fleet.api)
    monkeypatch.setattr(RowsWorker, "answer", fail)
    with make_device(link, tmp_path) as device:
        check_in_and_answer(device, fleet)
    assert [message.reason for call, message in link.sent if call == "decline"] == ["this device cannot answer"]


def test_an_app_that_allows_no_class_statistics_releases_nothing(fleet, tmp_path):
    with (
        pytest.raises(Exception, match="class_statistics"),
        make_device(MemoryLink(fleet.api), tmp_path, allow=()) as device,
    ):
        check_in_and_answer(device, fleet)
    assert not (tmp_path / "privacy.json").exists()


def test_a_row_of_infinities_counts_as_a_row_of_zeros(fleet, tmp_path, monkeypatch):
    """A decline, or an error, would tell the server about the row."""

    class Broken(RowsWorker):
        def __init__(self, contract):
            super().__init__(contract)
            self._rows[3] = np.inf
            self._rows[4, 0] = np.nan

    with make_device(MemoryLink(fleet.api), tmp_path, worker=Broken) as device:
        check_in_and_answer(device, fleet)
    (sent,) = received(fleet.store)
    assert np.isfinite(sent.sums).all()


# --- kill -9


def one_life(points, store, directory, budget=None):
    """Whether a device that was started with these failpoints has died of SIGKILL."""
    process = Forked(take_a_step, store, directory, budget)
    process.start(points)
    assert process.process is not None
    process.process.join(60)
    return process.was_killed


def disk_fleet(folder):
    fleet = PrivateFleet(Store.open(folder))
    fleet.ask()
    return fleet


def hits_of_an_answer(folder, monkeypatch):
    """The failpoints that a first answer comes by, in order."""
    names: list[str] = []
    disk_fleet(folder / "store").store.close()
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "hit", names.append)
        with make_device(MemoryLink(DeviceApi(Store.open(folder / "store"))), folder / "d") as device:
            device.step(0)
    return names


@pytest.mark.long
@pytest.mark.slow
def test_a_device_that_dies_sends_one_noise_vector_or_none(tmp_path, monkeypatch):
    """SIGKILL at each failpoint from the ledger to the receipt, device.privacy.after-record and after-release too."""
    names = hits_of_an_answer(tmp_path / "whole", monkeypatch)
    first = names.index("device.privacy.after-record") - 4  # the ledger's own write
    recorded, stored = (names.index(f"device.privacy.after-{what}") - 2 for what in ("record", "release"))  # renamed
    last = names.index("device.upload.after-receipt")
    assert {"device.privacy.after-record", "device.outbox.after-manifest", "front.receipt.before-commit"} <= set(
        names[first:last]
    )
    sending = names.index("device.upload.before-send")
    for number in range(first, last + 1):
        if number > sending and not names[number].startswith(("front.receipt", "device.")):
            continue  # the server's own points are those of every upload
        folder = tmp_path / str(number)
        fleet = disk_fleet(folder / "store")
        assert one_life(f"*=kill@{number + 1}", folder / "store", folder / "d"), names[number]
        before = received(fleet.store)
        assert not one_life("", folder / "store", folder / "d")
        lost = recorded <= number < stored  # the budget is spent, and no noise was kept
        sent = received(fleet.store)
        assert len(sent) == (0 if lost else 1), names[number]
        assert len(ledger(folder / "d")) == 1, names[number]
        for item in before:
            assert np.array_equal(item.sums, sent[0].sums), names[number]
        if sent:
            with np.load(folder / "d" / "released.npz") as kept:
                assert np.array_equal(kept["sums"], sent[0].sums), names[number]
        fleet.store.close()


@pytest.mark.slow
def test_device_dying_repeatedly_sends_one_noise_within_budget(tmp_path):
    points = ["device.privacy.after-record", "device.privacy.after-release", "device.outbox.before-data"]
    points += ["device.outbox.before-manifest", "device.outbox.after-manifest", "device.upload.before-send"]
    points += ["device.upload.after-receipt"]
    fleet = disk_fleet(tmp_path / "store")
    for point in points:
        assert one_life(f"{point}=kill", tmp_path / "store", tmp_path / "d", (1.5, 1e-5)), point
    assert not one_life("", tmp_path / "store", tmp_path / "d", (1.5, 1e-5))
    (sent,) = received(fleet.store)
    with np.load(tmp_path / "d" / "released.npz") as kept:
        assert np.array_equal(kept["sums"], sent.sums)
    assert len(ledger(tmp_path / "d")) == 2, "one of them was spent by the death before the noise"
