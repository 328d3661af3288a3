"""int8 quantisation of an exported ONNX file, with a check of what it costs. Requires onnx and onnxruntime."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetdistill.interruption import check_may_continue
from fleetdistill.training.onnx_file import cpu_session, doing

if TYPE_CHECKING:
    from fleetdistill.data.samples import Samples
    from fleetdistill.knowledge import Array

_BATCH = 64
CALIBRATION_SAMPLES = 256
"""Number of the device's own samples that calibrate and check an int8 file."""


@dataclass(frozen=True, eq=False)
class CheckData:
    """The device's own data that check and calibrate an int8 file.

    Attributes:
        samples: Inputs `[n, *input_shape]` float32 of the training data, n >= 1.
        validation: Reads the validation data in batches, inputs `[b, *input_shape]` float32 and labels `[b]`; None
            without such data.
    """

    samples: Array
    validation: Callable[[], Iterable[tuple[Array, Array]]] | None = None


def check_data_of(samples: Samples, validation: Samples | None) -> CheckData:
    """Returns up to 256 samples of the training data, and all validation data.

    Raises:
        DataError: The data cannot be read.
    """
    first = samples.rows.read(range(min(len(samples), CALIBRATION_SAMPLES)))[0]
    return CheckData(first, None if validation is None else partial(_batches, validation))


def _batches(samples: Samples) -> Iterator[tuple[Array, Array]]:
    for start in range(0, len(samples), _BATCH):
        yield samples.rows.read(range(start, min(start + _BATCH, len(samples))))


@dataclass(frozen=True)
class QuantizationCheck:
    """Comparison of an int8 file with its float file.

    Attributes:
        measured: `"accuracy"` on the validation data, or `"agreement"`: the share of the device's own samples with the
            same class.
        full: Value of the float file, in [0, 1]; 1 for agreement.
        quantized: Value of the int8 file, in [0, 1].
        difference: Largest absolute difference between logits of the two files on the device's own samples.
    """

    measured: str
    full: float
    quantized: float
    difference: float

    @property
    def drop(self) -> float:
        """How much lower the value of the int8 file is."""
        return self.full - self.quantized


def quantize(source: Path, target: Path, how: str, data: CheckData) -> QuantizationCheck:
    """Writes an int8 file and compares it with the float file.

    Args:
        source: Float file with one input `input` and the output `logits`.
        target: File to write.
        how: `"dynamic"` or `"static"`.
        data: Data for calibration and comparison.

    Raises:
        ExportError: The file cannot be quantised, or the int8 file cannot be run.
    """
    with doing(f"quantising {source.name}"), _quiet():
        prepared = target.with_name(f"{target.name}.prepared")
        try:
            _quantize(source, prepared, target, how, data.samples)
        finally:
            prepared.unlink(missing_ok=True)
        return _check(source, target, data)


def _quantize(source: Path, prepared: Path, target: Path, how: str, samples: Array) -> None:
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
    if how == "dynamic":
        # onnxruntime runs dynamically quantised convolutions on the CPU only with unsigned weights.
        quantize_dynamic(str(prepared), str(target), weight_type=QuantType.QUInt8)
        return
    quantize_static(
        str(prepared),
        str(target),
        _Samples(samples),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )


class _Samples:
    """Calibration data in the form that onnxruntime expects: one batch for each call, then None."""

    def __init__(self, samples: Array) -> None:
        self._batches = iter(samples[start : start + _BATCH] for start in range(0, len(samples), _BATCH))

    def get_next(self) -> dict[str, Array] | None:
        batch = next(self._batches, None)
        return None if batch is None else {"input": np.ascontiguousarray(batch, np.float32)}


def _check(source: Path, target: Path, data: CheckData) -> QuantizationCheck:
    expected, result = (_logits(item, data.samples) for item in (source, target))
    difference = float(np.abs(result - expected).max())
    if data.validation is not None:
        full, quantized = (_accuracy(item, data.validation()) for item in (source, target))
        return QuantizationCheck("accuracy", full, quantized, difference)
    same = expected.argmax(axis=1) == result.argmax(axis=1)
    return QuantizationCheck("agreement", 1.0, float(same.mean()), difference)


def _accuracy(path: Path, batches: Iterable[tuple[Array, Array]]) -> float:
    session = cpu_session(str(path))
    correct = [_logits_of(session, inputs).argmax(axis=1) == labels for inputs, labels in batches]
    return float(np.concatenate(correct).mean())


def _logits(path: Path, inputs: Array) -> Array:
    """Returns a file's logits `[n, classes]`."""
    session = cpu_session(str(path))
    starts = range(0, len(inputs), _BATCH)
    return np.concatenate([_logits_of(session, inputs[start : start + _BATCH]) for start in starts])


def _logits_of(session: Any, inputs: Array) -> Array:
    check_may_continue()
    return np.asarray(session.run(["logits"], {"input": np.ascontiguousarray(inputs, np.float32)})[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps advice of onnxruntime's quantisation, which it logs with the root logger, out of the app's log.

    Without a handler, `logging.warning` would configure the app's logging, so the root logger gets one meanwhile.
    """
    root = logging.getLogger()
    handler = logging.NullHandler()

    def is_other(record: logging.LogRecord) -> bool:
        return "onnxruntime" not in record.pathname

    root.addFilter(is_other)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.removeFilter(is_other)
