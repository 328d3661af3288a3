"""Files of ONNX: what every export writes into them, and the comparison that each must pass. Loads no torch."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from fleetdistill.errors import ExportError
from fleetdistill.knowledge import Array
from fleetdistill.state.durable import rename_durably


@dataclass(frozen=True, slots=True)
class OnnxReport:
    """What an export produced.

    Attributes:
        path: The file.
        max_difference: Largest absolute difference between a logit of onnxruntime's and of the model's.
        samples: Real samples that were compared.
        bytes: Size of the file.
    """

    path: Path
    max_difference: float
    samples: int
    bytes: int


def copy_onnx(source: Path, path: Path) -> None:
    """Puts an exported file under a second name too, in the same directory and in one step.

    Raises:
        ExportError: It could not be written.
    """
    with doing(f"writing {path}"), temporary_beside(path) as temporary:
        shutil.copyfile(source, temporary)
        rename_durably(temporary, path)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Turns whatever torch, onnx, onnxruntime or the disk raise into an `ExportError` that says what was going on."""
    try:
        yield
    except ImportError as error:
        raise ExportError(f"{what} needs {error.name}; install fleetdistill[onnx]") from error
    except Exception as error:
        raise ExportError(f"{what} failed: {type(error).__name__}: {error}") from error


def facts(input_shape: Sequence[int], classes: int) -> dict[str, str]:
    """What every file's metadata say."""
    try:
        release = version("fleetdistill")
    except PackageNotFoundError:  # runs from a source tree that is not installed
        release = "unknown"
    return {
        "classes": str(classes),
        "input_shape": ",".join(str(size) for size in input_shape),
        "fleetdistill_version": release,
    }


@contextmanager
def temporary_beside(path: Path) -> Iterator[Path]:
    """A name in the same directory, so that the rename is atomic; nothing is left there afterwards."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def finish(path: Path, metadata: Mapping[str, str]) -> int:
    """Adds the metadata to an exported file and has it checked; its size in bytes."""
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
    """What an exported file is compared with.

    Attributes:
        name: Who gave the expected numbers.
        on_shape: What to do where onnxruntime answers another shape.
        on_numbers: What to do where it answers other numbers.
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
    """Runs a file in onnxruntime; returns the largest difference from what is expected of each batch.

    Raises:
        ExportError: It does not run, or differs by more than the tolerance, relative to the largest number above 1.
    """
    with doing("loading the exported model into onnxruntime"):
        session = cpu_session(str(path))
    worst = 0.0
    for batch, wanted in zip(batches, expected, strict=True):
        with doing(f"running the exported model in onnxruntime on a batch of {len(batch)}"):
            answer = session.run([output], {"input": batch})[0]
        if answer.shape != wanted.shape:
            raise ExportError(
                f"onnxruntime answers shape {answer.shape} to a batch of {len(wanted)}, {reference.name} "
                f"{wanted.shape}; {reference.on_shape}"
            )
        difference = float(np.abs(answer - wanted).max())
        if not difference <= tolerance * max(1.0, float(np.abs(wanted).max())):  # "not <=" so that NaN fails
            raise ExportError(
                f"onnxruntime differs from {reference.name} by {difference:.3g} on a batch of {len(wanted)} real "
                f"samples, allowed is {tolerance:.3g}; {reference.on_numbers}"
            )
        worst = max(worst, difference)
    return worst


def cpu_session(model: str | bytes, threads: int = 1) -> Any:
    """A session of onnxruntime on the CPU, of a file or of its bytes; it raises whatever onnxruntime raises."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # errors come as exceptions; do not print them as well
    options.add_session_config_entry("session.load_model_format", "ONNX")
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
