"""Time until a device that trains is quiet: after a condition of its policy fails, and after `Device.stop`.

    python benchmarks/interruption.py
    python benchmarks/interruption.py --times 50

A real server on the loopback, and one device that trains a bundled model on the digits. Each turn ends the training at
a random moment. A device is quiet once no mini-batch runs, and the event `waiting` was emitted or the background thread
has ended. The ask stays open, so that the next turn begins with the same one. The first turn begins after the first
mini-batch, because loading PyTorch cannot be interrupted.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from torch import nn

from fleetdistill import COLUMNS, Deployment, Device, Eligibility, Event
from fleetdistill.device import permission
from fleetdistill.models import build_model
from fleetdistill_server.config.run_config import run_config
from fleetdistill_server.service.supervisor import Supervisor

MODEL = "digits_cnn_large"
PATIENCE_SECONDS = 60.0
MAX_TRAINING_SECONDS = 1.0


class App:
    """An app that ends its device's training, and notes when the device is quiet."""

    def __init__(self, server: str, folder: Path) -> None:
        self.eligible = True
        self.last_batch = 0.0
        self.waiting, self.training = threading.Event(), threading.Event()
        self.waiting_at = 0.0
        self.device = Device(
            allow=COLUMNS,
            server=server,
            model=self._model,
            data=digits(),
            state_dir=folder,
            deployment=Deployment(export="never"),
            on_event=self._note,
            eligibility=Eligibility(probes={"mine": lambda: self.eligible}),
        )

    def _model(self) -> nn.Module:
        model = build_model(MODEL)
        model.register_forward_hook(lambda module, *_: self._batch(module))  # a bound method would be copied too
        return model

    def _batch(self, module: nn.Module) -> None:
        if module.training:
            self.last_batch = time.perf_counter()
            self.training.set()

    def _note(self, event: Event) -> None:
        if event.kind == "waiting":
            self.waiting_at = time.perf_counter()
            self.waiting.set()

    def until_training(self) -> None:
        """Waits for a random moment of the training."""
        self.training.clear()
        assert self.training.wait(PATIENCE_SECONDS), "the device does not train"
        time.sleep(random.uniform(0, MAX_TRAINING_SECONDS))

    def not_eligible(self) -> float:
        """Returns the seconds from a condition that fails to a quiet device."""
        self.waiting.clear()
        began, self.eligible = time.perf_counter(), False
        assert self.waiting.wait(PATIENCE_SECONDS), "the device is not quiet"
        time.sleep(0.05)  # a mini-batch that still ran would be noted
        self.eligible = True
        return max(self.waiting_at, self.last_batch) - began

    def stopped(self) -> float:
        """Returns the seconds from `stop` to the end of the background thread, and starts the device again."""
        began = time.perf_counter()
        self.device.stop()
        assert self.device.join(PATIENCE_SECONDS), "the device did not stop"
        took = time.perf_counter() - began
        self.device.start()
        return took


def digits() -> tuple[np.ndarray, np.ndarray]:
    """The digits of scikit-learn, [1797, 1, 8, 8] in [0, 1]."""
    from sklearn.datasets import load_digits

    result = load_digits()
    return (result.images[:, None] / 16).astype(np.float32), result.target


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A server whose only ask trains for longer than the measurement."""
    config = run_config(
        {
            "run": {"name": "bench", "method": "fedavg", "rounds": 1, "min_devices": 1, "deadline_seconds": 86_400},
            "method": {"local_epochs": 1_000_000},
            "contract": {"classes": 10, "input_shape": [1, 8, 8]},
            "model": {"extractor": "", "server": "", "device": MODEL},
            "server": {"store": str(folder / "store"), "listen": "127.0.0.1:0", "torch_device": "cpu"},
        }
    )
    supervisor = Supervisor(config, log=folder / "server.log")
    serving = threading.Thread(target=supervisor.serve)
    serving.start()
    try:
        while supervisor.port is None and serving.is_alive():
            time.sleep(0.1)
        yield f"127.0.0.1:{supervisor.port}"
    finally:
        supervisor.stop()
        serving.join()


def measured(app: App, end: Callable[[], float], times: int) -> np.ndarray:
    """Returns the seconds of several turns, `[times]`."""
    result = []
    for _ in range(times):
        app.until_training()
        result.append(end())
    return np.array(result)


def main() -> None:
    """Prints one row for each way to end the training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=300)
    times = parser.parse_args().times
    permission.WAIT_SECONDS = 0.1  # how soon a device resumes does not change how soon it is quiet
    random.seed(0)
    with tempfile.TemporaryDirectory() as name, served(Path(name)) as server:
        app = App(server, Path(name) / "device")
        with app.device:
            app.device.start()
            print(f"{'seconds until quiet':24}{'median':>8}{'p99':>8}{'largest':>9}   {times} turns each")
            for what, end in (("no longer eligible", app.not_eligible), ("stop() and join()", app.stopped)):
                seconds = measured(app, end, times)
                print(f"{what:24}{np.median(seconds):8.3f}{np.percentile(seconds, 99):8.3f}{seconds.max():9.3f}")
            app.device.stop()
            app.device.join(PATIENCE_SECONDS)


if __name__ == "__main__":
    main()
