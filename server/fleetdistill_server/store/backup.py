"""Backs up a store, even while a server uses it, and restores it.

A backup is a directory with the layout of a store: `store.sqlite`, a snapshot, and under `blobs/` a copy of every
payload and checkpoint that the snapshot refers to. `manifest.json` is written last and lists them all; a directory
without it is not a backup. No process deletes payloads during a backup (`Blobs.exclusive`).

A restored store has the state of the backup. Receipts issued after the backup are void, and an event in each run
records that. Devices that are ahead of the store continue with their own state.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetdistill.errors import ConfigurationError, DamagedError, NoSpaceError, StoreError, in_words
from fleetdistill.link.credentials import write_private
from fleetdistill.state import failpoints
from fleetdistill.state.durable import keep_private, make_directory, sync_directory, sync_file
from fleetdistill.version import VERSION
from fleetdistill_server.store.blobs import disk_errors
from fleetdistill_server.store.checks import RECOVERY
from fleetdistill_server.store.file_blobs import FileBlobs
from fleetdistill_server.store.location import Location, has_store, read_location
from fleetdistill_server.store.operator_calls import BEGUN
from fleetdistill_server.store.retention import exclusive, needed
from fleetdistill_server.store.store import Store

FORMAT = 1
VOID = "receipts, revocations and deletions of devices since then are void"
"""What a restored store does not know."""
_DATABASE, MANIFEST, _BLOBS = "store.sqlite", "manifest.json", "blobs"
_DIGEST = re.compile("[0-9a-f]{64}")
_SHOWN = 5


@dataclass(frozen=True)
class BackedUp:
    """Contents of a backup.

    Attributes:
        payloads: Number of payloads and checkpoints.
        bytes: Total size of the payloads, the checkpoints and the database.
        lost: One sentence for each payload or checkpoint that is missing or damaged in the store; of a backup from
            elsewhere, the first ones.
        missing: Number of these payloads and checkpoints.
    """

    payloads: int
    bytes: int
    lost: list[str]
    missing: int


def backup(source: Path, target: Path, *, link: bool = False) -> BackedUp:
    """Copies a store, even while a server uses it.

    Args:
        source: The store's directory.
        target: A directory that is empty or does not exist.
        link: Whether payloads may be hard links to the store's, for a backup that is sent elsewhere and then deleted.

    Raises:
        ConfigurationError: `source` contains no store, or `target` is not empty, or within the store.
        StoreError: The database is damaged, a file could not be read or written, or another process holds the deletion
            lock for too long; what was written is deleted.
    """
    if not has_store(source):
        raise ConfigurationError(f"there is no store in {source}: the directory contains no {_DATABASE}")
    if read_location(source) != Location():
        raise ConfigurationError(
            f"the store {source} is in PostgreSQL or an object store; "
            "back it up with pg_dump and the object store's own tools"
        )
    check_empty(target)
    if not link and target.resolve().is_relative_to(source.resolve()):
        raise ConfigurationError(
            f"the backup {target} would be in the store that it copies; name a directory on another disk"
        )
    store = Store.open(source)
    try:
        with disk_errors(f"making the backup {target}"), exclusive(store), _removed_after_error(target):
            make_directory(target)
            keep_private(target)  # before anything is in it; it may have existed
            _snapshot(source / _DATABASE, target / _DATABASE)
            if damage := _damage_of(target / _DATABASE):
                raise StoreError(
                    f"the database of the store {source} is damaged ({damage}), so there is no backup of it. Keep the "
                    f"earlier backups. {RECOVERY}"
                )
            failpoints.hit("backup.after-snapshot")
            payloads, checkpoints = _needed_by(target)
            copy = _link_or_copy if link else _copy
            copied, lost = _copy_all(FileBlobs(source / _BLOBS), target / _BLOBS, payloads, checkpoints, copy)
            size = sum(copied.values()) + (target / _DATABASE).stat().st_size
            keep_private(target)
            _sync_all(target)
            failpoints.hit("backup.before-manifest")
            _write_manifest(target, payloads & copied.keys(), checkpoints & copied.keys(), lost)
    finally:
        store.close()
    return BackedUp(len(copied), size, list(lost.values()), len(lost))


def restore(source: Path, target: Path) -> int:
    """Creates a store from a backup after comparing every file with its digest.

    Args:
        source: The backup's directory.
        target: The store's directory, which must be empty or not exist.

    Returns:
        Number of payloads and checkpoints in the store.

    Raises:
        ConfigurationError: `source` is not a backup that this version can read, or `target` is not empty.
        StoreError: The backup is damaged; the message lists the damaged files. `target` is left unchanged.
    """
    manifest = _read_manifest(source)
    check_empty(target)
    wanted = check_backup(source)
    partial = target.with_name(target.name + ".restoring")
    with disk_errors(f"restoring into {target}"):
        shutil.rmtree(partial, ignore_errors=True)  # left by an interrupted attempt
        make_directory(partial)
        make_directory(partial / _BLOBS)
        for name, _ in wanted:
            _copy(source / _BLOBS / _file_of(name), partial / _BLOBS / _file_of(name))
        _copy(source / _DATABASE, partial / _DATABASE)
        _note_restore(partial, manifest["made_at"])
        keep_private(partial)
        _sync_all(partial)
        failpoints.hit("restore.before-rename")
        if target.exists():
            target.rmdir()
        partial.replace(target)  # atomic: `serve` would start new runs in an incomplete store
        sync_directory(target.parent)
    return len(wanted)


def check_backup(source: Path) -> list[tuple[str, bool]]:
    """Compares every file of a backup with its digest.

    Returns:
        The digest of each payload and checkpoint in hex, and whether it is a payload.

    Raises:
        ConfigurationError: `source` is not a backup that this version can read.
        StoreError: The backup is damaged; the message lists the damaged files.
    """
    manifest = _read_manifest(source)
    wanted = [(item, True) for item in manifest["payloads"]] + [(item, False) for item in manifest["checkpoints"]]
    _check_digests(source, manifest, wanted)
    return wanted


def check_empty(target: Path) -> None:
    """Raises ConfigurationError unless a directory is empty or does not exist."""
    with disk_errors(f"checking {target}"):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigurationError(f"{target} is not an empty directory; choose an empty or a new directory")


@contextlib.contextmanager
def _removed_after_error(target: Path) -> Iterator[None]:
    """Deletes what a failed backup has written, so that it can be repeated; names a target that is full."""
    existed = target.exists()
    try:
        yield
    except BaseException as error:
        for path in target.iterdir() if target.exists() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not existed:
            target.rmdir()
        if isinstance(error, NoSpaceError):
            raise NoSpaceError(f"making the backup {target}: the disk is full") from error
        raise


def _snapshot(source: Path, target: Path) -> None:
    """Copies a consistent state of the database while other processes may write to it."""
    try:
        with contextlib.closing(sqlite3.connect(source)) as from_, contextlib.closing(sqlite3.connect(target)) as to:
            from_.backup(to)
    except sqlite3.Error as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            raise NoSpaceError("the disk is full") from error
        raise StoreError(f"cannot copy the database {source} to {target}: {error}") from error


def _damage_of(snapshot: Path) -> str:
    """Reads a whole database to which nobody writes; returns what is damaged, or ""."""
    try:
        with contextlib.closing(sqlite3.connect(f"{snapshot.absolute().as_uri()}?immutable=1", uri=True)) as database:
            (result,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.DatabaseError as error:
        return str(error)
    return "" if result == "ok" else " ".join(str(result).split())


def _needed_by(directory: Path) -> tuple[set[bytes], set[bytes]]:
    """Returns the payloads and checkpoints that the snapshot in a directory refers to."""
    store = Store.open(directory)
    try:
        result = needed(store)
    finally:
        store.close()
    return result.payloads, result.checkpoints


def _copy_all(
    blobs: FileBlobs,
    target: Path,
    payloads: set[bytes],
    checkpoints: set[bytes],
    copy: Callable[[Path, Path], None],
) -> tuple[dict[bytes, int], dict[bytes, str]]:
    """Copies the undamaged blobs; returns their sizes, and for the others why they could not be copied."""
    copied, lost = {}, {}
    for sha256 in sorted(payloads | checkpoints):
        path = target / _file_of(sha256.hex())
        try:
            _verify(blobs, sha256, sha256 in payloads)
            copy(blobs.path_of(sha256), path)
            copied[sha256] = path.stat().st_size
        except DamagedError as damage:
            lost[sha256] = str(damage)
    return copied, lost


def _verify(blobs: FileBlobs, sha256: bytes, is_payload: bool) -> None:
    if is_payload:
        blobs.open(sha256, verify=True)
    else:
        blobs.get_state(sha256)


def _file_of(name: str) -> str:
    return f"{name[:2]}/{name}.safetensors"


def _link_or_copy(source: Path, target: Path) -> None:
    """Links or copies a stored file, for a reader that compares it with its digest and keeps neither."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or hard links are not supported
        _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _sync_all(directory: Path) -> None:
    """Calls fsync for every file and directory under a directory."""
    for folder, _, names in os.walk(directory):
        for name in names:
            with (Path(folder) / name).open("r+b") as file:
                sync_file(file)
        sync_directory(Path(folder))


def _write_manifest(target: Path, payloads: set[bytes], checkpoints: set[bytes], lost: dict[bytes, str]) -> None:
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "database": _file_digest(target / _DATABASE),
        "payloads": sorted(payload.hex() for payload in payloads),
        "checkpoints": sorted(checkpoint.hex() for checkpoint in checkpoints),
        "lost": {sha256.hex(): why for sha256, why in sorted(lost.items())},
    }
    write_private(target / MANIFEST, json.dumps(manifest, indent=1).encode())
    sync_directory(target.parent)


def _read_manifest(source: Path) -> dict[str, Any]:
    path = source / MANIFEST
    if not source.is_dir():
        raise ConfigurationError(f"directory {source} does not exist; choose a directory made by `fleetdistill backup`")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        known = {"format", "made_at", "database", "payloads", "checkpoints"} <= manifest.keys()
        names = [*manifest["payloads"], *manifest["checkpoints"]] if known else []
        if not all(isinstance(name, str) and _DIGEST.fullmatch(name) for name in names):
            raise ValueError("a payload or checkpoint is not named by a SHA-256")
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        text = f"{source} is not a complete backup: its {MANIFEST} cannot be read: {in_words(error)}"
        raise ConfigurationError(text) from error
    if not known or manifest["format"] != FORMAT:
        result = f"format {manifest.get('format')}, written by version {manifest.get('version')}"
        raise ConfigurationError(
            f"{path} has {result}; this version reads format {FORMAT}. Restore with the version that wrote it"
        )
    return manifest


def _check_digests(source: Path, manifest: dict[str, Any], wanted: list[tuple[str, bool]]) -> None:
    """Compares every file with its digest. Raises StoreError that lists the missing and damaged files."""
    blobs = FileBlobs(source / _BLOBS)
    wrong = list(_damage_in(source, manifest, blobs, wanted))
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise StoreError(f"the backup {source} is damaged: {'; '.join(wrong[:_SHOWN])}{more}. Restore another backup")


def _damage_in(
    source: Path, manifest: dict[str, Any], blobs: FileBlobs, wanted: list[tuple[str, bool]]
) -> Iterator[str]:
    if not (source / _DATABASE).exists():
        yield f"{_DATABASE} is missing"
    elif _file_digest(source / _DATABASE) != manifest["database"]:
        yield f"{_DATABASE} does not match its digest in {MANIFEST}"
    elif damage := _damage_of(source / _DATABASE):
        yield f"{_DATABASE} was damaged when the backup was made ({damage})"
    for name, is_payload in wanted:
        try:
            _verify(blobs, bytes.fromhex(name), is_payload)
        except (DamagedError, ValueError) as error:
            yield str(error)


def _file_digest(path: Path) -> str:
    with disk_errors(f"reading {path}"), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _note_restore(directory: Path, made_at: str) -> None:
    store = Store.open(directory)
    try:
        store.run_control.forget_server()
        made = store.operator_calls.newest(before=None, call="BackUp", text="", most=1)
        if made and made[0].result == BEGUN:  # the snapshot was taken while its own backup was being made
            store.operator_calls.settle(made[0].id, "done: the store was restored from this backup")
        for run in store.runs.names():
            text = f"restored from the backup of {made_at}; {VOID}"
            store.history.add_event(run, "restored", text)
    finally:
        store.close()
