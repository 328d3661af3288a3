"""What operators elsewhere ask for that is not one short transaction of the front's commit thread.

Runs are created in a process of its own, and rolled back and deleted over a connection of its own. Backups of the store
and exports of models are made one at a time, in a directory inside the store's, where a backup's payloads are hard
links; their files are streamed, and deleted afterwards. Directories that a killed front has left are deleted when the
next one starts.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from fleetdistill.errors import ConfigurationError, DamagedError, RefusedError, RunError
from fleetdistill.names import NAME_RULE, is_name
from fleetdistill.wire.codes import Code
from fleetdistill.wire.v1 import operations_pb2
from fleetdistill_server.service import run_changes
from fleetdistill_server.service.creation import NewRun, create_checked
from fleetdistill_server.service.processes import run_child
from fleetdistill_server.service.run_changes import RunState
from fleetdistill_server.store.backup import MANIFEST, backup
from fleetdistill_server.store.blobs import disk_errors
from fleetdistill_server.store.operator_calls import Call
from fleetdistill_server.store.retention import Pruned
from fleetdistill_server.store.rollback import RolledBack
from fleetdistill_server.store.run_names import no_such_run
from fleetdistill_server.store.states import OVER, RunStatus
from fleetdistill_server.store.store import Store
from fleetdistill_server.texts import shorten

PART_BYTES = 1 << 20
EXPORT_SECONDS = 600.0
"""Longest duration of an export in seconds."""
_PREFIX = "sending-"
Parts = Iterator[operations_pb2.FilePart]


def create(
    directory: Path,
    data_directories: Sequence[str],
    request: operations_pb2.CreateRunRequest,
    call: Call,
    ended: threading.Event,
) -> RunState:
    """Checks and creates a run, unless the call has ended; its data files must be in the given directories."""
    if request.clone_of:
        with contextlib.closing(Store.open(directory)) as store:
            _check_known(store, request.clone_of)
    with _refusals():
        run = NewRun(
            settings=_parse(request.run_toml),
            start=request.start,
            clone_of=request.clone_of,
            changes=list(request.changes),
            data_directories=list(data_directories),
        )
        return create_checked(directory, run, call, ended)


def check_checkpoint(store: Store, request: operations_pb2.ChangeRunRequest) -> None:
    """Checks that a run that is to be started can go on from its checkpoint."""
    _check_known(store, request.run)
    with _refusals():
        run_changes.check_checkpoint(store, request.run, request.status)


def change(store: Store, request: operations_pb2.ChangeRunRequest, who: str) -> RunState:
    """Starts, pauses, stops or cancels a run; not the last while devices of a run in progress are to be forgotten."""
    run = request.run
    _check_known(store, run)
    if request.status == RunStatus.CANCELLED and store.runs.status(run) not in OVER and store.devices.to_forget(run):
        text = f"run {run!r} still has devices to forget; try again after the run's next round"
        raise RefusedError(Code.NOT_READY, f"{text}, or cancel it on the server's machine with --store")
    with _refusals():
        return run_changes.change(store, run, request.status, who)


def forget(store: Store, run: str, device: str) -> bool:
    """Requests that a device's contributions to a run be deleted; returns whether they had been before."""
    _check_known(store, run)
    with _refusals():
        return run_changes.request_forgetting(store, run, device)


def check_deletable(store: Store, run: str) -> None:
    """Checks that there is a run, or that its deletion was begun."""
    if not store.operator_calls.has_deleted(run):
        _check_known(store, run)


def delete(directory: Path, run: str) -> Pruned | None:
    """Deletes a run with everything that belongs to it; returns None if it was deleted before."""
    with _refusals(), contextlib.closing(Store.open(directory)) as store:
        return run_changes.delete(directory, store, run)


def roll_back(directory: Path, run: str, to: int, who: str) -> RolledBack:
    """Rolls a run back to the state after a round; `who` is the operator."""
    with _refusals(), contextlib.closing(Store.open(directory)) as store:
        _check_known(store, run)
        return run_changes.roll_back(directory, store, run, to, who)


def _check_known(store: Store, run: str) -> None:
    """Raises RefusedError if there is no such run."""
    if store.runs.get(run) is None:
        raise RefusedError(Code.UNKNOWN_RUN, shorten(no_such_run(run, store.runs.names())))


def _parse(text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or a number of too many digits
        raise ConfigurationError(f"run.toml: {error}") from error


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except (ConfigurationError, RunError, DamagedError) as error:
        raise RefusedError(Code.BAD_MESSAGE, shorten(str(error))) from error


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
    if not is_name(run):  # which no argument of a process may be, with a zero byte in it
        raise RefusedError(Code.BAD_MESSAGE, f"run is {run[:70]!r}, must be {NAME_RULE}")
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
