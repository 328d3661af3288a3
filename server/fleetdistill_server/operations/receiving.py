"""Receives files from a server: exported models and backups. Nothing is taken from the server but checked content."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from fleetdistill.errors import LinkError, ModelError, in_words
from fleetdistill.printable import printable
from fleetdistill.state.durable import make_directory, rename_durably, sync_directory, sync_file
from fleetdistill.training.foreign_onnx import check_self_contained
from fleetdistill.wire.v1 import operations_pb2
from fleetdistill_server.store.backup import BackedUp, check_backup, check_empty
from fleetdistill_server.store.blobs import disk_errors
from fleetdistill_server.views.runs import TableRow

MAX_MODEL_BYTES = 2 << 30
"""Largest size of a model in bytes, that of a protobuf message."""
_NAMES = re.compile(r"backup/(manifest\.json|store\.sqlite|blobs/[0-9a-f]{2}/[0-9a-f]{64}\.safetensors)|model\.onnx")


def receive_model(parts: Iterable[operations_pb2.FilePart], out: Path) -> tuple[int, float]:
    """Writes a received model; returns its size in bytes and the largest difference to PyTorch's outputs.

    Raises:
        LinkError: The server sent something else than one complete model.
        StoreError: The file cannot be written.
    """
    with _receiving(parts, out, MAX_MODEL_BYTES) as (folder, report), disk_errors(f"writing {out}"):
        size = (folder / "model.onnx").stat().st_size if (folder / "model.onnx").exists() else -1
        if size != report.get("bytes"):
            raise LinkError(f"the server sent {max(size, 0)} of {report.get('bytes')} bytes of the model; try again")
        difference = float(report["max_difference"])
        if not 0 <= difference < math.inf:
            raise LinkError(f"the server reports the difference {difference} to PyTorch's outputs, must be at least 0")
        _check_onnx((folder / "model.onnx").read_bytes())
        rename_durably(folder / "model.onnx", out)
    return size, difference


def _check_onnx(data: bytes) -> None:
    try:
        check_self_contained(data, standard=False)
    except ModelError as error:
        raise LinkError(f"the model that the server sent {error}") from error


def receive_backup(parts: Iterable[operations_pb2.FilePart], out: Path) -> BackedUp:
    """Writes a received backup, after comparing every file with its digest in the manifest.

    A copy that was interrupted begins again: it is in `OUT.receiving` until it is complete, and deleted after an error.

    Raises:
        ConfigurationError: `out` is not empty.
        LinkError: The server sent other files than those of a backup.
        StoreError: A file is damaged or cannot be written.
    """
    check_empty(out)
    with _receiving(parts, out) as (folder, report):
        lost = [printable(str(item)) for item in list(report.get("lost", []))]
        missing = max(int(report.get("lost_in_all", 0)), len(lost))
        result = BackedUp(int(report.get("payloads", 0)), int(report.get("bytes", 0)), lost, missing)
        check_backup(folder / "backup")
        with disk_errors(f"writing {out}"):
            if out.exists():
                out.rmdir()
            (folder / "backup").replace(out)
            sync_directory(out.parent)
    return result


@contextmanager
def _receiving(
    parts: Iterable[operations_pb2.FilePart], out: Path, most: float = math.inf
) -> Iterator[tuple[Path, TableRow]]:
    """Yields a new folder beside `out` with the files, durably written, and the report on them; then deletes it."""
    folder = out.with_name(out.name + ".receiving")
    try:
        report = _receive_all(parts, folder, most)
        yield folder, report
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise LinkError(f"the server's report on the files is not valid: {in_words(error)}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _receive_all(parts: Iterable[operations_pb2.FilePart], folder: Path, most: float) -> TableRow:
    with disk_errors(f"receiving into {folder}"), ExitStack() as opened:
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted attempt
        make_directory(folder)
        file: IO[bytes] | None = None
        size = 0
        for part in parts:
            if part.report:
                if file is not None:
                    sync_file(file)
                return json_row(part.report)
            if part.path:
                if file is not None:
                    sync_file(file)
                    file.close()
                file = opened.enter_context(_new_file(folder, part.path))
            size += len(part.data)
            if size > most:
                raise LinkError(f"the server sent more than {most} bytes, which no model has")
            if file is None:
                break
            file.write(part.data)
    raise LinkError("the server's files ended early; run the command again, it begins anew")


def json_row(text: str) -> TableRow:
    """Parses a JSON object of a server. Raises LinkError if the text is none, or is nested too deeply."""
    try:
        result = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise LinkError(f"the server sent text that is not valid JSON: {in_words(error)}") from error
    if not isinstance(result, dict):
        raise LinkError(f"the server sent {type(result).__name__} in JSON, expected an object")
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _new_file(folder: Path, name: str) -> IO[bytes]:
    if not _NAMES.fullmatch(name):
        raise LinkError(f"the server sent a file named {name[:100]!r}, which is not part of a backup or a model")
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("xb")
