"""A camera app: classifies each frame with the current model, while its device learns from frames that the user labels.

    fleetdistill serve examples/classstats.toml
    python examples/camera_app.py --state-dir out/camera-0 --camera 0
    python examples/camera_app.py --state-dir out/camera-1 --camera 1

The frames are scikit-learn's digits with generated changes of light and position. Each camera sees all ten classes, but
its user labels only half of them; the fleet teaches the others. Labelled images are never used to measure accuracy.
Ctrl-C ends the app; the device continues from its state directory at the next start.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_digits

from fleetdistill import Device, Event, FleetDistillError, Predictor, Server
from fleetdistill.models import build_model

UPDATE_AFTER, KEPT, SHOWN_AFTER = 30, 300, 100
"""Labels between two updates of the device, labelled frames that it learns from, and frames between two lines."""


class Frame(NamedTuple):
    """An image `[1, 8, 8]` float32 in [0, 1], its class, and whether the app asks the user for the class."""

    image: np.ndarray
    label: int
    asks: bool


def main() -> int:
    """Runs the camera and its device until Ctrl-C is pressed."""
    given = parse_arguments()
    labelled: list[tuple[np.ndarray, int]] = []  # grows while the device runs
    try:
        with Device(
            server=Server(given.server, enrolment=given.enrolment),
            model=lambda: build_model("digits_mlp_small"),
            data=lambda: labelled[-KEPT:],  # called before each answer; no labels yet is not an error
            state_dir=given.state_dir,
            on_event=show,
        ) as device:
            device.start()
            watch(device, labelled, given.camera, given.fps)
    except KeyboardInterrupt:
        print("stopped")
    except FleetDistillError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def watch(device: Device, labelled: list[tuple[np.ndarray, int]], camera: int, fps: float) -> None:
    """Classifies frames, and collects those that the user labels, until the run is over."""
    predictor = Predictor(device.state_dir)
    correct: dict[bool, deque[bool]] = {mine: deque(maxlen=SHOWN_AFTER) for mine in (True, False)}
    for number, frame in enumerate(frames(camera), start=1):
        mine = frame.label // 5 == camera  # whether the user labels this class
        if predictor.refresh():
            print(f"frame {number:5}: model {predictor.version} of round {predictor.round} is in use", flush=True)
        if frame.asks and mine:
            labelled.append((frame.image, frame.label))
            if len(labelled) % UPDATE_AFTER == 0:
                device.replace_data()  # the data have changed: do not wait for the next request
        elif not frame.asks and predictor.ready:
            result = predictor.model.predict(frame.image[None]).argmax()
            correct[mine].append(bool(result == frame.label))
        if number % SHOWN_AFTER == 0 and predictor.ready:
            shares = (f"{np.mean(some):.0%}" if some else "-" for some in correct.values())
            print(f"frame {number:5}: {' of labelled classes, '.join(shares)} of other classes correct", flush=True)
        if device.join(timeout=1 / fps):  # until the next frame; raises what ended the device
            return


def frames(camera: int) -> Iterator[Frame]:
    """Yields this camera's digits without end, with slow changes of light, shifts and noise."""
    digits, random = load_digits(), np.random.default_rng(camera)
    rows = random.permutation(np.arange(camera, len(digits.target), 2))
    for number in count():
        row = rows[number % len(rows)]
        light = 0.8 + 0.2 * np.sin(number / 150)
        image = np.roll(digits.images[row] / 16, random.integers(-1, 2), axis=1)
        image = light * image + 0.1 * np.cos(number / 60) + random.normal(0, 0.05, image.shape)
        yield Frame(image[None].clip(0, 1).astype(np.float32), int(digits.target[row]), bool(row // 2 % 3 == 0))


def show(event: Event) -> None:
    """Prints what the device reports, in its thread."""
    if event.kind in ("checked-in", "no-samples", "delivered", "lost-contact", "contact-returned"):
        print(f"    {event.kind}: {event.text}", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:50051", help="host:port of the aggregation server")
    parser.add_argument("--enrolment", help="token from the operator, or a file with it, for a server with TLS")
    parser.add_argument("--state-dir", type=Path, required=True, help="directory used only by this device")
    parser.add_argument("--camera", type=int, choices=(0, 1), default=0, help="which half of the digits it sees")
    parser.add_argument("--fps", type=float, default=30, help="frames per second")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
