"""Memory and processor time of a device's whole exchange of class statistics, with PyTorch and without.

    python benchmarks/light_device.py

A server of its own for each device, on the loopback; the device is a process of its own from check-in to the end of the
run, with its interpreter and imports, and then answers for a hundred images. Both kinds have the same rows. Linux only:
peak memory is VmHWM, because ru_maxrss of getrusage counts what the process had before exec, its parent's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("torch", "light")
REPEATS = 3
ANSWERED = 100


def main() -> int:
    """Measures, or is one of the measured devices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--server", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.device:
        take_part(given.device, given.server, given.folder)
    else:
        compare()
    return 0


# --- a measured device: only what a device needs is imported


def take_part(kind: str, server: str, folder: Path) -> None:
    """One exchange, and the figures of this process as JSON."""
    from fleetdistill import Deployment, Device

    with np.load(folder / "data.npz") as arrays:
        data = arrays["inputs"], arrays["labels"]
    deployment = Deployment(export="never")
    with Device(server=server, state_dir=folder / kind, deployment=deployment, **computing(kind, data)) as device:
        device.run()
        assert {"general", "personal"} <= set(device.models)
        answer_for(kind, device.model, data[0][:ANSWERED])
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"peak": peak_memory(), "cpu": used.ru_utime + used.ru_stime}))


def peak_memory() -> int:
    """Most bytes that this process ever had in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def computing(kind: str, data: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
    """What computes for the device; the app's own network is as small as one can be."""
    if kind == "light":
        from fleetdistill.compute import light_worker

        return {"worker": light_worker(data)}
    from torch import nn

    from fleetdistill.training.model import split_sequential

    def model() -> nn.Module:
        return split_sequential(nn.Sequential(nn.Flatten(), nn.Linear(data[0][0].size, 10)), after=1)

    return {"model": model, "data": data}


def answer_for(kind: str, model: Any, inputs: np.ndarray) -> None:
    """What the app does with the result."""
    if kind == "light":
        model(inputs)
        return
    import torch

    with torch.no_grad():
        model(torch.from_numpy(inputs))


# --- the comparison


def data_sets() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A device's rows: a fifth of the digits, and as many pixels as Fashion-MNIST has."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    rng = np.random.default_rng(0)
    return {
        "360 digits, 8x8": ((digits.images[::5, None] / 16).astype(np.float32), digits.target[::5]),
        "600 random images, 28x28": (rng.random((600, 1, 28, 28), np.float32), np.arange(600) % 10),
    }


def compare() -> None:
    """Prints the table; kinds take turns, and a ratio is of one turn."""
    print(f"{'rows':26}{'device':>8}{'peak MB':>10}{'CPU s':>8}{'wall s':>8}   medians of {REPEATS}, one thread")
    for name, data in data_sets().items():
        turns = [{kind: measured(kind, data) for kind in KINDS} for _ in range(REPEATS)]
        for kind in KINDS:
            peak, cpu, wall = (
                statistics.median(turn[kind][item] for turn in turns) for item in ("peak", "cpu", "wall")
            )
            print(f"{name:26}{kind:>8}{peak / 1e6:10.0f}{cpu:8.2f}{wall:8.2f}")
        ratios = {
            what: statistics.median(turn["torch"][what] / turn["light"][what] for turn in turns)
            for what in ("peak", "cpu", "wall")
        }
        print(f"{'':26}{'ratio':>8}{ratios['peak']:10.1f}{ratios['cpu']:8.1f}{ratios['wall']:8.1f}")


def measured(kind: str, data: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """One device's exchange with a server of its own."""
    from fleetdistill_server.config.run_config import run_config
    from fleetdistill_server.service.supervisor import Supervisor

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.savez(folder / "data.npz", inputs=data[0], labels=data[1])
        config = run_config(
            {
                "run": {"name": "bench", "method": "classstats", "rounds": 1, "min_devices": 1},
                "contract": {"classes": 10, "input_shape": list(data[0].shape[1:])},
                "server": {"store": str(folder / "store"), "listen": "127.0.0.1:0", "torch_device": "cpu"},
            }
        )
        supervisor = Supervisor(config, log=folder / "server.log")
        serving = threading.Thread(target=supervisor.serve)
        serving.start()
        try:
            while supervisor.port is None:
                time.sleep(0.1)
            return run_device(kind, f"127.0.0.1:{supervisor.port}", folder)
        finally:
            supervisor.stop()
            serving.join()


def run_device(kind: str, server: str, folder: Path) -> dict[str, float]:
    """Starts the device's process; its figures, and how long it took with all waiting."""
    command = [sys.executable, __file__, "--device", kind, "--server", server, "--folder", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    started = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return {**json.loads(done.stdout.splitlines()[-1]), "wall": time.perf_counter() - started}


if __name__ == "__main__":
    sys.exit(main())
