"""Compiles the forward pass of a model during a training where that pays."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from fleetdistill.errors import FleetDistillError
from fleetdistill_server.training.hardware import Hardware
from fleetdistill_server.training.memory import Notify

MEASURED_STEPS = 20
"""Steps whose time is measured before `auto` decides."""
PAYS_SECONDS = 300.0
"""Remaining seconds of a training from which `auto` compiles; compiling takes up to a minute."""


class Compiling:
    """Replaces `model.forward` by its compiled form in a `with` block.

    With `auto`, that happens after `MEASURED_STEPS` steps if at least `PAYS_SECONDS` are left. If
    compiling fails, the training continues without it.

    Args:
        model: The model.
        hardware: Provides device, mode and backend.
        notify: Receives the event that reports a failure.
        now: Monotonic clock in seconds.
    """

    def __init__(
        self, model: nn.Module, hardware: Hardware, notify: Notify, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._model = model
        self._hardware = hardware
        self._notify = notify
        self._now = now
        self._decides = hardware.compile == "auto"
        self._steps = 0
        self._tried = self._works = False

    def __enter__(self) -> Compiling:
        self._started = self._now()
        if self._hardware.compile == "on":
            self._compile()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo()

    def count_batch(self, left: int) -> None:
        """Counts a mini-batch after its steps; `left` is the number of mini-batches of the training that remain."""
        self._steps += 1
        self._works = self._tried
        if self._decides and self._steps == MEASURED_STEPS:
            if self._hardware.device.type == "cuda":
                torch.cuda.synchronize(self._hardware.device)
            each = (self._now() - self._started) / self._steps
            if each * left >= PAYS_SECONDS:
                self._compile()

    def failed(self, error: Exception) -> bool:
        """Returns whether an error of a step comes from compiling; the model is then no longer compiled."""
        if not self._tried or self._works or isinstance(error, FleetDistillError):
            return False
        self._undo()
        self._works = True
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._notify("not-compiled", f"the forward pass cannot be compiled and runs uncompiled: {reason}")
        return True

    def _compile(self) -> None:
        self._tried = True
        compiled: Any = torch.compile(self._model.forward, backend=self._hardware.compile_backend)
        self._model.forward = compiled

    def _undo(self) -> None:
        self._model.__dict__.pop("forward", None)
