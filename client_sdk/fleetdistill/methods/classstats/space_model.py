"""Models that answer in the space of a fleet's classes: fixed extractor, projection, space, predictor.

As one file of ONNX they lead from an image to its class.
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
from fleetdistill.methods.classstats.kept_features import FixedFeatures, projection_tensor
from fleetdistill.models import PREDICTORS, check_predictor
from fleetdistill.models.shapes import checked_classes

MakePredictor = Callable[[int, int], nn.Module]
"""(q, C) -> a module from coordinates `[batch, q]` to logits `[batch, C]`."""


def make_predictor(wanted: str | MakePredictor, inputs: int, classes: int) -> nn.Module:
    """A predictor over coordinates, of a name of `PREDICTORS` or of the app's own making.

    Args:
        wanted: Its name, or a function of `inputs` and `classes`.
        inputs: q, coordinates of a row, at least 1.
        classes: C, at least 2.

    Raises:
        ConfigurationError: The name is unknown, or the predictor does not give `[batch, C]`.
    """
    check_predictor(wanted)
    if callable(wanted):
        made = wanted(inputs, checked_classes(classes))
    else:
        widths = (inputs, *PREDICTORS[wanted])
        hidden = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        made = nn.Sequential(*hidden, nn.Linear(widths[-1], checked_classes(classes)))
    with torch.no_grad():
        shape = tuple(made.eval()(torch.zeros(2, inputs)).shape)
    if shape != (2, classes):
        raise ConfigurationError(f"the predictor gives {list(shape)} for 2 rows of {inputs}, expected [2, {classes}]")
    return made


class ClosedForm(nn.Module):
    """Nearest class mean: logit_c = v b_c - |b_c|^2 / 2 (oneshot.md, 3.7).

    A class that is not in the space lies below all others.
    """

    centres: Tensor
    present: Tensor

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.register_buffer("centres", torch.zeros(classes, inputs))
        self.register_buffer("present", torch.ones(classes, dtype=torch.bool))

    def forward(self, v: Tensor) -> Tensor:
        """Logits `[batch, C]` of coordinates `[batch, q]`."""
        logits = v @ self.centres.T - self.centres.square().sum(dim=1) / 2
        below = logits.masked_fill(~self.present, torch.inf).amin(dim=1, keepdim=True) - BELOW_ALL
        return torch.where(self.present, logits, below)


class SpaceHead(nn.Module):
    """Projected features `[batch, D]` to logits: space, predictor, temperature and class shares."""

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
        """Logits `[batch, C]`."""
        return self.logits(z @ self.directions - self.origin)

    def logits(self, v: Tensor) -> Tensor:
        """Logits `[batch, C]` of coordinates `[batch, C - 1]`."""
        logits: Tensor = self.predictor(v)
        return logits / self.temperature + self.log_prior


class SpaceModel(nn.Module):
    """Inputs to logits. Models may share an extractor.

    Attributes:
        fixed: The extractor and its projection, whose features can be kept.
        above: The rest, from projected features on.
        matrix: `[F, C - 1]`, projection and space in one.
    """

    matrix: Tensor

    def __init__(self, fixed: FixedFeatures, classes: int, predictor: nn.Module | None = None) -> None:
        """Makes a model that knows no class yet.

        Args:
            fixed: Extractor and projection.
            classes: C of the contract, at least 2.
            predictor: From coordinates `[batch, C - 1]` to logits; None for the closed form. It is used, not copied.
        """
        super().__init__()
        self.fixed = fixed
        self.extractor = fixed.extractor  # so that it moves with the model, and is exported with it
        self.above = SpaceHead(fixed.dimensions, classes, predictor or ClosedForm(classes - 1, classes))
        self.register_buffer("matrix", torch.zeros(fixed.features, classes - 1), persistent=False)
        self.register_load_state_dict_post_hook(_join)  # type: ignore[no-untyped-call]

    def take(self, space: ClassSpace, temperature: float = 1.0, prior: Array | None = None) -> SpaceModel:
        """Answers in this space from now on; returns itself.

        Args:
            space: Of the fleet, or of the device alone. Directions that it lacks are zeros.
            temperature, prior: Of a personal answer; `prior` is `[C]`.
        """
        where = self.above.directions.device
        self.above.directions = _padded(space.directions, self.above.directions.shape).to(where)
        self.above.origin = _padded(space.origin, self.above.origin.shape).to(where)
        self.above.temperature = torch.tensor(float(temperature), device=where)
        log_prior = np.zeros(len(self.above.log_prior)) if prior is None else np.log(prior)
        self.above.log_prior = torch.tensor(log_prior, dtype=torch.float32, device=where)
        if isinstance(self.above.predictor, ClosedForm):
            _fill(self.above.predictor, space)
        _join(self)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Logits `[batch, C]` of inputs `[batch, *input_shape]`."""
        return self.above.logits(self.coordinates(x))

    def coordinates(self, x: Tensor) -> Tensor:
        """Coordinates `[batch, C - 1]` of inputs."""
        features: Tensor = self.extractor(x)
        return features.flatten(1) @ self.matrix - self.above.origin


def _join(model: nn.Module, keys: Any = None) -> None:
    """Makes one matrix of projection and space: a file of ONNX has no use for both."""
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


def _padded(array: Array, shape: Any) -> Tensor:
    found = torch.zeros(*shape)
    found[..., : array.shape[-1]] = torch.tensor(array, dtype=torch.float32)
    return found
