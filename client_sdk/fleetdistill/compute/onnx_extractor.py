"""Loads and runs the extractor of a run from its ONNX file, on devices without PyTorch.

The file comes from the server, so it is checked before onnxruntime loads it: only standard operators and embedded
weights are allowed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from fleetdistill.errors import ModelError, WireError
from fleetdistill.interruption import check_may_continue
from fleetdistill.knowledge import Array, NetworkFile, Parts
from fleetdistill.methods.classstats.class_space import projection
from fleetdistill.progress import report_progress
from fleetdistill.training.foreign_onnx import first_line, foreign_session
from fleetdistill.training.onnx_file import INPUT_RANGE, UNIT_RANGE

logger = logging.getLogger(__name__)
PART = "extractor"
"""Name of the payload's part with the extractor file."""
_INPUT = "input"
_BATCH = 8  # as fast as 32 for 28x28 images, with 18 MB less memory
_ADVICE = "the server's operator must fix the run"


class OnnxExtractor:
    """Extractor that maps inputs to features, run with onnxruntime.

    The counterpart with PyTorch is `fleetdistill.methods.classstats.space_model.FixedFeatures`.

    Attributes:
        features: Number of features F of one input.
        data: Content of the ONNX file.
    """

    def __init__(self, data: bytes, input_shape: Sequence[int], threads: int = 1) -> None:
        """Loads the file and computes a test batch.

        Args:
            data: ONNX file with one input `input`, float32 `[batch, *input_shape]`, and one output, float32
                `[batch, ...]`.
            input_shape: Shape of one input of the run.
            threads: Number of threads, at least 1; limited to the number of processors.

        Raises:
            WireError: The file is invalid.
            ModelError: onnxruntime is not installed.
        """
        self.data = data
        self._input_shape = tuple(input_shape)
        self._session = _load(data, min(max(threads, 1), os.cpu_count() or 1))
        self.features = prod(self._run(np.zeros((2, *self._input_shape), np.float32)).shape[1:])
        self._signs: Array | None = None
        metadata = self._session.get_modelmeta().custom_metadata_map
        self._warns_of_range = metadata.get(INPUT_RANGE) == UNIT_RANGE  # until it has

    def of(self, inputs: Array) -> Array:
        """Returns features `[n, F]` float32 for inputs `[n, *input_shape]`.

        Raises:
            WireError: A feature is not finite.
        """
        return np.concatenate([np.zeros((0, self.features), np.float32), *self._batches(inputs)])

    def projected(self, inputs: Array, dimensions: int) -> Array:
        """Returns projected features `[n, D]` float32; computed in batches, because F can be large."""
        if self._signs is None or self._signs.shape[1] != dimensions:
            self._signs = projection(self.features, dimensions)
        empty = np.zeros((0, dimensions), np.float32)
        return np.concatenate([empty, *(part @ self._signs for part in self._batches(inputs))])

    def _batches(self, inputs: Array) -> Iterator[Array]:
        for start in range(0, len(inputs), _BATCH):
            check_may_continue()
            report_progress("inference", start / len(inputs))
            self._check_range(inputs[start : start + _BATCH])
            part = self._run(inputs[start : start + _BATCH]).reshape(-1, self.features)
            if not np.isfinite(part).all():
                row = start + int(np.argwhere(~np.isfinite(part))[0][0])
                raise WireError(f"the run's extractor file gives features of row {row} that are not finite; {_ADVICE}")
            yield part

    def _check_range(self, inputs: Array) -> None:
        """Logs a warning about the first images outside [0, 1], if the extractor is pretrained and needs this range."""
        if self._warns_of_range and (inputs.min() < 0 or inputs.max() > 1):
            self._warns_of_range = False
            logger.warning(
                "images have values in [%g, %g], but the run's pretrained extractor needs [0, 1] and normalises "
                "itself; scale them",
                inputs.min(),
                inputs.max(),
            )

    def _run(self, inputs: Array) -> Array:
        try:
            outputs = self._session.run(None, {_INPUT: np.ascontiguousarray(inputs, np.float32)})[0]
        except Exception as error:  # onnxruntime raises its own exception types
            shape = list(self._input_shape)
            raise WireError(
                f"the run's extractor file does not accept inputs of shape {shape}: {first_line(error)}; {_ADVICE}"
            ) from error
        if outputs.ndim < 2 or len(outputs) != len(inputs) or not outputs.size:
            text = f"{list(outputs.shape)} for a batch of {len(inputs)}"
            raise WireError(f"the run's extractor file gives {text}, expected one row for each input; {_ADVICE}")
        return np.asarray(outputs)


def extractor_of(parts: Parts, input_shape: Sequence[int], threads: int) -> OnnxExtractor:
    """Returns the extractor in a payload's parts. Raises the same errors as `OnnxExtractor`."""
    result = parts.get(PART)
    if not isinstance(result, NetworkFile):
        raise WireError(f"part {PART!r} is {type(result).__name__}, expected a NetworkFile; {_ADVICE}")
    if result.onnx.dtype != np.uint8 or result.onnx.ndim != 1:
        raise WireError(
            f"part {PART!r} has {result.onnx.dtype} {list(result.onnx.shape)}, expected uint8 [bytes]; {_ADVICE}"
        )
    return OnnxExtractor(result.onnx.tobytes(), input_shape, threads)


def _load(data: bytes, threads: int) -> Any:
    """Returns a checked onnxruntime session for a file."""
    try:
        return foreign_session(data, threads)
    except ImportError as error:
        raise ModelError("a device without PyTorch requires onnxruntime: pip install 'fleetdistill[light]'") from error
    except ModelError as error:
        raise WireError(f"the run's extractor file {error}; {_ADVICE}") from error
