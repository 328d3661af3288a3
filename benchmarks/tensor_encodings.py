"""What small encodings save and what they cost: features of real digits in every knowledge type, packed and not.

Features are those of the run's own extractor after some rounds of training with a linear classifier on top of it, so
`same` is the share of all 1,797 digits that the classifier decides as it does on float32, and `softmax` the largest
difference of a probability. Speeds are of packing and unpacking alone, in one thread.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from fleetdistill.knowledge import ModelParameters, SampleKnowledge
from fleetdistill.models import build_model
from fleetdistill.training.model import split_sequential
from fleetdistill.training.parameters import model_parameters
from fleetdistill.wire.codec import Payload, decode, encode
from fleetdistill.wire.compression import RAW, ZSTD
from fleetdistill.wire.payload import chunk_data, chunks
from fleetdistill_lab.simulation.fleet import simulate
from fleetdistill_lab.simulation.spec.settings import Simulation

STEPS = 600
BATCH = 64
SPEED_BYTES = 64 << 20
ROUNDS = 10


def trained() -> tuple[nn.Module, torch.Tensor]:
    """The extractor and a linear head, trained on all digits, and the digits."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    targets = torch.tensor(labels)
    torch.manual_seed(0)
    extractor = build_model("digits_extractor", input_shape=(1, 8, 8))
    with torch.no_grad():
        width = extractor(inputs[:1]).numel()
    model = split_sequential(nn.Sequential(extractor, nn.Flatten(), nn.Linear(width, 10)), 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        rows = torch.randint(len(inputs), (BATCH,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    return model.eval(), inputs


def sent_bytes(payload: Payload, compression: Any) -> int:
    """Bytes of all chunks as they travel."""
    return sum(len(chunk.data) for chunk in chunks(payload.source, payload.slots, 0, compression))


def features_table() -> None:
    """Sizes and what they do to the classifier."""
    model, inputs = trained()
    with torch.no_grad():
        features = model.features(inputs)
        exact = model.predict(features).softmax(-1)
    print(f"{len(inputs):,} digits, features {list(features.shape[1:])}, trained extractor")
    print(f"{'type':10}{'bytes':>12}{'smaller':>9}{'zstd':>12}{'smaller':>9}{'same':>10}{'softmax':>10}")
    largest = 0
    for name in ("float32", "float16", "uint8"):
        sent = SampleKnowledge(sample_ids=np.arange(0), features={"cut": features.numpy()})
        payload = encode({"knowledge": sent}, name)
        (result,) = decode(payload).values()
        assert isinstance(result, SampleKnowledge)
        with torch.no_grad():
            said = model.predict(torch.tensor(result.features["cut"], dtype=torch.float32)).softmax(-1)
        same = float((said.argmax(-1) == exact.argmax(-1)).double().mean())
        packed, raw = sent_bytes(payload, ZSTD), payload.data_bytes
        largest = largest or raw
        print(
            f"{name:10}{raw:12,}{largest / raw:9.2f}{packed:12,}{largest / packed:9.2f}"
            f"{same:10.4%}{float((said - exact).abs().max()):10.1e}"
        )
    parameters_table(model_parameters(model))


def parameters_table(parameters: ModelParameters) -> None:
    """What packing does to weights."""
    payload = encode({"model": parameters})
    packed = sent_bytes(payload, ZSTD)
    print(f"{'weights':10}{payload.data_bytes:12,}{'':9}{packed:12,}{payload.data_bytes / packed:9.2f}")


def seconds(work: Callable[[], object]) -> float:
    """How long it takes, the best of three."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def speed_table() -> None:
    """How fast chunks are made and read, against the same chunks unpacked."""
    print(f"\n{'1 MiB chunks of':26}{'left':>8}{'made raw':>12}{'made zstd':>12}{'read zstd':>12}   MB/s")
    numbers = np.random.default_rng(0).normal(size=SPEED_BYTES // 4).astype(np.float32)
    relu = np.maximum(numbers, 0)
    kinds = {
        "weights, float32": encode({"x": ModelParameters(parameters={"w": numbers})}),
        "ReLU features, float16": _features(relu, "float16"),
        "ReLU features, uint8": _features(relu, "uint8"),
    }
    for name, payload in kinds.items():
        raw = seconds(lambda one=payload: sent_bytes(one, RAW))  # type: ignore[misc]
        packing = seconds(lambda one=payload: sent_bytes(one, ZSTD))  # type: ignore[misc]
        sent = list(chunks(payload.source, payload.slots, 0, ZSTD))
        reading = seconds(lambda all_of=sent: [chunk_data(item) for item in all_of])  # type: ignore[misc]
        mega = payload.data_bytes / 1e6
        left = sum(len(item.data) for item in sent) / payload.data_bytes
        read = f"{mega / reading:12,.0f}" if left < 1 else f"{'-':>12}"
        print(f"{name:26}{left:8.2f}{mega / raw:12,.0f}{mega / packing:12,.0f}{read}")


def _features(numbers: Any, name: str) -> Payload:
    rows = numbers.reshape(-1, 256)
    return encode({"x": SampleKnowledge(sample_ids=np.arange(len(rows)), features={"cut": rows})}, name)


def parity_table() -> None:
    """FedDKC on digits, the same seed in every type: what the fleet learns, and the bytes of a device and round."""
    print(f"\nFedDKC, digits, 5 devices, {ROUNDS} rounds, seed 0, over memory")
    print(f"{'type':10}{'accuracy':>10}{'own classes':>13}{'up':>10}{'sent up':>10}{'down':>10}{'sent down':>11}")
    for name in ("float32", "float16", "uint8"):
        with tempfile.TemporaryDirectory() as out:
            report = simulate(
                Simulation(
                    method="feddkc",
                    rounds=ROUNDS,
                    knowledge_type=name,  # type: ignore[arg-type]
                    with_alone=False,
                    with_fedavg=False,
                    torch_device="cpu",
                    out=Path(out),
                )
            )
        each = len(report.devices) * ROUNDS
        columns = (("bytes_up", 10), ("sent_up", 10), ("bytes_down", 10), ("sent_down", 11))
        spent = "".join(
            f"{sum(getattr(device, name) for device in report.devices) / each:{n},.0f}" for name, n in columns
        )
        print(f"{name:10}{report.mean_accuracy_fleet:10.2%}{report.mean_own_accuracy_fleet or 0:13.2%}{spent}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    features_table()
    speed_table()
    parity_table()
