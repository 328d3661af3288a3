"""A sensor app: a 1-D CNN recognises faults of a machine by its vibration, also a fault that this machine never had.

    cd examples; python sensor_app.py --make-proxy proxy.npz
    fleetdistill serve sensor.toml
    python sensor_app.py --state-dir ../out/pump --lacks bearing
    python sensor_app.py --state-dir ../out/fan --lacks unbalance

The signals are generated: a noisy rotation, stronger if the rotor is unbalanced, with impacts if the bearing is bad.
Server and devices share 24 labelled signals, the proxy set of the method cdkt; a device sends its predictions for them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleetdistill import Budgets, Device, Eligibility, Event, FleetDistillError, Step
from fleetdistill.training import SplitModel, wrap

CLASSES = ("normal", "unbalance", "bearing")


class VibrationNet(nn.Module):
    """Maps signals `[batch, 1, 256]` to logits `[batch, 3]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(1, width, 9, stride=2, padding=4), nn.BatchNorm1d(width), nn.ReLU())
        self.body = nn.Sequential(nn.Conv1d(width, 16, 9, stride=2, padding=4), nn.ReLU(), nn.AdaptiveMaxPool1d(4))
        self.head = nn.Linear(64, len(CLASSES))

    def forward(self, signals: Tensor) -> Tensor:
        """Returns the logits."""
        return self.head(self.body(self.stem(signals)).flatten(1))


def device_model() -> SplitModel:
    """Makes the model of a device, with the same weights at each start."""
    torch.manual_seed(0)
    return wrap(VibrationNet(width=8), cut="stem")


def server_model(input_shape: Sequence[int], classes: int) -> SplitModel:
    """Makes the server's model, which sensor.toml names; it may differ from the devices' models."""
    return wrap(VibrationNet(width=16), cut="stem")


def signals(count: int, kinds: Sequence[str], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Generates signals `[count, 1, 256]` float32, a quarter of a second each, and labels `[count]`, in equal parts."""
    random, seconds = np.random.default_rng(seed), np.arange(256) / 1024
    labels = np.resize([CLASSES.index(kind) for kind in kinds], count)
    rotation = random.uniform(20, 35, (count, 1)) * seconds + random.random((count, 1))
    strength = np.where(labels == 1, random.uniform(1.0, 1.6, count), 0.6)[:, None]
    damage = np.where(labels == 2, random.uniform(1.2, 2.0, count), 0.0)[:, None]
    impacts = np.exp(-4 * (3.6 * rotation % 1)) * np.sin(2 * np.pi * 300 * seconds)
    values = strength * np.sin(2 * np.pi * rotation) + damage * impacts + random.normal(0, 0.3, rotation.shape)
    return values[:, None].astype(np.float32), labels


def make_device(server: Any, state_dir: Path, lacks: str, temperature: Callable[[], float], **more: Any) -> Device:
    """Makes the device of a machine that never had one kind of fault; `temperature` returns that of the board in °C."""
    return Device(
        server=server,
        model=device_model,
        data=signals(120, [kind for kind in CLASSES if kind != lacks], seed=CLASSES.index(lacks)),
        state_dir=state_dir,
        device_id=state_dir.name,  # the machine's name
        allow={"logits", "metrics"},
        eligibility=Eligibility(max_temperature=70, min_free_disk=50_000_000, probes={"temperature": temperature}),
        budgets=Budgets(bytes_per_day=2_000_000, compute_seconds_per_day=600, threads=1),
        **more,
    )


def watch(device: Device, lacks: str) -> None:
    """Gives the device its turns until the run is over, and measures each new model on signals of no device."""
    shown, (inputs, labels) = 0, signals(300, CLASSES, seed=10)
    while device.tick() is not Step.FINISHED:
        time.sleep(0.25)  # until the sensor has the next signal, which an app classifies here
        if device.version > shown:
            shown = device.version
            correct = device.predict(inputs).argmax(axis=1) == labels
            shares = (f"{kind} {correct[labels == number].mean():.0%}" for number, kind in enumerate(CLASSES))
            print(f"model {shown} recognises {', '.join(shares)}; this machine never had: {lacks}", flush=True)


def show(event: Event) -> None:
    """Prints what the device reports about its conditions and its connection."""
    if event.kind in ("checked-in", "proxy", "waiting", "resumed", "lost-contact", "contact-returned", "finished"):
        print(f"    {event.kind}: {event.text}", flush=True)


def main() -> None:
    """Runs the app, or writes the proxy set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--make-proxy", type=Path, help="write the proxy set to this .npz file and exit")
    parser.add_argument("--server", default="127.0.0.1:50051", help="host:port of the aggregation server")
    parser.add_argument("--state-dir", type=Path, default=Path("sensor"), help="directory used only by this device")
    parser.add_argument("--lacks", choices=CLASSES[1:], default="bearing", help="the fault that this machine never had")
    given = parser.parse_args()
    if given.make_proxy:
        np.savez(given.make_proxy, **dict(zip(("inputs", "labels"), signals(24, CLASSES, seed=20), strict=True)))
        return
    try:
        with make_device(given.server, given.state_dir, given.lacks, lambda: 45.0, on_event=show) as device:
            watch(device, given.lacks)
    except FleetDistillError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main()
