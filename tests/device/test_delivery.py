"""Which model the app gets, with which figures, and which files."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from device.sdk_fleet import (
    RUN,
    Crash,
    Fleet,
    crashing_link,
    equal,
    knowledge_of,
    make_device,
    stubborn_link,
    tiny_data,
    tiny_model,
    weights,
)
from support.devices import compute_of
from torch import nn

from fleetdistill import Deployment, Predictor, Step
from fleetdistill.errors import (
    DataError,
    LinkError,
    NoRoomError,
)
from fleetdistill.knowledge import RefinedKnowledge
from fleetdistill.state import failpoints
from fleetdistill.testing import EventLog
from fleetdistill_server.store.states import RunStatus

# --- delivery


def reported(fleet: Fleet) -> list[tuple[int, bool]]:
    """Round by round, whether the device told the server that its app's model was replaced."""
    rows = fleet.store.history.figures(RUN, "replaced", "validation")
    assert all(row.count == 1 and row.sum in (0, 1) for row in rows)
    return [(row.round, row.sum == 1) for row in rows]


@pytest.mark.parametrize(
    "changes", [{"validation_data": None}, {"allow": ("features", "logits", "labels")}], ids=["no data", "not allowed"]
)
def test_verdict_report_needs_validation_data_and_metrics(
    fleet: Fleet, tmp_path: Path, changes: dict[str, Any]
) -> None:
    events = EventLog()
    with make_device(fleet, tmp_path, events, **{"validation_data": tiny_data(), **changes}) as device:
        fleet.ask("d")
        device.step(0)
    assert reported(fleet) == []
    assert events.kinds()[-1] in ("delivered", "kept"), "the app hears of it either way"


def test_validation_data_without_samples_are_refused(fleet: Fleet, tmp_path: Path) -> None:
    with (
        make_device(fleet, tmp_path, validation_data=tiny_data(0)) as device,
        pytest.raises(DataError, match="validation_data has no samples; pass at least one, or None"),
    ):
        device.step(0)


def unbeatable_data() -> tuple[np.ndarray, np.ndarray]:
    """Validation data that the app's own model answers without a mistake, if only just: no trained one does."""
    inputs, _ = tiny_data(3000)
    scores = tiny_model()(torch.from_numpy(inputs)).detach().sort(dim=1)
    close = (scores.values[:, -1] - scores.values[:, -2]).argsort()[:40].numpy()
    return inputs[close], scores.indices[:, -1].numpy()[close]


def test_model_that_joined_is_judged_and_survives_restart(fleet: Fleet, tmp_path: Path) -> None:
    unbeatable, joined = unbeatable_data(), tiny_model().state_dict()
    events = EventLog()
    with make_device(fleet, tmp_path / "d", events, validation_data=unbeatable) as device:
        assert equal(weights(device), joined), "and not with the run's initial extractor in it"
        for _ in range(3):
            fleet.ask("d")
            device.step(0)
    assert events[-1].kind == "kept"
    assert events[-1].values["accuracy_in_use"] == 1.0
    assert reported(fleet) == [(1, False), (2, False), (3, False)]
    with make_device(fleet, tmp_path / "d", validation_data=unbeatable) as device:
        assert equal(weights(device), joined)


def test_a_model_that_the_app_keeps_is_exported(fleet: Fleet, tmp_path: Path) -> None:
    inputs, _ = tiny_data(20)
    for _ in range(2):
        events = EventLog()
        with make_device(fleet, tmp_path, events, validation_data=unbeatable_data(), export="round") as device:
            device.step(0)
            for _ in range(2):
                fleet.ask("d")
                device.step(0)
            assert events.kinds().count("kept") == 2
            assert events.kinds().count("exported") == 1, "once in a process, which may have another model"
            predictor = Predictor(tmp_path)
            assert (predictor.version, device.version) == (0, 0)
            np.testing.assert_allclose(predictor.predict(inputs), device.predict(inputs), atol=1e-5)


def far_apart(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    inputs, labels = tiny_data(rows, seed)
    return inputs + 5 * np.eye(3, 4, dtype=np.float32)[labels], labels


def trained_model() -> nn.Module:
    """What an app has used for long before it joins a fleet: right on all of `far_apart`."""
    model, (inputs, labels) = tiny_model(), far_apart(60, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.from_numpy(inputs)), torch.from_numpy(labels)).backward()
        optimizer.step()
    return model.eval()


def test_model_trained_by_app_is_kept_until_fleet_has_better_one(fleet: Fleet, tmp_path: Path) -> None:
    events, own = EventLog(), trained_model()
    given: dict[str, Any] = {
        "model": trained_model,
        "data": far_apart(6, seed=0),
        "validation_data": far_apart(60, seed=0),
    }
    with make_device(fleet, tmp_path, events, export="finish", **given) as device:
        for _ in range(2):
            fleet.ask("d")
            device.step(0)
        sent = fleet.initial.parameters["0.weight"]  # type: ignore[attr-defined]
        assert not np.array_equal(own.extractor.state_dict()["0.weight"].numpy(), sent)  # type: ignore[union-attr]
        assert equal(weights(device), own.state_dict())
        assert equal(device.models["general"].state_dict(), own.state_dict())
    verdicts = [event for event in events if event.kind in ("kept", "delivered")]
    assert [(verdict.kind, verdict.values["accuracy_in_use"]) for verdict in verdicts] == [("kept", 1.0)] * 2
    assert reported(fleet) == [(1, False), (2, False)]
    fleet.store.runs.set_status(RUN, RunStatus.FINISHED, "2 rounds completed")
    with make_device(fleet, tmp_path, export="finish", **given) as device:
        assert equal(weights(device), own.state_dict())
        assert device.step(0) is Step.FINISHED
    inputs = far_apart(60, seed=0)[0]
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    with torch.no_grad():
        np.testing.assert_allclose(
            session.run(None, {"input": inputs})[0], own(torch.from_numpy(inputs)).numpy(), atol=1e-4
        )


@pytest.mark.parametrize("moment", ["before sending", "after the receipt was given"])
@pytest.mark.parametrize("early_look", [False, True])
def test_after_kill_around_upload_app_gets_what_was_reported(
    fleet: Fleet, tmp_path: Path, moment: str, early_look: bool
) -> None:
    given: dict[str, Any] = {"validation_data": tiny_data(30, seed=4)}
    fleet.ask("d")
    crashing = make_device(fleet, tmp_path / "a", link=crashing_link(fleet.api, moment), **given)
    joined = weights(crashing)
    with pytest.raises(Crash):
        crashing.step(0)
    assert equal(weights(crashing), joined), "no receipt, no delivery"
    crashing.close(leave=False)
    with make_device(fleet, tmp_path / "a", **given) as device:
        if early_look:  # loads the state from before the answer that waits in the outbox
            assert equal(weights(device), joined)
        device.step(0)
        fleet.ask("d")
        device.step(0)
        after = weights(device)
    other = Fleet()
    with make_device(other, tmp_path / "b", **given) as undisturbed:
        for _ in range(2):
            other.ask("d")
            undisturbed.step(0)
        assert equal(weights(undisturbed), after)
    assert reported(fleet) == reported(other)
    assert reported(fleet)[0] == (1, True)


def test_disk_full_half_way_through_delivery_still_delivers(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(name: str) -> None:
        if name == "device.promote.after-renames":
            raise OSError(errno.ENOSPC, "No space left on device")

    with make_device(fleet, tmp_path) as device:
        fleet.ask("d")
        with monkeypatch.context() as patch:
            patch.setattr(failpoints, "hit", full)
            with pytest.raises(LinkError, match="the server's reply cannot be stored"):
                device.step(0)
        assert device.step(0) is Step.WAITED, "it was settled, and is told"
        after = weights(device)
    with make_device(fleet, tmp_path) as restarted:
        assert equal(weights(restarted), after)


def test_an_ask_that_fails_for_a_full_disk_is_told_once(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(name: str) -> None:
        if name == "device.first-state.before-save":
            raise NoRoomError("No space left on device")

    fleet.ask("d")
    events = EventLog()
    with make_device(fleet, tmp_path, events) as device:
        with monkeypatch.context() as patch:
            patch.setattr(failpoints, "hit", full)
            for _ in range(3):
                with pytest.raises(NoRoomError):
                    device.step(0)
        assert device.step(0) is Step.ANSWERED
    assert events.kinds().count("ask") == 1


def test_a_device_whose_disk_is_full_at_check_in_leaves(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes it for present already, and a round would wait for it."""

    def full(name: str) -> None:
        if name == "device.check-in.before-save":
            raise NoRoomError("No space left on device")

    with make_device(fleet, tmp_path) as device:
        monkeypatch.setattr(failpoints, "hit", full)
        with pytest.raises(NoRoomError):
            device.step(0)
        assert fleet.store.devices.present(RUN)
    assert not fleet.store.devices.present(RUN)


def test_an_upload_that_is_refused_neither_delivers_nor_counts(fleet: Fleet, tmp_path: Path) -> None:
    fleet.ask("d")
    events = EventLog()
    link = stubborn_link(fleet.api, "bad-value", 1)
    with make_device(fleet, tmp_path, events, link=link, validation_data=tiny_data()) as device:
        joined = weights(device)
        device.step(0)
        assert equal(weights(device), joined)
    assert events.kinds()[-1] == "refused"
    assert reported(fleet) == []


def test_answer_that_failed_half_way_leaves_no_trace_in_next(fleet: Fleet, tmp_path: Path) -> None:
    """The app catches the error and goes on with the same Device."""
    other = Fleet()
    with make_device(fleet, tmp_path / "a") as device, make_device(other, tmp_path / "b") as undisturbed:
        for item in (fleet, other):
            item.ask("d")
        method = compute_of(device).method
        method.knowledge = lambda: (_ for _ in ()).throw(Crash())
        with pytest.raises(Crash):
            device.step(0)
        del method.knowledge
        device.step(0)
        undisturbed.step(0)
        assert equal(weights(device), weights(undisturbed))
    np.testing.assert_array_equal(knowledge_of(fleet).logits, knowledge_of(other).logits)


def test_no_replacement_is_reported_while_app_keeps_old_version(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(
        fleet, tmp_path, validation_data=tiny_data(30, seed=4), deployment=Deployment(max_accuracy_drop=1.0)
    ) as device:
        for release in (False, False, False, True):
            if release:
                device.roll_forward()
            elif device.version == 2:
                device.roll_back()
            fleet.ask("d")
            device.step(0)
    assert reported(fleet) == [(1, True), (2, True), (3, False), (4, True)]


# --- delivery, in the app


def test_apps_model_is_kept_when_validation_figure_would_fall(fleet: Fleet, tmp_path: Path) -> None:
    """After three rounds the teacher is wrong everywhere: training goes on, the app keeps its model."""
    events = EventLog()
    inputs, labels = tiny_data(60)
    wrong = RefinedKnowledge(valid=True, sample_ids=np.arange(60), values=60 * np.eye(3, dtype=np.float32)[labels - 2])
    with make_device(fleet, tmp_path, events, data=(inputs, labels), validation_data=(inputs, labels)) as device:
        for number in range(9):
            before = {name: tensor.clone() for name, tensor in device.model.state_dict().items()}
            trained = compute_of(device).state()
            fleet.ask("d", wrong if number >= 3 else None)
            device.step(0)
            same = all(torch.equal(tensor, before[name]) for name, tensor in device.model.state_dict().items())
            assert same == (events[-1].kind == "kept")
            assert compute_of(device).state() != trained, "training goes on either way"
    verdicts = [event for event in events if event.kind in ("kept", "delivered")]
    assert verdicts[0].kind == "delivered"
    kept = [event for event in verdicts if event.kind == "kept"]
    assert kept
    assert all(event.values["accuracy"] < event.values["accuracy_in_use"] for event in kept)
    assert reported(fleet) == [(event.round, event.kind == "delivered") for event in verdicts], "as the server hears"


def test_each_delivered_round_exports_an_onnx_model_of_it(fleet: Fleet, tmp_path: Path) -> None:
    import onnx

    events = EventLog()
    with make_device(fleet, tmp_path, events, export="round") as device:
        fleet.ask("d")
        device.step(0)
        fleet.ask("d")
        device.step(0)
    assert events.kinds().count("exported") == 2
    metadata = {prop.key: prop.value for prop in onnx.load(tmp_path / "model.onnx").metadata_props}
    assert (metadata["run"], metadata["round"], metadata["method"], metadata["classes"]) == (RUN, "2", "feddkc", "3")
    assert {"input_shape", "fleetdistill_version"} <= metadata.keys()
