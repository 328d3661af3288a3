"""A gateway: a long-running process that keeps the device of one site in a run, as a service of systemd.

    python gateway.py --server fleet.example.org:50051 --state-dir state --data samples --enrolment token

Other programs of the site put samples into the folder `--data`: .npz files with `inputs` [N, 1, 8, 8] and `labels` [N],
renamed to *.npz once they are complete. The device notices new files. SIGTERM and Ctrl-C end the process after the
current mini-batch; the next start continues. Exit status: 1 after an error, 78 if the server refuses the device.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import time
import zipfile
from pathlib import Path

import numpy as np

from fleetdistill import Device, Event, FleetDistillError, Server, Step
from fleetdistill.errors import RefusedError
from fleetdistill.models import build_model

logger = logging.getLogger("gateway")

TURN_SECONDS = 2.0  # pause between two turns; the server may ask for a longer one
REFUSED = 78  # exit status that the unit file excludes from restarts, as restarting would not help


def main() -> int:
    """Keeps the device in the run; returns the exit status."""
    given = parse_arguments()
    if not given.data.is_dir():
        sys.exit(f"--data is {given.data}, expected a folder")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")  # journald adds the time
    try:
        with Device(
            server=Server(given.server, enrolment=given.enrolment),
            model=lambda: build_model("digits_mlp_small"),
            data=lambda: samples_in(given.data),
            state_dir=given.state_dir,
            device_id=given.device_id,
            on_event=report,
        ) as device:
            serve(device, given.data)
    except RefusedError as error:
        logger.error("the server refuses this device: %s", error)
        return REFUSED
    except FleetDistillError as error:
        logger.error("%s: %s", type(error).__name__, error)
        return 1
    return 0


def serve(device: Device, data: Path) -> None:
    """Gives the device its turns until the run is over or a signal arrives."""
    stopping, known = [], set()

    def stop(number: int, frame: object) -> None:
        stopping.append(number)
        device.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    notify("READY=1")
    while not stopping and device.tick() is not Step.FINISHED:
        if (result := set(data.glob("*.npz"))) != known:
            known = result
            device.replace_data()
        notify("WATCHDOG=1")
        time.sleep(TURN_SECONDS)
    notify("STOPPING=1")
    logger.info("stopped by %s", signal.Signals(stopping[0]).name if stopping else "the end of the run")


def report(event: Event) -> None:
    """Reports to systemd that the device is working; the SDK logs the event."""
    notify(f"WATCHDOG=1\nSTATUS=round {event.round}: {event.kind}")


def notify(state: str) -> None:
    """Sends a state to systemd (sd_notify) without waiting, if systemd started this process."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel, contextlib.suppress(OSError):
            channel.setblocking(False)
            channel.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)


def samples_in(folder: Path) -> list[tuple[np.ndarray, int]]:
    """Returns the samples of all files that can be read. With an empty list, the device waits."""
    samples: list[tuple[np.ndarray, int]] = []
    for path in sorted(folder.glob("*.npz")):
        try:
            with np.load(path) as file:
                samples += list(zip(file["inputs"], file["labels"].tolist(), strict=True))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            logger.warning("%s is not used: %s", path, error)
    return samples


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="host:port of the aggregation server")
    parser.add_argument("--state-dir", type=Path, required=True, help="directory used only by this device")
    parser.add_argument("--data", type=Path, required=True, help="folder with .npz files of samples")
    parser.add_argument("--device-id", default=socket.gethostname(), help="name of the site; default: the host name")
    parser.add_argument("--enrolment", type=Path, help="file with the operator's token, for a server with TLS")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
