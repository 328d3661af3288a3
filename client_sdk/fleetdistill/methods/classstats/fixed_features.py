"""The fixed extractor of a run with one exchange, equal on the server and on every device, and a cache of its features.

The features depend only on extractor and rows, so all devices of a process share the cache: simulated devices have the
same test rows.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import threading
from collections import OrderedDict
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from fleetdistill.knowledge import Array
from fleetdistill.methods.classstats.class_space import projection
from fleetdistill.methods.classstats.config import SCATTERING, SpaceConfig
from fleetdistill.models import build_model
from fleetdistill.training.local_training import extract
from fleetdistill.training.model import output_shape
from fleetdistill.training.tensor_data import LazyInputs, parts_of

MAX_BYTES = 512 << 20
"""Maximum size of the cache in bytes; the least recently used features are removed first."""
_BATCH = 256

_kept: OrderedDict[bytes, Array] = OrderedDict()
_lock = threading.Lock()


class FixedFeatures:
    """Computes projected features z of inputs (line `features` in classstats.md), with a cache.

    Args:
        extractor: Fixed extractor, on the CPU.
        features: F, numbers that the extractor makes of one input.
        dimensions: D, numbers of the projected features.
        torch_device: Device to compute on.
    """

    def __init__(
        self, extractor: nn.Module, features: int, dimensions: int, torch_device: torch.device | str = "cpu"
    ) -> None:
        self.extractor = extractor
        self._torch_device = torch.device(torch_device)
        self.features = features
        self.dimensions = min(features, dimensions)

    def of(self, inputs: Tensor | LazyInputs) -> Array:
        """Returns the projected features of inputs `[n, ...]`, a read-only `[n, D]` float32 array."""
        name = self._name(inputs)
        with _lock:
            result = _kept.get(name)
            if result is not None:
                _kept.move_to_end(name)
                return result
        made = self._make(inputs)
        with _lock:
            _kept[name] = made
            while sum(item.nbytes for item in _kept.values()) > MAX_BYTES and len(_kept) > 1:
                _kept.popitem(last=False)
        return made

    def _make(self, inputs: Tensor | LazyInputs) -> Array:
        where = self._torch_device
        extractor = self.extractor if where.type == "cpu" else copy.deepcopy(self.extractor).to(where)
        signs = projection_tensor(self.features, self.dimensions).to(where)
        made = extract(lambda x: extractor(x.to(where)).flatten(1) @ signs, inputs, _BATCH, model=extractor)
        rows: Array = made.numpy()
        rows.flags.writeable = False
        return rows

    def _name(self, inputs: Tensor | LazyInputs) -> bytes:
        """Returns the cache key: the SHA-256 digest of extractor, D and inputs."""
        digest = hashlib.sha256(f"{self.extractor!r} {self.dimensions} {tuple(inputs.shape)}".encode())
        for tensor in (*self.extractor.state_dict().values(), *parts_of(inputs)):
            digest.update(np.ascontiguousarray(tensor.detach().cpu().numpy()).data)
        return digest.digest()


def projected(fixed: FixedFeatures) -> nn.Module:
    """Returns a module from inputs to projected features `[batch, D]`, without the cache."""
    project = nn.Linear(fixed.features, fixed.dimensions, bias=False)
    project.weight = nn.Parameter(projection_tensor(fixed.features, fixed.dimensions).T.clone(), requires_grad=False)
    return nn.Sequential(fixed.extractor, nn.Flatten(), project)


@functools.lru_cache(maxsize=4)
def projection_tensor(features: int, dimensions: int) -> Tensor:
    """Returns G, `[F, D]`, as a shared tensor that callers must not change."""
    return torch.from_numpy(projection(features, dimensions))


def fixed_features(
    config: SpaceConfig, extractor: nn.Module, input_shape: tuple[int, ...], torch_device: torch.device | str = "cpu"
) -> FixedFeatures:
    """Returns the extractor with the projection that a run's settings name.

    Args:
        config: Settings of classstats or classstats_private.
        extractor: The method's extractor.
        input_shape: Shape of one input.
        torch_device: Device to compute on.

    Raises:
        ConfigurationError: The inputs do not fit the extractor.
    """
    extractor = extractor.cpu().eval()  # FixedFeatures copies it to `torch_device`
    features = prod(output_shape(extractor, input_shape))
    return FixedFeatures(extractor, features, config.dimensions_for(input_shape, features), torch_device)


def usual_extractor(given: nn.Module | None, input_shape: tuple[int, ...]) -> nn.Module:
    """Returns the extractor of classstats: `given`, the run's own, or without one the scattering.

    Raises:
        ConfigurationError: The inputs are not images for the scattering.
    """
    return given if given is not None else build_model(SCATTERING, input_shape=input_shape)
