"""`StackedModels`, the backend that trains networks of one architecture together, in the simulation's process.

Tiny networks spend their time between the operations of torch. The devices of a round that have the same architecture
and as many rows take their steps as one network with a further dimension (`torch.vmap`), and do all else one by one.
The results are those of the other backends within float tolerance.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.dropout import _DropoutNd

from fleetdistill.errors import RunError
from fleetdistill.training.local_training import TensorData, Training, TrainingReport, train_together
from fleetdistill.training.model import in_mode, parameter_count
from fleetdistill_lab.simulation.backends.backend import Result, RunData, Task
from fleetdistill_lab.simulation.backends.worker import TaskRunner, run_task
from fleetdistill_lab.simulation.spec.compute import count_steps

__all__ = ["StackedModels", "train_stacked"]

logger = logging.getLogger("fleetdistill.server.simulation")
MAX_PARAMETERS = 10_000
"""Largest number of a network's parameters: with more, stacking loses; see `benchmarks/stacked.py`."""


class StackedModels:
    """Implements `Backend`: computes all tasks that were submitted when the first result is wanted.

    Each task has a thread, of which one at a time works. A thread stops where its device's network is to be trained,
    and goes on when those of all tasks are.

    Args:
        run: The run's data.
    """

    def __init__(self, run: RunData) -> None:
        self._runner = TaskRunner(run)
        self._waiting: list[tuple[Task, Future[Result]]] = []
        self._trained: Counter[str] = Counter()

    def submit(self, task: Task) -> Future[Result]:
        """See `Backend.submit`."""
        future = _Due(self._compute)
        self._waiting.append((task, future))
        return future

    def close(self) -> None:
        """See `Backend.close`; says if no training had another one to run with."""
        alone = {reason: count for reason, count in self._trained.items() if reason}
        if alone and not self._trained[""]:
            reasons = ", ".join(f"{count} because {reason}" for reason, count in alone.items())
            logger.warning("backend stacked: of %d trainings none ran together: %s", sum(alone.values()), reasons)

    def _compute(self) -> None:
        """Computes all submitted tasks."""
        waiting, self._waiting = self._waiting, []
        threads = self._runner.threads
        works = [_Work(partial(run_task, self._runner, task), task.spec.model, threads) for task, _ in waiting]
        state = torch.get_rng_state()
        try:
            going = works
            while going := [work for work in going if work.go_on()]:
                self._train(going)
        finally:
            for work in works:
                work.end()
            torch.set_rng_state(state)
        for (task, future), work in zip(waiting, works, strict=True):
            if work.result is None:
                raise RunError(f"the work of {task.spec.name} has ended without a result; its error is printed above")
            future.set_result(work.result)

    def _train(self, works: Sequence[_Work]) -> None:
        groups: dict[Any, list[tuple[_Work, Training]]] = {}
        for work in works:
            assert work.training is not None  # `go_on` has said so
            reason = _reason_alone(work.training)
            if reason:
                self._trained[reason] += 1
            else:
                groups.setdefault((work.model, *_shape(work.training)), []).append((work, work.training))
        for group in groups.values():
            try:
                reports = train_stacked([training for _, training in group])
            except CannotStackError as error:
                self._trained[str(error)] += len(group)
                continue
            self._trained[""] += len(group)
            for (work, _), report in zip(group, reports, strict=True):
                work.report = report


class CannotStackError(Exception):
    """Trainings cannot run together; the text says why, and nothing was changed."""


class _Due(Future[Result]):
    """A result that is computed when it is first wanted."""

    def __init__(self, compute: Callable[[], None]) -> None:
        super().__init__()
        self._compute = compute

    def result(self, timeout: float | None = None) -> Result:
        if not self.done():
            self._compute()
        return super().result(timeout)


class _Ended(BaseException):
    """Ends the thread of a work that is not wanted any more."""


class _Work:
    """A task in a thread of its own, which works only while `go_on` waits for it.

    Args:
        compute: Computes the task.
        model: Name of the device's model.
        threads: Torch's number of threads.

    Attributes:
        result: The result; None until the task is computed.
        training: What is to be trained before the thread goes on; None at its end.
        report: The report of that training, if it is done.
    """

    def __init__(self, compute: Callable[[], Result], model: str, threads: int) -> None:
        self.model = model
        self.result: Result | None = None
        self.training: Training | None = None
        self.report: TrainingReport | None = None
        self._compute, self._torch_threads = compute, threads
        self._is_wanted = True
        self._may_go, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def go_on(self) -> bool:
        """Lets the thread work until its next training, or its end; returns whether there is a training."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="stacked work", daemon=True)
            self._thread.start()
        self._may_go.release()
        self._has_stopped.acquire()
        return self.training is not None

    def end(self) -> None:
        """Ends the thread, if it still waits."""
        self._is_wanted = False
        if self._thread is not None:
            self._may_go.release()
            self._thread.join()

    def _work(self) -> None:
        self._may_go.acquire()
        torch.set_num_threads(self._torch_threads)
        try:
            with train_together(self._train):
                self.result = self._compute()
        except _Ended:
            return
        finally:
            self.training = None
            self._has_stopped.release()

    def _train(self, training: Training) -> TrainingReport | None:
        self.training, self.report = training, None
        with _kept_random_state():
            self._has_stopped.release()
            self._may_go.acquire()
        if not self._is_wanted:
            raise _Ended
        if self.report is not None:
            count_steps(self.report.steps)
        return self.report


@contextmanager
def _kept_random_state() -> Iterator[None]:
    """Keeps the state of torch's global generator while other threads use it."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _reason_alone(training: Training) -> str:
    """Returns why a training cannot run together with others; empty if it can."""
    if not isinstance(training.data, TensorData):
        return "rows are read or changed for each batch"
    if any(isinstance(module, _DropoutNd) for module in training.model.modules()):
        return "the network has dropout"
    if next(training.model.buffers(), None) is not None:  # each device has its own, and training may change them
        return "the network has buffers, such as those of batch-norm"
    if any(not parameter.requires_grad for parameter in training.model.parameters()):
        return "a part of the network is not trained"
    if parameter_count(training.model) > MAX_PARAMETERS:
        return f"the network has more than {MAX_PARAMETERS:,} parameters"
    if next(training.model.parameters()).device.type != "cpu":
        return "the networks are not on the CPU"
    return ""


def _shape(training: Training) -> tuple[Any, ...]:
    """Returns what trainings must have in common to run together, besides the model's name."""
    optimizer = training.optimizer
    weights = tuple((name, tensor.shape) for name, tensor in training.model.named_parameters())
    return len(training.data), training.epochs, training.batch_size, type(optimizer), str(optimizer.defaults), weights


def train_stacked(trainings: Sequence[Training]) -> list[TrainingReport]:
    """Trains networks of one architecture together, each on rows of its own.

    Args:
        trainings: Trainings with the same loss, architecture, number of rows, plan and kind of optimiser.

    Raises:
        CannotStackError: There is only one, a loss is not finite, or the network cannot run under `torch.vmap`.
    """
    if len(trainings) < 2:
        raise CannotStackError("no other device has the same network and as many rows")
    states = [training.generator.get_state() for training in trainings]
    try:
        with in_mode(trainings[0].model, training=True):
            return _train_stacked(trainings)
    except (RuntimeError, CannotStackError) as error:
        for training, state in zip(trainings, states, strict=True):
            training.generator.set_state(state)
        raise CannotStackError(str(error).split("\n")[0]) from error


def _train_stacked(trainings: Sequence[Training]) -> list[TrainingReport]:
    first = trainings[0]
    count, names = len(first.data), [name for name, _ in first.model.named_parameters()]
    stacked = {
        f"model.{name}": torch.stack([training.model.get_parameter(name).detach() for training in trainings])
        for name in names
    }
    kind = type(first.optimizer)
    known = inspect.signature(kind).parameters
    arguments = {name: value for name, value in first.optimizer.defaults.items() if name in known}
    optimizer = kind([tensor.requires_grad_() for tensor in stacked.values()], **arguments)
    network = _WithLoss(first.model, first.loss)
    losses_of = torch.vmap(lambda weights, inputs, labels: functional_call(network, weights, (inputs, labels)))
    steps, sums_k = 0, torch.zeros(len(trainings), dtype=torch.float64)
    for _ in range(first.epochs):
        rows_kn = torch.stack([torch.randperm(count, generator=training.generator) for training in trainings])
        for rows_kb in rows_kn.split(first.batch_size, dim=1):
            batches = list(zip(trainings, rows_kb, strict=True))
            inputs = torch.stack([training.data.draw(rows_b) for training, rows_b in batches])
            labels = torch.stack([training.data.labels[rows_b] for training, rows_b in batches])
            losses_k = losses_of(stacked, inputs, labels)
            if not losses_k.isfinite().all():
                raise CannotStackError("a loss is not finite")
            optimizer.zero_grad(set_to_none=True)
            losses_k.sum().backward()
            optimizer.step()
            steps, sums_k = steps + 1, sums_k + losses_k.detach().double() * rows_kb.shape[1]
    with torch.no_grad():
        for name in names:
            for training, trained in zip(trainings, stacked[f"model.{name}"], strict=True):
                training.model.get_parameter(name).copy_(trained)
    samples = first.epochs * count
    return [TrainingReport(steps, total / samples, samples) for total in sums_k.tolist()]


class _WithLoss(nn.Module):
    """A network with its loss as the result, so that `functional_call` sets the weights that the loss reads."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, inputs_b: Tensor, labels_b: Tensor) -> Tensor:
        return self._loss(inputs_b, labels_b)
