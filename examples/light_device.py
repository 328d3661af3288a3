"""An app with an embedded device without PyTorch, for example on a Raspberry Pi: NumPy and onnxruntime only.

    python examples/light_device.py --server 127.0.0.1:50051 --state-dir out/pi-0 --part 0/3

It takes part in a classstats run with its own digits, from scikit-learn. Install fleetdistill[light]. Ctrl-C stops the
device after its current step, a second Ctrl-C immediately. It resumes when it is started again.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import numpy as np

from fleetdistill import Deployment, Device, Event, FleetDistillError, Server, Splits
from fleetdistill.compute import light_worker


def main() -> int:
    """Takes part until the run is finished or Ctrl-C is pressed."""
    given = parse_arguments()
    training, validation, test = load_own_digits(*given.part)
    try:
        with Device(
            server=Server(given.server, run=given.run, enrolment=given.enrolment),
            worker=light_worker(Splits(training, validation_data=validation, test_data=test)),
            state_dir=given.state_dir,
            device_id=given.device_id,
            deployment=Deployment(export="never"),  # exporting requires the package onnx; device.model does not
            on_event=show,
        ) as device:
            stop_on_ctrl_c(device)
            device.run()
            use_models(device, *test)
    except FleetDistillError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def show(event: Event) -> None:
    """Prints an event of the device."""
    print(f"{event.kind:>10}  {event.text}", flush=True)


def stop_on_ctrl_c(device: Device) -> None:
    """Makes the first signal stop the device after its current step, and a second one raise KeyboardInterrupt."""

    def stop(number: int, frame: object) -> None:
        print("stopping after this step; press Ctrl-C again to stop immediately", flush=True)
        device.stop()
        signal.signal(number, signal.default_int_handler)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)


def use_models(device: Device, images: np.ndarray, labels: np.ndarray) -> None:
    """Uses the result: inference with each model variant."""
    if not device.models:
        print("no round has been delivered yet, so there is no model")
    for name, model in device.models.items():
        accuracy = np.mean(model(images).argmax(axis=1) == labels)
        print(f"the {name} model classifies {accuracy:.1%} of {len(labels)} unseen digits correctly")


Pair = tuple[np.ndarray, np.ndarray]


def load_own_digits(part: int, parts: int) -> tuple[Pair, Pair, Pair]:
    """Returns this device's share of scikit-learn's digits; shares do not overlap.

    Returns:
        Training, validation and test data.
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
    parser.add_argument("--enrolment", help="token from the operator, or a file with it, for a server with TLS")
    parser.add_argument("--state-dir", type=Path, required=True, help="directory used only by this device")
    parser.add_argument(
        "--part", type=parse_part, default=(0, 1), help="share of the digits that the device has, such as 0/3"
    )
    parser.add_argument("--run", default="", help="name of the run; optional if the server has a single run")
    parser.add_argument("--device-id", help="name of the device in the fleet; default: a UUID")
    return parser.parse_args()


def parse_part(text: str) -> tuple[int, int]:
    """Reads `i/n` with 0 <= i < n."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdigit() and parts.isdigit() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} must be i/n with 0 <= i < n, such as 0/3")
    return int(part), int(parts)


if __name__ == "__main__":
    sys.exit(main())
