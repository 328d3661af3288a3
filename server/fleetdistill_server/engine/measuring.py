"""Connects an engine with its metrics, if `[server] metrics` is set."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from fleetdistill.errors import in_words
from fleetdistill_server.config.run_config import RunConfig
from fleetdistill_server.engine.engine import Engine
from fleetdistill_server.extras import load_part
from fleetdistill_server.logs import about
from fleetdistill_server.service.wakeups import POLL_SECONDS, Waker

logger = logging.getLogger("fleetdistill.server.engine")


class EngineMeter(Protocol):
    """What measures an engine; the class is a part of an annex."""

    def waits(self) -> None:
        """Notes that the engine waits."""

    def of_round(self) -> AbstractContextManager[None]:
        """Notes that the block is a round."""

    def watch_memory(self, measure: Callable[[], Mapping[str, int]]) -> None:
        """Notes the GPU memory in bytes by state from time to time."""


def open_meter(config: RunConfig) -> EngineMeter | None:
    """Returns the metrics of a run's engine, or None without `[server] metrics` or without space for them."""
    if not config.server.metrics:
        return None
    try:
        meter: EngineMeter = load_part("engine-metrics")(Path(config.server.store), config.run.name)
        return meter
    except OSError as error:
        text = "this engine measures nothing until it is restarted: %s"
        logger.warning(text, in_words(error), extra=about(run=config.run.name))
        return None


def measure_waits(waker: Waker, meter: EngineMeter | None) -> Waker:
    """Returns a waker that notes when the engine waits; the same waker without metrics."""
    return waker if meter is None else _MeasuredWaker(waker, meter)


class _MeasuredWaker:
    def __init__(self, waker: Waker, meter: EngineMeter) -> None:
        self._waker = waker
        self._meter = meter

    async def wait(self, seconds: float = POLL_SECONDS) -> None:
        self._meter.waits()
        await self._waker.wait(seconds)

    def wake_other(self) -> None:
        self._waker.wake_other()


def measure(engine: Engine, meter: EngineMeter) -> None:
    """Notes the engine's rounds and the memory of its GPU."""
    others = engine.around_round

    @contextmanager
    def around_round(number: int) -> Iterator[None]:
        with others(number), meter.of_round():
            yield

    engine.around_round = around_round
    meter.watch_memory(partial(gpu_memory, engine.method.context.trainer.hardware.device))


def gpu_memory(device: torch.device) -> Mapping[str, int]:
    """Returns the memory of a GPU in bytes by state; empty for a CPU and before the GPU is used."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return {}
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return {"allocated": allocated, "reserved": reserved, "free": free, "total": total}
