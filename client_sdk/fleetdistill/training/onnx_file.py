"""Metadata of ONNX files, and the comparison that each export must pass. Does not import torch."""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fleetdistill.errors import ExportError, NoRoomError, WorkInterrupted
from fleetdistill.state.disk import FULL
from fleetdistill.state.durable import rename_durably
from fleetdistill.version import VERSION

if TYPE_CHECKING:  # Predictor uses this module, and loads neither gRPC nor protobuf
    from fleetdistill.knowledge import Array

__all__ = ["OnnxReport", "cpu_session"]


_END_OF_REASON = re.compile(r"\. Please feel free to|\s*\[Caused by|\n")
"""Where torch's exporter goes on with its issue tracker or parts of its graph."""
INPUT_RANGE = "input_range"
"""Metadata of an extractor that needs inputs in a range; the only value is `UNIT_RANGE`."""
UNIT_RANGE = "[0, 1]"


@dataclass(frozen=True, slots=True)
class OnnxReport:
    """Result of an export.

    Attributes:
        path: Path of the file.
        max_difference: Largest absolute difference between logits of onnxruntime and of the model.
        samples: Number of real samples compared.
        bytes: Size of the file in bytes.
        failures: Why other variants could not be exported, by name.
    """

    path: Path
    max_difference: float
    samples: int
    bytes: int
    failures: Mapping[str, ExportError] = field(default_factory=dict)


def copy_onnx(source: Path, path: Path) -> None:
    """Copies an exported file to a second name in the same directory, atomically.

    Raises:
        ExportError: The file cannot be written.
    """
    with doing(f"writing {path}"), temporary_beside(path) as temporary:
        shutil.copyfile(source, temporary)
        rename_durably(temporary, path)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Converts exceptions of torch, onnx, onnxruntime and the file system to `ExportError`.

    Raises:
        NoRoomError: The disk is full.
    """
    try:
        yield
    except WorkInterrupted:
        raise
    except OSError as error:
        kind = NoRoomError if error.errno in FULL else ExportError
        raise kind(f"{what} failed: {error}") from error
    except ImportError as error:
        raise ExportError(f"{what} needs {error.name}; install fleetdistill[onnx]") from error
    except Exception as error:
        reason = _END_OF_REASON.split(str(error))[0]
        raise ExportError(f"{what} failed: {type(error).__name__}: {reason}") from error


def facts(input_shape: Sequence[int], classes: int) -> dict[str, str]:
    """Returns the metadata of every file: classes, input shape and version."""
    return {
        "classes": str(classes),
        "input_shape": ",".join(str(size) for size in input_shape),
        "fleetdistill_version": VERSION,
    }


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same directory, so that a rename is atomic; deletes the file afterwards."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def finish(path: Path, metadata: Mapping[str, str]) -> int:
    """Adds metadata to an exported file and checks it with onnx; returns its size in bytes."""
    with doing("checking the exported model"):
        import onnx

        proto = onnx.load(path)
        onnx.helper.set_model_props(proto, dict(metadata))
        onnx.checker.check_model(proto, full_check=True)
        data: bytes = proto.SerializeToString()
    with doing(f"writing {path}"), path.open("wb") as file:
        file.write(data)
    return len(data)


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference that an exported file is compared with.

    Attributes:
        name: Name of the library that computed the expected values.
        on_shape: Advice if onnxruntime returns another shape.
        on_numbers: Advice if onnxruntime returns other values.
    """

    name: str
    on_shape: str
    on_numbers: str


def compare(
    path: Path,
    batches: Sequence[Array],
    expected: Sequence[Array],
    tolerance: float,
    reference: Reference,
    output: str = "logits",
) -> float:
    """Runs a file in onnxruntime and returns the largest absolute difference from the expected outputs.

    Raises:
        ExportError: The file does not run, or a difference exceeds `tolerance * max(1, largest expected value)`.
    """
    with doing("loading the exported model into onnxruntime"):
        session = cpu_session(str(path))
    worst = 0.0
    for batch, wanted in zip(batches, expected, strict=True):
        try:
            with doing(f"running the exported model in onnxruntime on a batch of {len(batch)}"):
                answer = session.run([output], {"input": batch})[0]
        except ExportError as error:
            raise ExportError(f"{error}; {reference.on_shape}") from error
        if answer.shape != wanted.shape:
            raise ExportError(
                f"onnxruntime returns shape {answer.shape} for a batch of {len(wanted)}, but {reference.name} returns "
                f"{wanted.shape}; {reference.on_shape}"
            )
        difference = float(np.abs(answer - wanted).max())
        if not difference <= tolerance * max(1.0, float(np.abs(wanted).max())):  # "not <=" so that NaN fails
            raise ExportError(
                f"onnxruntime differs from {reference.name} by {difference:.3g} on a batch of {len(wanted)} real "
                f"samples, more than the tolerance {tolerance:.3g}; {reference.on_numbers}"
            )
        worst = max(worst, difference)
    return worst


def cpu_session(model: str | bytes, threads: int = 1) -> Any:
    """Creates an onnxruntime session on the CPU from a file or its bytes; raises onnxruntime's exceptions."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # errors are raised as exceptions; do not print them too
    options.add_session_config_entry("session.load_model_format", "ONNX")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
