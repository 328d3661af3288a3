"""How many engines run at once, and on which GPU each of them computes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleetdistill_server.service.wakeups import Ends

_GPU_DEVICE = re.compile(r"nvidia\d+")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Slot:
    """The place of one engine.

    Attributes:
        ends: The engine's ends of the wake-up pipes.
        gpu: The GPU for an engine of one process, as in CUDA_VISIBLE_DEVICES; empty for the default.
    """

    ends: Ends
    gpu: str = ""

    def environment(self) -> Mapping[str, str]:
        """Returns the variables that select the GPU."""
        return {_VISIBLE: self.gpu} if self.gpu else {}


def make_slots(ends: Sequence[Ends]) -> list[Slot]:
    """Returns one place for each of the ends; the engines share the GPUs equally if there are several of each."""
    gpus = visible_gpus()
    if len(ends) == 1 or len(gpus) < 2:
        return [Slot(end) for end in ends]
    return [Slot(one, gpus[number % len(gpus)]) for number, one in enumerate(ends)]


def engines_at_once(setting: int) -> int:
    """Returns the number of engines that run at once; for 0 one a GPU, else one for two processors, at least 1."""
    return setting or len(visible_gpus()) or max(1, (os.cpu_count() or 1) // 2)


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """Returns the NVIDIA GPUs that a process may use, without loading CUDA: their numbers or names."""
    chosen = os.environ.get(_VISIBLE)
    if chosen is not None:
        return [item.strip() for item in chosen.split(",") if item.strip() not in ("", "-1")]
    result = sorted(int(item.name[6:]) for item in devices.glob("nvidia*") if _GPU_DEVICE.fullmatch(item.name))
    return [str(number) for number in range(len(result))]
