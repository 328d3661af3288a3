"""Features behind an extractor that nobody trains: computed once for each set of rows, and kept.

What is kept depends on extractor and rows alone, so the devices of a process share it: simulated ones are tested alike.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import threading
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor, nn

from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats.projection import projection
from fleetdistill.training.local_training import extract

MOST_BYTES = 512 << 20
"""Of all that is kept; what was used longest ago goes first."""
_BATCH = 256

_kept: OrderedDict[bytes, Array] = OrderedDict()
_lock = threading.Lock()


class FixedFeatures:
    """Inputs to projected features z (oneshot.md, 3.1 and 3.2).

    Args:
        extractor: On the CPU; its weights do not change any more.
        features: F, numbers that it makes of one input.
        dimensions: D.
        torch_device: Where to compute.
    """

    def __init__(
        self, extractor: nn.Module, features: int, dimensions: int, torch_device: torch.device | str = "cpu"
    ) -> None:
        self.extractor = extractor
        self._torch_device = torch.device(torch_device)
        self.features = features
        self.dimensions = min(features, dimensions)

    def of(self, inputs: Tensor) -> Array:
        """`[n, D]` float32 of inputs `[n, ...]`, read-only."""
        name = self._name(inputs)
        with _lock:
            found = _kept.get(name)
            if found is not None:
                _kept.move_to_end(name)
                return found
        made = self._make(inputs)
        with _lock:
            _kept[name] = made
            while sum(one.nbytes for one in _kept.values()) > MOST_BYTES and len(_kept) > 1:
                _kept.popitem(last=False)
        return made

    def _make(self, inputs: Tensor) -> Array:
        where = self._torch_device
        extractor = self.extractor if where.type == "cpu" else copy.deepcopy(self.extractor).to(where)
        signs = projection_tensor(self.features, self.dimensions).to(where)
        made = extract(lambda x: extractor(x.to(where)).flatten(1) @ signs, inputs, _BATCH, model=extractor)
        rows: Array = made.numpy()
        rows.flags.writeable = False
        return rows

    def _name(self, inputs: Tensor) -> bytes:
        """SHA-256 of all that the features depend on."""
        digest = hashlib.sha256(f"{self.extractor!r} {self.dimensions} {tuple(inputs.shape)}".encode())
        for tensor in [*self.extractor.state_dict().values(), inputs]:
            digest.update(np.ascontiguousarray(tensor.detach().cpu().numpy()).data)
        return digest.digest()


@functools.lru_cache(maxsize=4)
def projection_tensor(features: int, dimensions: int) -> Tensor:
    """G `[F, D]` as a tensor; not to be changed."""
    return torch.from_numpy(projection(features, dimensions))
