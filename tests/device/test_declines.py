"""What a device cannot answer is declined, and it goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device.sdk_fleet import RUN, Fleet, make_device
from support.devices import answer_waits, compute_of, state_of
from support.hostile_server import LyingLink, ask, device_at

from fleetdistill import Step
from fleetdistill.errors import (
    CannotAnswer,
)
from fleetdistill.knowledge import RefinedKnowledge
from fleetdistill.testing import EventLog, ManualClock
from fleetdistill_server.intake.memory_link import MemoryLink

# --- declining


def test_unanswerable_ask_is_declined_and_device_goes_on(fleet: Fleet, tmp_path: Path) -> None:
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
        assert device.step(0) is Step.DECLINED
        assert (events[-1].kind, events[-1].text) == ("dropped", "it has no teacher")
        (ask,) = fleet.store.asks.of_step(RUN, 1, 1)
        assert (ask.status, ask.reason) == ("out", "declined")
        (event,) = fleet.store.history.events(RUN, "declined")
        assert (event.device, event.round, event.text) == ("d", 1, "step 'train': it has no teacher")
        assert state_of(device) == before
        del method.handle
        assert device.step(0) is Step.WAITED
        assert fleet.store.devices.present(RUN) == ["d"], "out for the round, not for the run"
        fleet.ask("d")
        assert device.step(0) is Step.ANSWERED
    assert events.kinds()[-1] == "delivered"
    assert all(bool(parameter.any()) for parameter in compute_of(device).module.parameters()), (
        "it went on from the committed state"
    )


def test_what_fails_after_a_stop_is_not_declined_but_done_again(fleet: Fleet, tmp_path: Path) -> None:
    events = EventLog()
    with make_device(fleet, tmp_path, events) as device:
        device.step(0)
        method = compute_of(device).method

        def fail(ask: Any) -> Any:
            device.stop()  # the app ends, and with it what the work needs
            raise RuntimeError("the interpreter shuts down")

        method.handle = fail
        fleet.ask("d")
        assert device.step(0) is Step.PAUSED
        (ask,) = fleet.store.asks.of_step(RUN, 1, 1)
        assert ask.status == "open"
        assert "dropped" not in events.kinds()
        del method.handle
        assert device.step(0) is Step.ANSWERED


def test_repeated_ask_is_declined_after_longer_and_longer_pauses(tmp_path: Path) -> None:
    clock, pauses = ManualClock(), list[float]()
    device, events = device_at(LyingLink(*[ask(step="dream")] * 11, ask(step="dream", round=2)), tmp_path, clock=clock)
    with device:
        for _ in range(12):
            assert device.tick() is Step.DECLINED
            pauses.append(device.pause_seconds)
            clock.advance(pauses[-1])
    assert pauses == [0, 0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60, 0], "another ask is declined at once"
    assert [(event.kind, event.round) for event in events if event.kind == "dropped"] == [
        ("dropped", 1),
        ("dropped", 2),
    ]


def test_a_fault_that_recurs_is_one_traceback_and_then_lines(
    fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(ask: Any) -> None:
        raise ValueError("a fault of the app's model that recurs")

    events = EventLog()
    with make_device(fleet, tmp_path, events) as device:
        device.step(0)
        compute_of(device).method.handle = fail
        for _ in range(3):
            fleet.ask("d")
            assert device.step(0) is Step.DECLINED
    logged = [
        record
        for record in caplog.records
        if "failed with ValueError: a fault of the app's model" in record.getMessage()
    ]
    noted = [item.exc_info is not None for item in logged if item.name == "fleetdistill.compute.base"]
    assert noted == [True, False, False]
    assert events.kinds().count("dropped") == 3


# --- room, and questions that cannot be understood


def test_answer_over_device_bound_is_declined_and_device_goes_on(fleet: Fleet, tmp_path: Path) -> None:
    with make_device(fleet, tmp_path) as device:
        device.step(0)
        assert device.model is not None
        before = state_of(device)
        device._storage.outbox._max_answer_bytes = 100
        fleet.ask("d")
        assert device.step(0) is Step.DECLINED
        (declined,) = fleet.store.history.events(RUN, "declined")
        assert "the limit is 100 bytes; raise Budgets(spool_bytes=...)" in declined.text
        assert state_of(device) == before
        assert not answer_waits(device)
        device._storage.outbox._max_answer_bytes = 1 << 30
        fleet.ask("d")
        assert device.step(0) is Step.ANSWERED
    assert [row.round for row in fleet.store.asks.uploads(RUN)] == [2]


def test_question_over_device_bound_is_declined_before_fetching(fleet: Fleet, tmp_path: Path) -> None:
    events = EventLog()
    with make_device(fleet, tmp_path, events) as device:
        device.step(0)
        assert device.model is not None
        device._backend._downloads._max_bytes = 100
        fleet.ask("d", RefinedKnowledge(valid=True, sample_ids=np.arange(24), values=np.zeros((24, 3), np.float32)))
        assert device.step(0) is Step.DECLINED
        assert device.step(0) is Step.WAITED
    assert events[-1].kind == "dropped"
    assert "the limit is 100" in events[-1].text
    assert fleet.store.asks.of_step(RUN, 1, 1)[0].reason == "declined"


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
            assert device.step(0) is Step.DECLINED
        assert events[-1].kind == "dropped"
        assert "but the disk has 400 bytes free" in events[-1].text
        assert state_of(device) == before
        fleet.ask("d")
        assert device.step(0) is Step.ANSWERED
    assert [row.round for row in fleet.store.asks.uploads(RUN)] == [2]


@pytest.mark.parametrize("newer", ["a step", "a payload"])
def test_ask_of_newer_server_is_declined_and_ends_nothing(
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
        expected = "has no handler for step 'dream'; update the SDK if it is older than the server"
        assert (expected if newer == "a step" else "has unknown element type") in events[-1].text
        fleet.ask("d")
        device.step(0)
    assert [row.round for row in fleet.store.asks.uploads(RUN)] == [2]


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
