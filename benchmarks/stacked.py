"""Whether networks of one architecture train and are scored faster together, with `torch.vmap`.

    python benchmarks/stacked.py [--models 20]

Processor time of `--models` networks one after another, as a simulation trains them, over the time of one call of
`train_stacked`: above 1, stacking is faster. Training is ten steps of SGD with momentum on batches of 32 rows, scoring
2,000 rows in batches of 256.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from end_to_end import cnn, mlp
from simulation import tiny
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional

from fleetdistill.training.local_training import TensorData, Training, train_epochs
from fleetdistill_lab.simulation.backends.stacked_models import train_stacked

BATCH, SCORED, SCORED_BATCH, STEPS, RATE = 32, 2000, 256, 10, 0.01


def two_layers(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Builds McMahan et al.'s 2NN, with 199,210 parameters for 28x28 images."""
    layers = [nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, classes)]
    return nn.Sequential(nn.Flatten(), *layers)


NETWORKS: Mapping[str, tuple[Callable[..., nn.Module], int]] = {
    "logistic regression, 650 parameters": (tiny, 8),
    "perceptron, 2,410": (mlp, 8),
    "CNN, 20,490": (cnn, 28),
    "2NN, 199,210": (two_layers, 28),
}


def seconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """Returns the shortest processor time of a few calls."""
    result = []
    for _ in range(repeats + 1):
        began = time.process_time()
        work()
        result.append(time.process_time() - began)
    return min(result[1:])


def trainings(models: list[nn.Module], size: int) -> list[Training]:
    """Returns a training of ten steps for each model, with rows of its own."""
    result = []
    for number, model in enumerate(models):
        generator = torch.Generator().manual_seed(number)
        inputs = torch.rand(BATCH * STEPS, 1, size, size, generator=generator)
        data = TensorData(inputs, torch.randint(10, (len(inputs),), generator=generator))
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, nesterov=True)
        loss = partial(_loss, model)
        result.append(Training(model, loss, data, 1, BATCH, optimizer, generator))
    return result


def _loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(inputs), labels)


def train_apart(given: list[Training]) -> None:
    for one in given:
        train_epochs(
            one.model,
            one.data,
            epochs=one.epochs,
            batch_size=one.batch_size,
            optimizer=one.optimizer,
            loss=lambda logits, labels, rows: functional.cross_entropy(logits, labels),
            generator=one.generator,
            device="cpu",
        )


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

        given = trainings(models, size)
        apart, together = seconds(partial(train_apart, given)), seconds(partial(train_stacked, given))
        scored, scored_together = seconds(score_apart), seconds(score_stacked)
        print(f"| {name} | {apart / together:.2f} | {scored / scored_together:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
