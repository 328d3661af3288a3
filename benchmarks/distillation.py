"""Speed of the engine's training loop on mapped features, against a plain PyTorch loop on tensors in memory.

    OMP_NUM_THREADS=1 python benchmarks/distillation.py
    python benchmarks/distillation.py --device cuda --batch 256 --rows 50000

Both loops minimise FedDKC's loss, cross-entropy plus distillation, with the same mini-batches. The plain loop indexes
float32 tensors that are on the device before the clock starts. The engine's loop reads float16 features of ten
devices' answers from a store. A pair runs one after the other, in alternating order; the script prints the median of
the pairs' ratios with minimum and maximum, of wall time and of processor time, and the samples per second of each.
With CUDA it also compares bfloat16 with float32.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetdistill.knowledge import CUT, SampleKnowledge
from fleetdistill.training.losses import distillation_loss
from fleetdistill.wire.codec import decode, encode
from fleetdistill_server.models.resnet import resnet20
from fleetdistill_server.store.file_blobs import FileBlobs
from fleetdistill_server.training.hardware import Hardware
from fleetdistill_server.training.loop import batches
from fleetdistill_server.training.rows import Pool, mapped_tensor
from fleetdistill_server.training.trainer import Trainer

CLASSES, DEVICES = 10, 10
SHAPE = (16, 16, 16)
Timed = tuple[float, float]


def small_cnn() -> nn.Module:
    """A predictor with 20,490 parameters."""
    return nn.Sequential(
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 48),
        nn.ReLU(),
        nn.Linear(48, CLASSES),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"resnet20": lambda: resnet20(SHAPE, CLASSES), "small_cnn": small_cnn}


class Data:
    """Random knowledge of ten devices, in the files of a store and as tensors in memory."""

    def __init__(self, directory: Path, rows: int, device: torch.device) -> None:
        blobs, rng = FileBlobs(directory), np.random.default_rng(0)
        self.mapped: list[Tensor] = []
        for _ in range(DEVICES):
            features = rng.standard_normal((rows // DEVICES, *SHAPE), np.float32)
            sent = SampleKnowledge(sample_ids=np.arange(len(features)), features={CUT: features})
            payload = encode({"knowledge": sent}, np.dtype(np.float16))
            blobs.put(payload)
            result = decode(blobs.open(payload.sha256))["knowledge"]
            assert isinstance(result, SampleKnowledge)
            self.mapped.append(mapped_tensor(result.features[CUT]))
        self.rows = sum(len(part) for part in self.mapped)
        drawn = torch.Generator().manual_seed(0)
        self.features = torch.cat(self.mapped).float().to(device)
        self.labels = torch.randint(0, CLASSES, (self.rows,), generator=drawn).to(device)
        self.targets = torch.randn(self.rows, CLASSES, generator=drawn).softmax(1).to(device)


def loss_of(model: nn.Module, features: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    logits = model(features)
    return functional.cross_entropy(logits, labels) + 1.5 * distillation_loss(logits, targets, 1.0)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)


def plain_loop(model: nn.Module, data: Data, batch: int, device: torch.device) -> None:
    optimizer, generator = optimizer_of(model), torch.Generator().manual_seed(1)
    model.train()
    for rows in batches([data.rows], batch, 2, generator):
        rows_b = rows.to(device)
        loss = loss_of(model, data.features[rows_b], data.labels[rows_b], data.targets[rows_b])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


def engine_loop(model: nn.Module, data: Data, batch: int, trainer: Trainer) -> None:
    trainer.train_steps(
        model,
        data.rows,
        epochs=1,
        batch_size=batch,
        optimizer=optimizer_of(model),
        losses=lambda epoch, rows, features: [loss_of(model, features.float(), data.labels[rows], data.targets[rows])],
        generator=torch.Generator().manual_seed(1),
        pool=Pool(data.mapped, trainer.hardware),
    )


def timed(run: Callable[[], None], device: torch.device) -> Timed:
    """Wall and processor seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - wall, time.process_time() - cpu


def pairs(count: int, one: Callable[[], None], other: Callable[[], None], device: torch.device) -> list[list[Timed]]:
    """Times of both, in alternating order, after one call of each."""
    one(), other()  # type: ignore[func-returns-value]
    result = []
    for number in range(count):
        order = [one, other] if number % 2 else [other, one]
        times = {run: timed(run, device) for run in order}
        result.append([times[one], times[other]])
    return result


def show(name: str, found: list[list[Timed]], rows: int) -> None:
    for what, index in (("wall", 0), ("processor", 1)):
        ratios = [engine[index] / plain[index] for engine, plain in found]
        middle = statistics.median(ratios)
        print(f"{name}, {what}: {middle:.3f} ({min(ratios):.3f}, {max(ratios):.3f})")
    speeds = [rows / statistics.median(item[0] for item in column) for column in zip(*found, strict=True)]
    print(f"{name}, samples per second: engine {speeds[0]:,.0f}, compared with {speeds[1]:,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    given = parser.parse_args()
    device = torch.device(given.device)
    with tempfile.TemporaryDirectory() as directory:
        data = Data(Path(directory), given.rows, device)
        for name in given.models:
            torch.manual_seed(0)
            model = MODELS[name]().to(device)

            def run(hardware: Hardware | None, start: nn.Module = model) -> None:
                fresh = copy.deepcopy(start)
                if hardware is None:
                    plain_loop(fresh, data, given.batch, device)
                else:
                    engine_loop(fresh, data, given.batch, Trainer(hardware))

            plain = Hardware(device=device, channels_last=device.type == "cuda")
            streamed = Hardware(device=device, channels_last=device.type == "cuda", resident_bytes=1)
            bfloat16 = Hardware(device=device, channels_last=device.type == "cuda", dtype=torch.bfloat16)
            measured = {"kept on the device": plain, "streamed": streamed}
            for how, hardware in measured.items():
                result = pairs(given.pairs, partial(run, hardware), partial(run, None), device)
                show(f"{name}, {how}", result, data.rows)
            if device.type == "cuda":
                result = pairs(given.pairs, partial(run, bfloat16), partial(run, plain), device)
                show(f"{name}, bfloat16 against float32", result, data.rows)


if __name__ == "__main__":
    main()
