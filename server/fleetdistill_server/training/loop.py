"""One training: mini-batches, optimiser steps that fit in memory, and resume points."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from fleetdistill.progress import report_progress
from fleetdistill.training.local_training import TrainingReport, finite_loss
from fleetdistill_server.training.compiling import Compiling
from fleetdistill_server.training.hardware import Hardware
from fleetdistill_server.training.memory import Memory, ModelSnapshot
from fleetdistill_server.training.ranks import Ranks
from fleetdistill_server.training.resume import ResumePoints
from fleetdistill_server.training.rows import Pool, on_device
from fleetdistill_server.training.weights import Weights

CHECKED_STEPS = 50
"""Steps between two checks of the losses on an accelerator, each of which waits for the device."""

BatchLosses = Callable[..., Iterable[Tensor]]
"""(epoch from 0, rows [b], and with a pool the pool's rows [b, ...]) -> scalars, each the loss of one step."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Arguments of one training.

    Attributes:
        model, epochs, batch_size, optimizer, losses, generator, pool: As in `Trainer.train_steps`.
        pools: Number of rows of each pool.
        smallest: Smallest mini-batch.
        is_mean: Whether each loss is a mean over rows.
        normalises: Whether batch-norm uses the statistics of the mini-batch.
    """

    model: nn.Module
    pools: Sequence[int]
    epochs: int
    batch_size: int
    optimizer: torch.optim.Optimizer
    losses: BatchLosses
    generator: torch.Generator
    pool: Pool | None
    smallest: int
    is_mean: bool
    normalises: bool


class Loop:
    """Runs one training.

    Args:
        plan: The training.
        hardware: Device and precision.
        memory: Reacts to out-of-memory errors.
        compiling: Compiles the forward pass.
        ranks: The processes that train together.
        weights: The weights of the plan's model and optimiser.
        points: Resume points; None for none.
    """

    def __init__(
        self,
        plan: Plan,
        hardware: Hardware,
        memory: Memory,
        compiling: Compiling,
        ranks: Ranks,
        weights: Weights,
        points: ResumePoints | None,
    ) -> None:
        self._plan = plan
        self._hardware = hardware
        self._memory = memory
        self._compiling = compiling
        self._ranks = ranks
        self._points = points
        self._weights = weights
        self._before = ModelSnapshot(plan.model, hardware.device)
        self._meter = _Meter(hardware, plan.optimizer)
        self._epoch = self._batch = 0  # of the next mini-batch

    def run(self) -> TrainingReport:
        key = self._resume()
        with self._weights:
            return self._train(key)

    def _train(self, key: str) -> TrainingReport:
        plan = self._plan
        while self._epoch < plan.epochs:
            self._drawn_from = plan.generator.get_state()
            rows = list(batches(plan.pools, plan.batch_size, plan.smallest, plan.generator))
            own = [self._ranks.own(rows_b, plan.is_mean) for rows_b in rows]
            left = own[self._batch :]
            read = repeat(None) if plan.pool is None else plan.pool.batches(left)
            moved = on_device(left, self._hardware.device)
            for rows_b, own_b, data_b in zip(rows[self._batch :], moved, read, strict=False):
                report_progress("training", (self._epoch + self._batch / len(rows)) / plan.epochs)
                self._meter.where = f"epoch {self._epoch + 1} of {plan.epochs}"
                self._take_steps(own_b, data_b, len(rows_b))
                self._batch += 1
                self._compiling.count_batch((plan.epochs - self._epoch) * len(rows) - self._batch)
                self._save_if_due(key)
            self._epoch, self._batch = self._epoch + 1, 0
        return self._meter.report()

    # --- steps

    def _take_steps(self, rows_b: Tensor, data_b: Tensor | None, whole: int) -> None:
        """Takes all steps of a mini-batch; after an out-of-memory error, those that are not taken yet.

        Args:
            rows_b: This process's rows of the mini-batch.
            data_b: Their rows of the pool.
            whole: Number of rows of the mini-batch.
        """
        self._before.begin()
        while True:
            try:
                for loss in self._gradients(rows_b, data_b, whole):
                    self._step(loss, whole)
                return
            except torch.OutOfMemoryError as error:
                if self._weights.sharded or self._ranks.communicates_in_forward(self._plan.normalises):
                    raise self._memory.exhausted(error) from error
                self._memory.use_less(len(rows_b), self._splits, error)
            except Exception as error:
                if not self._compiling.failed(error):
                    raise
            self._before.failed = True
            self._plan.optimizer.zero_grad(set_to_none=True)

    @property
    def _splits(self) -> bool:
        return self._plan.is_mean and not self._plan.normalises

    def _step(self, loss: Tensor, rows: int) -> None:
        loss = self._ranks.summed(loss, self._weights.gradients())
        self._meter.check(loss)
        try:
            self._plan.optimizer.step()
        except torch.OutOfMemoryError as error:  # some weights may have changed, so the step cannot be repeated
            raise self._memory.exhausted(error) from error
        self._meter.add(loss, rows)
        self._before.count_step()

    def _gradients(self, rows_b: Tensor, data_b: Tensor | None, whole: int) -> Iterator[Tensor]:
        """Yields the loss of each step that is not taken yet, with the gradients computed."""
        parts = self._memory.parts(len(rows_b), self._ranks.shares(whole, self._plan.is_mean), self._splits)
        series = [self._losses(rows_b[part], None if data_b is None else data_b[part]) for part in parts]
        shares = [self._ranks.share(len(rows_b[part]), whole, self._plan.is_mean) for part in parts]
        if self._before.failed:
            for one in series * self._before.steps:
                with torch.no_grad():
                    self._next(one)
            self._before.restore()
        while True:
            self._plan.optimizer.zero_grad(set_to_none=True)
            total: Tensor | None = None
            for one, share in zip(series, shares, strict=True):
                with self._memory.saving():
                    loss = self._next(one)
                    if loss is None:
                        return
                    loss = loss if share == 1 else loss * share
                    loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
            assert total is not None
            yield total

    def _losses(self, rows_b: Tensor, data_b: Tensor | None) -> Iterator[Tensor]:
        return iter(self._plan.losses(self._epoch, rows_b, *(() if data_b is None else (data_b,))))

    def _next(self, losses: Iterator[Tensor]) -> Tensor | None:
        with self._hardware.autocast():
            return next(losses, None)

    # --- resume points

    def _resume(self) -> str:
        """Continues from a resume point if there is one; returns the training's key."""
        plan, key, state = self._plan, "", None
        if self._points is not None:
            training = [plan.generator.initial_seed(), list(plan.pools), plan.epochs, plan.batch_size]
            key, state = self._points.begin(training)
        state = self._ranks.from_first(state)
        if state is not None:
            self._load(state)
        return key

    def _save_if_due(self, key: str) -> None:
        due = self._points is not None and self._points.is_due()
        if self._weights.agreed(due):
            state = self._state()
            if self._points is not None:
                self._points.save(key, state)

    def _state(self) -> dict[str, Any]:
        """Returns everything that the rest of the training depends on."""
        cuda = self._hardware.device.type == "cuda"
        return {
            **self._weights.state(),
            "drawn_from": self._drawn_from,
            "random": torch.get_rng_state(),
            "random_on_gpu": torch.cuda.get_rng_state(self._hardware.device) if cuda else None,
            "position": [self._epoch, self._batch],
            "losses": self._meter.state(),
        }

    def _load(self, state: dict[str, Any]) -> None:
        self._plan.model.load_state_dict(state["model"])
        self._plan.optimizer.load_state_dict(state["optimizer"])
        self._plan.generator.set_state(state["drawn_from"])
        torch.set_rng_state(state["random"])
        if state["random_on_gpu"] is not None and self._hardware.device.type == "cuda":
            torch.cuda.set_rng_state(state["random_on_gpu"], self._hardware.device)
        self._epoch, self._batch = state["position"]
        self._meter.load(state["losses"])


class _Meter:
    """Sums losses; checks them at each step on a CPU, and after several steps on an accelerator."""

    def __init__(self, hardware: Hardware, optimizer: torch.optim.Optimizer) -> None:
        self._deferred = hardware.device.type != "cpu"
        self._optimizer = optimizer
        self._steps = self._samples = 0
        self._sum: float | Tensor = 0.0
        self.where = "the first step"

    def check(self, loss: Tensor) -> None:
        """Raises KnowledgeError before the step if the loss is not finite; on an accelerator, after at most 50 steps.

        There the weights have then taken steps with such a loss, and the caller restores them.
        """
        if not self._deferred:
            self._finite(loss)
        elif isinstance(self._sum, Tensor) and self._steps % CHECKED_STEPS == 0:
            self._finite(self._sum)

    def add(self, loss: Tensor, rows: int) -> None:
        self._steps, self._samples = self._steps + 1, self._samples + rows
        self._sum = self._sum + (loss.double() if self._deferred else float(loss)) * rows

    def state(self) -> list[float]:
        return [self._steps, self._samples, float(self._sum)]

    def load(self, state: list[float]) -> None:
        self._steps, self._samples, self._sum = int(state[0]), int(state[1]), state[2]

    def report(self) -> TrainingReport:
        total = self._finite(self._sum) if isinstance(self._sum, Tensor) else self._sum
        return TrainingReport(self._steps, total / self._samples if self._samples else math.nan, self._samples)

    def _finite(self, value: Tensor) -> float:
        return finite_loss(value, f"{self.where}, step {self._steps + 1}", self._optimizer)


def batches(pools: Sequence[int], batch_size: int, smallest: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yields the row numbers of each mini-batch of one epoch; batches of fewer than `smallest` rows are left out.

    Each pool is shuffled by itself; the pools follow each other.
    """
    first = 0
    for size in pools:
        shuffled = first + torch.randperm(size, generator=generator)
        yield from (rows_b for rows_b in shuffled.split(batch_size) if len(rows_b) >= smallest)
        first += size
