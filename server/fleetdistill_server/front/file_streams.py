"""Makes backups of the store and exports of models for operators elsewhere, one at a time, and streams their files.

The files are made in a directory inside the store's, where a backup's payloads are hard links, and deleted afterwards.
Directories that a killed front has left are deleted when the next one starts.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from fleetdistill.errors import ConfigurationError, RefusedError
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import operations_pb2
from fleetdistill_server.service.processes import run_child
from fleetdistill_server.store.backup import MANIFEST, backup
from fleetdistill_server.store.blobs import disk_errors
from fleetdistill_server.texts import shorten

PART_BYTES = 1 << 20
EXPORT_SECONDS = 600.0
"""Longest duration of an export in seconds."""
_PREFIX = "sending-"
Parts = Iterator[operations_pb2.FilePart]


def delete_remains(directory: Path) -> None:
    """Deletes what a killed front has left in the store's directory."""
    for folder in directory.glob(f"{_PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def folder_in(directory: Path) -> Iterator[Path]:
    """Yields a new folder inside the store's directory, which is deleted at the end of the block."""
    with disk_errors(f"making a folder in {directory}"):
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=directory))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_backup(directory: Path, folder: Path) -> tuple[list[Path], str]:
    """Backs up the store into a folder; returns the files, the manifest last, and a report on them as JSON.

    Raises:
        RefusedError: The store is in PostgreSQL or an object store, which have tools of their own.
        StoreError: A file could not be read or written.
    """
    target = folder / "backup"
    try:
        made = backup(directory, target, link=True)
    except ConfigurationError as error:
        raise RefusedError(Code.BAD_MESSAGE, shorten(str(error))) from error
    files = sorted(path for path in target.rglob("*") if path.is_file() and path.name != MANIFEST)
    return [*files, target / MANIFEST], json.dumps(
        {"payloads": made.payloads, "bytes": made.bytes, "lost": made.lost[:100], "lost_in_all": made.missing}
    )


def make_export(directory: Path, run: str, ended: threading.Event, folder: Path) -> tuple[list[Path], str]:
    """Exports a run's model into a folder, unless the call ends; returns the file and a report on it as JSON.

    Raises:
        RefusedError: The run does not exist or has no model to export, or the export takes too long.
    """
    path = folder / "model.onnx"
    command = [sys.executable, "-m", "fleetdistill_server.engine.export_process", str(directory), run, str(path)]
    try:
        report = json.loads(run_child(command, "", EXPORT_SECONDS, ended).stdout or "{}")
    except TimeoutError as error:
        text = f"the export took longer than {EXPORT_SECONDS:g} s; export the model on the server's machine"
        raise RefusedError(Code.NOT_READY, text) from error
    except ValueError as error:
        raise RefusedError(Code.INTERNAL, "the export failed; see the server's log") from error
    if "bytes" not in report:
        text = report.get("error", "the export failed; see the server's log")
        raise RefusedError(Code.BAD_MESSAGE, shorten(text))
    return [path], json.dumps(report)


def parts_of_files(folder: Path, files: list[Path], report: str) -> Parts:
    """Yields the files in parts, and the report at the end. Raises StoreError."""
    for path in files:
        name = path.relative_to(folder).as_posix()
        with disk_errors(f"reading {path}"), path.open("rb") as file:
            yield operations_pb2.FilePart(path=name, data=file.read(PART_BYTES))
            while data := file.read(PART_BYTES):
                yield operations_pb2.FilePart(data=data)
    yield operations_pb2.FilePart(report=report)
