"""Runs simulated devices in a few processes, and starts a process again that was killed.

python -m fleetdistill_lab.simulation.links.device_host SPECS.json --server 127.0.0.1:PORT --processes N
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from fleetdistill import FleetDistillError
from fleetdistill.methods.outside import import_modules
from fleetdistill_lab.simulation.links.multiplexer import run_devices
from fleetdistill_lab.simulation.spec.device import DeviceSpec
from fleetdistill_server.service.processes import allow_open_files, end_with_parent

MAX_RESTARTS = 5
"""How often one process of a simulation is started again."""
_LOOK_SECONDS = 0.2


def main() -> int:
    """Runs devices until the run is finished; returns the process's exit status."""
    parser = argparse.ArgumentParser(description="Runs simulated devices.")
    parser.add_argument("specs", type=Path, help="JSON list of device specs.")
    parser.add_argument("--server", required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--parent", type=int, help="exit when this process exits; default: the parent process")
    options = parser.parse_args()
    log = logging.FileHandler(options.specs.with_suffix(".log"), delay=True)
    log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.setLevel(logging.WARNING)
    logging.getLogger("fleetdistill").addHandler(log)
    specs = [DeviceSpec(**load) for load in json.loads(options.specs.read_text())]
    try:
        import_modules(dict.fromkeys(name for spec in specs for name in spec.modules), "modules")
    except FleetDistillError as error:
        print(error, file=sys.stderr)
        return 1
    groups = [group for first in range(options.processes) if (group := specs[first :: options.processes])]
    return run_processes(groups, options.server, os.getppid() if options.parent is None else options.parent)


class DeviceProcess:
    """A process with some of the devices.

    Args:
        specs: The devices.
        server: `"host:port"` of the server.
    """

    def __init__(self, specs: Sequence[DeviceSpec], server: str) -> None:
        self._given = specs, server, os.getpid()
        self._restarts = 0
        self.process = self._start()

    def _start(self) -> Any:
        # On Linux, processes are forks of this one, so that torch is loaded once. Elsewhere, forking a process that has
        # loaded torch is unsafe.
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        process = context.Process(target=_run_group, args=self._given)
        process.start()
        return process

    def start_again(self) -> bool:
        """Starts a killed process again; returns False if it has failed, or was killed too often."""
        number = -self.process.exitcode
        if number <= 0:
            return False
        self._restarts += 1
        name = f"a process with {len(self._given[0])} devices was killed by signal {number}"
        if self._restarts > MAX_RESTARTS:
            print(f"{name}, the {self._restarts}th time; the machine may lack memory", file=sys.stderr)
            return False
        print(f"{name}; it is started again, and its devices continue from their state directories", file=sys.stderr)
        self.process = self._start()
        return True

    def kill(self) -> None:
        """Kills the process and waits for its end."""
        self.process.kill()
        self.process.join()


def run_processes(groups: Sequence[Sequence[DeviceSpec]], server: str, parent: int) -> int:
    """Runs a process for each group of devices.

    Returns:
        0 when the last process has ended, or 1 when one has failed, this process receives SIGTERM, or its parent exits.
    """
    if sys.platform == "linux":
        preload()  # takes seconds; until its end SIGTERM ends this process, which has no children yet
    stopping: list[int] = []
    # A flag, because Python discards an exception that a signal handler raises in a hook of os.fork.
    signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
    running = []
    try:
        for group in groups:
            running.append(DeviceProcess(group, server))
        while running and not stopping and os.getppid() == parent:
            wait([item.process.sentinel for item in running], _LOOK_SECONDS)
            for item in [item for item in running if not item.process.is_alive()]:
                if item.process.exitcode == 0:
                    running.remove(item)
                elif not item.start_again():
                    return 1
        return 1 if running else 0
    finally:
        for item in running:
            item.kill()


def _run_group(specs: Sequence[DeviceSpec], server: str, host: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(host)
    allow_open_files()
    status = run_devices(specs, server)
    sys.stderr.flush()
    os._exit(status)  # after a device's failure, without waiting for the training of others


def preload() -> None:
    """Imports the modules that devices need; a discarded ONNX export imports the 800 modules of torch's exporter.

    The garbage collector then ignores their objects; otherwise a process's first full collection copies all their
    pages.
    """
    import onnxruntime  # noqa: F401
    import torch._dynamo  # noqa: F401  (otherwise imported by each process's first training step, which takes seconds)
    from torch import nn

    from fleetdistill.compute.torch_compute import TorchCompute  # noqa: F401
    from fleetdistill.training.onnx_export import onnx_bytes

    onnx_bytes(nn.Linear(1, 1), (1,))
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # otherwise a library of torch._dynamo prints hundreds of lines about objects that it did not free
