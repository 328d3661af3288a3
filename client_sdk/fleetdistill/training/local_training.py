"""Training and evaluation of a model; used by device and server halves.

Rows are sliced from tensors by index, because a DataLoader over tensors is several times slower.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from math import prod
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fleetdistill.errors import CannotAnswer, ConfigurationError, DataError, KnowledgeError, ModelError
from fleetdistill.interruption import check_may_continue
from fleetdistill.progress import report_progress
from fleetdistill.training.figures import Confusion, Counts
from fleetdistill.training.model import frozen_batch_norm, in_mode
from fleetdistill.training.randomness import draws_nothing
from fleetdistill.training.tensor_data import LazyData, LazyInputs, TensorData, as_tensor_data

__all__ = [
    "LazyData",
    "TensorData",
    "Training",
    "TrainingReport",
    "as_tensor_data",
    "check_plan",
    "check_smallest_batch",
    "evaluate",
    "extract",
    "finite_loss",
    "make_optimizer",
    "rows_at_once",
    "smallest_batch",
    "train_epochs",
    "train_steps",
    "train_together",
    "trained_together",
]

BATCH_BYTES = 64 << 20
"""Largest size in bytes of the inputs and outputs of one layer together, in a batch without gradients."""
UNMEASURED_ROWS = 16
"""Largest number of rows whose needs are not measured."""
_FLOAT_BYTES = 4
SCORED_ROWS = 256
"""Rows of a batch that is scored: the activations of more leave a processor's caches, which costs a quarter more."""
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits [b, classes], labels [b], rows [b]) -> scalar mean over the mini-batch."""
BatchLosses = Callable[[int, Tensor], Iterable[Tensor]]
"""(epoch from 0, rows [b]) -> scalars, each the loss of one optimiser step."""


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """Result of one call of `train_epochs` or `train_steps`.

    Attributes:
        steps: Number of optimiser steps.
        mean_loss: Mean loss over all samples, each at the step that used it; NaN without a step.
        samples_seen: Number of samples used, counted once per epoch and step.
    """

    steps: int
    mean_loss: float
    samples_seen: int


@dataclass(frozen=True, eq=False)
class Training:
    """A device's training in mini-batches that may be computed together with others; see `train_together`.

    Attributes:
        model: The model.
        loss: Function of a mini-batch's inputs `[b, ...]` and labels `[b]`, a scalar; besides them it depends only on
            `model`'s weights, and on what is the same on all devices that are asked with it.
        data: The device's rows.
        epochs, batch_size: Passes over the rows, and rows of a mini-batch.
        optimizer: A new optimiser of all parameters.
        generator: CPU generator of the rows' order, of which each epoch draws one permutation.
    """

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    data: TensorData | LazyData
    epochs: int
    batch_size: int
    optimizer: torch.optim.Optimizer
    generator: torch.Generator


TrainTogether = Callable[[Training], TrainingReport | None]
_together: ContextVar[TrainTogether | None] = ContextVar("fleetdistill_train_together", default=None)


@contextmanager
def train_together(train: TrainTogether) -> Iterator[None]:
    """Lets a function train the models of devices in the block, such as those of a simulation in one pass.

    Args:
        train: Trains `model` with others and returns the report; or changes nothing, and returns None.
    """
    token = _together.set(train)
    try:
        yield
    finally:
        _together.reset(token)


def trained_together(training: Training) -> TrainingReport | None:
    """Trains with others if the current context has a function for that; None if the caller has to train."""
    train = _together.get()
    return None if train is None else train(training)


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Creates stochastic gradient descent with the given settings.

    Raises:
        ConfigurationError: A value is out of range, or `nesterov` is set without momentum.
        ModelError: There are no parameters to train.
    """
    for name, value in {"momentum": momentum, "weight_decay": weight_decay}.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigurationError(f"{name} is {value}, must be a finite number >= 0")
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise ConfigurationError(f"learning_rate is {learning_rate}, must be a finite number > 0")
    if nesterov and momentum == 0:
        raise ConfigurationError(
            "nesterov needs momentum > 0, but momentum is 0; raise momentum or set nesterov to false"
        )
    trained = list(parameters)
    if not trained:
        raise ModelError("the model has no parameters to train")
    return torch.optim.SGD(trained, lr=learning_rate, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)


def train_epochs(
    model: nn.Module,
    data: TensorData | LazyData,
    *,
    epochs: int,
    batch_size: int,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    generator: torch.Generator,
    device: torch.device | str,
) -> TrainingReport:
    """Trains in shuffled mini-batches, in train mode; every module's mode is restored afterwards.

    Results on a CPU are bit-equal for equal models, data, generator state, global RNG state (dropout) and thread count.
    If the model has batch-norm, a last batch of one sample is omitted, because its variance is undefined. A single
    sample in all is trained on with the batch-norm's running statistics, which do not change.

    Args:
        model: Model on `device`.
        data: Training data, at least one sample.
        epochs: Passes over the data, at least 1.
        batch_size: Samples per mini-batch, at least 1, or 2 with batch-norm.
        optimizer: Optimiser of the model's parameters.
        loss: Function of the mini-batch's logits, labels and row indices, all on `device`; the row indices select a
            teacher's rows.
        generator: CPU generator; one permutation is drawn per epoch.
        device: Torch device to train on.

    Raises:
        ConfigurationError: `epochs` or `batch_size` is out of range.
        DataError: There are no samples.
        KnowledgeError: The loss is not finite; the model keeps the weights from before that step.
        CannotAnswer, WorkInterrupted: The work must end; see `fleetdistill.interruption`.
    """
    own = data.to(device)
    return train_steps(
        model,
        len(data),
        epochs=epochs,
        batch_size=batch_size,
        optimizer=optimizer,
        losses=lambda epoch, rows_b: [loss(model(own.draw(rows_b)), own.labels[rows_b], rows_b)],
        generator=generator,
        device=device,
    )


def train_steps(
    model: nn.Module,
    count: int,
    *,
    epochs: int,
    batch_size: int,
    optimizer: torch.optim.Optimizer,
    losses: BatchLosses,
    generator: torch.Generator,
    device: torch.device | str,
) -> TrainingReport:
    """Trains in shuffled mini-batches of row indices; `losses` computes the losses of a mini-batch.

    Use it for data other than inputs and labels, or for several steps per mini-batch. Arguments, results and exceptions
    are otherwise those of `train_epochs`.

    Args:
        model: Module on `device` whose modes are set; the optimiser may have only some of its parameters.
        count: Number of rows, at least 1.
        epochs, batch_size, optimizer, generator, device: As in `train_epochs`.
        losses: Function of the epoch, from 0, and the mini-batch's row indices. Each yielded loss is one optimiser
            step, taken before the next loss is computed. Parameters that a loss does not depend on stay bit-identical.

    Returns:
        A report; `mean_loss` is the mean over all steps, NaN without a step.
    """
    check_plan(epochs, batch_size)
    if not any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"]):
        raise CannotAnswer("no parameter that is to be trained requires a gradient; call model.requires_grad_(True)")
    smallest = check_smallest_batch(model, count, batch_size)
    steps, samples, loss_sum = 0, 0, 0.0
    with in_mode(model, training=True), frozen_batch_norm(model, count < smallest_batch(model)):
        for epoch in range(epochs):
            for number, rows in enumerate(_batches(count, batch_size, smallest, generator)):
                check_may_continue()
                report_progress("training", (epoch + number * batch_size / count) / epochs)
                for loss_value in losses(epoch, rows.to(device)):
                    mean_loss = finite_loss(loss_value, f"epoch {epoch + 1} of {epochs}, step {steps + 1}", optimizer)
                    optimizer.zero_grad(set_to_none=True)
                    with draws_nothing():
                        loss_value.backward()
                        optimizer.step()
                    steps, samples, loss_sum = steps + 1, samples + len(rows), loss_sum + mean_loss * len(rows)
    return TrainingReport(steps, loss_sum / samples if samples else math.nan, samples)


def evaluate(model: nn.Module, data: TensorData | LazyData, classes: int, batch_size: int = SCORED_ROWS) -> Counts:
    """Evaluates a model in eval mode, without gradients. Ties are resolved in favour of the lowest class index.

    Raises:
        DataError: A label is outside [0, classes).
        KnowledgeError: A logit is not finite.
        ModelError: The model's output is not `[batch, classes]`.
    """
    logits = extract(model, data.inputs, batch_size)
    labels = data.labels.cpu()
    if len(labels) and int(labels.max()) >= classes:
        raise DataError(f"label {int(labels.max())} is outside [0, {classes})")
    _check_logits(logits, len(labels), classes)
    best = logits.argmax(dim=1)  # documented to return the first of several maxima
    return Counts(
        correct=int((best == labels).sum()),
        count=len(labels),
        loss_sum=float(functional.cross_entropy(logits.double(), labels, reduction="sum")),
        confusion=Confusion.of(labels.numpy(), best.numpy(), classes),
    )


def extract(
    model_fn: Callable[[Tensor], Tensor],
    inputs: Tensor | LazyInputs,
    batch_size: int = 1024,
    *,
    model: nn.Module | None = None,
) -> Tensor:
    """Runs a model over all rows, in order, in eval mode and without gradients.

    A batch has at most `batch_size` rows, and fewer if a layer's inputs and outputs would need more than `BATCH_BYTES`.
    This is measured on the first two of more than 16 rows.

    Args:
        model_fn: A module, a method of a module, or any function together with `model`.
        inputs: `[N, ...]`, on any device; batches are copied to the model's device.
        batch_size: Largest number of rows per batch, at least 1.
        model: The module that `model_fn` uses, set to eval mode during the call. By default derived from `model_fn`.

    Returns:
        Outputs `[N, ...]` on the CPU, detached, in the order of the inputs.

    Raises:
        ConfigurationError: `batch_size` is less than 1, or the module of `model_fn` is unknown.
    """
    if batch_size < 1:
        raise ConfigurationError(f"batch_size is {batch_size}, must be at least 1")
    module = model if model is not None else _module_of(model_fn)
    tensor = next(chain(module.parameters(), module.buffers()), None)
    device = inputs.device if tensor is None else tensor.device
    count, outputs = len(inputs), None
    read = min(batch_size, max(BATCH_BYTES // (_FLOAT_BYTES * prod(inputs.shape[1:]) or 1), 1))
    with in_mode(module, training=False), torch.no_grad():
        size = read
        for start in range(0, max(count, 1), read):  # without rows, the outputs' shape is that of an empty batch's
            rows = inputs[start : start + read]
            if start == 0 and len(rows) > UNMEASURED_ROWS:
                size = min(read, rows_at_once(model_fn, module, rows[:2].to(device)))
            for at, part in enumerate(rows.split(size)):
                check_may_continue()
                done = start + at * size
                report_progress("inference", done / max(count, 1))
                made = model_fn(part.to(device))
                if outputs is None:  # joining batches would hold all of them twice
                    outputs = torch.empty((count, *made.shape[1:]), dtype=made.dtype)
                outputs[done : done + len(part)] = made
    assert outputs is not None
    return outputs


def rows_at_once(model_fn: Callable[[Tensor], Tensor], module: nn.Module, rows: Tensor) -> int:
    """Returns how many rows a batch without gradients may have, at least 1: see `BATCH_BYTES`.

    A scripted module is not measured and has no limit. A module is measured once for each function and shape of input.

    Args:
        model_fn: Function that uses the module.
        module: The module, in eval mode.
        rows: One or two inputs on the module's device, on which a layer's inputs and outputs are measured.
    """
    code = getattr(model_fn, "__func__", getattr(model_fn, "__code__", None))  # the same each time for a lambda
    measured, key = _row_bytes.setdefault(module, {}), (code, rows.shape, rows.dtype)
    if key not in measured:
        measured[key] = _measure_row_bytes(model_fn, module, rows)
    return max(BATCH_BYTES // measured[key], 1)


_row_bytes: WeakKeyDictionary[nn.Module, dict[Hashable, int]] = WeakKeyDictionary()


def _measure_row_bytes(model_fn: Callable[[Tensor], Tensor], module: nn.Module, rows: Tensor) -> int:
    """Returns the size of the inputs and outputs of the largest layer, for one row."""
    largest, thread = 1, threading.get_ident()

    def note(layer: nn.Module, given: tuple[object, ...], made: object) -> None:
        nonlocal largest
        if threading.get_ident() != thread:  # another one uses the module with other rows
            return
        tensors = [item for item in (*given, made) if isinstance(item, Tensor)]
        largest = max(largest, sum(item.numel() * item.element_size() for item in tensors) // len(rows))

    layers = [layer for layer in module.modules() if not isinstance(layer, torch.jit.ScriptModule)]
    handles = [layer.register_forward_hook(note) for layer in layers]
    try:
        model_fn(rows)
    finally:
        for handle in handles:
            handle.remove()
    return largest


def _module_of(model_fn: Callable[[Tensor], Tensor]) -> nn.Module:
    module = model_fn if isinstance(model_fn, nn.Module) else getattr(model_fn, "__self__", None)
    if not isinstance(module, nn.Module):
        # In train mode the function would silently change batch-norm statistics.
        raise ConfigurationError(f"extract does not know which module {model_fn!r} uses; pass it as model=")
    return module


def _batches(count: int, batch_size: int, smallest: int, generator: torch.Generator) -> Iterator[Tensor]:
    for rows in torch.split(torch.randperm(count, generator=generator), batch_size):
        if len(rows) >= smallest:
            yield rows


def smallest_batch(model: nn.Module) -> int:
    """Returns the smallest mini-batch for training: 2 rows for a model with batch-norm, else 1."""
    return 2 if any(isinstance(module, _BatchNorm) for module in model.modules()) else 1


def check_smallest_batch(model: nn.Module, count: int, batch_size: int) -> int:
    """Returns the smallest mini-batch for training on `count` rows.

    Raises:
        ConfigurationError: `batch_size` is smaller.
        DataError: There are no rows.
    """
    if count < 1:
        raise DataError("the training data has 0 samples: there is nothing to train on; pass at least 1")
    smallest = min(smallest_batch(model), count)
    if batch_size < smallest:
        raise ConfigurationError(
            f"batch_size is {batch_size}, but a model with batch-norm cannot train on single samples; use at least 2"
        )
    return smallest


def finite_loss(loss_value: Tensor, where: str, optimizer: torch.optim.Optimizer) -> float:
    """Returns a loss as a number; raises KnowledgeError, which names the step and the rate, if it is not finite."""
    value = float(loss_value.detach())
    if not math.isfinite(value):
        raise KnowledgeError(
            f"the loss is {value} at {where}; the learning rate {optimizer.param_groups[0]['lr']} is probably "
            "too large (lower learning_rate or beta), or the teacher has non-finite rows"
        )
    return value


def check_plan(epochs: int, batch_size: int) -> None:
    """Raises ConfigurationError if `epochs` or `batch_size` is less than 1."""
    for name, value in {"epochs": epochs, "batch_size": batch_size}.items():
        if value < 1:
            raise ConfigurationError(f"{name} is {value}, must be at least 1")


def _check_logits(logits: Tensor, count: int, classes: int) -> None:
    if logits.shape != (count, classes):
        raise ModelError(f"the model returned shape {list(logits.shape)}, expected logits [{count}, {classes}]")
    finite = logits.isfinite()
    if not finite.all():
        row = int((~finite).any(dim=1).nonzero()[0])
        raise KnowledgeError(f"the model returned a non-finite logit at row {row}; it has probably diverged")
