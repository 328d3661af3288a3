"""What an app needs to show a bar: rounds of the run, and progress of the work, at a limited rate."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
from device.waiting import Ticking
from support.hostile_server import LyingLink, ask, device_at, terms
from support.open_device import open_device

from fleetdistill import Event
from fleetdistill.compute import light_worker
from fleetdistill.progress import report_progress, report_to
from fleetdistill.testing import EventLog, ManualClock
from fleetdistill_server.testing import MemoryServer


def test_training_reports_its_progress_at_most_once_per_second(tmp_path: Path) -> None:
    fourth = ask(round=4, completed_rounds=2)  # of a run of three, in which one fell short
    link = LyingLink(fourth, terms=terms(settings={"local_epochs": 40, "batch_size": 4}))
    threads: set[threading.Thread] = set()

    def note(event: Event) -> None:
        events.append(event)
        threads.add(threading.current_thread())

    device, events = device_at(link, tmp_path, clock=Ticking(), on_event=note)
    with device:
        device.run()
    training = [event for event in events if event.kind == "progress" and event.values["phase"] == "training"]
    fractions = [event.progress for event in training if event.progress is not None]
    assert fractions == sorted(fractions)
    assert 0 <= fractions[0] < 0.1 < 0.9 < fractions[-1] < 1
    calls = 40 * 3  # batches; each one looks at the clock for the time limit and for the progress
    assert len(fractions) <= calls * 2 * 0.25
    text = f"round 4: training, {fractions[0]:.0%}"
    values = {"step": "train", "phase": "training", "completed_rounds": 2}
    assert training[0] == Event("progress", 4, text, values, rounds=3, progress=fractions[0])
    assert threads == {threading.current_thread()}


def test_a_device_without_pytorch_reports_progress_too(tmp_path: Path) -> None:
    images, labels = np.random.default_rng(0).random((600, 1, 8, 8), np.float32), np.arange(600) % 10
    settings: dict[str, dict[str, Any]] = {
        "run": {"method": "classstats", "rounds": 1},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
    }
    events = EventLog()
    with (
        MemoryServer(settings) as server,
        open_device(
            server=server.link(),
            worker=light_worker((images, labels)),
            state_dir=tmp_path,
            clock=Ticking(),
            on_event=events.append,
        ) as device,
    ):
        device.run()
    result = [event for event in events if event.kind == "progress"]
    assert result
    assert all(event.values["phase"] == "inference" and 0 <= (event.progress or 0) < 1 for event in result)
    assert "progress" not in events.kinds()


def test_every_event_after_the_check_in_has_the_number_of_rounds(tmp_path: Path) -> None:
    for rounds in (3, 0):
        device, events = device_at(LyingLink(ask(), terms=terms(rounds=rounds)), tmp_path / str(rounds))
        with device:
            device.run()
        assert {event.rounds for event in events} == {rounds}


def test_a_callback_that_fails_during_training_does_not_end_it(tmp_path: Path) -> None:
    kinds: list[str] = []

    def fail(event: Event) -> None:
        kinds.append(event.kind)
        if event.kind == "progress":
            raise OSError("no display")

    link = LyingLink(ask(), terms=terms(settings={"local_epochs": 20}))
    device, _ = device_at(link, tmp_path, clock=Ticking(), on_event=fail, seconds_per_ask=1e9)
    with device:
        device.run()
    assert kinds.count("callback-failed") == kinds.count("progress") > 1
    assert kinds[-1] == "finished"


def test_nothing_is_reported_without_receiver_or_for_short_work() -> None:
    result: list[tuple[str, float]] = []
    report_progress("training", 0.5)
    clock = ManualClock()
    with report_to(lambda phase, fraction: result.append((phase, fraction)), clock.now):
        report_progress("training", 0.1)
        clock.advance(1)
        report_progress("training", 0.2)
        report_progress("training", 0.3)
    assert result == [("training", 0.2)]
