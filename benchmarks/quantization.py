"""int8 files against float files: size, latency and accuracy, for the models of the digits and the paper's ResNets.

    python benchmarks/quantization.py

Each model is trained on half of the digits of scikit-learn and compared on the other half, with the code of
`Deployment(quantize=...)`. Sizes and latencies are ratios float / int8: above 1, the int8 file is smaller or faster.
Latency is the best of many alternating repetitions in one thread of onnxruntime on the CPU.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from fleetdistill.deployment.quantization import CheckData, quantize
from fleetdistill.models import build_model
from fleetdistill.training.onnx_export import export_onnx
from fleetdistill.training.onnx_file import cpu_session

MODELS = ("digits_mlp_small", "digits_mlp_large", "digits_cnn_large", "resnet4", "resnet12")
EPOCHS, BATCH, REPETITIONS = 12, 32, 150


def main() -> None:
    """Prints one row of a Markdown table for each model and kind of quantisation."""
    images, labels = load_digits(return_X_y=True)
    inputs = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    half = len(inputs) // 2
    data = CheckData(inputs[:256], lambda: [(inputs[half:], labels[half:])])
    print("| model | float file | int8 | size ratio | latency ratio, batch 1 | batch 64 | accuracy float | int8 |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            model = trained(name, inputs[:half], labels[:half])
            compare(name, model, Path(folder), data)


def trained(name: str, inputs: np.ndarray, labels: np.ndarray) -> nn.Module:
    """A model after a few epochs."""
    torch.manual_seed(0)
    model = build_model(name, input_shape=(1, 8, 8))
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    x, y = torch.from_numpy(inputs), torch.from_numpy(labels)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(BATCH):
            if len(batch) > 1:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
    return model.eval()


def compare(name: str, model: nn.Module, folder: Path, data: CheckData) -> None:
    """Exports, quantises and measures one model."""
    full, small = folder / "float.onnx", folder / "int8.onnx"
    export_onnx(model, full, torch.from_numpy(data.samples), {})
    for how in ("dynamic", "static"):
        check = quantize(full, small, how, data)
        size = full.stat().st_size / small.stat().st_size
        latencies = [latency_ratio(full, small, data.samples[:batch]) for batch in (1, 64)]
        figures = " | ".join(f"{item:.2f}" for item in (size, *latencies))
        accuracies = f"{check.full:.3f} | {check.quantized:.3f}"
        print(f"| {name} | {full.stat().st_size} bytes | {how} | {figures} | {accuracies} |", flush=True)


def latency_ratio(full: Path, small: Path, batch: np.ndarray) -> float:
    """Best latency of the float file over that of the int8 file."""
    sessions = [cpu_session(str(path)) for path in (full, small)]
    best = [float("inf"), float("inf")]
    for _ in range(REPETITIONS):
        for position, session in enumerate(sessions):
            best[position] = min(best[position], seconds(session, batch))
    return best[0] / best[1]


def seconds(session: Any, batch: np.ndarray) -> float:
    """Duration of one prediction."""
    start = time.perf_counter()
    session.run(["logits"], {"input": batch})
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
