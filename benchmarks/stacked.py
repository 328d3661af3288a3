"""Whether models of one architecture train and are scored faster when they are stacked with `torch.func.vmap`.

    python benchmarks/stacked.py [--models 20]

Processor time of `--models` networks one after another, as a simulation has them, over the time of one stacked call:
above 1, stacking is faster. Training is SGD on batches of 32 rows, scoring 2,000 rows in batches of 256.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from end_to_end import cnn, mlp
from simulation import tiny
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional

BATCH, SCORED, SCORED_BATCH, STEPS, RATE = 32, 2000, 256, 10, 0.05
NETWORKS: Mapping[str, tuple[Callable[..., nn.Module], int]] = {"650": (tiny, 8), "2k": (mlp, 8), "20k CNN": (cnn, 28)}


def seconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """Returns the shortest processor time of a few calls."""
    result = []
    for _ in range(repeats + 1):
        began = time.process_time()
        work()
        result.append(time.process_time() - began)
    return min(result[1:])


def train_apart(models: list[nn.Module], inputs_kb: Tensor, labels_kb: Tensor) -> None:
    for model, inputs, labels in zip(models, inputs_kb, labels_kb, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()


def train_stacked(base: nn.Module, parameters: dict[str, Tensor], inputs_kb: Tensor, labels_kb: Tensor) -> None:
    def loss(of_one: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(base, (of_one, {}), (inputs,)), labels)

    gradients = vmap(grad(loss))
    for _ in range(STEPS):
        found = gradients(parameters, inputs_kb, labels_kb)
        parameters = {name: tensor - RATE * found[name] for name, tensor in parameters.items()}


def main() -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=20)
    count = parser.parse_args().models
    torch.set_num_threads(1)
    print("| network | training, gain of stacking | scoring, gain of stacking |\n|---|---|---|")
    for name, (build, size) in NETWORKS.items():
        models = [build((1, size, size), 10) for _ in range(count)]
        stacked = {key: value.detach() for key, value in stack_module_state(models)[0].items()}
        base = copy.deepcopy(models[0]).to("meta")
        inputs, labels = torch.rand(count, BATCH, 1, size, size), torch.randint(10, (count, BATCH))
        test = torch.rand(SCORED, 1, size, size)

        def score_stacked(base: nn.Module = base, stacked: Any = stacked, test: Tensor = test) -> None:
            def forward(of_one: dict[str, Tensor], rows: Tensor) -> Tensor:
                return functional_call(base, (of_one, {}), (rows,))

            with torch.no_grad():
                for rows in test.split(SCORED_BATCH):
                    vmap(forward, in_dims=(0, None))(stacked, rows)

        def score_apart(models: list[nn.Module] = models, test: Tensor = test) -> None:
            with torch.no_grad():
                for model in models:
                    for rows in test.split(SCORED_BATCH):
                        model(rows)

        apart = seconds(lambda m=models, x=inputs, y=labels: train_apart(m, x, y))
        together = seconds(lambda b=base, p=stacked, x=inputs, y=labels: train_stacked(b, p, x, y))
        scored, scored_together = seconds(score_apart), seconds(score_stacked)
        print(f"| {name} | {apart / together:.2f} | {scored / scored_together:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
