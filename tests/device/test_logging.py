"""What a device logs, and that it leaves the app's logging alone."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from pathlib import Path

import pytest
from device.waiting import Ticking
from support.hostile_server import LyingLink, ask, device_at, terms

import fleetdistill


def test_loggers_are_below_fleetdistill_without_handler_or_level() -> None:
    modules = [package.name for package in pkgutil.walk_packages(fleetdistill.__path__, "fleetdistill.")]
    modules = [name for name in modules if not name.endswith(".__main__")]
    for name in modules:
        importlib.import_module(name)
    names = {name for name in logging.root.manager.loggerDict if name.startswith("fleetdistill.")} | set(modules)
    loggers = [logging.getLogger(name) for name in names if not name.startswith("fleetdistill.server")]
    assert len(loggers) > 100
    assert [logger for logger in loggers if logger.handlers or logger.level or not logger.propagate] == []


def test_events_are_logged_at_info_and_progress_for_debugging(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fleetdistill")
    link = LyingLink(ask(), terms=terms(settings={"local_epochs": 20}), remote=True)
    device, events = device_at(link, tmp_path, clock=Ticking())
    with device:
        device.run()
    logged = [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if record.name == "fleetdistill.device.events"
    ]
    levels = {"progress": "DEBUG"}
    expected = [(levels.get(event.kind, "INFO"), f"{device.device_id}: {event.text}") for event in events]
    warnings = [item for item in logged if item[0] == "WARNING"]
    assert [item for item in logged if item not in warnings] == expected
    assert "DEBUG" in dict(expected)
    assert ["what leaves this device" in text for _, text in warnings] == [True]
