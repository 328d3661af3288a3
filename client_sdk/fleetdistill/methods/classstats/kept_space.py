"""A class space as a device keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fleetdistill.knowledge import ClassSpace


def copied(space: ClassSpace) -> ClassSpace:
    """A space of its own memory: what came may lie in a file that is deleted."""
    arrays = {name: np.array(value) for name, value in vars(space).items() if name != "labels"}
    return ClassSpace(labels=list(space.labels), **arrays)


def packed(space: ClassSpace) -> dict[str, Any]:
    """A space as `fleetdistill.state.state_file` keeps it."""
    import torch

    arrays = {name: torch.from_numpy(np.array(value)) for name, value in vars(space).items() if name != "labels"}
    return {"labels": list(space.labels), **arrays}


def unpacked(state: Mapping[str, Any]) -> ClassSpace:
    """What `packed` gave."""
    return ClassSpace(**{name: value if name == "labels" else value.numpy() for name, value in state.items()})
