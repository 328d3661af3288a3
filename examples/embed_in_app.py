"""An app with an embedded device: takes part in the run of examples/run.toml with its own digits.

    python examples/embed_in_app.py --server 127.0.0.1:50051 --state-dir out/device-0 --model digits_linear --part 0/3

Ctrl-C stops the device after its current step, a second Ctrl-C immediately. It resumes when it is started again.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import numpy as np

from fleetdistill import COLUMNS, Device, Event, FleetDistillError, Server, Splits, TorchModel


def main() -> int:
    """Takes part until the run is finished or Ctrl-C is pressed."""
    given = parse_arguments()
    training, validation, test = load_own_digits(*given.part)
    try:
        with Device(
            server=Server(given.server, run=given.run, enrolment=given.enrolment),
            model=TorchModel(lambda: build_my_model(given.model), name=given.model),
            data=Splits(training, validation_data=validation, test_data=test),
            state_dir=given.state_dir,
            device_id=given.device_id,
            allow=COLUMNS,  # FedDKC requires features, logits and labels, which do not leave the device by default
            on_event=show,
        ) as device:
            stop_on_ctrl_c(device)
            device.run()
    except KeyboardInterrupt:
        print("stopped immediately; every acknowledged answer is safe")
    except FleetDistillError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    use_model(given.state_dir / "model.onnx", *test)
    return 0


def build_my_model(name: str):  # type: ignore[no-untyped-def]  # returns a torch module; torch is imported when it is needed
    """Builds the app's model: here a built-in one, in an app `split_sequential(nn.Sequential(...), after=...)`."""
    from fleetdistill.models import build_model

    return build_model(name, input_shape=(1, 8, 8), classes=10)


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


def use_model(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Uses the result: inference with onnxruntime, without torch."""
    if not path.exists():
        print("no round has been delivered yet, so there is no model.onnx")
        return
    import onnxruntime

    logits = onnxruntime.InferenceSession(str(path)).run(["logits"], {"input": images})[0]
    print(f"{path} classifies {np.mean(logits.argmax(1) == labels):.1%} of {len(labels)} unseen digits correctly")


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
    parser.add_argument("--model", default="digits_mlp_small", help="device model, see docs/reference/models.md")
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
