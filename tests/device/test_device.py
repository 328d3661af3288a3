"""The SDK's Device over the in-memory link: what an app sees, and what survives when things go wrong."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from support.devices import answer_waits, compute_of, state_of
from support.processes import PATIENCE_SECONDS
from torch import nn

from fleetdistill import Device, Event, Step
from fleetdistill.device.check_in import CheckIn
from fleetdistill.device.events import Events as DeviceEvents
from fleetdistill.device.sender import Sender
from fleetdistill.device.torch_compute import TorchCompute
from fleetdistill.errors import (
    CannotAnswer,
    ConfigurationError,
    DataError,
    ExportError,
    KnowledgeError,
    LinkError,
    ModelError,
    RefusedError,
    StateError,
)
from fleetdistill.knowledge import RefinedKnowledge, SampleKnowledge
from fleetdistill.state import failpoints
from fleetdistill.state.directory import Storage
from fleetdistill.state.outbox import Outbox
from fleetdistill.testing import EventLog, Fault, FaultyLink, refused
from fleetdistill.training.model import split_sequential
from fleetdistill.wire.codec import decode, encode
from fleetdistill.wire.codes import Code, is_final, status_of
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.config.run_config import RunConfig, run_config
from fleetdistill_server.engine.engine import build_method, make_contract  # type: ignore[attr-defined]
from fleetdistill_server.intake import device_api
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.simulation.links.memory_link import MemoryLink
from fleetdistill_server.store.store import Store

RUN = "sdk"
ALLOW = ("features", "logits", "labels", "metrics")


def tiny_extractor(input_shape: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(nn.Linear(input_shape[0], 5), nn.ReLU())


def tiny_server(feature_shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(feature_shape[0], classes)


def tiny_model() -> nn.Module:
    torch.manual_seed(11)
    return split_sequential(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), 2)


def tiny_data(rows: int = 24, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.arange(rows) % 3
    return (rng.normal(size=(rows, 4)) + labels[:, None]).astype(np.float32), labels


class Fleet:
    """A store with a published run, and the asks that a test writes into it."""

    def __init__(self) -> None:
        self.store = Store.in_memory()
        self.config: RunConfig = run_config(
            {
                "run": {"name": RUN},
                "contract": {"classes": 3, "input_shape": [4]},
                "model": {"extractor": "test_device:tiny_extractor", "server": "test_device:tiny_server"},
            }
        )
        sys.modules["test_device"] = sys.modules[__name__]
        self.store.runs.begin(RUN, self.config.fixed_part())
        contract, initial, _ = make_contract(self.config, build_method(self.config))
        self.initial = decode(initial)["initial"]  # type: ignore[arg-type]
        self.store.blobs.put(initial)  # type: ignore[arg-type]
        self.store.runs.publish_contract(RUN, contract.SerializeToString())
        self.api = DeviceApi(self.store)
        self.round = 0

    def ask(self, device: str, knowledge: RefinedKnowledge | None = None, **changes: Any) -> None:
        """Opens a round with one ask for one device."""
        self.round = self.store.runs.start_round(RUN, [device])
        payload = encode({"knowledge": knowledge or RefinedKnowledge(valid=False)}, np.float16)
        self.store.blobs.put(payload)
        row = {"run": RUN, "round": self.round, "step_number": 1, "device": device, "step": "train", "seed": 5}
        row |= {"payload": payload.sha256, "payload_bytes": payload.data_bytes, "deadline_at": time.time() + 60}
        self.store.asks.write([{**row, "expects": {"knowledge": "sample_knowledge"}, **changes}])


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.store.close()


def make_device(
    fleet: Fleet, state_dir: Path, events: EventLog | None = None, link: Any = None, **changes: Any
) -> Device:
    noted = EventLog() if events is None else events
    arguments: dict[str, Any] = {
        "server": link or MemoryLink(fleet.api),
        "model": tiny_model,
        "data": tiny_data(),
        "test_data": tiny_data(9, seed=1),
        "state_dir": state_dir,
        "device_id": "d",
        "allow": ALLOW,
        "export_onnx": "never",
        "on_event": noted.append,
    }
    return Device(**{**arguments, **changes})


def knowledge_of(fleet: Fleet, number: int = -1) -> SampleKnowledge:
    upload = fleet.store.asks.uploads(RUN)[number]
    found = decode(fleet.store.blobs.open(upload["sha256"]))["knowledge"]
    assert isinstance(found, SampleKnowledge)
    return found


# --- one turn


def test_a_device_checks_in_answers_and_finishes(fleet: Fleet, tmp_path: Path) -> None:
    events = EventLog()
    with make_device(fleet, tmp_path, events) as device:
        assert device.step(0) is Step.WAITED
        fleet.ask("d")
        assert device.step(0) is Step.ANSWERED
        fleet.store.runs.end(RUN, "finished", "1 rounds completed")
        device.run()
    assert events.kinds() == ["checked-in", "ask", "scored", "answered", "delivered", "finished"]
    upload = fleet.store.asks.uploads(RUN)[0]
    assert upload["samples"] == 24
    assert events[3].values == {"receipt": upload["receipt"], "tries": 1}
    assert knowledge_of(fleet).features["cut"].dtype == np.float16
    assert [row["count"] for row in fleet.store.history.figures(RUN, "accuracy", "test")] == [9]
    assert fleet.store.devices.present(RUN) == []


def test_every_device_starts_from_the_runs_extractor(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path) as device:
        model = device.model
    sent = fleet.initial.parameters["0.weight"]  # type: ignore[attr-defined]
    np.testing.assert_array_equal(model.extractor.state_dict()["0.weight"].numpy(), sent)


def test_metrics_stay_home_when_the_app_keeps_them_back(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path, allow=("features", "logits", "labels")) as device:
        fleet.ask("d")
        device.step(0)
    assert fleet.store.history.figures(RUN, "accuracy", "test") == []


def test_columns_that_the_app_keeps_back_are_refused_at_check_in_with_a_sentence(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path, allow=("features", "logits")) as device, pytest.raises(RefusedError) as error:
        device.run()
    assert "feddkc sends features, logits, labels; the app keeps back labels" in str(error.value)
    assert fleet.store.asks.uploads(RUN) == []


# --- delivery


def reported(fleet: Fleet) -> list[tuple[int, bool]]:
    """Round by round, whether the device told the server that its app's model was replaced."""
    rows = fleet.store.history.figures(RUN, "replaced", "validation")
    assert all(row["count"] == 1 and row["sum"] in (0, 1) for row in rows)
    return [(row["round"], row["sum"] == 1) for row in rows]


def weights(device: Device) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in device.model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    "changes", [{"validation_data": None}, {"allow": ("features", "logits", "labels")}], ids=["no data", "not allowed"]
)
def test_a_verdict_is_reported_only_with_validation_data_and_metrics(
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
        pytest.raises(DataError, match="validation_data has no samples; give at least one, or None"),
    ):
        device.step(0)


def unbeatable_data() -> tuple[np.ndarray, np.ndarray]:
    """Validation data that the app's own model answers without a mistake, if only just: no trained one does."""
    inputs, _ = tiny_data(3000)
    scores = tiny_model()(torch.from_numpy(inputs)).detach().sort(dim=1)
    close = (scores.values[:, -1] - scores.values[:, -2]).argsort()[:40].numpy()
    return inputs[close], scores.indices[:, -1].numpy()[close]


def test_the_model_that_joined_is_judged_too_and_survives_a_restart(fleet: Fleet, tmp_path: Path) -> None:
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


def test_a_model_that_an_app_has_trained_before_is_kept_while_the_fleet_has_no_better_one(
    fleet: Fleet, tmp_path: Path
) -> None:
    events, own = EventLog(), trained_model()
    given = {"model": trained_model, "data": far_apart(6, seed=0), "validation_data": far_apart(60, seed=0)}
    with make_device(fleet, tmp_path, events, export_onnx="finish", **given) as device:
        for _ in range(2):
            fleet.ask("d")
            device.step(0)
        sent = fleet.initial.parameters["0.weight"]  # type: ignore[attr-defined]
        assert not np.array_equal(own.extractor.state_dict()["0.weight"].numpy(), sent)  # type: ignore[union-attr]
        assert equal(weights(device), own.state_dict())
        assert equal(device.models["general"].state_dict(), own.state_dict())
    verdicts = [event for event in events if event.kind in ("kept", "delivered")]
    assert [(one.kind, one.values["accuracy_in_use"]) for one in verdicts] == [("kept", 1.0)] * 2
    assert reported(fleet) == [(1, False), (2, False)]
    fleet.store.runs.end(RUN, "finished", "2 rounds completed")
    with make_device(fleet, tmp_path, export_onnx="finish", **given) as device:  # type: ignore[arg-type]
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
def test_after_a_kill_around_the_upload_the_app_gets_what_was_reported(
    fleet: Fleet, tmp_path: Path, moment: str, early_look: bool
) -> None:
    given = {"validation_data": tiny_data(30, seed=4)}
    fleet.ask("d")
    crashing = make_device(fleet, tmp_path / "a", link=crashing_link(fleet.api, moment), **given)  # type: ignore[arg-type]
    joined = weights(crashing)
    with pytest.raises(Crash):
        crashing.step(0)
    assert equal(weights(crashing), joined), "no receipt, no delivery"
    crashing.close(leave=False)
    with make_device(fleet, tmp_path / "a", **given) as device:  # type: ignore[arg-type]
        if early_look:  # loads the state from before the answer that waits in the outbox
            assert equal(weights(device), joined)
        device.step(0)
        fleet.ask("d")
        device.step(0)
        after = weights(device)
    other = Fleet()
    with make_device(other, tmp_path / "b", **given) as undisturbed:  # type: ignore[arg-type]
        for _ in range(2):
            other.ask("d")
            undisturbed.step(0)
        assert equal(weights(undisturbed), after)
    assert reported(fleet) == reported(other)
    assert reported(fleet)[0] == (1, True)


def test_a_disk_that_is_full_half_way_through_a_delivery_delivers_it_all_the_same(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(name: str) -> None:
        if name == "device.promote.after-renames":
            raise OSError(errno.ENOSPC, "No space left on device")

    with make_device(fleet, tmp_path) as device:
        fleet.ask("d")
        with monkeypatch.context() as patch:
            patch.setattr(failpoints, "hit", full)
            with pytest.raises(LinkError, match="no room to note what the server said"):
                device.step(0)
        assert device.step(0) is Step.WAITED, "it was settled, and is told"
        after = weights(device)
    with make_device(fleet, tmp_path) as restarted:
        assert equal(weights(restarted), after)


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


def test_an_answer_that_failed_half_way_leaves_no_trace_in_the_next(fleet: Fleet, tmp_path: Path) -> None:
    """The app catches the error and goes on with the same Device."""
    other = Fleet()
    with make_device(fleet, tmp_path / "a") as device, make_device(other, tmp_path / "b") as undisturbed:
        for one in (fleet, other):
            one.ask("d")
        method = compute_of(device).method
        method.knowledge = lambda: (_ for _ in ()).throw(Crash())
        with pytest.raises(Crash):
            device.step(0)
        del method.knowledge
        device.step(0)
        undisturbed.step(0)
        assert equal(weights(device), weights(undisturbed))
    np.testing.assert_array_equal(knowledge_of(fleet).logits, knowledge_of(other).logits)


# --- declining


def test_an_ask_that_a_device_cannot_answer_is_declined_and_the_device_goes_on(fleet: Fleet, tmp_path: Path) -> None:
    events = EventLog()
    with make_device(fleet, tmp_path, events) as device:
        device.step(0)
        method = compute_of(device).method
        before = state_of(device)

        def cannot(ask: Any) -> Any:
            with torch.no_grad():
                next(method.local.model.parameters()).zero_()  # whatever it did before it gave up
            raise CannotAnswer("it has no teacher")

        method.handle = cannot
        fleet.ask("d")
        assert device.step(0) is Step.ANSWERED
        assert (events[-1].kind, events[-1].text) == ("dropped", "it has no teacher")
        (ask,) = fleet.store.asks.of_step(RUN, 1, 1)
        assert (ask["status"], ask["reason"]) == ("out", "declined")
        (event,) = fleet.store.history.events(RUN, "declined")
        assert (event["device"], event["round"], event["text"]) == ("d", 1, "step 'train': it has no teacher")
        assert state_of(device) == before
        del method.handle
        assert device.step(0) is Step.WAITED
        assert fleet.store.devices.present(RUN) == ["d"], "out for the round, not for the run"
        fleet.ask("d")
        assert device.step(0) is Step.ANSWERED
    assert events.kinds()[-1] == "delivered"
    assert all(bool(one.any()) for one in compute_of(device).module.parameters()), "it went on from the committed state"


# --- delivery, in the app


def test_the_apps_model_is_kept_when_its_validation_figure_would_fall(fleet: Fleet, tmp_path: Path) -> None:
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
    with make_device(fleet, tmp_path, events, export_onnx="round") as device:
        fleet.ask("d")
        device.step(0)
        fleet.ask("d")
        device.step(0)
    assert events.kinds().count("exported") == 2
    metadata = {one.key: one.value for one in onnx.load(tmp_path / "model.onnx").metadata_props}
    assert (metadata["run"], metadata["round"], metadata["method"], metadata["classes"]) == (RUN, "2", "feddkc", "3")
    assert {"input_shape", "fleetdistill_version"} <= metadata.keys()


# --- crashes: an exception stands for the moment the process dies


class Crash(Exception):
    """Not one of ours, so nothing in the SDK catches it."""


def crashing_link(api: DeviceApi, moment: str) -> FaultyLink:
    """The process dies at a named moment of the first upload."""
    crash = {
        "before sending": Fault("upload", Crash()),
        "after the receipt was given": Fault("upload", Crash(), reply_only=True),
    }
    return FaultyLink(MemoryLink(api), *([crash[moment]] if moment in crash else []))


def test_an_export_that_fails_is_told_once_and_locks_nobody_out(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> None:
        raise ExportError("onnx is not installed")

    with make_device(fleet, tmp_path, export_onnx="round") as device:
        fleet.ask("d")
        with monkeypatch.context() as patch:
            patch.setattr(TorchCompute, "export", fail)
            with pytest.raises(ExportError):
                device.step(0)
            assert device.step(0) is Step.WAITED, "not again at every call"
        fleet.ask("d")
        assert device.step(0) is Step.ANSWERED
        assert_exported(device, tmp_path / "model.onnx", "2")


def test_an_export_that_is_due_is_forgotten_by_an_app_that_wants_none(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "model.onnx.due").write_bytes(b"damaged")
    with make_device(fleet, tmp_path, export_onnx="never") as device:
        device.step(0)
    assert not (tmp_path / "model.onnx.due").exists()
    assert not (tmp_path / "model.onnx").exists()


def test_training_that_diverges_declines_the_ask_and_the_app_goes_on(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(*given: Any, **settings: Any) -> None:
        raise KnowledgeError("the loss is not finite")

    events = EventLog()
    with make_device(fleet, tmp_path, events) as device:
        fleet.ask("d")
        with monkeypatch.context() as patch:
            patch.setattr(TorchCompute, "answer", diverge)
            assert device.step(0) is Step.ANSWERED
        (declined,) = fleet.store.history.events(RUN, "declined")
        assert "the loss is not finite" in declined["text"]
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


def test_a_restart_with_other_validation_data_judges_the_model_in_use_anew(fleet: Fleet, tmp_path: Path) -> None:
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
def test_a_device_killed_between_receipt_and_export_exports_after_the_restart(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The file must not stay one delivery behind the model that it claims to be, also when no round follows."""

    def die(*given: Any) -> None:
        raise Crash

    crashing = make_device(fleet, tmp_path, export_onnx="round")
    fleet.ask("d")
    crashing.step(0)
    fleet.ask("d")
    with monkeypatch.context() as patch:
        patch.setattr(Outbox if moment == "promote" else Sender, moment, die)
        with pytest.raises(Crash):
            crashing.step(0)
    crashing.close(leave=False)
    with make_device(fleet, tmp_path, export_onnx="round") as device:
        device.step(0)
        device.step(0)
        assert_exported(device, tmp_path / "model.onnx", str(fleet.round))
    assert not (tmp_path / "model.onnx.due").exists()


def assert_exported(device: Device, path: Path, number: str) -> None:
    import onnx
    import onnxruntime

    metadata = {one.key: one.value for one in onnx.load(path).metadata_props}
    assert metadata["round"] == number
    inputs = tiny_data()[0]
    session = onnxruntime.InferenceSession(path)
    with torch.no_grad():
        expected = device.model(torch.as_tensor(inputs)).numpy()
    np.testing.assert_allclose(session.run(None, {"input": np.asarray(inputs)})[0], expected, atol=1e-5)


@pytest.mark.parametrize("moment", ["before sending", "after the receipt was given"])
def test_a_device_killed_around_its_upload_settles_it_after_the_restart(
    fleet: Fleet, tmp_path: Path, moment: str
) -> None:
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


def test_a_device_killed_while_training_trains_again_from_the_committed_state(fleet: Fleet, tmp_path: Path) -> None:
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


def test_an_answer_to_a_closed_round_is_dropped_and_its_training_taken_back(fleet: Fleet, tmp_path: Path) -> None:
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
def test_a_device_killed_before_the_app_has_heard_tells_it_after_the_restart(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """At least once: the crash falls before the first event, or behind the last one."""

    def die(*given: Any) -> None:
        raise Crash

    first, events = EventLog(), EventLog()
    fleet.ask("d")
    crashing = make_device(fleet, tmp_path, first)
    with monkeypatch.context() as patch:
        patch.setattr(*((DeviceEvents, "emit_scores") if moment == "before" else (Outbox, "outcome_reported")), die)  # type: ignore[call-overload]
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
    assert events[2].values == {"receipt": fleet.store.asks.uploads(RUN)[0]["receipt"], "tries": 1}


def test_what_a_handler_of_the_app_raises_does_not_swallow_the_event(fleet: Fleet, tmp_path: Path) -> None:
    def raising(event: Event) -> None:
        if event.kind == "answered":
            raise Crash

    fleet.ask("d")
    failing = make_device(fleet, tmp_path, on_event=raising)
    with pytest.raises(Crash):
        failing.step(0)
    failing.close(leave=False)
    events = EventLog()
    with make_device(fleet, tmp_path, events) as device:
        device.step(0)
    assert "answered" in events.kinds()
    assert len(fleet.store.asks.uploads(RUN)) == 1


# --- room, and questions that cannot be understood


def test_an_answer_over_the_devices_bound_is_declined_and_the_device_goes_on(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path) as device:
        device.step(0)
        assert device.model is not None
        before = state_of(device)
        device._storage.outbox._max_answer_bytes = 100
        fleet.ask("d")
        assert device.step(0) is Step.ANSWERED
        (declined,) = fleet.store.history.events(RUN, "declined")
        assert "the device keeps at most 100 (max_spool_bytes)" in declined["text"]
        assert state_of(device) == before
        assert not answer_waits(device)
        device._storage.outbox._max_answer_bytes = 1 << 30
        fleet.ask("d")
        assert device.step(0) is Step.ANSWERED
    assert [row["round"] for row in fleet.store.asks.uploads(RUN)] == [2]


def test_a_question_over_the_devices_bound_is_declined_before_it_is_fetched(fleet: Fleet, tmp_path: Path) -> None:
    events = EventLog()
    with make_device(fleet, tmp_path, events) as device:
        device.step(0)
        assert device.model is not None
        device._check_in._downloads._max_bytes = 100
        fleet.ask("d", RefinedKnowledge(valid=True, sample_ids=np.arange(24), values=np.zeros((24, 3), np.float32)))
        assert device.step(0) is Step.ANSWERED
        assert device.step(0) is Step.WAITED
    assert events[-1].kind == "dropped"
    assert "the limit is 100" in events[-1].text
    assert fleet.store.asks.of_step(RUN, 1, 1)[0]["reason"] == "declined"


def test_a_full_disk_declines_the_ask_and_keeps_the_state(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = EventLog()
    with make_device(fleet, tmp_path, events) as device:
        device.step(0)
        assert device.model is not None
        before = state_of(device)
        fleet.ask("d")
        with monkeypatch.context() as patch:
            usage = shutil.disk_usage(tmp_path)
            patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=400))
            assert device.step(0) is Step.ANSWERED
        assert events[-1].kind == "dropped"
        assert "the disk has 400 free" in events[-1].text
        assert state_of(device) == before
        fleet.ask("d")
        assert device.step(0) is Step.ANSWERED
    assert [row["round"] for row in fleet.store.asks.uploads(RUN)] == [2]


@pytest.mark.parametrize("newer", ["a step", "a payload"])
def test_what_a_newer_server_asks_is_declined_with_a_sentence_and_ends_nothing(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newer: str
) -> None:
    events = EventLog()
    with make_device(fleet, tmp_path, events) as device:
        if newer == "a step":
            fleet.ask("d", step="dream")
            device.step(0)
        else:
            assert device.model is not None, "it has its state"
            fleet.ask("d")
            with monkeypatch.context() as patch:
                patch.setattr("fleetdistill.wire.payload.DTYPES", {})
                device.step(0)
        assert events[-1].kind == "dropped"
        expected = "has no handler for step 'dream'; is the SDK older than the server?"
        assert (expected if newer == "a step" else "has unknown element type") in events[-1].text
        fleet.ask("d")
        device.step(0)
    assert [row["round"] for row in fleet.store.asks.uploads(RUN)] == [2]


def test_a_payload_that_serves_two_asks_is_fetched_once(fleet: Fleet, tmp_path: Path) -> None:
    fetched: list[bytes] = []

    class Noting(MemoryLink):
        def download(self, identity: Any, sha256: bytes, first_byte: int) -> Any:
            fetched.append(sha256)
            return super().download(identity, sha256, first_byte)

    for _ in range(2):
        with make_device(fleet, tmp_path, link=Noting(fleet.api)) as device:
            assert device.step(0) is Step.WAITED
            fleet.ask("d")
            assert device.step(0) is Step.ANSWERED
            fleet.store.runs.close_short_round(RUN, fleet.round, "over")
    assert len(fetched) == len(set(fetched)) == 2, "the initial weights, and what both rounds ask with"
    assert len(list((tmp_path / "downloads").iterdir())) == 1


# --- refusals and unkind links


def stubborn_link(api: DeviceApi, code: str, times: int) -> FaultyLink:
    """The server refuses the first uploads with a code."""
    return FaultyLink(MemoryLink(api), *(refused("upload", code, nth) for nth in range(1, times + 1)))


@pytest.mark.parametrize("call", ["check_in", "next_ask", "upload_status", "download"])
@pytest.mark.parametrize("code", sorted(code for code in Code if not is_final(code)))
def test_a_refusal_that_passes_ends_nothing_at_any_call(fleet: Fleet, tmp_path: Path, call: str, code: Code) -> None:
    fleet.ask("d")
    link = FaultyLink(MemoryLink(fleet.api), refused(call, code, after_seconds="7"))
    with make_device(fleet, tmp_path, link=link) as device:
        if call != "upload_status" or status_of(code) in ("UNAVAILABLE", "RESOURCE_EXHAUSTED"):
            with pytest.raises(LinkError, match="was refused with") as error:
                device.step(0)
            assert error.value.after_seconds == 7.0
        assert device.step(0) is Step.ANSWERED, "sent again at once, or at the next turn"
    assert link.left == []
    assert len(fleet.store.asks.uploads(RUN)) == 1


def test_a_damaged_transfer_is_sent_again_at_once(fleet: Fleet, tmp_path: Path) -> None:
    fleet.ask("d")
    with make_device(fleet, tmp_path, link=stubborn_link(fleet.api, "checksum", 2)) as device:
        assert device.step(0) is Step.ANSWERED
    assert len(fleet.store.asks.uploads(RUN)) == 1


def test_a_full_disk_at_the_server_keeps_the_answer_in_the_outbox(fleet: Fleet, tmp_path: Path) -> None:
    fleet.ask("d")
    with make_device(fleet, tmp_path, link=stubborn_link(fleet.api, "no-space", 1)) as device:
        with pytest.raises(LinkError, match="no-space"):
            device.step(0)
        assert answer_waits(device)
        assert fleet.store.asks.uploads(RUN) == []
        assert device.step(0) is Step.ANSWERED
    assert len(fleet.store.asks.uploads(RUN)) == 1


def test_an_answer_that_waits_is_taken_though_the_app_has_come_back_with_fewer_samples(
    fleet: Fleet, tmp_path: Path
) -> None:
    """It was made of the data of before; what the device has now is told once it is settled."""
    crashing = make_device(fleet, tmp_path, link=crashing_link(fleet.api, "before sending"))
    fleet.ask("d")
    with pytest.raises(Crash):
        crashing.step(0)
    crashing.close(leave=False)
    with make_device(fleet, tmp_path, data=tiny_data(9)) as device:
        device.models  # noqa: B018  (the app looks before the device has settled anything)
        device.step(0)
        assert declared_samples(fleet) == 24
        fleet.ask("d")
        device.step(0)
        assert declared_samples(fleet) == 9
    assert [row["samples"] for row in fleet.store.asks.uploads(RUN)] == [24, 9]
    assert fleet.store.history.events(RUN, "refused") == []


def test_a_restored_server_that_knows_fewer_samples_refuses_one_answer_and_hears_of_them(
    fleet: Fleet, tmp_path: Path
) -> None:
    events = EventLog()
    with make_device(fleet, tmp_path, events) as device:
        device.step(0)
        profile = profile_in(fleet)
        profile.samples = 23  # as the backup has it
        fleet.store.database.write("UPDATE devices SET profile = ? WHERE run = ?", profile.SerializeToString(), RUN)
        for _ in range(2):
            fleet.ask("d")
            device.step(0)
    assert [event.kind for event in events if event.kind in ("refused", "answered")] == ["refused", "answered"]
    assert declared_samples(fleet) == 24


def profile_in(fleet: Fleet) -> contract_pb2.DeviceProfile:
    row = fleet.store.devices.get(RUN, "d")
    assert row is not None
    return contract_pb2.DeviceProfile.FromString(row["profile"])


def declared_samples(fleet: Fleet) -> int:
    return profile_in(fleet).samples


def test_a_refused_answer_is_an_event_and_its_training_does_not_count(fleet: Fleet, tmp_path: Path) -> None:
    fleet.ask("d")
    events = EventLog()
    with make_device(fleet, tmp_path, events, link=stubborn_link(fleet.api, "bad-value", 1)) as device:
        before = device.model.state_dict()["stages.0.weight"].clone()
        device.step(0)
        assert events[-1].kind == "refused"
        assert events[-1].values["code"] == "bad-value"
        assert device.model is not None
        assert torch.equal(compute_of(device).module.state_dict()["stages.0.weight"], before)


# --- what the app gives


def test_a_state_directory_of_another_run_or_device_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path) as device:
        device.step(0)
    with pytest.raises(StateError, match="belongs to run 'sdk', not 'other'"):
        make_device(fleet, tmp_path, run="other")
    with pytest.raises(StateError, match="belongs to device id 'd', not 'e'"):
        make_device(fleet, tmp_path, device_id="e")


def test_a_lost_response_to_the_first_check_in_does_not_lock_the_id(fleet: Fleet, tmp_path: Path) -> None:
    class Losing(MemoryLink):
        def check_in(self, identity: Any, profile: Any) -> Any:
            response = super().check_in(identity, profile)
            if profile is not None:
                raise Crash
            return response

    losing = make_device(fleet, tmp_path, link=Losing(fleet.api))
    with pytest.raises(Crash):
        losing.step(0)
    losing.close(leave=False)
    with make_device(fleet, tmp_path) as device:
        assert device.step(0) is Step.WAITED


def test_a_damaged_profile_is_made_anew_and_a_damaged_secret_said(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path) as device:
        device.step(0)
    (tmp_path / "profile.bin").write_bytes(b"\xff\xff")
    with make_device(fleet, tmp_path) as device:
        assert device.step(0) is Step.WAITED
    text = (tmp_path / "device.json").read_text()
    (tmp_path / "device.json").write_text(text.replace('"secret": "', '"secret": "xyz'))
    with pytest.raises(StateError, match="its secret is no hex"):
        make_device(fleet, tmp_path)


def test_class_counts_stay_home_when_the_app_keeps_them_back(fleet: Fleet, tmp_path: Path) -> None:
    for name, allow in (("kept", ALLOW), ("told", (*ALLOW, "counts"))):
        with make_device(fleet, tmp_path / name, device_id=name, allow=allow) as device:
            fleet.ask(name)
            device.step(0)
            fleet.store.runs.close_short_round(RUN, fleet.round, "over")
    told = {row["device"]: row["by_class"] for row in fleet.store.history.figures(RUN, "accuracy", "test")}
    assert told["kept"] == "{}"
    assert told["told"] != "{}"


def test_a_device_without_an_id_makes_one_and_keeps_it(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path, device_id=None) as device:
        device.step(0)
        name = device.device_id
    with make_device(fleet, tmp_path, device_id=None) as device:
        assert device.device_id == name
    assert len(name) == 36


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"data": (np.zeros((0, 4), np.float32), np.zeros(0, np.int64))}, DataError, "data"),
        ({"data": (np.zeros((3, 7), np.float32), np.arange(3))}, DataError, r"inputs of shape \[7\].*has \[4\]"),
        ({"data": (np.zeros((3, 4), np.float32), np.array([0, 1, 3]))}, DataError, "label 3"),
        ({"data": (np.full((3, 4), np.nan, np.float32), np.arange(3))}, DataError, "NaN or infinity, first at row 0"),
        ({"model": lambda: nn.Linear(4, 3)}, ModelError, "split_sequential"),
    ],
)
def test_data_and_models_that_do_not_fit_say_what_to_do(
    fleet: Fleet, tmp_path: Path, changes: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with make_device(fleet, tmp_path, **changes) as device, pytest.raises(error, match=sentence):
        device.step(0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"allow": ("images",)}, "unknown columns images; known are"),
        ({"device_id": "a/b"}, "device_id 'a/b' must be"),
        ({"predictor": "space_mpl_64"}, "unknown predictor 'space_mpl_64'; did you mean 'space_mlp_64'"),
        ({"predictor": 64}, "unknown predictor 64, expected one of space_linear.*or a function"),
        ({"export_onnx": "rounds"}, "unknown export_onnx 'rounds'; did you mean 'round'"),
    ],
)
def test_arguments_out_of_range_are_refused(
    fleet: Fleet, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        make_device(fleet, tmp_path, **changes)


@pytest.mark.parametrize("server", ["10.0.0.5:50051", "example.org:50051", "0.0.0.0:50051"])
def test_plain_text_to_another_machine_needs_the_apps_word(tmp_path: Path, server: str) -> None:
    arguments: dict[str, Any] = {"server": server, "model": tiny_model, "data": tiny_data(), "state_dir": tmp_path}
    with pytest.raises(
        ConfigurationError, match=r"is not on this machine, and plain text could be read.*insecure=True"
    ):
        Device(**arguments)
    assert not (tmp_path / "lock").exists()
    Device(**arguments, insecure=True).close()


def test_a_device_of_a_stopped_run_stays_and_goes_on_with_it(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run` returns only once the run is finished; the app is told once why nothing happens."""
    monkeypatch.setattr(device_api, "STOPPED_SECONDS", 0.0)
    events, asked = EventLog(), 0

    class Operator(MemoryLink):
        """Starts the run again after three questions for work."""

        def next_ask(self, identity: Any, wait_seconds: float) -> Any:
            nonlocal asked
            asked += 1
            if asked == 4:
                fleet.store.runs.end(RUN, "running", "started again")
                fleet.ask("d")
            if asked == 5:
                fleet.store.runs.end(RUN, "finished", "1 rounds completed")
            return super().next_ask(identity, wait_seconds)

    fleet.store.runs.end(RUN, "stopped", "the engine failed 6 times")
    with make_device(fleet, tmp_path, events, link=Operator(fleet.api)) as device:
        device.run()
    assert events.kinds() == ["checked-in", "stopped", "ask", "scored", "answered", "delivered", "finished"]
    assert events[1].text == (
        "the run is stopped until its operator starts it again: the engine failed 6 times; the device waits"
    )


def test_stop_ends_a_run_that_waits_for_work_at_once(fleet: Fleet, tmp_path: Path) -> None:
    class Waiting(MemoryLink):
        """Holds the question for work until it is interrupted, as a long poll does."""

        asked, interrupted = threading.Event(), threading.Event()

        def next_ask(self, identity: Any, wait_seconds: float) -> Any:
            self.asked.set()
            assert self.interrupted.wait(PATIENCE_SECONDS), "nobody interrupted the poll"
            raise LinkError("the question for work was cancelled")

        def interrupt(self) -> None:
            self.interrupted.set()

    events = EventLog()
    with make_device(fleet, tmp_path, events, link=Waiting(fleet.api)) as device:
        running = threading.Thread(target=device.run)
        running.start()
        assert Waiting.asked.wait(PATIENCE_SECONDS)
        device.stop()
        running.join(PATIENCE_SECONDS)
        assert not running.is_alive()
    assert "lost-contact" not in events.kinds()


def test_a_model_with_another_extractor_is_refused_with_both_sides(fleet: Fleet, tmp_path: Path) -> None:
    def other() -> nn.Module:
        return split_sequential(nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)), 2)

    with make_device(fleet, tmp_path, model=other) as device, pytest.raises(RefusedError) as error:
        device.step(0)
    assert error.value.code == "contract-mismatch"
    assert "extractor: the device has" in str(error.value)


def test_an_idle_device_that_is_known_loads_no_torch(tmp_path: Path) -> None:
    """The first check-in builds the model; after a restart the saved profile serves."""
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from fleetdistill import Device, Step
        from fleetdistill.wire.v1 import service_pb2, contract_pb2

        TERMS = contract_pb2.Contract(run="r", method="feddkc", classes="ab", knowledge_type=1, threads=1)

        class Idle:
            remote = False
            def check_in(self, identity, profile):
                assert profile is not None and profile.model_name == "known"
                return service_pb2.CheckInResponse(contract=TERMS, heartbeat_seconds=15)
            def next_ask(self, identity, wait_seconds):
                return service_pb2.NextAskResponse(come_back=service_pb2.ComeBack())
            def leave(self, identity): pass
            def interrupt(self): pass
            def close(self): pass

        device = Device(server=Idle(), model=lambda: 1 / 0, data=lambda: 1 / 0, state_dir=Path(sys.argv[1]))
        assert device.step(0) is Step.WAITED
        device.close()
        assert "torch" not in sys.modules and "onnx" not in sys.modules
        """
    )
    from fleetdistill.wire.v1 import contract_pb2

    storage = Storage(tmp_path)
    storage.save_identity({"device": "d", "run": "r", "secret": "00" * 32})
    storage.save("profile.bin", contract_pb2.DeviceProfile(model_name="known").SerializeToString())
    storage.close()
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- other rows


def version_of(fleet: Fleet, device: str = "d") -> bytes:
    """The data version that the server knows."""
    row = fleet.store.devices.get(RUN, device)
    assert row is not None
    return contract_pb2.DeviceProfile.FromString(row["profile"]).data_version


def test_the_same_rows_have_one_version_and_two_devices_have_two(fleet: Fleet, tmp_path: Path) -> None:
    found = []
    for state_dir, name in (("a", "a"), ("a", "a"), ("b", "b")):
        with make_device(fleet, tmp_path / state_dir, device_id=name, data=tiny_data()) as device:
            device.step(0)
        found.append(version_of(fleet, name))
    assert found[0] == found[1] != found[2]
    assert {len(one) for one in found} == {16}


@pytest.mark.parametrize("rows", [tiny_data(), lambda: tiny_data(), tuple(map(torch.from_numpy, tiny_data()))])
def test_a_version_is_of_the_rows_however_they_are_given(fleet: Fleet, tmp_path: Path, rows: Any) -> None:
    with make_device(fleet, tmp_path) as device:
        device.step(0)
        first = version_of(fleet)
        device.replace_data(rows)
        device.step(0)
    assert version_of(fleet) == first


@pytest.mark.parametrize("other", [tiny_data(seed=3), tiny_data(23), (tiny_data()[0], tiny_data()[1][::-1].copy())])
def test_replaced_rows_are_told_with_the_next_step_and_what_was_learned_stays(
    fleet: Fleet, tmp_path: Path, other: tuple[np.ndarray, np.ndarray]
) -> None:
    with make_device(fleet, tmp_path) as device:
        fleet.ask("d")
        device.step(0)
        first, learned = version_of(fleet), weights(device)
        device.replace_data(other)
        assert version_of(fleet) == first
        assert device.step(0) is Step.WAITED
        assert version_of(fleet) != first
        assert equal(weights(device), learned)
        fleet.ask("d")
        device.step(0)
    assert [row["samples"] for row in fleet.store.asks.uploads(RUN)] == [24, len(other[1])]


def test_an_answer_of_the_rows_of_before_is_settled_before_the_new_ones_are_told(fleet: Fleet, tmp_path: Path) -> None:
    class Cut(MemoryLink):
        cut = True

        def upload(self, header: Any, chunks: Any) -> Any:
            if self.cut:
                raise LinkError("the way is cut")
            assert version_of(fleet) == first, "while this answer waits, the server knows the rows that it was made of"
            return super().upload(header, chunks)

    link = Cut(fleet.api)
    with make_device(fleet, tmp_path, link=link) as device:
        fleet.ask("d")
        with pytest.raises(LinkError):
            device.step(0)
        first = version_of(fleet)
        device.replace_data(tiny_data(12))
        link.cut = False
        assert device.step(0) is Step.ANSWERED
        assert [row["samples"] for row in fleet.store.asks.uploads(RUN)] == [24]
        device.step(0)
        assert version_of(fleet) != first


def test_rows_may_be_replaced_from_within_any_event(fleet: Fleet, tmp_path: Path) -> None:
    """Whatever is under way then comes to its end, and the rows of the last call are told."""
    asked = 0

    def replace(event: Event) -> None:
        nonlocal asked
        asked += 1
        device.replace_data(tiny_data(seed=asked))

    with make_device(fleet, tmp_path, on_event=replace, export_onnx="round") as device:
        for _ in range(2):
            fleet.ask("d")
            while not fleet.store.asks.uploads(RUN) or fleet.store.asks.open_ids():
                device.step(0)
        device.step(0)
        device.step(0)
        told = version_of(fleet)
        device.replace_data(tiny_data(seed=asked))
        device.step(0)
    assert version_of(fleet) == told
    assert [row["samples"] for row in fleet.store.asks.uploads(RUN)] == [24, 24]


@pytest.mark.parametrize("told", [True, False], ids=["by the digest", "by the app before it died"])
def test_a_restarted_device_with_other_rows_tells_so_without_being_asked(
    fleet: Fleet, tmp_path: Path, told: bool
) -> None:
    """Arrays are looked at; of what a function would give, the app has said that it is new."""
    first: Any = tiny_data() if told else tiny_data
    other: Any = tiny_data(seed=3) if told else lambda: tiny_data(seed=3)
    with make_device(fleet, tmp_path, data=first) as device:
        device.step(0)
        before = version_of(fleet)
        if not told:
            device.replace_data(other)
    with make_device(fleet, tmp_path, data=other) as device:
        assert version_of(fleet) == before
        assert device.step(0) is Step.WAITED
        assert version_of(fleet) != before


def test_a_restarted_device_with_the_rows_of_before_makes_no_worker(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_device(fleet, tmp_path) as device:
        device.step(0)
    monkeypatch.setattr(CheckIn, "make_compute", lambda device, contract: pytest.fail("nobody has asked for work"))
    with make_device(fleet, tmp_path) as device:
        assert device.step(0) is Step.WAITED


def test_a_lost_or_damaged_note_of_the_rows_costs_a_look_and_no_more(fleet: Fleet, tmp_path: Path) -> None:
    note = tmp_path / "rows.txt"
    with make_device(fleet, tmp_path) as device:
        device.step(0)
    right, version = note.read_bytes(), version_of(fleet)
    for damage in (None, b"", b"\xff\xfe", right[:20], right + b"0", right.replace(b"\n", b"")):
        note.unlink() if damage is None else note.write_bytes(damage)
        with make_device(fleet, tmp_path) as device:
            device.step(0)
        assert (note.read_bytes(), version_of(fleet)) == (right, version)


def test_rows_that_do_not_fit_are_refused_until_others_are_given(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path) as device:
        device.step(0)
        device.replace_data((np.zeros((3, 5), np.float32), np.zeros(3, np.int64)))
        for _ in range(2):
            with pytest.raises(DataError, match=r"data has inputs of shape \[5\]"):
                device.step(0)
        device.replace_data(tiny_data(12))
        assert device.step(0) is Step.WAITED


def test_replacing_nothing_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path) as device, pytest.raises(ConfigurationError, match="takes the new data"):
        device.replace_data()
    given = {"model": None, "data": None, "test_data": None}
    with make_device(fleet, tmp_path / "own", worker=lambda contract: None, **given) as device:
        with pytest.raises(ConfigurationError, match="none in an app that gave worker="):
            device.replace_data(tiny_data())
        device.replace_data()
