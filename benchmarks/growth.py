"""How time and memory grow with devices, cohort, rounds, classes and bytes of features.

    python benchmarks/growth.py                            # every axis
    python benchmarks/growth.py rounds --values 10 100     # one axis
    python benchmarks/growth.py classes --only feddkc

- devices: FedAvg with 10 to 10,000 devices, of which each of three rounds draws ten
- round: a round that draws 50 of 100 to 100,000 devices: processor time, without start, final delivery and report
- cohort: one round of FedAvg with 10 to 10,000 devices, which all take part
- rounds: 10 to 1,000 rounds of FedAvg with ten devices, and of FedDKC with three
- classes: FedAvg, FedDKC and class statistics with 10 to 1,000 classes on the same number of rows
- features: FedDKC over gRPC with a front, an engine and a device, whose features have 1 MB to 2 GB in each round

All but the last are whole simulations over the in-memory link, report included. Each value runs in a process of its own
that first runs a small simulation, so that modules are loaded and caches filled. Memory is the peak above what the
process has then, in parts: private memory (sampled), and with it pages of mapped files, which the system can take back.
With gRPC each process is measured from the device's check-in to the end of the run.

The exponent of a column is the slope of a straight line through log(value) and log(figure): 1 is linear, 0 is flat.
*Last* is the slope between the two largest values. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

Figures = dict[str, float]
"""Figures of one value, by column."""
MB = 1e6
SECONDS_BETWEEN_SAMPLES = 0.02
CLASSES, MAX_CLASSES = 10, 1000
COMMON: dict[str, Any] = {"partition": "iid", "with_alone": False, "with_fedavg": False, "torch_device": "cpu"}
FEATURES_OF_A_ROW = (64, 32, 32)
ROW_BYTES = 4 * math.prod(FEATURES_OF_A_ROW)


# --- memory and processor time of a process


def status(pid: int | str, name: str) -> float:
    """Returns a field of /proc/PID/status in megabytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")) / MB


def cpu_seconds(pid: int) -> float:
    """Returns the processor time of a process so far, in steps of the kernel's tick."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Sampled:
    """A process, measured in a thread from now until it ends or the measurement is closed.

    Attributes:
        private: Most private memory so far, MB.
        peak: Most memory so far, with mapped files, MB.
        cpu: Processor time so far, seconds.
    """

    pid: int
    private: float = 0.0
    peak: float = 0.0
    cpu: float = 0.0
    _start: Figures = field(default_factory=dict)
    _closed: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")  # the peak starts again here
        self._sample()
        self._start = {"private": self.private, "resident": status(self.pid, "VmRSS"), "cpu": self.cpu}
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        with contextlib.suppress(OSError, StopIteration):  # the process has ended
            while not self._closed.wait(SECONDS_BETWEEN_SAMPLES):
                self._sample()

    def _sample(self) -> None:
        self.private = max(self.private, status(self.pid, "RssAnon") + status(self.pid, "RssShmem"))
        self.peak = status(self.pid, "VmHWM")
        self.cpu = cpu_seconds(self.pid)

    def figures(self, name: str = "") -> Figures:
        """Ends the measurement; returns processor time and memory above the start, with the process's name."""
        self._closed.set()
        self._thread.join()
        prefix = f"{name} " if name else ""
        return {
            f"{prefix}CPU s": self.cpu - self._start["cpu"],
            f"{prefix}private MB": self.private - self._start["private"],
            f"{prefix}peak MB": self.peak - self._start["resident"],
        }


# --- simulations in one process


def tiny(input_shape: Sequence[int], classes: int) -> Any:
    """Builds logistic regression."""
    from torch import nn

    from fleetdistill.training.model import split_sequential

    return split_sequential(nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes)), 1)


def images(train: int, test: int = 500, classes: int = CLASSES) -> dict[str, np.ndarray]:
    """Returns learnable classes of 8x8 images: a random picture for each class, with noise."""
    rng = np.random.default_rng(0)
    centres = rng.random((classes, 1, 8, 8), np.float32)

    def part(name: str, rows: int) -> dict[str, np.ndarray]:
        labels = np.arange(rows) % classes
        inputs = (centres[labels] + rng.normal(0, 0.3, (rows, 1, 8, 8))).clip(0, 1)  # as scattering needs them
        return {f"{name}_inputs": inputs.astype(np.float32), f"{name}_labels": labels}

    return part("train", train) | part("test", test)


def fleet(devices: int, rounds: int, data: Mapping[str, np.ndarray], method: str = "fedavg", **more: Any) -> Any:
    """Returns a simulation's settings without its folder; FedAvg trains the smallest model."""
    from fleetdistill_lab import Simulation

    models = (tiny,) if method == "fedavg" else ("digits_cnn_small",)
    given: dict[str, Any] = {**COMMON, "method": method, "devices": devices, "rounds": rounds, "models": models}
    return Simulation(dataset=data, **given, **more)


def devices_point(value: int) -> Any:
    return fleet(value, 3, images(10 * value), devices_per_round=10)


def round_of_fleet(value: int) -> Figures:
    """Measures a round that draws 50 devices: the median of five, without the first and the last."""
    import torch

    from fleetdistill_lab import Progress, simulate

    torch.set_num_threads(1)
    marks: list[float] = []

    def note(done: Progress) -> None:
        marks.append(time.process_time())

    wanted = fleet(value, 7, images(10 * value), devices_per_round=50, score="global", export="none")
    with tempfile.TemporaryDirectory() as folder:
        simulate(replace(wanted, out=Path(folder) / "out"), note)
    rounds = [after - before for before, after in itertools.pairwise(marks)]
    return {"CPU ms a round": 1000 * statistics.median(rounds[1:-1])}


def cohort_point(value: int) -> Any:
    return fleet(value, 1, images(10 * value))


def rounds_point(value: int, method: str) -> Any:
    return fleet(10 if method == "fedavg" else 3, value, images(100), method)


def classes_point(value: int, method: str) -> Any:
    rounds = 1 if method == "classstats" else 3
    return fleet(5, rounds, images(10 * MAX_CLASSES, MAX_CLASSES, value), method)


def run_simulation(wanted: Any) -> float:
    """Runs a simulation and returns its seconds."""
    from fleetdistill_lab import simulate

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        simulate(replace(wanted, out=Path(folder) / "out"))
    return time.perf_counter() - began


def simulated(make: Callable[[int], Any], value: int) -> Figures:
    """Measures a simulation in this process, after a small one."""
    import torch

    torch.set_num_threads(1)
    wanted = make(value)
    small = fleet(wanted.devices if wanted.devices <= 10 else 10, 1, images(100), wanted.method)
    run_simulation(small)
    measured, began = Sampled(os.getpid()), time.process_time()
    seconds = run_simulation(wanted)
    return {"s": seconds, **measured.figures(), "CPU s": time.process_time() - began}


# --- a server and a device


def extractor(input_shape: Sequence[int]) -> Any:
    """Builds layers with features of 262 kB for each input of 256 bytes."""
    from torch import nn

    return nn.Sequential(nn.Upsample(scale_factor=4), nn.Conv2d(input_shape[0], FEATURES_OF_A_ROW[0], 1))


def predictor(feature_shape: Sequence[int], classes: int) -> Any:
    """Builds a cheap network of the features."""
    from torch import nn

    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(16 * feature_shape[0], classes))


def device_model() -> Any:
    from torch import nn

    from fleetdistill.training.model import split_sequential

    below = extractor((1,))
    return split_sequential(nn.Sequential(*below, *predictor(FEATURES_OF_A_ROW, CLASSES)), len(below))


def served(value: int) -> Figures:
    """Measures front, engine and device of a run with one device; `value` is the bytes of features in a round."""
    with tempfile.TemporaryDirectory() as name, serving(Path(name)) as (address, front, engine):
        command = [sys.executable, __file__, "--be-device", json.dumps([address, name, max(1, value // ROW_BYTES)])]
        device = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        assert device.stdout is not None
        assert device.stdin is not None
        assert device.stdout.readline() == "checked in\n"
        processes = {"device": Sampled(device.pid), "front": Sampled(front), "engine": Sampled(engine)}
        began = time.perf_counter()
        print("measured", file=device.stdin, flush=True)
        assert device.wait() == 0
        result = {"s": time.perf_counter() - began}
        for who, process in processes.items():
            result |= process.figures(who)
    return result


def be_device(server: str, folder: str, rows: int) -> None:
    """Takes part in the run; waits after the check-in until it is measured."""
    import torch

    from fleetdistill import COLUMNS, Deployment, Device, Event

    def note(event: Event) -> None:
        if event.kind == "checked-in" and not waited:
            waited.append(True)
            print("checked in", flush=True)
            input()

    waited: list[bool] = []
    torch.set_num_threads(1)
    data = images(rows)
    with Device(
        server=server,
        state_dir=Path(folder) / "device",
        model=device_model,
        data=(data["train_inputs"], data["train_labels"]),
        allow=COLUMNS,
        deployment=Deployment(export="never"),
        on_event=note,
    ) as device:
        device.run()


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Serves a run of two rounds; yields its address, and the ids of its front and its engine."""
    from fleetdistill_server.config.run_config import run_config
    from fleetdistill_server.service.supervisor import Supervisor

    sections: dict[str, Any] = {
        "run": {"name": "bench", "method": "feddkc", "rounds": 2, "min_devices": 1, "deadline_seconds": 3600},
        "contract": {"classes": CLASSES, "input_shape": [1, 8, 8], "knowledge_type": "float32"},
        "method": {"local_epochs": 1, "server_epochs": 1},
        "model": {"extractor": "growth:extractor", "server": "growth:predictor"},
        "server": {"store": str(folder / "store"), "listen": "127.0.0.1:0", "torch_device": "cpu"},
    }
    supervisor = Supervisor(run_config(sections), log=folder / "server.log")
    thread = threading.Thread(target=supervisor.serve)
    thread.start()
    try:
        while supervisor.port is None:
            time.sleep(0.1)
        front, engine = (child(f"fleetdistill_server.{name}") for name in ("front", "engine"))
        yield f"127.0.0.1:{supervisor.port}", front, engine
    finally:
        supervisor.stop()
        thread.join()


def child(module: str) -> int:
    """Waits for the child process that runs a module, and returns its id."""
    while True:
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended
                words = (path / "cmdline").read_bytes().split(b"\0")
                if module.encode() in words and f"PPid:\t{os.getpid()}\n" in (path / "status").read_text():
                    return int(path.name)
        time.sleep(0.1)


# --- the axes


@dataclass(frozen=True)
class Axis:
    """What grows.

    Attributes:
        values: What it is measured at.
        measures: Measures one value, by what is measured.
    """

    values: tuple[int, ...]
    measures: Mapping[str, Callable[[int], Figures]]


def _methods(point: Callable[..., Any], *names: str) -> dict[str, Callable[[int], Figures]]:
    return {name: partial(simulated, partial(point, method=name)) for name in names}


AXES = {
    "round": Axis((100, 1000, 10_000, 100_000), {"fedavg": round_of_fleet}),
    "devices": Axis((10, 100, 1000, 10_000), {"fedavg": partial(simulated, devices_point)}),
    "cohort": Axis((10, 100, 1000, 10_000), {"fedavg": partial(simulated, cohort_point)}),
    "rounds": Axis((10, 100, 1000), _methods(rounds_point, "fedavg", "feddkc")),
    "classes": Axis((10, 100, 1000), _methods(classes_point, "fedavg", "feddkc", "classstats")),
    "features": Axis((10**6, 10**7, 10**8, 10**9, 2 * 10**9), {"feddkc": served}),
}


def in_own_process(axis: str, what: str, value: int) -> Figures:
    """Measures one value in a process of its own."""
    command = [sys.executable, __file__, axis, "--only", what, "--point", str(value)]
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def exponent(values: Sequence[int], figures: Sequence[float]) -> str:
    """Returns the slope of log(figure) over log(value), and the slope between the two largest values."""
    if len(values) < 2 or min(figures) <= 0:
        return ""
    x, y = np.log(np.asarray(values, float)), np.log(np.asarray(figures, float))
    return f"{np.polyfit(x, y, 1)[0]:.2f}, {(y[-1] - y[-2]) / (x[-1] - x[-2]):.2f}"


def print_table(axis: str, what: str, values: Sequence[int]) -> None:
    """Measures the values and prints each row as soon as it is known."""
    result: dict[int, Figures] = {}
    for value in values:
        result[value] = figures = in_own_process(axis, what, value)
        if len(result) == 1:
            print(f"\n| {axis}, {what} | {' | '.join(figures)} |\n|{'---|' * (len(figures) + 1)}")
        print(f"| {value:,} | {' | '.join(f'{figure:,.1f}' for figure in figures.values())} |", flush=True)
    slopes = [exponent(values, [item[name] for item in result.values()]) for name in figures]
    print(f"| exponent, last | {' | '.join(slopes)} |", flush=True)


def main() -> int:
    """Measures the axes, or is a process that measures one value."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axes", nargs="*", choices=[*AXES, []], help="default: all")
    parser.add_argument("--values", type=int, nargs="+", help="default: those above")
    parser.add_argument("--only", nargs="+", help="methods; default: all of an axis")
    parser.add_argument("--point", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--be-device", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.be_device:
        be_device(*json.loads(given.be_device))
        return 0
    for name in given.axes or AXES:
        axis = AXES[name]
        for what in [measure for measure in axis.measures if measure in (given.only or axis.measures)]:
            if given.point:
                print(json.dumps(axis.measures[what](given.point)))
            else:
                print_table(name, what, given.values or axis.values)
    return 0


if __name__ == "__main__":
    sys.modules["growth"] = sys.modules["__main__"]  # the models' paths name this module
    raise SystemExit(main())
