"""The SDK's files in a state directory and their erasure: no others are erased, and others mark a foreign folder."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from fleetdistill.errors import StateError
from fleetdistill.state import failpoints
from fleetdistill.state.disk import disk_errors
from fleetdistill.state.durable import sync_directory
from fleetdistill.state.files import Files
from fleetdistill.state.privacy_ledger import PRIVACY_LEDGER

DEVICE = "device.json"
_IN_USE = "deployed.json"
_TOP = (
    r"(lock|erasing|(device|deployed|usage|pace|last_outcome|privacy|secure(_steps|_ended)?)\.json|ledger\.jsonl|rows\.txt|released\.npz"
    r"|(profile|contract|sample_ids)\.bin|(state|delivered)\.safetensors|(model|general|personal|own)\.onnx"
    r"|model\.onnx\.due|roll-back\.due|pinned)"
)
_IN_FOLDERS = (
    r"outbox/((header|data)\.bin|(candidate|delivered)\.safetensors|(manifest|outcome)\.json|tries\.txt)",
    r"downloads/[0-9a-f]{64}\.(part|payload)",
    r"weights/[0-9a-f]{64}",
    r"versions/deployed\.json",
    r"versions/\d+/(delivered\.safetensors|version\.json|[^/]+\.onnx)",
    r"tls/(identity|ca)\.pem",
    r"proxy/(header|data)\.bin",  # SDK 0.1
    r"export\.new/.+",
)
_OWN = re.compile("|".join((_TOP, *_IN_FOLDERS)))
_FOLDERS = re.compile(r"outbox|downloads|weights|versions(/\d+)?|tls|proxy|export\.new(/.+)?")
_ENDING = re.compile(r"(\.new(?<!^export\.new)|\.damaged-\d+)(?=/|$)")
_HARMLESS = re.compile(r"\..*|lost\+found")  # hidden files, and the folder of a file system's root


def own_files(directory: Path) -> Iterator[Path]:
    """Yields the SDK's files in a state directory, the list of ONNX files last; other files are left out."""
    listed = _listed_onnx(directory)
    last = []
    for path in _walk(directory):
        name = _plain(directory, path)
        if _is_folder(path):
            continue
        if name == _IN_USE:
            last.append(path)  # names the app's ONNX files, for an erasure that is completed after a crash
        elif name in listed or _OWN.fullmatch(name):
            yield path
    yield from last


def own_folders(directory: Path) -> Iterator[Path]:
    """Yields the SDK's folders in a state directory, inner ones first."""
    for path in reversed(_walk(directory)):
        if _is_folder(path) and _FOLDERS.fullmatch(_plain(directory, path)):
            yield path


def check_can_be_state(directory: Path) -> None:
    """Checks that a directory is missing, has been used by a device, or contains nothing else.

    Raises:
        StateError: The directory contains other files, and no device, or it is a file.
    """
    with disk_errors(directory):
        if directory.exists() and not directory.is_dir():
            raise StateError(f"state_dir {str(directory)!r} is a file, expected a directory for this device alone")
        if not directory.is_dir() or (directory / DEVICE).exists():
            return
        foreign = sorted(path.name for path in directory.iterdir() if not _is_expected(directory, path))
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise StateError(
            f"state_dir {str(directory)!r} contains {foreign[0]!r}{more}, which is not a device's; "
            "pass an empty or new directory, which belongs to this device alone"
        )


def _is_expected(directory: Path, path: Path) -> bool:
    name = _plain(directory, path)
    known = _FOLDERS if _is_folder(path) else _OWN
    return bool(known.fullmatch(name) or _HARMLESS.fullmatch(path.name))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _walk(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*"))


def _plain(directory: Path, path: Path) -> str:
    """Returns the path in the directory without the endings of unfinished and damaged files."""
    return _ENDING.sub("", path.relative_to(directory).as_posix())


def _listed_onnx(directory: Path) -> set[str]:
    """Returns the names of the ONNX files of the version in use; a custom method names its own variants."""
    result: set[str] = set()
    for path in (directory / _IN_USE, directory / "versions" / _IN_USE):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            result |= {str(name) for name in json.loads(path.read_bytes())["files"]}
    return {name for name in result if name.endswith(".onnx") and "/" not in name}


# --- Erases a state directory, so that a crash at any time leaves either all of it, or an erasure that is completed.
#
# erasing         exists while the directory is being erased; the next start completes the erasure

ERASING = "erasing"
_KEPT = (PRIVACY_LEDGER, "lock", ERASING)


def erase(files: Files) -> None:
    """Deletes the SDK's files in a state directory, except for its lock and the privacy ledger; keeps other files.

    A private release was sent and stays spent: without the ledger, a new device with the same rows could make another.

    Raises:
        StateError: A file cannot be deleted. Opening the directory tries again.
    """
    files.save(ERASING, b"")
    failpoints.hit("device.forget.after-mark")
    complete_erasure(files)


def complete_erasure(files: Files) -> None:
    """Completes an erasure that has begun; does nothing in any other directory."""
    if not (files.directory / ERASING).exists():
        return
    with disk_errors(files.directory):
        for path in own_files(files.directory):
            if path.name not in _KEPT:
                path.unlink(missing_ok=True)
        for folder in own_folders(files.directory):
            if not any(folder.iterdir()):
                folder.rmdir()
        sync_directory(files.directory)
        failpoints.hit("device.forget.after-files")
        (files.directory / ERASING).unlink()
        sync_directory(files.directory)
