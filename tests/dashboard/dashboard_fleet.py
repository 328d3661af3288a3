"""A served run with SDK devices for tests of the dashboard: they train a real, small model in threads of the test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from support.open_device import open_device

from fleetdistill import Device

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "run": {"method": "fedavg", "rounds": 3},
    "contract": {"classes": 10, "input_shape": [1, 8, 8]},
    "model": {"extractor": "", "server": "", "device": "digits_linear"},
    "method": {"local_epochs": 1},
}
SAMPLES = 40


def make_device(address: str, work: Path, run: str, number: int, **more: Any) -> Device:
    """A device with random images, which reports its accuracy and how many samples of each class it has.

    `more` are further arguments of `Device`.
    """
    random = np.random.default_rng(number)
    images = random.random((SAMPLES, 1, 8, 8), np.float32)
    labels = np.arange(SAMPLES) % 10
    return open_device(
        server=address,
        model=_model,
        name="digits_linear",
        data=(images, labels),
        test_data=(images[:20], labels[:20]),
        state_dir=work / f"device-{number}",
        run=run,
        device_id=f"device-{number}",
        allow=["parameters", "counts", "metrics"],
        export="never",
        **more,
    )


def _model() -> Any:
    from fleetdistill.models import build_model

    return build_model("digits_linear", input_shape=(1, 8, 8), classes=10)


@contextlib.contextmanager
def devices_at_work(address: str, work: Path, run: str, count: int = 2) -> Iterator[list[Device]]:
    """Devices that take part in a run, each in a thread, until it is over or the block ends."""
    devices = [make_device(address, work, run, number) for number in range(count)]
    threads = [threading.Thread(target=device.run) for device in devices]
    for thread in threads:
        thread.start()
    try:
        yield devices
    finally:
        for device in devices:
            device.stop()
        for thread in threads:
            thread.join()
        for device in devices:
            device.close()


def tiles_of(page: Any, region: str, awaited: str) -> dict[str, str]:
    """The tiles of a region of a page by name, once one of them has a text."""
    tiles = page.get_by_role("region", name=region).locator("dl div")
    tiles.filter(has_text=awaited).first.wait_for()
    return dict(zip(tiles.locator("dt").all_text_contents(), tiles.locator("dd").all_text_contents(), strict=True))
