"""Processor time of a training step: torch's SGD as it is, `foreach` and `fused`, and ten devices in one step.

    OMP_NUM_THREADS=1 python benchmarks/experiments/optimiser_steps.py

The last column trains ten models of one architecture with `torch.func.vmap` over their weights, each on its own
mini-batch of 32, and is divided by ten. Minimum of several series, because other jobs only add to a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional

DEVICES, BATCH, SERIES = 10, 32, 8
LEARNING_RATE, MOMENTUM = 0.02, 0.9


def logistic_regression() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    convolutions = [
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    ]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(784, 24), nn.ReLU(), nn.Linear(24, 10))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "logistic regression, 8x8": (logistic_regression, (1, 8, 8)),
    "CNN of 20,490 parameters, 28x28": (cnn, (1, 28, 28)),
}


def seconds(step: Callable[[], None], repeats: int) -> float:
    """Returns the smallest processor time of a step over the series."""

    def one_series() -> float:
        begun = time.process_time()
        for _ in range(repeats):
            step()
        return (time.process_time() - begun) / repeats

    return min(one_series() for _ in range(SERIES))


def single(make: Callable[[], nn.Module], inputs: Tensor, labels: Tensor, **options: bool) -> Callable[[], None]:
    """Returns a step of one device."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, **options)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def grouped(make: Callable[[], nn.Module], inputs: Tensor, labels: Tensor) -> Callable[[], None]:
    """Returns a step of all devices together; `inputs` and `labels` have a dimension of devices."""
    weights, buffers = stack_module_state([make() for _ in range(DEVICES)])
    skeleton = make().to("meta")
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    weights = {name: weight.detach() for name, weight in weights.items()}

    def loss(own: dict[str, Tensor], rest: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(skeleton, (own, rest), (x,)), y)

    gradients = vmap(grad(loss))

    def step() -> None:
        for name, gradient in gradients(weights, buffers, inputs, labels).items():
            momenta[name].mul_(MOMENTUM).add_(gradient)
            weights[name].sub_(momenta[name], alpha=LEARNING_RATE)

    return step


def main() -> None:
    """Prints a table in microseconds per device and step."""
    torch.set_num_threads(1)
    print("| | SGD | foreach | fused | ten devices with vmap, each |\n|---|---|---|---|---|")
    for name, (make, shape) in CASES.items():
        inputs, labels = torch.rand(DEVICES, BATCH, *shape), torch.randint(0, 10, (DEVICES, BATCH))
        repeats = 200 if len(list(make().modules())) < 5 else 20
        ways = [{}, {"foreach": True}, {"fused": True}]
        cells = [seconds(single(make, inputs[0], labels[0], **way), repeats) for way in ways]
        cells.append(seconds(grouped(make, inputs, labels), repeats) / DEVICES)
        print(f"| {name} | {' | '.join(f'{1e6 * cell:.0f}' for cell in cells)} |", flush=True)


if __name__ == "__main__":
    main()
