"""Time from `fleetdistill runs create --start` to the first ask that a device answers.

A server of many runs without a run serves a store; a device calls it as soon as the run may exist. The time has three
parts: the command, which checks the run in a process of its own; the start of the engine, which loads torch again; and
the first round. The device is scripted: it computes nothing.

    python benchmarks/many_runs.py [--repeats 5]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.answering import AnsweringDevice
from support.processes import COMMAND, free_port

from fleetdistill.errors import LinkError, RefusedError
from fleetdistill.link.grpc_link import GrpcLink

RUN_TOML = """
[run]
name = "{name}"
method = "feddkc"
min_devices = 1
[contract]
classes = 10
input_shape = [1, 8, 8]
[server]
torch_device = "cpu"
"""


@contextlib.contextmanager
def served(folder: Path, port: int) -> Iterator[None]:
    """Serves an empty store to the loopback interface."""
    config = folder / "server.toml"
    settings = f"listen = '127.0.0.1:{port}'\nstore = {json.dumps(str(folder / 'store'))}\nengines_at_once = 100\n"
    config.write_text(f"[server]\n{settings}")
    log = (folder / "server.log").open("wb")
    process = subprocess.Popen([*COMMAND, "serve", str(config)], stdout=log, stderr=log)
    try:
        while b"is served on" not in (folder / "server.log").read_bytes():
            assert process.poll() is None, (folder / "server.log").read_text()
            time.sleep(0.05)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
        log.close()


def create_run(folder: Path, name: str) -> None:
    """Runs the command."""
    path = folder / f"{name}.toml"
    path.write_text(RUN_TOML.format(name=name))
    words = ["runs", "create", str(path), "--start", "--store", str(folder / "store")]
    subprocess.run([*COMMAND, *words], check=True, stdout=subprocess.DEVNULL)


def first_ask(port: int, name: str) -> None:
    """Returns once a device of the run has an ask."""
    link = GrpcLink(f"127.0.0.1:{port}")
    device = AnsweringDevice(link, name, "d0")
    while not device.receipts:
        try:
            device.step(0.5)
        except (LinkError, RefusedError):  # the run does not exist, or its engine prepares it
            time.sleep(0.02)
    link.close()


def main() -> None:
    """Prints medians and ranges in seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    commands, asks = [], []
    with tempfile.TemporaryDirectory() as name, served(Path(name), port := free_port()):
        for number in range(given.repeats):
            run, began = f"run-{number}", time.monotonic()
            create_run(Path(name), run)
            commands.append(time.monotonic() - began)
            first_ask(port, run)
            asks.append(time.monotonic() - began)
            stop = ["runs", "stop", run, "--store", str(Path(name) / "store")]
            subprocess.run([*COMMAND, *stop], check=True, stdout=subprocess.DEVNULL)
    for what, seconds in (("runs create --start", commands), ("from its start to the first answer to an ask", asks)):
        print(f"{what}: {statistics.median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})")
    print(f"{given.repeats} runs, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
