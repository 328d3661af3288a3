"""What a device says at its check-in about what its answers reveal."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from device.sdk_fleet import Fleet, make_device

from fleetdistill.methods import example_config
from fleetdistill.testing import EventLog
from fleetdistill_server.intake.memory_link import MemoryLink


@pytest.mark.parametrize(
    ("method", "settings", "expected"),
    [
        ("fedavg", {}, ""),
        ("cdkt", {}, ""),
        ("dafkd", {}, ""),
        ("classstats", {}, ""),
        ("classstats", {"rows_per_direction": 2}, "a direction for every 2 samples"),
        ("classstats", {"rows_per_direction": 2, "rank": 0}, ""),
        ("classstats", {"rows_per_direction": 9}, "a direction for every 9 samples"),
        ("classstats", {"rows_per_direction": 10}, ""),
        ("classstats", {"refine": "gradients"}, "5 sums of gradients leave besides class statistics"),
        ("classstats", {"refine": "auto"}, ""),
        ("classstats_summed", {}, ""),
        ("classstats_summed", {"refine": "auto"}, "at heads that the server chooses"),
        ("classstats_private", {}, ""),
        ("feddkd", {}, ""),
        ("feddkd", {"dkd_batch_size": 32}, ""),
        ("feddkd", {"dkd_batch_size": 31}, "gradients of 31 samples leave"),
        ("feddkd", {"dkd_batch_size": 1, "dkd_steps": 0}, ""),
        ("feddkc", {}, "features of every sample leave, .* and its label"),
        ("feddkc", {"labels": False}, "logits that give its label"),
        ("fedd2s", {}, "first layer's output of every sample leaves"),
    ],
)
def test_settings_that_reveal_single_samples(method, settings, expected) -> None:
    revealed = example_config(method, **settings).reveals()
    assert bool(revealed) == bool(expected)
    assert re.search(expected, revealed)


@pytest.mark.parametrize("remote", [False, True])
def test_a_device_says_it_at_check_in(
    fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture, remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the event, and in the log if the answers leave the process."""
    monkeypatch.setattr(MemoryLink, "remote", remote)
    events = EventLog()
    with caplog.at_level(logging.WARNING, "fleetdistill.device"), make_device(fleet, tmp_path, events) as device:
        device.step(0)
    assert "features of every sample leave" in events[0].values["reveals"]
    warned = [record.message for record in caplog.records if "what leaves this device" in record.message]
    assert len(warned) == remote
