"""What a device needs: import time, installed size, memory, processor time of a round, and bytes a day.

    python benchmarks/device_needs.py                    everything
    python benchmarks/device_needs.py --only imports     `imports`, `sizes`, `memory`, `polls` or `bytes`

Import times are of pairs of cold starts that alternate. A measured device is a process of its own; its server's front
and engine run beside it. Memory is from /proc, so Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from light_device import data_sets, peak_memory
from packaging.requirements import Requirement

PAIRS = 21
REPEATS = 3
ROUNDS = 10
POLLS = 50
POLL_SECONDS = 20
HOURS = 24
KINDS = ("torch", "light")
EXTRAS: dict[str, tuple[str, ...]] = {
    "(base)": (),
    "light": ("light",),
    "light, tls": ("light", "tls"),
    "train": ("train",),
    "train, onnx": ("train", "onnx"),
}
SEED = 2026
"""Of the demo."""


def main() -> int:
    """Measures, or is one of the measured devices."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MEASUREMENTS, help="one measurement")
    parser.add_argument("--device", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.device:
        _be_device(**json.loads(given.device))
        return 0
    for name, measure in MEASUREMENTS.items():
        if given.only in (None, name):
            print(f"\n-- {name}")
            measure()
    return 0


# --- import time

STATEMENTS = {
    "import grpc, numpy": "import grpc, numpy",
    "import fleetdistill": "import fleetdistill",
    "from fleetdistill import Device": "from fleetdistill import Device",
    "Device and light_worker": "from fleetdistill import Device; from fleetdistill.compute import light_worker",
}


def measure_imports() -> None:
    """Prints processor and wall seconds of cold starts, and their ratios to `import grpc, numpy`."""
    with _with_bytecode() as environment:
        starts = [{name: _cold_start(code, environment) for name, code in STATEMENTS.items()} for _ in range(PAIRS + 1)]
    turns = starts[1:]  # the first one compiles
    base = "import grpc, numpy"
    for name in STATEMENTS:
        figures = [statistics.median(turn[name][item] for turn in turns) for item in (0, 1)]
        ratios = [statistics.median(turn[name][item] / turn[base][item] for turn in turns) for item in (0, 1)]
        text = f"CPU {figures[0]:.3f} s, ratio {ratios[0]:.2f}; wall {figures[1]:.3f} s, ratio {ratios[1]:.2f}"
        print(f"{name:34}{text}   (medians of {PAIRS})")


@contextlib.contextmanager
def _with_bytecode() -> Iterator[dict[str, str]]:
    """Yields an environment in which modules are compiled once, as after an installation."""
    with tempfile.TemporaryDirectory() as folder:
        kept = {name: one for name, one in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        yield {**kept, "PYTHONPYCACHEPREFIX": folder}


def _cold_start(code: str, environment: Mapping[str, str]) -> tuple[float, float]:
    """Processor and wall seconds of a new interpreter."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=dict(environment), check=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


# --- installed size


def measure_sizes() -> None:
    """Prints the sum of the files of the installed distributions by extra."""
    for name, extras in EXTRAS.items():
        result = closure(extras)
        of_gpu = sum(size_of(item) for item in result if item.startswith(("nvidia-", "cuda-", "triton")))
        print(f"{name:14}{sum(map(size_of, result)) / 1e6:8.0f} MB in {len(result)} distributions", end="")
        print(f", {of_gpu / 1e6:.0f} MB of them of CUDA and triton" if of_gpu else "")
        largest = sorted(result, key=lambda one: -size_of(one))[:5]
        print(f"{'':14}largest: {', '.join(f'{item} {size_of(item) / 1e6:.0f}' for item in largest)}")


def closure(extras: tuple[str, ...]) -> set[str]:
    """Returns the distributions that the SDK needs with these extras, directly and indirectly."""
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]
    direct = [*project["dependencies"], *(item for extra in extras for item in project["optional-dependencies"][extra])]
    todo = [Requirement(text) for text in direct]
    known: dict[str, set[str]] = {}
    while todo:
        one = todo.pop()
        wanted = {"", *one.extras}
        if wanted <= known.setdefault(one.name.lower(), set()):
            continue
        known[one.name.lower()] |= wanted
        inner = [Requirement(text) for text in importlib.metadata.requires(one.name) or ()]
        todo += [
            each for each in inner if each.marker is None or any(each.marker.evaluate({"extra": x}) for x in wanted)
        ]
    return set(known)


def size_of(name: str) -> int:
    """Returns the bytes of a distribution's installed files, without bytecode."""
    files = [Path(str(item.locate())) for item in importlib.metadata.files(name) or () if item.suffix != ".pyc"]
    return sum(path.stat().st_size for path in files if path.exists())


# --- memory and processor time


def measure_memory() -> None:
    """Prints resident memory of waiting devices, the peak of training ones, and processor seconds of a round."""
    for name, code in {
        "python": "",
        "import grpc, numpy": "import grpc, numpy",
        "import torch": "import torch",
    }.items():
        shown = f"{code or 'pass'}; print(open('/proc/self/status').read())"
        status = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True).stdout
        print(f"{name:44}{_field(status, 'VmRSS') / 1e6:6.0f} MB")
    data = data_sets()["360 digits, 8x8"]
    for kind in KINDS:
        turns = [_idle(kind, data) for _ in range(REPEATS)]
        for item in turns[0]:
            print(f"{f'{kind}, {item}':44}{statistics.median(turn[item] for turn in turns) / 1e6:6.0f} MB")
    for kind, method in (("light", "classstats"), ("torch", "classstats"), ("torch", "fedavg"), ("torch", "feddkc")):
        turns = [_training(kind, method, data) for _ in range(REPEATS)]
        peak, cpu = (statistics.median(turn[item] for turn in turns) for item in ("peak", "cpu"))
        print(f"{f'{kind}, {method}, training':44}{peak / 1e6:6.0f} MB at most, {cpu:.2f} CPU s a round")


def _idle(kind: str, data: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """A device that waits for others: after its first check-in, and after a restart."""
    with tempfile.TemporaryDirectory() as name, _server(Path(name), data, "classstats", min_devices=2) as server:
        wanted = {"kind": kind, "method": "classstats", "server": server, "folder": name, "wait": True}
        return {what: _device_process(wanted)["resident"] for what in ("waiting", "waiting after a restart")}


def _training(kind: str, method: str, data: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """A device that is alone in its run."""
    with tempfile.TemporaryDirectory() as name, _server(Path(name), data, method, min_devices=1) as server:
        return _device_process({"kind": kind, "method": method, "server": server, "folder": name, "wait": False})


def _device_process(wanted: Mapping[str, Any]) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--device", json.dumps(wanted)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _be_device(kind: str, method: str, server: str, folder: str, wait: bool) -> None:
    from fleetdistill import COLUMNS, Deployment, Device, Event

    with np.load(Path(folder) / "data.npz") as arrays:
        data = arrays["inputs"], arrays["labels"]
    begun: list[float] = []

    def note(event: Event) -> None:
        if event.kind == "checked-in":
            begun.append(_processor_seconds())

    given = {"server": server, "state_dir": Path(folder) / kind, "allow": COLUMNS, "on_event": note}
    given |= {"deployment": Deployment(export="never")}
    with Device(**given, **_computing(kind, method, data)) as device:
        if wait:
            _step_until_waiting(device)
            print(json.dumps({"resident": _field(Path("/proc/self/status").read_text(), "VmRSS")}), flush=True)
            os._exit(0)  # without leaving the run
        device.run()
    rounds = 1 if method == "classstats" else ROUNDS
    print(json.dumps({"peak": peak_memory(), "cpu": (_processor_seconds() - begun[0]) / rounds}))


def _step_until_waiting(device: Any) -> None:
    """Checks in, once the server has prepared the run, and asks for work."""
    from fleetdistill import Step
    from fleetdistill.errors import LinkError

    step = None
    while step is not Step.WAITED:
        with contextlib.suppress(LinkError):
            step = device.step(0.0)


def _computing(kind: str, method: str, data: tuple[np.ndarray, np.ndarray]) -> dict[str, Any]:
    """What computes for the device; the models are the demo's, built by name."""
    if kind == "light":
        from fleetdistill.compute import light_worker

        return {"worker": light_worker(data)}

    def model() -> Any:
        from fleetdistill.models import build_model

        return build_model("digits_cnn_small")

    return {"model": model, "data": data}


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _field(status: str, name: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{name}:"))


@contextlib.contextmanager
def _server(folder: Path, data: tuple[np.ndarray, np.ndarray], method: str, min_devices: int) -> Iterator[str]:
    """Serves a run; yields its address."""
    from fleetdistill_server.config.run_config import run_config
    from fleetdistill_server.service.supervisor import Supervisor

    np.savez(folder / "data.npz", inputs=data[0], labels=data[1])
    rounds = 1 if method == "classstats" else ROUNDS
    sections: dict[str, Any] = {
        "run": {"name": "bench", "method": method, "rounds": rounds, "min_devices": min_devices},
        "contract": {"classes": 10, "input_shape": list(data[0].shape[1:])},
        "server": {"store": str(folder / "store"), "listen": "127.0.0.1:0", "torch_device": "cpu"},
    }
    models = {
        "fedavg": {"extractor": "", "server": "", "device": "digits_cnn_small"},
        "feddkc": {"extractor": "digits_extractor", "server": "digits_server"},
    }
    sections |= {"model": models[method]} if method in models else {}
    supervisor = Supervisor(run_config(sections), log=folder / "server.log")
    serving = threading.Thread(target=supervisor.serve)
    serving.start()
    try:
        while supervisor.port is None:
            time.sleep(0.1)
        yield f"127.0.0.1:{supervisor.port}"
    finally:
        supervisor.stop()
        serving.join()


# --- bytes


class _CountingProxy:
    """Forwards TCP connections to a server and counts the bytes in each direction."""

    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._target = host, int(port)
        self.up = self.down = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near = self._listening.accept()[0]
            far = socket.create_connection(self._target)
            threading.Thread(target=self._forward, args=(near, far, "up"), daemon=True).start()
            threading.Thread(target=self._forward, args=(far, near, "down"), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        while data := source.recv(1 << 16):
            setattr(self, direction, getattr(self, direction) + len(data))
            target.sendall(data)
        with contextlib.suppress(OSError):  # the other direction may have ended first
            target.shutdown(socket.SHUT_WR)


def measure_polls() -> None:
    """Prints what a waiting device sends and receives over TCP, without TCP's and IP's headers."""
    from fleetdistill import Device
    from fleetdistill.compute import light_worker

    data = data_sets()["360 digits, 8x8"]
    with tempfile.TemporaryDirectory() as name, _server(Path(name), data, "classstats", min_devices=2) as server:
        proxy = _CountingProxy(server)
        device = Device(server=proxy.address, state_dir=Path(name) / "state", worker=light_worker(data))
        with device:
            _step_until_waiting(device)
            print(f"connection and first check-in: {proxy.up} bytes up, {proxy.down} down")
            before = proxy.up, proxy.down
            for _ in range(POLLS):
                device.step(0.0)
            up, down = ((after - one) / POLLS for after, one in zip((proxy.up, proxy.down), before, strict=True))
    day = HOURS * 3600 / POLL_SECONDS
    print(f"a request for work without work: {up:.0f} bytes up, {down:.0f} down")
    print(f"the same every {POLL_SECONDS} s for a day: {up * day / 1e3:.0f} kB up, {down * day / 1e3:.0f} kB down")


def measure_bytes() -> None:
    """Prints the bytes of a day's 24 rounds of every method on the demo's fleet, as its store counts them."""
    from fleetdistill.methods import METHODS

    print(f"{'method':12}{'up kB':>10}{'down kB':>10}{'day kB':>10}{'first round kB':>16}")
    for method in sorted(METHODS):
        rounds = _bytes_by_round(method)
        up, down = (sum(item[direction] for item in rounds) / 1e3 for direction in ("up", "down"))
        first = (rounds[0]["up"] + rounds[0]["down"]) / 1e3
        print(f"{method:12}{up:10.1f}{down:10.1f}{up + down:10.1f}{first:16.1f}", flush=True)


def _bytes_by_round(method: str) -> list[dict[str, float]]:
    """Mean bytes on the link, of a device, by round; the sizes of messages do not depend on epochs."""
    from fleetdistill_lab import Simulation, simulate

    with tempfile.TemporaryDirectory() as folder:
        report = simulate(
            Simulation(
                method=method,
                settings={} if method == "classstats" else {"local_epochs": 1},
                rounds=1 if method == "classstats" else HOURS,
                alpha=0.5,
                seed=SEED,
                test_limit=50,
                with_alone=False,
                with_fedavg=False,
                torch_device="cpu",
                out=Path(folder) / "out",
            )
        )
    return list(report.bytes_by_round)


MEASUREMENTS: dict[str, Callable[[], None]] = {
    "imports": measure_imports,
    "sizes": measure_sizes,
    "memory": measure_memory,
    "polls": measure_polls,
    "bytes": measure_bytes,
}

if __name__ == "__main__":
    sys.exit(main())
