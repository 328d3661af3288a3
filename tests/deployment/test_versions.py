"""The versions of the delivered model: numbers, how many are kept, and the way back to an earlier one."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from deployment.deployed import BATCH, device_of
from hypothesis import given
from hypothesis import strategies as st
from support.hostile_server import CLASSES, Events, LyingLink, ask, device_at
from support.open_device import open_device
from support.processes import PATIENCE_SECONDS, wait_until
from support.small_device import SmallWorker

from fleetdistill import Deployment, Device, Eligibility, Event, Predictor, Step
from fleetdistill.compute import light_worker
from fleetdistill.deployment.versions import MODEL, Versions
from fleetdistill.errors import ConfigurationError, DamagedStateError, LinkError, NoRoomError, StateError
from fleetdistill.replacement import judge
from fleetdistill.state import failpoints
from fleetdistill.state.files import Files
from fleetdistill.testing import ManualClock
from fleetdistill.wire.v1 import service_pb2
from fleetdistill_server.testing import MemoryServer

THREE = Deployment(keep_versions=3)


class Crash(Exception):
    """Stands for the moment a process dies."""


def play(device: Device, rounds: int) -> list[np.ndarray]:
    """Plays rounds; the logits after each."""
    result = []
    for _ in range(rounds):
        device.step(0)
        result.append(device.predict(BATCH))
    return result


def assert_uses(device: Device, version: int, logits: np.ndarray) -> None:
    """The model, predictions, the file and the version in use are all of one version."""
    assert device.version == version
    np.testing.assert_array_equal(device.predict(BATCH), logits)
    with torch.no_grad():
        np.testing.assert_allclose(device.model(torch.from_numpy(BATCH)).numpy(), logits, atol=1e-6)
    predictor = Predictor(device.state_dir)
    assert (predictor.version, predictor.error) == (version, "")
    np.testing.assert_allclose(predictor.predict(BATCH), logits, atol=1e-5)


def kinds(events: Events) -> list[tuple[str, int]]:
    return [(event.kind, event.round) for event in events if event.kind in ("rolled-back", "delivered")]


# --- files


@pytest.mark.parametrize("restarting", [False, True])
def test_a_deleted_file_is_exported_again(tmp_path: Path, restarting: bool) -> None:
    device, _ = device_of(tmp_path, range(11, 13))
    with device:
        logits = play(device, 2)[-1]
        if not restarting:
            (tmp_path / "model.onnx").unlink()
            assert device.step(0) is Step.FINISHED
            assert_uses(device, 2, logits)
    if restarting:
        (tmp_path / "model.onnx").unlink()
        device, events = device_of(tmp_path, range(0))
        with device:
            assert device.step(0) is Step.FINISHED
            assert_uses(device, 2, logits)
        assert [event.kind for event in events].count("exported") == 1


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_file_is_exported_again_at_the_start(tmp_path: Path, damage: str) -> None:
    device, _ = device_of(tmp_path, range(11, 12))
    with device:
        (logits,) = play(device, 1)
    file = tmp_path / "model.onnx"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data if damage == "flipped" else data[:-1])
    restarted, _ = device_of(tmp_path, range(0))
    with restarted:
        restarted.step(0)
        assert_uses(restarted, 1, logits)


@pytest.mark.parametrize(("error", "kept"), [(OSError(28, "No space left on device"), 0), (ZeroDivisionError(), 1)])
def test_an_export_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kept: int
) -> None:
    """After an error of the disk a minute later, after any error at the next start."""

    def fail(*given: Any, **named: Any) -> None:
        raise error

    clock = ManualClock()
    device, events = device_of(tmp_path, range(11, 12), clock=clock)
    with device:
        with monkeypatch.context() as patch:
            patch.setattr(torch.onnx, "export", fail)
            (logits,) = play(device, 1)
        for seconds in (59, 1):
            clock.advance(seconds)
            assert not (tmp_path / "model.onnx").exists()
            device.step(0)
        assert (tmp_path / "model.onnx").exists() == (not kept)
        assert len(events.texts("not-exported")) == 1
    restarted, _ = device_of(tmp_path, range(0))
    with restarted:
        restarted.step(0)
        assert_uses(restarted, 1, logits)


class Away(LyingLink):
    """A server that does not reply."""

    def check_in(self, identity: Any, profile: Any) -> Any:
        raise LinkError("the server is away")


@pytest.mark.parametrize("kind", ["answered", "delivered"])
def test_what_was_delivered_before_a_kill_is_used_offline(tmp_path: Path, kind: str) -> None:
    def die(event: Event) -> None:
        if event.kind == kind:
            raise SystemExit

    for link in (LyingLink(ask(round=11)), Away()):  # and a second kill, offline, before the app has the event
        device, _ = device_at(link, tmp_path, export="round", on_event=die)
        with pytest.raises(SystemExit):
            device.step(0)
        device.close(leave=False)
    restarted, events = device_at(Away(), tmp_path, export="round")
    with restarted:
        assert restarted.version == 1
        logits = restarted.predict(BATCH)
        with pytest.raises(LinkError, match="the server is away"):
            restarted.step(0)
        assert_uses(restarted, 1, logits)
    assert [event.kind for event in events if event.kind in ("delivered", "exported")] == ["delivered", "exported"]


# --- roll-back on request


def test_roll_back_restores_previous_model_predictions_and_file(tmp_path: Path) -> None:
    device, events = device_of(tmp_path, range(11, 14), deployment=THREE)
    with device:
        assert device.version == 0
        logits = play(device, 3)
        assert_uses(device, 3, logits[2])
        for back in (2, 1):
            assert device.roll_back() == back
            assert device.version == back + 1, "in the next turn"
            device.step(0)
            assert_uses(device, back, logits[back - 1])
            last = [event for event in events if event.kind == "rolled-back"][-1]
            assert (last.round, last.values) == (10 + back, {"version": back})
        with pytest.raises(StateError, match=r"no earlier version of the model than version \d+, which is in use"):
            device.roll_back()
        assert sorted(os.listdir(tmp_path / "versions")) == ["3", "deployed.json"]
        assert device.roll_forward() == 3, "the version that the app has returned from is the newest"
        device.step(0)
        assert_uses(device, 3, logits[2])
        last = [event for event in events if event.kind in ("delivered", "rolled-back")][-1]
        assert (last.kind, last.round, last.values) == ("delivered", 13, {"version": 3})
    assert sorted(os.listdir(tmp_path / "versions")) == ["1", "deployed.json"]


@pytest.mark.parametrize(
    ("deliveries", "reason"),
    [(1, "it is the first that was delivered"), (2, r"the device keeps 1: pass a larger Deployment\(keep_versions")],
)
def test_a_roll_back_says_why_there_is_no_earlier_version(tmp_path: Path, deliveries: int, reason: str) -> None:
    device, _ = device_of(tmp_path, range(deliveries), deployment=Deployment(keep_versions=1))
    with device:
        play(device, deliveries)
        expected = f"no earlier version of the model than version {deliveries}, which is in use; {reason}"
        with pytest.raises(StateError, match=expected):
            device.roll_back()


@pytest.mark.parametrize("keep", [2, 4])
@pytest.mark.parametrize("kind", ["delivered", "exported"])
def test_roll_back_from_delivery_event_returns_to_version_before(tmp_path: Path, kind: str, keep: int) -> None:
    """The delivered version is not recorded yet when the app hears of it."""
    undisturbed, _ = device_of(tmp_path / "a", range(1, 4))
    with undisturbed:
        expected = play(undisturbed, 3)
    returned: list[int] = []

    def on_event(event: Event) -> None:
        if (event.kind, event.round) == (kind, 3):
            returned.append(device.roll_back())

    device, _ = device_of(tmp_path / "b", range(1, 4), deployment=Deployment(keep_versions=keep), on_event=on_event)
    with device:
        play(device, 3)
        device.step(0)
        assert returned == [2]
        assert_uses(device, 2, expected[1])


def test_version_and_predictions_change_before_event_delivered(tmp_path: Path) -> None:
    result = []

    def on_event(event: Event) -> None:
        if event.kind in ("delivered", "exported"):
            result.append((event.kind, device.version, device.predict(BATCH)))

    device, _ = device_of(tmp_path, range(1, 3), on_event=on_event)
    with device:
        assert device.predict(BATCH).shape
        logits = play(device, 2)
    assert [item[:2] for item in result] == [("delivered", 1), ("exported", 1), ("delivered", 2), ("exported", 2)]
    for _, version, predicted in result:
        np.testing.assert_array_equal(predicted, logits[version - 1])


def test_after_roll_back_training_goes_on_with_a_new_number(tmp_path: Path) -> None:
    results, kept = [], []
    for name, back in (("a", False), ("b", True)):
        device, events = device_of(tmp_path / name, range(1, 3))
        with device:
            play(device, 2)
            if back:
                device.roll_back()
                device.step(0)
                assert device.roll_forward() == 2
        kept.append(kinds(events))
        device, events = device_of(tmp_path / name, range(3, 4))
        with device:
            results.append(play(device, 1)[0])
            assert device.version == 3
            assert device.roll_back() == 2
        kept[-1] += kinds(events)
    np.testing.assert_array_equal(results[0], results[1])
    assert kept[1] == [*kept[0][:2], ("rolled-back", 1), ("delivered", 2), ("delivered", 3)]


@pytest.mark.parametrize("restarting", [False, True])
def test_roll_back_holds_until_roll_forward_despite_deliveries(tmp_path: Path, restarting: bool) -> None:
    undisturbed, _ = device_of(tmp_path / "a", range(1, 6))
    with undisturbed:
        expected = play(undisturbed, 5)
    device, events = device_of(tmp_path / "b", range(1, 3 if restarting else 6))
    play(device, 2)
    assert device.roll_back() == 1
    for number in (3, 4, 5):
        if restarting:
            device.close()
            device, events = device_of(tmp_path / "b", range(number, number + 1))
        device.step(0)
        assert_uses(device, 1, expected[0])
        assert (events[-1].kind, events[-1].round, events[-1].values) == ("kept", number, {"pinned": True})
        assert sorted(os.listdir(tmp_path / "b" / "versions")) == [str(number), "deployed.json"]
    assert device.roll_forward() == 5
    assert device.version == 1, "in the next turn"
    if restarting:
        device.close()
        device, events = device_of(tmp_path / "b", range(0))
    with device:
        device.step(0)
        assert_uses(device, 5, expected[4])
        assert [event.values for event in events if event.kind == "delivered"][-1] == {"version": 5}
        assert device.roll_back() == 1
        device.step(0)
        assert_uses(device, 1, expected[0])


def test_roll_forward_withdraws_what_no_turn_has_begun(tmp_path: Path) -> None:
    device, events = device_of(tmp_path, range(1, 4))
    with device:
        with pytest.raises(StateError, match="was not rolled back, so there is nothing to roll forward to"):
            device.roll_forward()
        play(device, 2)
        device.roll_back()
        assert device.roll_forward() == 2
        with pytest.raises(StateError, match="nothing to roll forward to; the app uses each delivery already"):
            device.roll_forward()
        play(device, 1)
        assert device.version == 3
    assert kinds(events) == [("delivered", 1), ("delivered", 2), ("delivered", 3)]


def test_a_held_version_is_not_what_a_roll_back_returns_to(tmp_path: Path) -> None:
    """The disk was too full to use version 2 after `roll_forward`, and version 3 is delivered meanwhile."""
    (tmp_path / MODEL).write_bytes(b"model")
    versions = Versions(Files(tmp_path), 3)
    versions.announce(1, "", None)
    (first,) = filter(None, [versions.due()])
    versions.record(first)
    versions.hold(tmp_path / MODEL, 2, "", None)
    assert versions.previous() is None
    versions.announce(3, "", None)
    (delivered, previous) = filter(None, [versions.due(), versions.previous()])
    assert (delivered.number, previous.number) == (3, 1)


@pytest.mark.parametrize(("keep", "kept"), [(1, []), (2, ["4"]), (3, ["3", "4"])])
def test_as_many_versions_are_kept_as_the_app_wants(tmp_path: Path, keep: int, kept: list[str]) -> None:
    device, _ = device_of(tmp_path, range(1, 6), deployment=Deployment(keep_versions=keep))
    with device:
        play(device, 5)
    folder = tmp_path / "versions"
    assert sorted(os.listdir(folder)) == [*kept, "deployed.json"]
    for item in kept:
        assert sorted(os.listdir(folder / item)) == ["delivered.safetensors", "model.onnx", "version.json"]


def test_a_request_survives_a_restart(tmp_path: Path) -> None:
    device, _ = device_of(tmp_path, range(1, 3))
    with device:
        logits = play(device, 2)
        device.roll_back()
    restarted, events = device_of(tmp_path, range(0))
    with restarted:
        restarted.step(0)
        assert_uses(restarted, 1, logits[0])
    assert kinds(events) == [("rolled-back", 1)]


def test_model_is_rolled_back_even_without_exported_file(tmp_path: Path) -> None:
    device, _ = device_of(tmp_path, range(1, 3), export="never")
    with device:
        logits = play(device, 2)
        device.roll_back()
        device.step(0)
        np.testing.assert_array_equal(device.predict(BATCH), logits[0])
    exporting, _ = device_of(tmp_path, range(3, 4), export="round")
    with exporting:
        exporting.roll_forward()
        play(exporting, 1)
        assert exporting.roll_back() == 2
        exporting.step(0)
        assert Predictor(tmp_path).version == 2, "exported now, because the kept version has no file"


def test_an_export_that_fails_in_a_roll_back_is_one_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, _ = device_of(tmp_path, range(1, 3), export="never")
    with device:
        logits = play(device, 2)
    exporting, events = device_of(tmp_path, range(0), export="round")
    with exporting:
        exporting.roll_back()
        with monkeypatch.context() as patch:
            patch.setattr(onnx.checker, "check_model", fail)
            exporting.step(0)
        exporting.step(0)
        assert [text for text in events.texts("not-exported") if "not a model" in text] == events.texts("not-exported")
        assert len(events.texts("not-exported")) == 1
        assert exporting.version == 1
        np.testing.assert_array_equal(exporting.predict(BATCH), logits[0])
    assert kinds(events) == [("rolled-back", 1)]


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_roll_back_replaces_a_lost_model(tmp_path: Path, damage: str) -> None:
    """A version that cannot be read is not kept for `roll_forward`."""
    device, _ = device_of(tmp_path, range(1, 3))
    with device:
        logits = play(device, 2)
    lost = tmp_path / "delivered.safetensors"
    data = bytearray(lost.read_bytes())
    lost.unlink()
    if damage == "damaged":
        data[-1] ^= 1
        lost.write_bytes(data)
    device, _ = device_of(tmp_path, range(0))
    with device:
        with pytest.raises(DamagedStateError):
            _ = device.model
        np.testing.assert_allclose(device.predict(BATCH), logits[1], atol=1e-5)  # with model.onnx
        assert device.roll_back() == 1
        device.step(0)
        assert_uses(device, 1, logits[0])
        assert device.roll_forward() == 1


class WaitingLink(LyingLink):
    """Has no more work after its asks: the next request waits until the device interrupts it."""

    def __init__(self, *asks: Any) -> None:
        super().__init__(*asks)
        self.waits, self.interrupted = threading.Event(), threading.Event()

    def next_ask(self, identity: Any, wait_seconds: float) -> Any:
        if not self.asks and not self.interrupted.is_set():
            self.waits.set()
            assert self.interrupted.wait(PATIENCE_SECONDS)
            raise LinkError("the call was cancelled")
        return super().next_ask(identity, wait_seconds)

    def interrupt(self) -> None:
        self.interrupted.set()


def test_a_roll_back_ends_the_wait_for_work(tmp_path: Path) -> None:
    link = WaitingLink(*(ask(round=number) for number in (1, 2)))
    device, events = device_at(link, tmp_path)
    with device:
        device.start()
        assert link.waits.wait(PATIENCE_SECONDS)
        assert device.roll_back() == 1
        assert device.join(PATIENCE_SECONDS)
        assert kinds(events) == [("delivered", 1), ("delivered", 2), ("rolled-back", 1)]
    assert [event.kind for event in events if "contact" in event.kind] == []


def test_a_roll_back_ends_the_pause_after_a_turn(tmp_path: Path) -> None:
    pause = service_pb2.NextAskResponse(come_back=service_pb2.ComeBack(after_seconds=3600, before_seconds=3600))
    link = LyingLink(*(ask(round=number) for number in (1, 2)), pause, remote=True)
    device, events = device_at(link, tmp_path)
    with device:
        device.start()
        wait_until(lambda: not link.asks, "the pause to begin")
        assert device.roll_back() == 1
        wait_until(lambda: kinds(events)[-1] == ("rolled-back", 1), "the roll-back")


def test_a_device_that_must_not_work_rolls_back(tmp_path: Path) -> None:
    may_work = [True]
    when = Eligibility(charging=True, probes={"charging": lambda: may_work[0]})
    device, events = device_of(tmp_path, range(1, 4), eligibility=when)
    with device:
        logits = play(device, 2)
        may_work[0] = False
        assert device.roll_back() == 1
        assert device.tick() is Step.WAITED
        assert_uses(device, 1, logits[0])
        assert device.roll_forward() == 2
        assert device.tick() is Step.WAITED
        assert_uses(device, 2, logits[1])
    assert kinds(events)[-2:] == [("rolled-back", 1), ("delivered", 2)]


def fail(*given: Any, **settings: Any) -> None:
    raise onnx.checker.ValidationError("not a model")


def test_a_damaged_version_is_refused_and_the_model_in_use_stays(tmp_path: Path) -> None:
    device, _ = device_of(tmp_path, range(1, 3))
    with device:
        logits = play(device, 2)
        kept = tmp_path / "versions" / "1" / "delivered.safetensors"
        data = bytearray(kept.read_bytes())
        kept.unlink()
        data[-1] ^= 1
        kept.write_bytes(data)
        with pytest.raises(StateError, match="version 1 of the model is damaged; the device keeps the model in use"):
            device.roll_back()
        device.step(0)
        assert_uses(device, 2, logits[1])


@pytest.mark.parametrize("damaged", [b'{"number": ', b"", "number", None], ids=["cut", "empty", "digit", "missing"])
def test_damaged_record_is_restored_and_numbers_stay_unique(tmp_path: Path, damaged: bytes | str | None) -> None:
    device, _ = device_of(tmp_path, range(1, 4), deployment=Deployment(keep_versions=1))
    with device:
        play(device, 3)
    record, whole = tmp_path / "deployed.json", (tmp_path / "deployed.json").read_bytes()
    record.unlink()
    if damaged is not None:
        record.write_bytes(damaged if isinstance(damaged, bytes) else whole.replace(b'"number": 3', b'"number": 2'))
    restarted, events = device_of(tmp_path, range(4, 5), deployment=Deployment(keep_versions=1))
    with restarted:
        assert restarted.version == 3
        play(restarted, 1)
        assert restarted.version == 4
    texts = [f"{record} is damaged: it does not describe a version; it is kept as deployed.json.damaged-1, and "]
    texts[0] += "version 3 is restored from a copy"
    assert events.texts("damaged") == ([] if damaged is None else texts)


def test_unrecoverable_record_is_put_aside_and_numbers_restart(tmp_path: Path) -> None:
    device, _ = device_of(tmp_path, range(1, 4), deployment=THREE)
    with device:
        play(device, 3)
    for name in ("deployed.json", "versions/deployed.json"):
        (tmp_path / name).write_bytes(b'{"number": ')
    restarted, events = device_of(tmp_path, range(4, 5), deployment=THREE)
    with restarted:
        assert restarted.version == 0
        play(restarted, 1)
        assert restarted.version > 2, "above those that are kept"
    assert (tmp_path / "deployed.json.damaged-1").read_bytes() == b'{"number": '
    (text,) = events.texts("damaged")
    assert text.endswith("and the numbers of versions start again")


def test_file_systems_without_hard_links_get_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*names: Any, **settings: Any) -> None:
        raise OSError("hard links are not supported")

    monkeypatch.setattr(os, "link", unsupported)
    device, _ = device_of(tmp_path, range(1, 3))
    with device:
        logits = play(device, 2)
        device.roll_back()
        device.step(0)
        assert_uses(device, 1, logits[0])
    assert not list(tmp_path.rglob("*.new"))


def test_a_device_without_pytorch_rolls_back_all_its_variants(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "run": {"method": "classstats", "rounds": 3},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
    }
    rng = np.random.default_rng(0)
    images = [rng.random((60, 1, 8, 8), dtype=np.float32) for _ in range(3)]
    result: list[dict[str, np.ndarray]] = []
    with MemoryServer(settings) as server:
        worker = light_worker(lambda: (images[len(result)], np.arange(60) % 10))
        with open_device(server=server.link(), worker=worker, state_dir=tmp_path) as device:
            while not result:
                device.step(0)
                if device.version == 1:
                    result.append({name: model(images[0][:3]) for name, model in device.models.items()})
            device.replace_data()
            while device.version < 2:
                device.step(0)
            result.append({})
            assert device.roll_back() == 1
            device.replace_data()
            device.run()
            assert device.version == 1, "the third delivery is stored"
            for name, model in device.models.items():
                np.testing.assert_array_equal(model(images[0][:3]), result[0][name])
                predicted = Predictor(tmp_path, variant=name).predict(images[0][:3])
                np.testing.assert_allclose(predicted, result[0][name], rtol=1e-4, atol=1e-4)
            assert device.roll_forward() == 3
            device.step(0)
            assert device.version == Predictor(tmp_path).version == 3
            for name, model in device.models.items():
                assert not np.array_equal(model(images[0][:3]), result[0][name])


# --- kills


def die_at(patch: pytest.MonkeyPatch, point: str) -> None:
    def hit(name: str) -> None:
        if name == point:
            raise Crash

    patch.setattr(failpoints, "hit", hit)


def roll_back_now(device: Device) -> None:
    device.roll_back()
    device.step(0)


@pytest.mark.parametrize(
    "point", ["device.roll-back.after-request", "device.roll-back.after-file", "device.roll-back.after-record"]
)
def test_a_device_killed_in_a_roll_back_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    device, _ = device_of(tmp_path, range(1, 3))
    logits = play(device, 2)
    with monkeypatch.context() as patch:
        die_at(patch, point)
        with pytest.raises(Crash):
            roll_back_now(device)
    device.close(leave=False)
    restarted, events = device_of(tmp_path, range(3, 4))
    with restarted:
        play(restarted, 1)
        assert kinds(events) == [("rolled-back", 1)]
        assert_uses(restarted, 1, logits[0])
        assert restarted.roll_forward() == 3
        restarted.step(0)
        assert kinds(events) == [("rolled-back", 1), ("delivered", 3)]
        assert restarted.roll_back() == 1
        restarted.step(0)
        assert_uses(restarted, 1, logits[0])


@pytest.mark.long
@pytest.mark.parametrize(
    "point",
    [
        "device.promote.before-renames",
        "device.promote.between-renames",
        "device.promote.after-renames",
        "device.outcome.after-told",
        "device.roll-back.after-file",
        "device.roll-back.after-record",
    ],
)
def test_kill_while_version_is_pinned_loses_no_delivery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    undisturbed, _ = device_of(tmp_path / "a", range(1, 4))
    with undisturbed:
        expected = play(undisturbed, 3)
    device, _ = device_of(tmp_path / "b", range(1, 4))
    play(device, 2)
    device.roll_back()
    with monkeypatch.context() as patch:
        if point.startswith("device.roll-back"):
            play(device, 1)
            device.roll_forward()
        die_at(patch, point)
        with pytest.raises(Crash):
            device.step(0)
    device.close(leave=False)
    restarted, _ = device_of(tmp_path / "b", range(0))
    with restarted:
        restarted.step(0)
        if not point.startswith("device.roll-back"):
            restarted.roll_forward()
        restarted.step(0)
        assert_uses(restarted, 3, expected[2])
        assert restarted.roll_back() == 1
        restarted.step(0)
        assert_uses(restarted, 1, expected[0])


@pytest.mark.long
@pytest.mark.parametrize(
    "point",
    [
        "device.deploy.after-keep",
        "device.promote.before-renames",
        "device.promote.between-renames",
        "device.promote.after-renames",
        "device.outcome.after-told",
        "device.deploy.before-record",
        "device.deploy.after-record",
    ],
)
def test_a_device_killed_in_a_delivery_has_each_version_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    device, _ = device_of(tmp_path, range(1, 3), deployment=THREE)
    logits = play(device, 1)
    with monkeypatch.context() as patch:
        die_at(patch, point)
        with pytest.raises(Crash):
            device.step(0)
    device.close(leave=False)
    restarted, _ = device_of(tmp_path, range(3, 4), deployment=THREE)
    with restarted:
        while restarted.version < 3:
            logits += play(restarted, 1)
        assert_uses(restarted, 3, logits[-1])
        assert restarted.roll_back() == 2
        restarted.step(0)
        assert restarted.roll_back() == 1
        restarted.step(0)
        assert_uses(restarted, 1, logits[0])


@pytest.mark.parametrize("failing", [1, 2])
def test_full_disk_when_version_is_recorded_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    left = [failing]

    def full(name: str) -> None:
        if name == "device.deploy.before-record" and left[0]:
            left[0] -= 1
            raise NoRoomError("the state directory cannot be used: No space left on device")

    device, events = device_of(tmp_path, range(1, 4), deployment=THREE)
    with device:
        logits = play(device, 1)
        monkeypatch.setattr(failpoints, "hit", full)
        logits += play(device, 1)
        assert device.version == 2
        assert events.texts("not-recorded") == [
            "version 2 of the model could not be recorded: the state directory cannot be used: No space left on device"
            "; the device goes on, and the next delivery tries again"
        ]
        if failing == 2:
            with pytest.raises(LinkError, match="No space left on device"):
                device.step(0)
        logits += play(device, 1)
        assert_uses(device, 3, logits[2])
        for back in (2, 1):
            assert device.roll_back() == back
            device.step(0)
            assert_uses(device, back, logits[back - 1])


# --- accuracy


@given(
    accuracies=st.dictionaries(st.sampled_from("abc"), st.floats(0, 1), min_size=1),
    in_use=st.floats(0, 1),
    drop=st.floats(0, 1),
)
def test_model_replaces_apps_unless_accuracy_falls_beyond_limit(
    accuracies: dict[str, float], in_use: float, drop: float
) -> None:
    best, replacement = judge(accuracies, in_use, drop)
    assert accuracies[best] == max(accuracies.values())
    assert replacement.replaced == (max(accuracies.values()) >= in_use - drop)
    assert judge(accuracies, None, drop)[1].replaced


def disagreement(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    result = np.flatnonzero(first.argmax(axis=1) != second.argmax(axis=1))
    assert len(result) >= 3, "the two versions must differ somewhere"
    return result


INPUTS = np.random.default_rng(5).normal(size=(4000, 4)).astype(np.float32)


def data_for_the_first(state_dir: Path) -> tuple[np.ndarray, np.ndarray]:
    """Validation data on which of two versions, which a device has then, only the first one is right."""
    anything = (INPUTS[:60], np.arange(60) % CLASSES)
    device, _ = device_of(
        state_dir, range(1, 3), validation_data=anything, deployment=Deployment(keep_versions=3, max_accuracy_drop=1.0)
    )
    with device:
        answers = []
        for _ in range(2):
            device.step(0)
            answers.append(device.predict(INPUTS))
    differ = disagreement(*answers)
    return INPUTS[differ], answers[0][differ].argmax(axis=1)


@pytest.mark.parametrize(("limit", "version"), [(0.0, 1), (0.5, 1), (1.0, 3)])
def test_model_worse_than_earlier_on_new_data_is_rolled_back(tmp_path: Path, limit: float, version: int) -> None:
    """The second version is delivered; then the app has data on which only the first one is right."""
    validation = data_for_the_first(tmp_path)
    restarted, events = device_of(
        tmp_path,
        range(3, 4),
        validation_data=validation,
        deployment=Deployment(keep_versions=3, max_accuracy_drop=limit),
    )
    with restarted:
        restarted.step(0)
        assert restarted.version == version
        assert ("rolled-back", 1) in kinds(events) or version == 3
        if version == 1:
            assert_uses(restarted, 1, restarted.predict(BATCH))
            np.testing.assert_array_equal(restarted.predict(validation[0]).argmax(axis=1), validation[1])


def test_a_number_is_not_given_again_after_a_roll_back(tmp_path: Path) -> None:
    """The device returns from the third version to the first by itself, and forgets the others."""
    validation = data_for_the_first(tmp_path)
    restarted, _ = device_of(tmp_path, range(3, 4), validation_data=validation, deployment=THREE)
    with restarted:
        restarted.step(0)
        assert restarted.version == 1
    again, _ = device_of(tmp_path, range(4, 5))
    with again:
        again.step(0)
        assert again.version == 4


def test_the_version_that_an_app_has_returned_to_stays_if_worse(tmp_path: Path) -> None:
    """The app returned to the second of three; then it has data on which only the first one is right."""
    anything = (INPUTS[:60], np.arange(60) % CLASSES)
    any_model = Deployment(keep_versions=3, max_accuracy_drop=1.0)
    device, _ = device_of(tmp_path, range(1, 4), validation_data=anything, deployment=any_model)
    with device:
        answers = []
        for _ in range(3):
            device.step(0)
            answers.append(device.predict(INPUTS))
        assert device.roll_back() == 2
        device.step(0)
    differ = disagreement(answers[0], answers[1])
    validation = (INPUTS[differ], answers[0][differ].argmax(axis=1))
    restarted, events = device_of(tmp_path, range(4, 5), validation_data=validation, deployment=THREE)
    with restarted:
        restarted.step(0)
        assert restarted.version == 2
        np.testing.assert_array_equal(restarted.predict(INPUTS), answers[1])
    assert kinds(events) == []


def test_with_a_limit_a_slightly_worse_model_is_delivered(tmp_path: Path) -> None:
    own, _ = device_of(tmp_path / "own", range(1))
    with own:
        logits = own.predict(INPUTS)
    margin = np.sort(logits, axis=1)
    close = np.argsort(margin[:, -1] - margin[:, -2])[:40]
    validation = (INPUTS[close], logits[close].argmax(axis=1))  # the app's own model is right, but only just
    for limit, kind in ((0.0, "kept"), (1.0, "delivered")):
        device, events = device_of(
            tmp_path / kind,
            range(1, 2),
            validation_data=validation,
            deployment=Deployment(max_accuracy_drop=limit),
        )
        with device:
            device.step(0)
        (judged,) = [event for event in events if event.kind in ("kept", "delivered")]
        assert judged.kind == kind
        assert judged.values["accuracy"] < judged.values["accuracy_in_use"] == 1.0


# --- workers of an app


def test_worker_without_protocol_accepts_only_keep_versions(tmp_path: Path) -> None:
    changes = {"model": None, "data": None, "worker": SmallWorker, "export": "never"}
    device, _ = device_of(tmp_path, range(1), **changes, deployment=Deployment(max_accuracy_drop=0.1))
    with device, pytest.raises(ConfigurationError, match="the worker SmallWorker supports only keep_versions"):
        device.step(0)
    kept, _ = device_of(tmp_path / "kept", range(1, 3), **changes, deployment=THREE)
    with kept:
        kept.step(0)
        kept.step(0)
        assert (kept.version, kept.roll_back()) == (2, 1)
