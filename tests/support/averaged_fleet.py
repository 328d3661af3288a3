"""What several tests of averaged class statistics look at."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from support.class_statistics_fleet import (
    Rounds,
)

from fleetdistill import Device
from fleetdistill.methods.classstats.drawn_rows import RoundPlan
from fleetdistill_server.intake.device_api import DeviceApi
from fleetdistill_server.simulation.links.memory_link import MemoryLink
from fleetdistill_server.simulation.spec.device import make_device as make_simulated


def lesson_of(seed: int) -> RoundPlan:
    return RoundPlan(draw_seed=seed, nonnegative=True, merge=1, learning_rate=0.01)


def lessons(rounds: Rounds) -> list[tuple[str, list[str]]]:
    return [(device, sorted(parts)) for step, device, parts in rounds.asked if step == "learn"]


def devices_of(prepared: Any, stack: ExitStack, api: DeviceApi) -> list[Device]:
    return [stack.enter_context(make_simulated(spec, MemoryLink(api))) for spec in prepared[1]]
