"""Backups of a store, taken while it is served, and stores made of them.

A backup is a directory with the same layout as a store: `store.sqlite`, a snapshot, and under `blobs/` every payload
and checkpoint that the snapshot needs, hard links where the file system can. `manifest.json` is written last and names
them all; a directory without it is no backup. While one is made nobody deletes payloads (`Blobs.exclusive`).

A restored store stands where it stood at the backup. Receipts that were given since are void, and each run has an event
that says so; devices that are ahead go on with the state that they have.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetdistill.errors import ConfigurationError, DamagedError, StoreError, in_words
from fleetdistill.state import failpoints
from fleetdistill.state.durable import make_directory, rename_durably, sync_directory, sync_file
from fleetdistill.version import VERSION
from fleetdistill_server.store.blobs import disk_errors
from fleetdistill_server.store.file_blobs import FileBlobs
from fleetdistill_server.store.retention import exclusive, needed
from fleetdistill_server.store.store import Store

FORMAT = 1
_DATABASE, _MANIFEST, _BLOBS = "store.sqlite", "manifest.json", "blobs"
_SHOWN = 5


@dataclass(frozen=True)
class BackedUp:
    """What a backup holds.

    Attributes:
        payloads: Payloads and checkpoints.
        bytes: Of these and of the database.
        lost: What the store should have and has not, or has damaged: a sentence each.
    """

    payloads: int
    bytes: int
    lost: list[str]


def backup(source: Path, target: Path) -> BackedUp:
    """Copies a store, also while it is served.

    Args:
        source: The store's directory.
        target: A directory that is not there yet, or empty.

    Raises:
        ConfigurationError: There is no store, or `target` is not empty.
        StoreError: Something could not be read or written, or another process keeps deleting payloads.
    """
    if not (source / _DATABASE).exists():
        raise ConfigurationError(f"there is no store in {source}")
    _check_empty(target)
    store = Store.open(source)
    try:
        with disk_errors(f"making the backup {target}"), exclusive(store):
            make_directory(target)
            _snapshot(source / _DATABASE, target / _DATABASE)
            failpoints.hit("backup.after-snapshot")
            payloads, checkpoints = _needed_by(target)
            copied, lost = _copy_all(FileBlobs(source / _BLOBS), target / _BLOBS, payloads, checkpoints)
            size = sum(copied.values()) + (target / _DATABASE).stat().st_size
            _sync_all(target)
            failpoints.hit("backup.before-manifest")
            _write_manifest(target, payloads & copied.keys(), checkpoints & copied.keys(), lost)
    finally:
        store.close()
    return BackedUp(len(copied), size, list(lost.values()))


def restore(source: Path, target: Path) -> int:
    """Makes a store of a backup, every file of which is held against its digest first.

    Args:
        source: The backup.
        target: The store's directory, which must not be there or be empty.

    Returns:
        How many payloads and checkpoints the store has.

    Raises:
        ConfigurationError: `source` is no backup of a version that this one reads, or `target` is not empty.
        StoreError: The backup is damaged; the message says what is. Nothing is left at `target` then.
    """
    manifest = _read_manifest(source)
    _check_empty(target)
    wanted = [(one, True) for one in manifest["payloads"]] + [(one, False) for one in manifest["checkpoints"]]
    _check_whole(source, manifest, wanted)
    partial = target.with_name(target.name + ".restoring")
    with disk_errors(f"restoring into {target}"):
        shutil.rmtree(partial, ignore_errors=True)  # what an earlier try left
        make_directory(partial / _BLOBS)
        for name, _ in wanted:
            _copy(source / _BLOBS / _file_of(name), partial / _BLOBS / _file_of(name))
        _copy(source / _DATABASE, partial / _DATABASE)
        _note_restore(partial, manifest["made_at"])
        _sync_all(partial)
        failpoints.hit("restore.before-rename")
        if target.exists():
            target.rmdir()
        partial.replace(target)  # whole or not at all: `serve` would begin afresh in half a store
        sync_directory(target.parent)
    return len(wanted)


def _check_empty(target: Path) -> None:
    with disk_errors(f"looking at {target}"):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigurationError(f"{target} is not an empty directory; name one that is, or that is not there yet")


def _snapshot(source: Path, target: Path) -> None:
    """One consistent state of the database, whoever writes to it meanwhile."""
    try:
        with contextlib.closing(sqlite3.connect(source)) as from_, contextlib.closing(sqlite3.connect(target)) as to:
            from_.backup(to)
    except sqlite3.Error as error:
        raise StoreError(f"the database could not be copied: {error}") from error


def _needed_by(directory: Path) -> tuple[set[bytes], set[bytes]]:
    """Payloads and checkpoints that the snapshot in a directory needs."""
    store = Store.open(directory)
    try:
        found = needed(store)
    finally:
        store.close()
    return found.payloads, found.checkpoints


def _copy_all(
    blobs: FileBlobs, target: Path, payloads: set[bytes], checkpoints: set[bytes]
) -> tuple[dict[bytes, int], dict[bytes, str]]:
    """Copies what is whole; returns the sizes, and why the rest is not there."""
    copied, lost = {}, {}
    for sha256 in sorted(payloads | checkpoints):
        path = target / _file_of(sha256.hex())
        try:
            _verify(blobs, sha256, sha256 in payloads)
            _link_or_copy(blobs.path_of(sha256), path)
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
    """A file at rest never changes, so a link to it is as good as a copy, and free."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _sync_all(directory: Path) -> None:
    """Makes every file and every name under a directory durable."""
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
        "payloads": sorted(one.hex() for one in payloads),
        "checkpoints": sorted(one.hex() for one in checkpoints),
        "lost": {sha256.hex(): why for sha256, why in sorted(lost.items())},
    }
    temporary = target / f"{_MANIFEST}.new"
    temporary.write_text(json.dumps(manifest, indent=1))
    rename_durably(temporary, target / _MANIFEST)
    sync_directory(target.parent)


def _read_manifest(source: Path) -> dict[str, Any]:
    path = source / _MANIFEST
    if not source.is_dir():
        raise ConfigurationError(f"there is no directory {source}; name one that `fleetdistill backup` has made")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        known = {"format", "made_at", "database", "payloads", "checkpoints"} <= manifest.keys()
    except (OSError, ValueError, AttributeError) as error:
        text = (
            f"{source} is no backup, or one that was never finished: its {_MANIFEST} cannot be read: {in_words(error)}"
        )
        raise ConfigurationError(text) from error
    if not known or manifest["format"] != FORMAT:
        found = f"format {manifest.get('format')}, written by version {manifest.get('version')}"
        raise ConfigurationError(f"{path} has {found}; this version reads format {FORMAT}: use the one that wrote it")
    return manifest


def _check_whole(source: Path, manifest: dict[str, Any], wanted: list[tuple[str, bool]]) -> None:
    """Holds every file against its digest. Raises StoreError that names what is wrong."""
    blobs = FileBlobs(source / _BLOBS)
    wrong = list(_wrong_with(source, manifest, blobs, wanted))
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise StoreError(f"the backup {source} is damaged: {'; '.join(wrong[:_SHOWN])}{more}")


def _wrong_with(
    source: Path, manifest: dict[str, Any], blobs: FileBlobs, wanted: list[tuple[str, bool]]
) -> Iterator[str]:
    if not (source / _DATABASE).exists():
        yield f"{_DATABASE} is missing"
    elif _file_digest(source / _DATABASE) != manifest["database"]:
        yield f"{_DATABASE} is not what the manifest names"
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
        for run in store.runs.names():
            text = f"restored from the backup of {made_at}; receipts that were given since are void"
            store.history.add_event(run, "restored", text)
    finally:
        store.close()
