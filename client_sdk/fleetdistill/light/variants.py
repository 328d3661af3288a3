"""What a device without PyTorch answers with, and how that is kept: numpy alone, behind the run's extractor."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any
from zipfile import BadZipFile

import numpy as np

from fleetdistill.errors import DataError
from fleetdistill.knowledge import Array, ClassSpace
from fleetdistill.light.onnx_extractor import OnnxExtractor
from fleetdistill.methods.classstats.class_space import coordinates, logits
from fleetdistill.methods.classstats.projection import projection

_SPACE_FIELDS = tuple(one.name for one in fields(ClassSpace) if one.name != "labels")


@dataclass(frozen=True, kw_only=True, eq=False)
class SpaceClassifier:
    """What makes logits of a row: a space, and of a personal answer its temperature and class shares (3.7, 3.9)."""

    space: ClassSpace
    temperature: float = 1.0
    prior: Array | None = None

    def logits(self, coordinates_nq: Array, classes: int) -> Array:
        """`[n, C]` float64 of coordinates in the space."""
        found = logits(self.space, coordinates_nq, classes) / self.temperature
        return found if self.prior is None else found + np.log(self.prior)


def shape_message(found: Sequence[int], input_shape: Sequence[int]) -> str:
    """The sentence about inputs of another shape than `[samples, *input_shape]`."""
    expected = ", ".join(["samples", *map(str, input_shape)])
    return f"the inputs have shape {list(found)}, expected [{expected}]"


class LightModel:
    """One answer of a device without PyTorch: images to logits. It is changed in place by the next delivery."""

    def __init__(
        self, extractor: OnnxExtractor, input_shape: Sequence[int], classes: int, classifier: SpaceClassifier
    ) -> None:
        self.extractor = extractor
        self.classes = classes
        self._input_shape = tuple(input_shape)
        # Answer and its matrix are replaced together: another thread of the app may be in a call.
        self._current: tuple[SpaceClassifier, Array | None] = (classifier, None)

    @property
    def classifier(self) -> SpaceClassifier:
        """What it answers with."""
        return self._current[0]

    @classifier.setter
    def classifier(self, classifier: SpaceClassifier) -> None:
        self._current = (classifier, None)

    def __call__(self, inputs: Array) -> Array:
        """Logits `[n, C]` float32 of inputs `[n, *input_shape]`.

        Raises:
            DataError: The inputs have another shape.
        """
        inputs = np.asarray(inputs, np.float32)
        if inputs.shape[1:] != self._input_shape or not inputs.ndim:
            raise DataError(f"{shape_message(inputs.shape, self._input_shape)}; one image is a batch of 1")
        classifier, matrix = self._current
        if matrix is None:
            matrix = self.matrix()
            self._current = (classifier, matrix)
        found = self.extractor.of(inputs) @ matrix - classifier.space.origin.astype(np.float32)
        return classifier.logits(found, self.classes).astype(np.float32)

    def predict(self, inputs: Array) -> Array:
        """The likeliest class of each input, `[n]`."""
        return np.asarray(self(inputs).argmax(axis=1))

    def of_rows(self, rows_nd: Array) -> Array:
        """Logits of projected features `[n, D]`."""
        return self.classifier.logits(coordinates(self.classifier.space, rows_nd), self.classes)

    def matrix(self) -> Array:
        """`[F, q]` float32: projection and space in one."""
        directions = self.classifier.space.directions.astype(np.float64)
        signs = projection(self.extractor.features, len(directions))
        return np.asarray(signs @ directions, dtype=np.float32)


def pack_variants(outline: Mapping[str, Any], spaces: Mapping[str, ClassSpace], priors: Mapping[str, Array]) -> bytes:
    """State as bytes: arrays as numpy keeps them, without pickle, and an outline in JSON.

    Args:
        outline: What JSON can hold.
        spaces, priors: By name of an answer; a prior only where there is a space.
    """
    arrays = {f"{name}/{key}": getattr(space, key) for name, space in spaces.items() for key in _SPACE_FIELDS}
    arrays |= {f"{name}/prior": prior for name, prior in priors.items()}
    labels = {name: list(space.labels) for name, space in spaces.items()}
    file = io.BytesIO()
    np.savez(file, outline=np.array(json.dumps({**outline, "labels": labels})), **arrays)
    return file.getvalue()


def unpack_variants(saved: bytes) -> tuple[dict[str, Any], dict[str, ClassSpace], dict[str, Array]]:
    """What `pack_variants` was given. Raises ValueError, KeyError, OSError or EOFError where the bytes are others."""
    try:
        with np.load(io.BytesIO(saved), allow_pickle=False) as arrays:
            outline = json.loads(str(arrays["outline"]))
            spaces = {
                name: ClassSpace(labels=labels, **{key: arrays[f"{name}/{key}"] for key in _SPACE_FIELDS})
                for name, labels in outline["labels"].items()
            }
            priors = {name: arrays[f"{name}/prior"] for name in spaces if f"{name}/prior" in arrays}
    except (BadZipFile, AttributeError) as error:
        raise ValueError(str(error)) from error
    return outline, spaces, priors
