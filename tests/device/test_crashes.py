"""What survives a kill: an exception stands for the moment the process dies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from device.sdk_fleet import RUN, Crash, Fleet, crashing_link, make_device, tiny_data
from support.devices import answer_waits, compute_of, state_of

from fleetdistill import Device, Event, Step
from fleetdistill.compute.torch_compute import TorchCompute
from fleetdistill.device.deployer import Deployer
from fleetdistill.device.events import Events as DeviceEvents
from fleetdistill.errors import (
    ExportError,
    KnowledgeError,
)
from fleetdistill.state.outbox import Outbox
from fleetdistill.testing import EventLog
from fleetdistill_server.intake.memory_link import MemoryLink


def test_an_export_that_fails_is_told_once_and_locks_nobody_out(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise ExportError("onnx is not installed")

    events = EventLog()
    with make_device(fleet, tmp_path, events, export="round") as device:
        fleet.ask("d")
        with monkeypatch.context() as patch:
            patch.setattr(TorchCompute, "export", fail)
            assert device.step(0) is Step.ANSWERED
            assert events.of("not-exported").values == {"version": 1, "error": "ExportError"}
            assert "onnx is not installed; the previous file remains" in events.of("not-exported").text
            assert device.step(0) is Step.WAITED, "not again at every call"
        fleet.ask("d")
        assert device.step(0) is Step.ANSWERED
        assert_exported(device, tmp_path / "model.onnx", "2")


def test_due_export_is_forgotten_by_app_that_wants_none(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "model.onnx.due").write_bytes(b"damaged")
    with make_device(fleet, tmp_path, export="never") as device:
        device.step(0)
    assert not (tmp_path / "model.onnx.due").exists()
    assert not (tmp_path / "model.onnx").exists()


def test_diverging_training_declines_ask_and_app_goes_on(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(*given: Any, **settings: Any) -> None:
        raise KnowledgeError("the loss is not finite")

    events = EventLog()
    with make_device(fleet, tmp_path, events) as device:
        fleet.ask("d")
        with monkeypatch.context() as patch:
            patch.setattr(TorchCompute, "answer", diverge)
            assert device.step(0) is Step.DECLINED
        (declined,) = fleet.store.history.events(RUN, "declined")
        assert "the loss is not finite" in declined.text
        assert "dropped" in events.kinds()
        fleet.ask("d")
        assert device.step(0) is Step.ANSWERED
    assert len(fleet.store.asks.uploads(RUN)) == 1


def test_scores_of_an_answer_that_is_dropped_are_not_told(fleet: Fleet, tmp_path: Path) -> None:
    """The model goes back to what it was, so an app must not be told how good it had been."""

    class TooLate(MemoryLink):
        def upload_status(self, identity: Any, name: Any) -> Any:
            fleet.store.asks.expire(RUN, time.time() + 1e6)
            return super().upload_status(identity, name)

    events = EventLog()
    with make_device(fleet, tmp_path, events, link=TooLate(fleet.api)) as device:
        fleet.ask("d")
        device.step(0)
    assert "dropped" in events.kinds()
    assert "scored" not in events.kinds()


def test_restart_with_other_validation_data_judges_model_anew(fleet: Fleet, tmp_path: Path) -> None:
    """An accuracy of 1 on the data of before must not keep every later model out."""
    easy = tiny_data(1, seed=3)
    hard = (tiny_data(60, seed=4)[0], np.arange(60) % 3)
    with make_device(fleet, tmp_path, validation_data=easy) as device:
        fleet.ask("d")
        device.step(0)
    events = EventLog()
    with make_device(fleet, tmp_path, events, validation_data=hard) as device:
        assert device.step(0) is Step.WAITED
        fleet.ask("d")
        device.step(0)
    (verdict,) = [event for event in events if event.kind in ("kept", "delivered")]
    assert 0 < verdict.values["accuracy_in_use"] < 0.9


@pytest.mark.parametrize("moment", ["promote", "export"])
def test_kill_between_receipt_and_export_exports_after_restart(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The file must not stay one delivery behind the model that it claims to be, also when no round follows."""

    def die(*given: Any, **more: Any) -> None:
        raise Crash

    crashing = make_device(fleet, tmp_path, export="round")
    fleet.ask("d")
    crashing.step(0)
    fleet.ask("d")
    with monkeypatch.context() as patch:
        patch.setattr(Outbox if moment == "promote" else Deployer, moment, die)
        with pytest.raises(Crash):
            crashing.step(0)
    crashing.close(leave=False)
    with make_device(fleet, tmp_path, export="round") as device:
        device.step(0)
        device.step(0)
        assert_exported(device, tmp_path / "model.onnx", str(fleet.round))
    assert not (tmp_path / "model.onnx.due").exists()


def assert_exported(device: Device, path: Path, number: str) -> None:
    import onnx

    metadata = {prop.key: prop.value for prop in onnx.load(path).metadata_props}
    assert metadata["round"] == number
    inputs = tiny_data()[0]
    session = onnxruntime.InferenceSession(path)
    with torch.no_grad():
        expected = device.model(torch.as_tensor(inputs)).numpy()
    np.testing.assert_allclose(session.run(None, {"input": np.asarray(inputs)})[0], expected, atol=1e-5)


@pytest.mark.parametrize("moment", ["before sending", "after the receipt was given"])
def test_kill_around_upload_is_settled_after_restart(fleet: Fleet, tmp_path: Path, moment: str) -> None:
    fleet.ask("d")
    crashing = make_device(fleet, tmp_path / "a", link=crashing_link(fleet.api, moment))
    with pytest.raises(Crash):
        crashing.step(0)
    crashing.close(leave=False)  # what the end of the process does
    events = EventLog()
    with make_device(fleet, tmp_path / "a", events) as device:
        device.step(0)
        assert "ask" not in events.kinds(), "the answer is in the outbox: nothing is computed again"
        assert events.kinds() == ["checked-in", "scored", "answered", "delivered"]
        again = {name: tensor.clone() for name, tensor in device.model.state_dict().items()}
    assert len(fleet.store.asks.uploads(RUN)) == 1
    other = Fleet()
    other.ask("d")
    with make_device(other, tmp_path / "b") as undisturbed:
        undisturbed.step(0)
        assert all(torch.equal(tensor, again[name]) for name, tensor in undisturbed.model.state_dict().items())


def test_kill_in_training_trains_again_from_committed_state(fleet: Fleet, tmp_path: Path) -> None:
    fleet.ask("d")
    crashing = make_device(fleet, tmp_path)
    worker = compute_of(crashing)
    original = worker.method.knowledge
    worker.method.knowledge = lambda: (_ for _ in ()).throw(Crash())
    with pytest.raises(Crash):
        crashing.step(0)
    assert original is not None
    crashing.close(leave=False)
    with make_device(fleet, tmp_path) as device:
        assert device.step(0) is Step.ANSWERED
    assert len(fleet.store.asks.uploads(RUN)) == 1


def test_answer_to_closed_round_is_dropped_and_training_undone(fleet: Fleet, tmp_path: Path) -> None:
    fleet.ask("d")
    events = EventLog()
    crashing = make_device(fleet, tmp_path, link=crashing_link(fleet.api, "before sending"))
    with pytest.raises(Crash):
        crashing.step(0)
    crashing.close(leave=False)
    fleet.store.runs.close_short_round(RUN, fleet.round, "too few devices")
    with make_device(fleet, tmp_path, events) as device:
        before = state_of(device)
        device.step(0)
        assert events.kinds() == ["checked-in", "dropped"]
        assert not answer_waits(device)
        assert state_of(device) == before


@pytest.mark.parametrize("moment", ["before", "after"])
def test_kill_before_app_has_heard_is_told_after_restart(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """At least once: the crash falls before the first event, or behind the last one."""

    def die(*given: Any, **more: Any) -> None:
        raise Crash

    first, events = EventLog(), EventLog()
    fleet.ask("d")
    crashing = make_device(fleet, tmp_path, first)
    with monkeypatch.context() as patch:
        patch.setattr(*((DeviceEvents, "emit_scores") if moment == "before" else (Outbox, "mark_reported")), die)  # type: ignore[call-overload]
        with pytest.raises(Crash):
            crashing.step(0)
    crashing.close(leave=False)
    told = ["scored", "answered", "delivered"]
    assert first.kinds() == ["checked-in", "ask", *(told if moment == "after" else [])]
    with make_device(fleet, tmp_path, events) as device:
        assert device.step(0) is Step.WAITED
        assert events.kinds() == ["checked-in", *told]
        assert device.step(0) is Step.WAITED
    assert len(events) == 4, "and not a third time"
    assert events[2].values == {"receipt": fleet.store.asks.uploads(RUN)[0].receipt, "tries": 1}


def test_an_app_that_exits_in_its_handler_gets_the_event_again(fleet: Fleet, tmp_path: Path) -> None:
    def raising(event: Event) -> None:
        if event.kind == "answered":
            raise SystemExit

    fleet.ask("d")
    failing = make_device(fleet, tmp_path, on_event=raising)
    with pytest.raises(SystemExit):
        failing.step(0)
    failing.close(leave=False)
    events = EventLog()
    with make_device(fleet, tmp_path, events) as device:
        device.step(0)
    assert "answered" in events.kinds()
    assert len(fleet.store.asks.uploads(RUN)) == 1
