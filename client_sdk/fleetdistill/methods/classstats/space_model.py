"""The fixed extractor with its projection, a cache of its features, and the models in the space of a fleet's classes.

The extractor is equal on the server and on every device, and features depend only on it and on the rows, so all devices
of a process share the cache: simulated devices have the same test rows. A model is extractor, projection, space and
predictor; exported as one ONNX file, it maps an image to logits.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import Array, ClassSpace
from fleetdistill.methods.classstats.class_space import BELOW_ALL, projection
from fleetdistill.methods.classstats.config import SCATTERING, SpaceConfig
from fleetdistill.models import PREDICTORS, build_model, check_predictor
from fleetdistill.models.shapes import check_classes
from fleetdistill.training.local_training import extract
from fleetdistill.training.model import output_shape
from fleetdistill.training.tensor_data import LazyInputs, parts_of

MakePredictor = Callable[[int, int], nn.Module]
"""(q, C) -> a module from coordinates `[batch, q]` to logits `[batch, C]`."""
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


def make_predictor(wanted: str | MakePredictor, inputs: int, classes: int) -> nn.Module:
    """Builds a predictor from coordinates to logits.

    Args:
        wanted: A key of `PREDICTORS`, or the app's function of `inputs` and `classes` that returns a module.
        inputs: q, coordinates of a row, at least 1.
        classes: C, at least 2.

    Raises:
        ConfigurationError: The name is unknown, or the predictor's output is not `[batch, C]`.
    """
    check_predictor(wanted)
    if callable(wanted):
        made = wanted(inputs, check_classes(classes))
    else:
        widths = (inputs, *PREDICTORS[wanted])
        hidden = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        made = nn.Sequential(*hidden, nn.Linear(widths[-1], check_classes(classes)))
    with torch.no_grad():
        shape = tuple(made.eval()(torch.zeros(2, inputs)).shape)
    if shape != (2, classes):
        raise ConfigurationError(f"the predictor returns {list(shape)} for 2 rows of {inputs}, expected [2, {classes}]")
    return made


class ClosedForm(nn.Module):
    """Nearest class mean: logit_c = v b_c - |b_c|^2 / 2 (line `general` in docs/reference/methods/classstats.md).

    A class that is not in the space has the smallest logit.
    """

    centres: Tensor
    present: Tensor

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("centres", torch.zeros(classes, inputs))
        self.register_buffer("present", torch.ones(classes, dtype=torch.bool))

    def forward(self, v: Tensor) -> Tensor:
        """Returns logits `[batch, C]` of coordinates `[batch, q]`."""
        logits = v @ self.centres.T - self.centres.square().sum(dim=1) / 2
        below = logits.masked_fill(~self.present, torch.inf).amin(dim=1, keepdim=True) - BELOW_ALL
        return torch.where(self.present, logits, below)


class ChosenPredictor(nn.Module):
    """A trained predictor, or instead the closed form of the device's own statistics.

    Which one it is may change from round to round. A delivered model is changed in place and saved without its
    modules, so both are always there.
    """

    uses_closed: Tensor

    def __init__(self, trained: nn.Module, closed: ClosedForm, *, uses_closed: bool) -> None:
        super().__init__()
        self.trained, self.closed = trained, closed
        self.register_buffer("uses_closed", torch.tensor(uses_closed))

    def forward(self, v: Tensor) -> Tensor:
        """Returns logits `[batch, C]` of coordinates `[batch, q]`."""
        return torch.where(self.uses_closed, self.closed(v), self.trained(v))


class SpaceHead(nn.Module):
    """Maps projected features `[batch, D]` to logits: space, predictor, temperature and class shares."""

    directions: Tensor
    origin: Tensor
    temperature: Tensor
    log_prior: Tensor

    def __init__(self, dimensions: int, classes: int, predictor: nn.Module) -> None:
        super().__init__()
        self.predictor = predictor
        self.register_buffer("directions", torch.zeros(dimensions, classes - 1))
        self.register_buffer("origin", torch.zeros(classes - 1))
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("log_prior", torch.zeros(classes))

    def forward(self, z: Tensor) -> Tensor:
        """Returns logits `[batch, C]` of projected features `[batch, D]`."""
        return self.logits(z @ self.directions - self.origin)

    def logits(self, v: Tensor) -> Tensor:
        """Returns logits `[batch, C]` of coordinates `[batch, C - 1]`."""
        logits: Tensor = self.predictor(v)
        return logits / self.temperature + self.log_prior


class SpaceModel(nn.Module):
    """Maps inputs to logits. Several models may share an extractor.

    Attributes:
        fixed: Extractor and projection, with their cache.
        above: The layers after the projected features.
        matrix: Product of projection and space, `[F, C - 1]`.
    """

    matrix: Tensor

    def __init__(self, fixed: FixedFeatures, classes: int, predictor: nn.Module | None = None) -> None:
        """Creates a model without classes; `take` sets its space.

        Args:
            fixed: Extractor and projection.
            classes: C of the contract, at least 2.
            predictor: Module from coordinates `[batch, C - 1]` to logits, not copied; None for the closed form.
        """
        super().__init__()
        self.fixed = fixed
        self.extractor = fixed.extractor  # a submodule, so that it moves with the model and is exported with it
        self.above = SpaceHead(fixed.dimensions, classes, predictor or ClosedForm(classes - 1, classes))
        self.register_buffer("matrix", torch.zeros(fixed.features, classes - 1), persistent=False)
        self.register_load_state_dict_post_hook(_join)  # type: ignore[no-untyped-call]

    def take(self, space: ClassSpace, temperature: float = 1.0, prior: Array | None = None) -> SpaceModel:
        """Sets the space in which the model classifies; returns the model.

        Args:
            space: The fleet's space, or that of the device's own statistics. Missing directions become zeros.
            temperature: Temperature of a personal variant, above 0.
            prior: Class shares of a personal variant, `[C]`; None for uniform ones.
        """
        where = self.above.directions.device
        self.above.directions = _pad(space.directions, self.above.directions.shape).to(where)
        self.above.origin = _pad(space.origin, self.above.origin.shape).to(where)
        self.above.temperature = torch.tensor(float(temperature), device=where)
        log_prior = np.zeros(len(self.above.log_prior)) if prior is None else np.log(prior)
        self.above.log_prior = torch.tensor(log_prior, dtype=torch.float32, device=where)
        for part in self.above.predictor.modules():
            if isinstance(part, ClosedForm):
                _fill(part, space)
        _join(self)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits `[batch, C]` of inputs `[batch, *input_shape]`."""
        return self.above.logits(self.coordinates(x))

    def coordinates(self, x: Tensor) -> Tensor:
        """Returns coordinates `[batch, C - 1]` of inputs `[batch, *input_shape]`."""
        features: Tensor = self.extractor(x)
        return features.flatten(1) @ self.matrix - self.above.origin


def _join(model: nn.Module, keys: Any = None) -> None:
    """Multiplies projection and space into `matrix`, so that an exported ONNX file contains one matrix."""
    assert isinstance(model, SpaceModel)
    directions = model.above.directions
    signs = projection_tensor(model.fixed.features, model.fixed.dimensions).double()
    model.matrix = (signs @ directions.cpu().double()).float().to(directions.device)


def _fill(closed: ClosedForm, space: ClassSpace) -> None:
    classes, inputs = closed.centres.shape
    centres, present = torch.zeros(classes, inputs), torch.zeros(classes, dtype=torch.bool)
    centres[space.labels, : space.centres.shape[1]] = torch.tensor(space.centres, dtype=torch.float32)
    present[space.labels] = True
    closed.centres, closed.present = centres.to(closed.centres.device), present.to(closed.present.device)


def _pad(array: Array, shape: Any) -> Tensor:
    result = torch.zeros(*shape)
    result[..., : array.shape[-1]] = torch.tensor(array, dtype=torch.float32)
    return result
