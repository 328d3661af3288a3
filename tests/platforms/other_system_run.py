"""A run in memory in a process that behaves like one on another system; see `platforms.other_system`.

Imports the product only inside functions, after the process has been changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from platforms import other_system

SYSTEMS: dict[str, Callable[[], None]] = {
    "linux": lambda: None,
    "windows": other_system.windows,
    "no locks": lambda: other_system.without_modules("fcntl", "msvcrt"),
}
"""What is changed in a process, by the system's name."""
SETTINGS: dict[str, dict[str, Any]] = {
    "torch": {
        "run": {"method": "fedavg", "rounds": 3},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
        "model": {"extractor": "", "server": "", "device": "digits_linear"},
    },
    "light": {
        "run": {"method": "classstats", "rounds": 1},
        "contract": {"classes": 10, "input_shape": [1, 8, 8]},
    },
}
"""Runs by kind of device."""


def take_part(system: str, kind: str, folder: Path) -> None:
    """Runs a device to the end of a run with one restart; writes its events to a file."""
    other_system.forget_product()
    SYSTEMS[system]()
    from fleetdistill import Step
    from fleetdistill_server.testing import MemoryServer

    kinds: list[str] = []
    with MemoryServer(SETTINGS[kind]) as server:
        with _device(kind, server, folder, kinds) as device:
            while device.step(0.0) is not Step.ANSWERED:
                pass
            if system != "no locks":
                _check_second_device(kind, server, folder)
        with _device(kind, server, folder, kinds) as device:
            device.run()
            kinds.append(server.status)
    (folder / "events.json").write_bytes(json.dumps(kinds).encode())


def _device(kind: str, server: Any, folder: Path, kinds: list[str]) -> Any:
    from support.open_device import open_device

    return open_device(
        server=server.link(),
        state_dir=folder / "state",
        device_id="d",
        on_event=lambda event: kinds.append(event.kind),
        **_computing(kind),
    )


def _computing(kind: str) -> dict[str, Any]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    data = (digits.images[:200, None] / 16).astype(np.float32), digits.target[:200]
    if kind == "light":
        from fleetdistill.compute import light_worker
        from fleetdistill.data import Splits

        return {"worker": light_worker(Splits(data, validation_data=data))}
    from fleetdistill.models import build_model

    allow = ("parameters", "counts", "metrics")
    return {"model": lambda: build_model("digits_linear"), "data": data, "validation_data": data, "allow": allow}


def _check_second_device(kind: str, server: Any, folder: Path) -> None:
    """A second device in an open directory is an error."""
    from fleetdistill.errors import StateError

    with pytest.raises(StateError, match="is in use by another device"):
        _device(kind, server, folder, [])
