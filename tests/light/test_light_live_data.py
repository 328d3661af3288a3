"""Data that change under a device without PyTorch, also in a private run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.open_device import open_device
from support.private_fleet import CLASSES, PrivateFleet, RecordingLink, received

from fleetdistill import Budgets, Device, Step
from fleetdistill.compute import light_worker
from fleetdistill.data import Augmented
from fleetdistill.errors import DataError
from fleetdistill.testing import EventLog, ManualClock
from fleetdistill_server.testing import MemoryServer

SETTINGS: dict[str, Any] = {
    "run": {"method": "classstats", "rounds": 1},
    "contract": {"classes": CLASSES, "input_shape": [1, 8, 8]},
}
Pairs = list[tuple[np.ndarray, int]]


def pairs(count: int = 60, seed: int = 0) -> Pairs:
    random = np.random.default_rng(seed)
    return [(random.random((1, 8, 8)).astype(np.float32), row % CLASSES) for row in range(count)]


def light_device(link: Any, state_dir: Path, data: Any, events: EventLog) -> Device:
    return open_device(
        server=link,
        worker=light_worker(data),
        state_dir=state_dir,
        device_id="d",
        export="never",
        on_event=events.append,
        clock=ManualClock(),
    )


def test_light_device_waits_for_samples_then_takes_part(tmp_path: Path) -> None:
    kept: Pairs = []
    events = EventLog()
    with MemoryServer(SETTINGS) as server, light_device(server.link(), tmp_path, kept, events) as device:
        assert [device.step(0), device.step(0)] == [Step.WAITED, Step.WAITED]
        assert events.kinds() == ["no-samples"]
        kept.extend(pairs())
        device.run()
        assert server.status == "finished"
    assert "delivered" in events.kinds()


@pytest.mark.parametrize("form", ["pairs", "a mapped array"])
def test_every_form_gives_the_same_statistics(tmp_path: Path, form: str) -> None:
    inputs = np.stack([image for image, _ in pairs()])
    labels = np.array([label for _, label in pairs()])
    file = np.memmap(tmp_path / "inputs.bin", np.float32, "w+", shape=inputs.shape)
    file[:] = inputs
    sent = []
    for name, data in (("a", (inputs, labels)), ("b", pairs() if form == "pairs" else (file, labels))):
        events = EventLog()
        with MemoryServer(SETTINGS) as server, light_device(server.link(), tmp_path / name, data, events) as device:
            device.run()
            sent.append([row.sha256 for row in server.store.asks.uploads("test")])
    assert sent[0] == sent[1]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (Augmented(pairs(), lambda one: one), "does not train, so Augmented has no effect"),
        ((np.zeros((2, 1, 8, 8), np.uint8), np.zeros(2, np.int64)), "data: the inputs are uint8"),
        ("photos/", "data: the data is of type str"),
    ],
)
def test_data_that_cannot_work_are_an_error_at_construction(data: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        light_worker(data)


# --- private runs


def answer(device: Device, fleet: PrivateFleet) -> None:
    fleet.ask("d")
    assert device.step(0) in (Step.ANSWERED, Step.DECLINED)


def test_changed_rows_are_second_release_that_budget_declines(tmp_path: Path) -> None:
    """The rows are read again without `replace_data`, and the server learns nothing of it but the decline."""
    fleet, events, kept = PrivateFleet(), EventLog(), pairs()
    link = RecordingLink(fleet.api)
    with light_device(link, tmp_path, kept, events) as device:
        device.step(0)
        answer(device, fleet)
        answer(device, fleet)
        kept.append(pairs(1, seed=5)[0])
        answer(device, fleet)
    first, again = received(fleet.store)
    assert np.array_equal(first.sums, again.sums)
    assert [message.reason for call, message in link.sent if call == "decline"] == ["privacy budget used up"]
    profiles = [message for call, message in link.sent if call == "check_in" and message is not None]
    assert {(profile.samples, profile.data_version) for profile in profiles} == {(1, b"")}


def test_a_private_device_does_not_say_that_its_samples_are_gone(tmp_path: Path) -> None:
    fleet, events, kept = PrivateFleet(), EventLog(), pairs()
    link = RecordingLink(fleet.api)
    with light_device(link, tmp_path, kept, events) as device:
        device.step(0)
        kept.clear()
        answer(device, fleet)
    assert [message.reason for call, message in link.sent if call == "decline"] == ["this device cannot answer"]
    assert any("no samples" in event.text for event in events if event.kind == "dropped")


def test_an_extractor_above_the_limit_declines_the_ask(tmp_path: Path) -> None:
    """As an answer that is too large: the device continues, and its app is told which limit to raise."""
    events = EventLog()
    with (
        MemoryServer(SETTINGS) as server,
        open_device(
            server=server.link(),
            worker=light_worker(pairs()),
            state_dir=tmp_path,
            device_id="d",
            budgets=Budgets(spool_bytes=1000),
            on_event=events.append,
            clock=ManualClock(),
        ) as device,
    ):
        assert Step.DECLINED in [device.step(0) for _ in range(2)]
    told = next(event.text for event in events if event.kind == "dropped")
    assert "the limit is 1000 bytes; raise Budgets(spool_bytes=...)" in told
