"""Model variants of a device without PyTorch: closed-form classifiers on the features of the run's extractor."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any
from zipfile import BadZipFile

import numpy as np

from fleetdistill.compute.onnx_extractor import OnnxExtractor
from fleetdistill.deployment.batch import check_batch, shape_message
from fleetdistill.errors import DataError
from fleetdistill.knowledge import Array, ClassSpace
from fleetdistill.methods.classstats.class_space import coordinates, logits, projection

_SPACE_FIELDS = tuple(field.name for field in fields(ClassSpace) if field.name != "labels")


@dataclass(frozen=True, kw_only=True, eq=False)
class SpaceClassifier:
    """Classifier in a class space; the personal variant also has a temperature and class shares."""

    space: ClassSpace
    temperature: float = 1.0
    prior: Array | None = None

    def logits(self, coordinates_nq: Array, classes: int) -> Array:
        """Returns logits `[n, C]` float64 for coordinates in the space."""
        scaled = logits(self.space, coordinates_nq, classes) / self.temperature
        return scaled if self.prior is None else scaled + np.log(self.prior)


class LightModel:
    """Model variant of a device without PyTorch, updated in place by deliveries. Call it with a batch of inputs."""

    def __init__(
        self, extractor: OnnxExtractor, input_shape: Sequence[int], classes: int, classifier: SpaceClassifier
    ) -> None:
        self.extractor = extractor
        self.classes = classes
        self._input_shape = tuple(input_shape)
        # Classifier and matrix are replaced together, because another thread of the app may be using them.
        self._current: tuple[SpaceClassifier, Array | None] = (classifier, None)

    @property
    def classifier(self) -> SpaceClassifier:
        """The classifier that follows the extractor."""
        return self._current[0]

    @classifier.setter
    def classifier(self, classifier: SpaceClassifier) -> None:
        self._current = (classifier, None)

    def __call__(self, inputs: Array) -> Array:
        """Returns logits `[n, C]` float32 for inputs `[n, *input_shape]`.

        Raises:
            DataError: The inputs have another shape.
        """
        inputs = np.asarray(inputs, np.float32)
        if inputs.shape[1:] != self._input_shape or not inputs.ndim:
            raise DataError(f"{shape_message(inputs.shape, self._input_shape)}; a single image is a batch of 1")
        classifier, matrix = self._current
        if matrix is None:
            matrix = self.matrix()
            self._current = (classifier, matrix)
        coordinates_nq = self.extractor.of(inputs) @ matrix - classifier.space.origin.astype(np.float32)
        return classifier.logits(coordinates_nq, self.classes).astype(np.float32)

    def predict(self, inputs: Array) -> Array:
        """Returns the most probable class of each input, `[n]` int64."""
        return np.asarray(self(inputs).argmax(axis=1))

    def logits_of_features(self, rows_nd: Array) -> Array:
        """Returns logits `[n, C]` for projected features `[n, D]`."""
        return self.classifier.logits(coordinates(self.classifier.space, rows_nd), self.classes)

    def matrix(self) -> Array:
        """Returns the product of projection and space directions, `[F, q]` float32."""
        directions = self.classifier.space.directions.astype(np.float64)
        signs = projection(self.extractor.features, len(directions))
        return np.asarray(signs @ directions, dtype=np.float32)


class FrozenLightModel:
    """A `LightModel` for `Device.predict`: nobody else has a reference to it, so deliveries do not change it."""

    def __init__(self, model: LightModel, input_shape: Sequence[int]) -> None:
        self._model = model
        self._input_shape = tuple(input_shape)

    def __call__(self, inputs: Array) -> Array:
        """Returns logits `[n, C]` float32 for inputs `[n, *input_shape]`. Raises DataError for other inputs."""
        check_batch(inputs, self._input_shape)
        return self._model(inputs)


def pack_variants(outline: Mapping[str, Any], spaces: Mapping[str, ClassSpace], priors: Mapping[str, Array]) -> bytes:
    """Packs spaces and priors in NumPy's format, without pickle, and an outline in JSON.

    Args:
        outline: Values that JSON supports.
        spaces: Class spaces by name of the variant.
        priors: Class shares by name of the variant, which must have a space.
    """
    arrays = {f"{name}/{key}": getattr(space, key) for name, space in spaces.items() for key in _SPACE_FIELDS}
    arrays |= {f"{name}/prior": prior for name, prior in priors.items()}
    labels = {name: list(space.labels) for name, space in spaces.items()}
    file = io.BytesIO()
    np.savez(file, outline=np.array(json.dumps({**outline, "labels": labels})), **arrays)
    return file.getvalue()


def unpack_variants(saved: bytes) -> tuple[dict[str, Any], dict[str, ClassSpace], dict[str, Array]]:
    """Unpacks the arguments of `pack_variants`. Raises ValueError, KeyError, OSError or EOFError for invalid bytes."""
    try:
        with np.load(io.BytesIO(saved), allow_pickle=False) as arrays:
            outline = json.loads(str(arrays["outline"]))
            spaces = {
                name: ClassSpace(
                    labels=labels,
                    leverage=float(arrays[f"{name}/leverage"]),
                    **{key: arrays[f"{name}/{key}"] for key in _SPACE_FIELDS if key != "leverage"},
                )
                for name, labels in outline["labels"].items()
            }
            priors = {name: arrays[f"{name}/prior"] for name in spaces if f"{name}/prior" in arrays}
    except (BadZipFile, AttributeError) as error:
        raise ValueError(str(error)) from error
    return outline, spaces, priors
