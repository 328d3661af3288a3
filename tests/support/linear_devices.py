"""SDK devices of the smallest model, with ten classes of small images, for runs that are over at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.open_device import open_device
from support.served import RUN

from fleetdistill import COLUMNS
from fleetdistill.models import build_model


def digits(part: int) -> tuple[np.ndarray, np.ndarray]:
    """Ten classes of images, 4 of each."""
    labels = np.arange(40) % 10
    images = np.random.default_rng(part).random((40, 1, 8, 8)) * 0.3
    images[np.arange(40), 0, labels % 8] += 0.5 + labels[:, None] // 8
    return images.astype(np.float32), labels


def take_part(work: Path, address: str, name: str, part: int, token: str) -> None:
    """Takes part in the run of `support.served` as an SDK device until the run ends; its state is in `work`/`name`."""
    with open_device(
        server=address,
        model=lambda: build_model("digits_linear"),
        data=digits(part),
        test_data=digits(part + 2),
        state_dir=work / name,
        device_id=name,
        run=RUN,
        allow=COLUMNS,
        enrolment=token,
        export="never",
    ) as device:
        device.run()
