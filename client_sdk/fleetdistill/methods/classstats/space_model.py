"""Models that classify in the space of a fleet's classes: fixed extractor, projection, space and predictor.

Exported as one ONNX file, a model maps an image to logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import Array, ClassSpace
from fleetdistill.methods.classstats.class_space import BELOW_ALL
from fleetdistill.methods.classstats.fixed_features import FixedFeatures, projection_tensor
from fleetdistill.models import PREDICTORS, check_predictor
from fleetdistill.models.shapes import check_classes

MakePredictor = Callable[[int, int], nn.Module]
"""(q, C) -> a module from coordinates `[batch, q]` to logits `[batch, C]`."""


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
