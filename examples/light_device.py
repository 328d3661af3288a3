"""An app with a device of the fleet in it, without PyTorch: for a Raspberry Pi, with numpy and onnxruntime alone.

    python examples/light_device.py --server 127.0.0.1:50051 --state-dir out/pi-0 --part 0/3

It takes part in a run of class statistics with its own digits (install fleetdistill[light]; the digits are
scikit-learn's, an app brings its own data). Ctrl-C ends it after the step it is in, a second Ctrl-C at once; started
again it goes on where it was.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import numpy as np

from fleetdistill import Device, Event, FleetDistillError
from fleetdistill.light import light_worker


def main() -> int:
    """Takes part until the run is over or someone presses Ctrl-C."""
    given = parse_arguments()
    training, validation, test = load_own_digits(*given.part)
    try:
        with Device(
            server=given.server,
            worker=light_worker(training, validation_data=validation, test_data=test),
            state_dir=given.state_dir,
            run=given.run,
            device_id=given.device_id,
            enrolment=given.enrolment,
            export_onnx="never",  # writing files needs the package onnx; device.model answers without
            on_event=show,
        ) as device:
            stop_on_ctrl_c(device)
            device.run()
            use_answers(device, *test)
    except FleetDistillError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def show(event: Event) -> None:
    """Prints what the device says."""
    print(f"{event.kind:>10}  {event.text}", flush=True)


def stop_on_ctrl_c(device: Device) -> None:
    """The first signal stops the device after the step it is in, a second one raises KeyboardInterrupt."""

    def stop(number: int, frame: object) -> None:
        print("stopping after this step; Ctrl-C again ends at once", flush=True)
        device.stop()
        signal.signal(number, signal.default_int_handler)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


def use_answers(device: Device, images: np.ndarray, labels: np.ndarray) -> None:
    """What the app does with the result."""
    if not device.models:
        print("no round was delivered yet, so there is no answer")
    for name, model in device.models.items():
        known = np.mean(model.predict(images) == labels)
        print(f"the {name} answer knows {known:.1%} of {len(labels)} digits that it has not seen")


Pair = tuple[np.ndarray, np.ndarray]


def load_own_digits(part: int, parts: int) -> tuple[Pair, Pair, Pair]:
    """This device's share of scikit-learn's digits; no two parts overlap.

    Returns:
        What it makes statistics of, what decides whether a round's answer becomes the app's, and what neither has seen.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images[part::parts, None] / 16).astype(np.float32)  # [N, 1, 8, 8] in [0, 1]
    labels = digits.target[part::parts]
    tenth = len(labels) // 10
    test, validation, training = slice(tenth), slice(tenth, 2 * tenth), slice(2 * tenth, None)
    return tuple((images[rows], labels[rows]) for rows in (training, validation, test))  # type: ignore[return-value]


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:50051", help="host:port of the aggregation server")
    parser.add_argument("--enrolment", help="the operator's token, or the file it is in, for a server with TLS")
    parser.add_argument("--state-dir", type=Path, required=True, help="directory of this device alone")
    parser.add_argument("--part", type=parse_part, default=(0, 1), help="which share of the digits it has, such as 0/3")
    parser.add_argument("--run", default="", help="name of the run; not needed where the server has only one")
    parser.add_argument("--device-id", help="its name in the fleet; a UUID by default")
    return parser.parse_args()


def parse_part(text: str) -> tuple[int, int]:
    """Reads `i/n` with 0 <= i < n."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} must be i/n with 0 <= i < n, such as 0/3")
    return int(part), int(parts)


if __name__ == "__main__":
    sys.exit(main())
