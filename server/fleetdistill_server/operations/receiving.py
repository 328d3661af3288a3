"""Receives files from a server: exported models and backups. Nothing is taken from the server but checked content."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from fleetdistill.errors import LinkError
from fleetdistill.state.durable import make_directory, rename_durably, sync_directory, sync_file
from fleetdistill.wire.v1 import operations_pb2
from fleetdistill_server.store.backup import BackedUp, check_backup, check_empty
from fleetdistill_server.store.blobs import disk_errors

_NAMES = re.compile(r"backup/(manifest\.json|store\.sqlite|blobs/[0-9a-f]{2}/[0-9a-f]{64}\.safetensors)|model\.onnx")


def receive_model(parts: Iterable[operations_pb2.FilePart], out: Path) -> tuple[int, float]:
    """Writes a received model; returns its size in bytes and the largest difference to PyTorch's outputs.

    Raises:
        LinkError: The server sent something else than one complete model.
        StoreError: The file cannot be written.
    """
    folder = out.with_name(out.name + ".receiving")
    report = _receive_all(parts, folder)
    with disk_errors(f"writing {out}"):
        size = (folder / "model.onnx").stat().st_size if (folder / "model.onnx").exists() else -1
        if size != report.get("bytes"):
            raise LinkError(f"the server sent {max(size, 0)} of {report.get('bytes')} bytes of the model; try again")
        rename_durably(folder / "model.onnx", out)
        shutil.rmtree(folder)
    return size, float(report["max_difference"])


def receive_backup(parts: Iterable[operations_pb2.FilePart], out: Path) -> BackedUp:
    """Writes a received backup, after comparing every file with its digest in the manifest.

    A copy that was interrupted begins again: it is in `OUT.receiving` until it is complete.

    Raises:
        ConfigurationError: `out` is not empty.
        LinkError: The server sent other files than those of a backup.
        StoreError: A file is damaged or cannot be written.
    """
    check_empty(out)
    folder = out.with_name(out.name + ".receiving")
    report = _receive_all(parts, folder)
    check_backup(folder / "backup")
    with disk_errors(f"writing {out}"):
        if out.exists():
            out.rmdir()
        (folder / "backup").replace(out)
        sync_directory(out.parent)
        shutil.rmtree(folder)
    hidden = int(report.get("lost_in_all", 0)) - len(report.get("lost", []))
    lost = [str(one) for one in report.get("lost", [])] + ([f"and {hidden} more"] if hidden > 0 else [])
    return BackedUp(int(report.get("payloads", 0)), int(report.get("bytes", 0)), lost)


def _receive_all(parts: Iterable[operations_pb2.FilePart], folder: Path) -> dict[str, Any]:
    """Writes the files into a new folder, durably, and returns the report on them."""
    with disk_errors(f"receiving into {folder}"), ExitStack() as opened:
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted attempt
        make_directory(folder)
        file: IO[bytes] | None = None
        for part in parts:
            if part.report:
                if file is not None:
                    sync_file(file)
                report: dict[str, Any] = json.loads(part.report)
                return report
            if part.path:
                if file is not None:
                    sync_file(file)
                    file.close()
                file = opened.enter_context(_new_file(folder, part.path))
            if file is None:
                break
            file.write(part.data)
    raise LinkError("the server's files ended early; run the command again, it begins anew")


def _new_file(folder: Path, name: str) -> IO[bytes]:
    if not _NAMES.fullmatch(name):
        raise LinkError(f"the server sent a file named {name[:100]!r}, which is not part of a backup or a model")
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("xb")
