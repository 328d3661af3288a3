"""`Predictor` runs the delivered ONNX model with onnxruntime alone, also in another process than the device's.

    predictor = Predictor("fleet-state")
    logits = predictor.predict(images)

Imports neither torch nor gRPC.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetdistill.checked import check_integer, check_name
from fleetdistill.deployment.batch import RangeCheck, check_batch, check_logits
from fleetdistill.deployment.external_weights import whole
from fleetdistill.deployment.settings import is_installed
from fleetdistill.deployment.stamp import check_stamp
from fleetdistill.errors import ModelError, StateError
from fleetdistill.names import did_you_mean
from fleetdistill.training.foreign_onnx import first_line, foreign_session

logger = logging.getLogger(__name__)

__all__ = ["DeployedModel", "Predictor"]
MAX_FILE_BYTES = 2 << 30
"""Largest size of an ONNX file in bytes, that of a protobuf message."""


class DeployedModel:
    """One version of the delivered model, loaded into onnxruntime. It never changes, and is thread-safe.

    Attributes:
        version: Number of the version, from 1; every delivery has a higher number than all earlier ones.
        round: Round that delivered the model.
        variant: Name of the variant, such as `general`; empty if the method has a single one.
        run: Name of the run.
        class_names: Names of the classes, in the order of the logits.
        input_shape: Shape of one input; None where any size is accepted.
        quantized: `"dynamic"` or `"static"` for an int8 file, else empty.
    """

    def __init__(self, data: bytes, threads: int = 1) -> None:
        """Loads a file.

        Args:
            data: Content of the file.
            threads: Number of threads of onnxruntime, at least 1.

        Raises:
            ModelError: The file is damaged, or onnxruntime cannot load it.
        """
        check_stamp(data)
        try:
            self._session = foreign_session(data, threads, standard=False)
        except ModelError as error:
            raise ModelError(f"the file {error}") from error
        result: Mapping[str, str] = self._session.get_modelmeta().custom_metadata_map
        self.version, self.round = _number(result, "version"), _number(result, "round")
        self.variant, self.run = result.get("answer", ""), result.get("run", "")
        self.class_names: Sequence[str] = tuple(result.get("class_names", "").split(","))
        self.quantized = result.get("quantized", "")
        self._scale = RangeCheck(_range(result.get("input_range", "")))
        (model_input,), (output,) = self._session.get_inputs(), self._session.get_outputs()
        if output.name != "logits" or len(model_input.shape) < 1:
            raise ModelError(f"the file has the output {output.name[:40]!r}, expected 'logits'")
        self.input_shape = tuple(size if isinstance(size, int) else None for size in model_input.shape[1:])

    def predict(self, inputs: NDArray[Any]) -> NDArray[np.float32]:
        """Returns logits `[batch, classes]` float32 for inputs `[batch, *input_shape]` of any float type.

        Raises:
            DataError: The inputs are not floats, have another shape, or are not finite.
            ModelError: onnxruntime cannot process the batch, or the model gives NaN.
        """
        check_batch(inputs, self.input_shape)
        batch = np.ascontiguousarray(inputs, np.float32)
        try:
            logits = np.asarray(self._session.run(["logits"], {"input": batch})[0])
        except Exception as error:
            shape = list(batch.shape)
            raise ModelError(f"the model cannot process a batch of shape {shape}: {first_line(error)}") from error
        if logits.ndim != 2 or len(logits) != len(batch):
            raise ModelError(f"the model gives shape {list(logits.shape)} for a batch of {len(batch)}")
        self._scale.check(batch)
        check_logits(logits)
        return logits


class Predictor:
    """Predicts with the newest ONNX file that a device has written to its state directory.

    Each `predict` checks whether there is a new file and loads it, while other threads predict with the previous model.
    A file that is incomplete or damaged is reported, and the previous model remains in use. Thread-safe.

    Args:
        state_dir: State directory of a device with `Deployment(export="round")` or `"finish"`; it must exist.
        variant: Variant to use, such as `"personal"`. Default: the one that the device selects, in `model.onnx`.
        threads: Number of threads of onnxruntime for one prediction, at least 1.

    Raises:
        ConfigurationError: `variant` or `threads` is invalid.
        StateError: `state_dir` does not exist.
        ModelError: onnxruntime is not installed.
    """

    def __init__(self, state_dir: str | Path, *, variant: str = "model", threads: int = 1) -> None:
        check_name("variant", variant)
        check_integer("threads", threads)
        if not Path(state_dir).is_dir():
            state = "is not a directory" if Path(state_dir).exists() else "does not exist"
            raise StateError(f"the state directory {state_dir} {state}; use the device's state_dir")
        if not is_installed("onnxruntime"):
            raise ModelError("Predictor requires onnxruntime: pip install 'fleetdistill[light]'")
        self._path = Path(state_dir) / f"{variant}.onnx"
        self._threads = threads
        self._loading = threading.Lock()
        self._model: DeployedModel | None = None
        self._seen: tuple[int, ...] | None = None  # identity of the last file read, usable or not
        self._error = ""
        self.refresh()

    def predict(self, inputs: NDArray[Any]) -> NDArray[np.float32]:
        """Returns the logits of the newest model; see `DeployedModel.predict`.

        Args:
            inputs: `[batch, *input_shape]` of any float type, scaled as the training data. Another scale gives wrong
                answers and no error, only a warning in the log, if the device wrote its data's range into the file.

        Returns:
            Logits `[batch, classes]` float32.

        Raises:
            DataError: The inputs are not floats, have another shape, or are not finite.
            ModelError: There is no model yet (see `ready`), it cannot process the batch, or it gives NaN.
        """
        self.refresh()
        return self.model.predict(inputs)

    @property
    def ready(self) -> bool:
        """Whether there is a model, after a look at the newest file.

        False before the device's first export (events `exported` and `too-large`).
        """
        self.refresh()
        return self._model is not None

    @property
    def error(self) -> str:
        """Why the newest file cannot be used, or which variants there are if `variant` is not one of them.

        Empty if the file is in use, or if the device has not completed an export yet. Also logged as a warning.
        """
        self.refresh()
        return self._error

    @property
    def model(self) -> DeployedModel:
        """The model in use. Keep a reference for predictions and their version from exactly one model.

        Raises:
            ModelError: There is no model yet.
        """
        if self._model is None:
            if self._error and self._seen is None:
                raise ModelError(f"{self._path} does not exist; {self._error}")
            reason = f" ({self._error})" if self._error else ""
            raise ModelError(
                f"{self._path} has no usable model{reason}; run the device until its event 'exported', and check "
                "`predictor.ready`. A device with Deployment(export='never') writes none, nor one whose file is above "
                "max_bytes (event 'too-large'): change its Deployment, or predict with `device.predict` in its process"
            )
        return self._model

    @property
    def version(self) -> int:
        """Number of the model's version, from 1; 0 for the app's own. Raises ModelError if there is no model yet."""
        return self.model.version

    @property
    def round(self) -> int:
        """Round that delivered the model. Raises ModelError if there is no model yet."""
        return self.model.round

    @property
    def variant(self) -> str:
        """Name of the model's variant; empty for a single one. Raises ModelError if there is no model yet."""
        return self.model.variant

    def refresh(self) -> bool:
        """Loads the file if it has changed; returns whether the model was replaced.

        Does not wait if another thread is loading the file and there is a model in use.
        """
        identity = _identity(self._path)
        if identity is None and self._model is None:
            self._report_other_variants()
        if identity in (None, self._seen):
            return False
        if not self._loading.acquire(blocking=self._model is None):
            return False
        try:
            return self._load()
        finally:
            self._loading.release()

    def _report_other_variants(self) -> None:
        """Reports once which variants a device has exported, `model.onnx` last, if it has not exported this one."""
        name, others = self._path.stem, sorted(path.stem for path in self._path.parent.glob("*.onnx"))
        text = f"no variant {name!r} was exported{did_you_mean(name, others) or '.'} There are {', '.join(others)}"
        error = text if "model" in others else ""
        if error and error != self._error:
            logger.warning("%s does not exist; %s", self._path, error)
        self._error = error

    def _load(self) -> bool:
        try:
            with open(self._path, "rb", opener=_open_without_waiting) as file:
                status = os.fstat(file.fileno())
                seen = _identity_of(status)
                if seen == self._seen:  # another thread has loaded it
                    return False
                self._seen = seen
                _check_file(status)
                data = file.read(MAX_FILE_BYTES)
            self._model = DeployedModel(whole(data, self._path.parent), self._threads)
        except (ModelError, OSError, MemoryError) as error:
            self._error = str(error) or "memory is short"
            logger.warning("%s is not used: %s", self._path, error)
            return False
        self._error = ""
        return True


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        return _identity_of(path.stat())
    except OSError:
        return None


def _identity_of(found: os.stat_result) -> tuple[int, ...]:
    return found.st_mtime_ns, found.st_size, found.st_ino


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # of a named pipe


def _check_file(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ModelError("the file is not a regular file")
    if status.st_size > MAX_FILE_BYTES:
        raise ModelError(f"the file has {status.st_size} bytes, must be at most {MAX_FILE_BYTES}")


def _range(text: str) -> tuple[float, float] | None:
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        return None  # an earlier SDK wrote none, and neither does a device without samples
    return low, high


def _number(metadata: Mapping[str, str], name: str) -> int:
    text = metadata.get(name, "")
    if not re.fullmatch("[0-9]{1,18}", text):
        raise ModelError(f"the file has no {name} in its metadata; export it with this SDK")
    return int(text)
