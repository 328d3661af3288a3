"""Export of a trained model to an ONNX file that is known to answer like the model.

The file appears under its name only after onnx's checker has accepted it and onnxruntime has given the model's logits
on real samples; before that, and whenever anything fails, an older file stays as it is.

We trace with `torch.onnx.export(dynamo=False)`. Measured with torch 2.15 on one core, digits and ResNet12 alike:

| exporter | first export | second export | memory on top of torch's 530 MB |
|---|---|---|---|
| `dynamo=False` (TorchScript) | 0.08 to 0.19 s | 0.01 to 0.03 s | 35 to 40 MB |
| `dynamo=True` (torch.export) | 2.9 to 3.2 s | 0.6 to 1.2 s | 235 MB |

A device exports beside the app it serves, so time and memory decide. The tracer needs no onnxscript either. What
speaks for the other one, that it refuses control flow which depends on data where a tracer takes the branch of its
example, is covered by the comparison on real samples, and the tracer's own warnings about it are passed on.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import tempfile
import threading
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fleetdistill.durable import rename_durably
from fleetdistill.errors import ExportError

_FEATURES_TOLERANCE = 1e-3  # logarithms of numbers near 0 differ more than logits
_OPSET = 18  # fixed, so that a newer torch does not shut out the onnxruntime that a fleet already has
_exporting = threading.Lock()  # torch's exporter and Python's warning filters are global state


@dataclass(frozen=True, slots=True)
class OnnxReport:
    """What an export produced.

    Attributes:
        path: The file.
        max_difference: Largest absolute difference between a logit of onnxruntime's and of PyTorch's.
        samples: Real samples that were compared.
        bytes: Size of the file.
    """

    path: Path
    max_difference: float
    samples: int
    bytes: int


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    samples: Tensor,
    metadata: Mapping[str, str],
    tolerance: float = 1e-4,
) -> OnnxReport:
    """Writes a model as ONNX, if onnxruntime agrees with it on real samples.

    The file has one input `input`, float32 `[batch, *input_shape]` with any batch size, one output `logits`
    `[batch, classes]`, and all weights inside. A copy of the model is exported, in eval mode, in float32, on the CPU;
    the model itself does not change, whatever its mode, device or memory format.

    Args:
        model: Maps `[batch, *input_shape]` to logits `[batch, classes]`.
        path: File to write; its directory must exist. An existing file is replaced in one step.
        samples: Real samples, `[n, *input_shape]`, n >= 1. All are compared at once and the first one alone, because
            a wrong graph may be right for the batch size it was traced with.
        metadata: Written as `metadata_props`: by convention `run`, `round` and `method`. `classes` (their number),
            `input_shape` ("1,8,8") and `fleetdistill_version` are added unless given.
        tolerance: Largest difference allowed, relative to the largest logit where that is above 1.

    Raises:
        ExportError: The export failed, the checker refused it, it differs from the model, or it could not be written.
    """
    path = Path(path)
    _check_arguments(path, samples, metadata, tolerance)
    batches = _batches(samples)
    with _exporting, torch.no_grad(), _temporary_beside(path) as temporary:
        twin = _twin(model)
        with _doing("running the model in PyTorch"):
            expected = [twin(batch) for batch in batches]
        _check_logits(expected[-1], batches[-1])
        _trace(twin, batches[-1], temporary)
        size = _finish(temporary, {**_facts(samples, expected[-1]), **metadata})
        difference = _compare(temporary, batches, expected, tolerance)
        with _doing(f"writing {path}"):
            rename_durably(temporary, path)
    return OnnxReport(path=path, max_difference=difference, samples=len(samples), bytes=size)


def onnx_bytes(module: nn.Module, input_shape: Sequence[int]) -> bytes:
    """An extractor as ONNX, for devices without PyTorch: `input` float32 `[batch, *input_shape]` to `features`.

    Compared with the module on noise in [0, 1).

    Args:
        module: In eval mode it is a function of its input alone.
        input_shape: Of one sample.

    Raises:
        ExportError: The export failed, or it differs from the module.
    """
    samples = torch.rand(4, *input_shape, generator=torch.Generator().manual_seed(0))
    batches = _batches(samples)
    with _exporting, torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        path, twin = Path(folder) / "extractor.onnx", _twin(module)
        with _doing("running the extractor in PyTorch"):
            expected = [twin(batch) for batch in batches]
        _trace(twin, batches[-1], path, "features")
        _finish(path, {})
        _compare(path, batches, expected, _FEATURES_TOLERANCE, "features")
        return path.read_bytes()


def copy_onnx(source: Path, path: Path) -> None:
    """Puts an exported file under a second name too, in the same directory and in one step.

    Raises:
        ExportError: It could not be written.
    """
    with _doing(f"writing {path}"), _temporary_beside(path) as temporary:
        shutil.copyfile(source, temporary)
        rename_durably(temporary, path)


@contextmanager
def _doing(what: str) -> Iterator[None]:
    """Turns whatever torch, onnx, onnxruntime or the disk raise into an `ExportError` that says what was going on."""
    try:
        yield
    except ImportError as error:
        raise ExportError(f"{what} needs {error.name}; install fleetdistill[onnx]") from error
    except Exception as error:
        raise ExportError(f"{what} failed: {type(error).__name__}: {error}") from error


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
    """One sample alone, then all of them; always two batch sizes."""
    every = samples.detach().to(device="cpu", dtype=torch.float32).contiguous()
    return [every[:1], every if len(every) > 1 else torch.cat([every, every])]


def _check_logits(logits: Any, batch: Tensor) -> None:
    if isinstance(logits, Tensor) and logits.ndim == 2 and len(logits) == len(batch):
        return
    found = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
    raise ExportError(f"the model answers {found} to a batch of {len(batch)}, expected logits [{len(batch)}, classes]")


def _twin(model: nn.Module) -> nn.Module:
    """A copy in eval mode, float32 and plain memory format on the CPU."""
    with _doing("copying the model to the CPU"):
        twin = copy.deepcopy(model).to(device="cpu", dtype=torch.float32)
        return twin.to(memory_format=torch.contiguous_format).eval()


def _trace(twin: nn.Module, batch: Tensor, path: Path, output: str = "logits") -> None:
    """Writes the graph that one batch takes, with a free batch size."""
    with _doing("tracing the model"), warnings.catch_warnings():
        # Only what torch says about its own exporter: a warning about the model's code is for the app to read.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=rf"torch\.|{re.escape(__name__)}$")
        warnings.filterwarnings("ignore", message="Constant folding - Only steps=1")  # of padding; it folds the rest
        torch.onnx.export(
            twin,
            (batch,),
            str(path),
            dynamo=False,
            verbose=False,
            opset_version=_OPSET,
            input_names=["input"],
            output_names=[output],
            dynamic_axes={"input": {0: "batch"}, output: {0: "batch"}},
        )


def _facts(samples: Tensor, logits: Tensor) -> dict[str, str]:
    try:
        release = version("fleetdistill")
    except PackageNotFoundError:  # runs from a source tree that is not installed
        release = "unknown"
    return {
        "classes": str(logits.shape[1]),
        "input_shape": ",".join(str(size) for size in samples.shape[1:]),
        "fleetdistill_version": release,
    }


@contextmanager
def _temporary_beside(path: Path) -> Iterator[Path]:
    """A name in the same directory, so that the rename is atomic; nothing is left there afterwards."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _finish(path: Path, metadata: Mapping[str, str]) -> int:
    """Adds the metadata to an exported file and has it checked; its size in bytes."""
    with _doing("checking the exported model"):
        import onnx

        proto = onnx.load(path)
        onnx.helper.set_model_props(proto, dict(metadata))
        onnx.checker.check_model(proto, full_check=True)
        data: bytes = proto.SerializeToString()
    with _doing(f"writing {path}"), path.open("wb") as file:
        file.write(data)
    return len(data)


def _compare(
    path: Path, batches: list[Tensor], expected: list[Tensor], tolerance: float, output: str = "logits"
) -> float:
    with _doing("loading the exported model into onnxruntime"):
        session = _session(path)
    worst = 0.0
    for batch, logits in zip(batches, expected, strict=True):
        with _doing(f"running the exported model in onnxruntime on a batch of {len(batch)}"):
            answer = torch.from_numpy(session.run([output], {"input": batch.numpy()})[0])
        if answer.shape != logits.shape:
            raise ExportError(
                f"onnxruntime answers shape {tuple(answer.shape)} to a batch of {len(logits)}, PyTorch "
                f"{tuple(logits.shape)}; the model fixes the batch size in Python code, take it from tensors instead"
            )
        difference = float((answer - logits).abs().max())
        if not difference <= tolerance * max(1.0, float(logits.abs().max())):  # "not <=" so that NaN fails
            raise ExportError(
                f"onnxruntime differs from PyTorch by {difference:.3g} on a batch of {len(logits)} real samples, "
                f"allowed is {tolerance:.3g}; look for Python code in forward() that depends on data, for "
                "randomness in eval mode, or for logits that are not finite"
            )
        worst = max(worst, difference)
    return worst


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # errors come as exceptions; do not print them as well
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
