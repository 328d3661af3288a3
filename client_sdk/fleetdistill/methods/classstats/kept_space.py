"""Conversion of a class space to and from saved state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fleetdistill.knowledge import ClassSpace


def copy(space: ClassSpace) -> ClassSpace:
    """Returns a copy in memory; the arrays of a received space are mapped from a file that is deleted later."""
    arrays = {name: np.array(value) for name, value in vars(space).items() if name != "labels"}
    return ClassSpace(labels=list(space.labels), **arrays)


def pack(space: ClassSpace) -> dict[str, Any]:
    """Returns a space in the form that `fleetdistill.state.state_file` stores."""
    import torch

    arrays = {name: torch.from_numpy(np.array(value)) for name, value in vars(space).items() if name != "labels"}
    return {"labels": list(space.labels), **arrays}


def unpack(state: Mapping[str, Any]) -> ClassSpace:
    """Returns the space in a value of `pack`."""
    return ClassSpace(**{name: value if name == "labels" else value.numpy() for name, value in state.items()})
