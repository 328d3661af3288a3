"""Exports a trained model to an ONNX file whose outputs are verified against the model.

The file is renamed to its final name only after onnx's checker has accepted it and onnxruntime has reproduced the
model's logits on real samples. If a step fails, an existing file remains unchanged.
"""

from __future__ import annotations

import copy
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fleetdistill.errors import ExportError
from fleetdistill.knowledge import Array
from fleetdistill.state.durable import rename_durably
from fleetdistill.training.onnx_file import OnnxReport, Reference, compare, doing, facts, finish, temporary_beside
from fleetdistill.training.onnx_graphs import BATCH, OPSET, Graphs, trace

__all__ = ["onnx_bytes"]

_FEATURES_TOLERANCE = 1e-3  # logarithms of values near 0 differ more than logits
_PYTORCH = Reference(
    "PyTorch",
    "the model fixes the batch size in Python code; take it from tensors instead",
    "look for Python code in forward() that depends on data, for randomness in eval mode, or for logits that are not "
    "finite",
)
NO_METADATA: Mapping[str, str] = MappingProxyType({})
_exporting = threading.Lock()  # torch's exporter and Python's warning filters are global state


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    samples: Tensor,
    metadata: Mapping[str, str],
    tolerance: float = 1e-4,
    *,
    opset: int | None = None,
    dynamic_size: bool = False,
    graphs: Graphs | None = None,
) -> OnnxReport:
    """Writes a model as ONNX after comparing onnxruntime's logits with the model's on real samples.

    The file contains all weights and has one input `input`, float32 `[batch, *input_shape]` with a free batch size, and
    one output `logits` `[batch, classes]`. A copy of the model in eval mode, float32 and on the CPU is exported; the
    model itself does not change.

    Args:
        model: Maps `[batch, *input_shape]` to logits `[batch, classes]`.
        path: File to write; its directory must exist. An existing file is replaced in one step.
        samples: Real samples, `[n, *input_shape]`, n >= 1. All of them and the first one alone are compared, because a
            wrong graph may be correct for the batch size that it was traced with.
        metadata: Written as `metadata_props`, by convention `run`, `round` and `method`. `classes` (their number),
            `input_shape` ("1,8,8") and `fleetdistill_version` are added unless given.
        tolerance: Largest allowed difference, relative to the largest logit if that is above 1.
        opset: Opset of the file; None for 18.
        dynamic_size: Whether all dimensions of an input but the first are free, too. The outputs are also compared on
            inputs of another size.
        graphs: Graphs of earlier exports, in which models of the same architecture only change the weights; None to
            trace each model. A file with a wrong answer is traced again.

    Raises:
        ExportError: The export or the check fails, outputs differ, or the file cannot be written.
    """
    path = Path(path)
    _check_arguments(path, samples, metadata, tolerance)
    batches = [*(_enlarge(samples) if dynamic_size else []), *_batches(samples)]
    with _exporting, torch.no_grad(), temporary_beside(path) as temporary:
        twin = _cpu_copy(model)
        with doing("running the model in PyTorch"):
            expected = [twin(batch) for batch in batches]
        for logits, batch in zip(reversed(expected), reversed(batches), strict=True):
            _check_logits(logits, batch)
        wanted = opset or OPSET, _free(samples, dynamic_size)
        properties = {**facts(samples.shape[1:], expected[-1].shape[1]), **metadata}

        def checked() -> tuple[int, float]:
            size = finish(temporary, properties)
            return size, compare(temporary, _arrays(batches), _arrays(expected), tolerance, _PYTORCH)

        result = None
        if graphs is not None and graphs.write(twin, batches[-1], temporary, *wanted):
            with suppress(ExportError):
                result = checked()
        if result is None:
            trace(twin, batches[-1], temporary, opset=wanted[0], free=wanted[1])
            result = checked()
        size, difference = result
        with doing(f"writing {path}"):
            rename_durably(temporary, path)
    return OnnxReport(path=path, max_difference=difference, samples=len(samples), bytes=size)


def onnx_bytes(module: nn.Module, input_shape: Sequence[int], metadata: Mapping[str, str] = NO_METADATA) -> bytes:
    """Returns an extractor as ONNX for devices without PyTorch: `input` float32 `[batch, *input_shape]` to `features`.

    The outputs are compared with the module's on noise in [0, 1).

    Args:
        module: The extractor; in eval mode its output must depend on the input only.
        input_shape: Shape of one sample.
        metadata: Written as `metadata_props`.

    Raises:
        ExportError: The export fails, or the outputs differ from the module's.
    """
    samples = torch.rand(4, *input_shape, generator=torch.Generator().manual_seed(0))
    batches = _batches(samples)
    with _exporting, torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "extractor.onnx"
        twin = _cpu_copy(module)
        with doing("running the extractor in PyTorch"):
            expected = [twin(batch) for batch in batches]
        trace(twin, batches[-1], path, "features")
        finish(path, metadata)
        compare(path, _arrays(batches), _arrays(expected), _FEATURES_TOLERANCE, _PYTORCH, "features")
        return path.read_bytes()


def _check_arguments(path: Path, samples: Tensor, metadata: Mapping[str, str], tolerance: float) -> None:
    if not path.parent.is_dir():
        raise ExportError(f"cannot write {path}: the directory {path.parent} does not exist; create it first")
    if samples.ndim < 2 or len(samples) == 0:
        raise ExportError(f"samples have shape {tuple(samples.shape)}, expected [n, *input_shape] with n >= 1")
    wrong = sorted(str(key) for key, value in metadata.items() if not isinstance(value, str))
    if wrong:
        raise ExportError(f"metadata values must be strings; convert {', '.join(wrong)}")
    if not tolerance > 0:
        raise ExportError(f"tolerance is {tolerance}, must be above 0")


def _batches(samples: Tensor) -> list[Tensor]:
    """Returns two batches of different sizes: one sample, and all samples."""
    every = samples.detach().to(device="cpu", dtype=torch.float32).contiguous()
    return [every[:1], every if len(every) > 1 else torch.cat([every, every])]


def _enlarge(samples: Tensor) -> list[Tensor]:
    """Returns two samples with half as many values more in each dimension but the first, repeated from the start."""
    every = samples[:2].detach().to(device="cpu", dtype=torch.float32)
    for dimension in range(2, every.ndim):
        every = torch.cat([every, every.narrow(dimension, 0, (every.shape[dimension] + 1) // 2)], dimension)
    return [every.contiguous()]


def _free(samples: Tensor, dynamic_size: bool) -> dict[int, str]:
    """Returns the names of an input's free dimensions, by position."""
    return {**BATCH, **({item: f"size_{item - 1}" for item in range(2, samples.ndim)} if dynamic_size else {})}


def _check_logits(logits: Any, batch: Tensor) -> None:
    if isinstance(logits, Tensor) and logits.ndim == 2 and len(logits) == len(batch):
        return
    result = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    raise ExportError(
        f"the model returns {result} for a batch of {len(batch)}, expected logits [{len(batch)}, classes]"
    )


def _cpu_copy(model: nn.Module) -> nn.Module:
    """Copies a model to the CPU in eval mode, float32 and contiguous memory format."""
    with doing("copying the model to the CPU"):
        twin = copy.deepcopy(model).to(device="cpu", dtype=torch.float32)
        return twin.to(memory_format=torch.contiguous_format).eval()


def _arrays(tensors: Sequence[Tensor]) -> list[Array]:
    return [tensor.numpy() for tensor in tensors]
