"""Determines which payloads and checkpoints a store still needs, and deletes the others.

Each run needs its newest checkpoints (`[server] keep_checkpoints`), the payloads that its contract refers to, and the
payloads of its kept rounds: the newest closed or undone rounds (`[server] keep_rounds`), later short rounds, and the
open round; of a round that has ended not those of secure sums. All other payloads and checkpoints are deleted: at the
end of the round that made them unnecessary, or, if a crash prevented this, periodically by `sweep`.

An acknowledged upload that is still needed is never deleted. Deletion checks the rows and deletes the files under the
database's write lock. Under the same lock, the front commits a receipt only if nothing was deleted since before the
payload was stored (`asks.py`) or if the payload still exists, and the engine writes a missing payload or
checkpoint again before it stores a reference to it. Files about to be referenced are new, and `sweep` skips new files,
so this is rarely necessary; `sweep_all` does not skip them.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from fleetdistill.errors import ConfigurationError, RunError, StoreError
from fleetdistill.state import failpoints
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.store.blobs import StoredBlob
from fleetdistill_server.store.records import Run
from fleetdistill_server.store.states import AT_REST
from fleetdistill_server.store.store import Store

__all__ = ["Pruned", "prune"]

GRACE_SECONDS = 3600.0
"""Minimum age in seconds at which `sweep` deletes an unreferenced file; newer files may be about to be referenced."""
SWEEP_SECONDS = 300.0
"""Seconds between two sweeps of a front."""
WAIT_SECONDS = 10.0
"""Longest time in seconds that a command waits for another process that deletes payloads or makes a backup."""
_GROUP = 200
_STAGED_FOR = re.compile(r"ask-(\d+)-attempt-\d+")
_NEVER = 1 << 62


@dataclass(frozen=True)
class Needed:
    """Digests of the payloads and checkpoints that must not be deleted."""

    payloads: set[bytes]
    checkpoints: set[bytes]

    def __contains__(self, sha256: object) -> bool:
        return sha256 in self.payloads or sha256 in self.checkpoints


@dataclass(frozen=True)
class Freed:
    """Files that were deleted, or that a dry run would delete.

    Attributes:
        payloads: Number of payloads and checkpoints.
        staged: Number of uploads that can no longer be completed.
        bytes: Total size in bytes.
    """

    payloads: int = 0
    staged: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Pruned:
    """Result of `prune`; for a dry run, what would be deleted.

    Attributes:
        rounds: Number of rounds that were not pruned before; all rounds if the whole run is deleted.
        events, figures: Number of deleted rows.
        freed: Deleted files.
        later: Unneeded files that are too new to delete while a server runs; its sweeps delete them.
    """

    rounds: int = 0
    events: int = 0
    figures: int = 0
    freed: Freed = Freed()
    later: Freed = Freed()


def needed(store: Store) -> Needed:
    """Returns the digests of all payloads and checkpoints that must not be deleted."""
    result = Needed(set(), set())
    for name in store.runs.names():
        run = store.runs.existing(name)
        result.checkpoints.update(_checkpoints(store, run))
        if run.contract:
            result.payloads.update(_contract_digests(run.contract))
        result.payloads.update(store.runs.payloads_between(name, store.runs.first_kept_round(name), _NEVER))
    return result


def free_after_round(store: Store, run: str, spent: Iterable[bytes] = ()) -> None:
    """Deletes the payloads and checkpoints that a run no longer needs after its newest round has closed.

    Within a transaction they are deleted after its commit, such as that of a simulation's round: a process that is
    killed before it still needs the last checkpoint.

    Args:
        store: Store that contains the run.
        run: Name of the run.
        spent: Digests of the checkpoints, and of payloads of the round itself, that the run no longer keeps.
    """
    keep = store.runs.existing(run).keep_rounds
    first, stop = store.runs.first_kept_round(run, keep + 1), store.runs.first_kept_round(run, keep)
    unneeded = [*store.runs.payloads_between(run, first, stop), *spent]
    if store.database.in_transaction():
        store.database.after_commit(partial(_free, store, unneeded))
    else:
        _free(store, unneeded)


def _free(store: Store, digests: Iterable[bytes]) -> None:
    with store.blobs.exclusive() as free:
        if free:  # otherwise a later sweep deletes them
            _delete(store, digests)
    store.blobs.trim()


def drop_unneeded(store: Store, digests: Iterable[bytes], wait_seconds: float = WAIT_SECONDS) -> None:
    """Deletes those of the given payloads and checkpoints that are no longer needed.

    Within a transaction, nothing is deleted unless an earlier transaction has announced a deletion.
    Waits up to `wait_seconds` for other processes that delete payloads or make a backup, then leaves the files to a
    sweep.
    """
    with contextlib.suppress(StoreError), _exclusive_within(store, wait_seconds) as free:
        if free:
            _delete(store, digests)


def sweep(store: Store, grace_seconds: float = GRACE_SECONDS) -> Freed:
    """Deletes leftovers of crashes: unneeded payloads and checkpoints, and uploads to asks that are no longer open.

    Does nothing while another process deletes payloads or makes a backup.
    """
    store.blobs.trim()
    with store.blobs.exclusive() as free:
        return _sweep(store, grace_seconds) if free else Freed()


def sweep_all(store: Store, damaged: Collection[bytes], wait_seconds: float = 0.0) -> bool:
    """Deletes all unneeded files, regardless of age, and the quarantined files with the given digests.

    Returns:
        False if another process deletes payloads or makes a backup for longer than `wait_seconds`; then nothing is
        deleted.
    """
    with _exclusive_within(store, wait_seconds) as free:
        if free:
            _sweep(store, 0.0)
            store.blobs.drop_quarantined(damaged)
        return free


def _sweep(store: Store, grace_seconds: float) -> Freed:
    kept = needed(store)
    spent = {
        item.sha256: item.bytes
        for item in store.blobs.held()
        if item.age_seconds >= grace_seconds and item.sha256 not in kept
    }
    deleted = _delete(store, spent, grace_seconds)
    store.deletions.end()  # of a process that crashed
    staged = _discard_staged(store, grace_seconds)
    return Freed(len(deleted), len(staged), sum(spent[item] for item in deleted) + sum(staged))


def sweep_directory(directory: Path) -> Freed:
    """Opens the store in a directory and sweeps it."""
    store = Store.open(directory)
    try:
        return sweep(store)
    finally:
        store.close()


def prune(
    store: Store,
    run: str,
    *,
    keep_rounds: int | None = None,
    older_than_seconds: float | None = None,
    whole: bool = False,
    dry_run: bool = False,
    served: bool = False,
) -> Pruned:
    """Deletes the payloads, events and figures of a run's old rounds, or the whole run. Receipts and traffic are kept.

    Args:
        store: Store that contains the run.
        run: Name of the run.
        keep_rounds: Number of newest closed rounds to keep; None for the run's own setting.
        older_than_seconds: Prune only rounds that ended at least this many seconds ago; None for no such limit.
        whole: Delete the run completely.
        dry_run: Only report what would be deleted.
        served: Whether a server uses the store.

    Raises:
        ConfigurationError: The run does not exist, or `keep_rounds` is negative.
        RunError: `keep_rounds` is 0, but the run has not ended.
        StoreError: Another process holds the deletion lock for too long, for example during a backup.
    """
    pruned = store.runs.existing(run)
    _check_may_go(pruned, keep_rounds)
    grace = GRACE_SECONDS if served else 0.0  # a server may be about to refer to new files
    with exclusive(store):
        held = {item.sha256: item for item in store.blobs.held()}
        stop = _NEVER if whole else _first_kept(store, run, keep_rounds, older_than_seconds)
        kept_from = 0 if whole else pruned.kept_from
        rounds = sum(kept_from <= found.number < stop for found in store.runs.rounds(run))
        spent = held.keys() & (
            store.runs.payloads_between(run, 0, stop) | (_run_files(store, pruned) if whole else set())
        )
        events, figures, spent = _delete_rows(store, run, stop, whole, spent, dry_run)
        old = {item for item in spent if held[item].age_seconds >= grace}
        going = old if dry_run else set(_delete(store, old, grace))
    if not dry_run:
        with contextlib.suppress(StoreError):  # the rows are deleted; their pages are used again
            store.database.compact()
    return Pruned(rounds, events, figures, _sum(held, going), _sum(held, spent - old))


def _sum(held: dict[bytes, StoredBlob], digests: set[bytes]) -> Freed:
    return Freed(payloads=len(digests), bytes=sum(held[digest].bytes for digest in digests))


def _check_may_go(run: Run, keep_rounds: int | None) -> None:
    if keep_rounds is not None and keep_rounds < 0:
        raise ConfigurationError(f"--keep-rounds is {keep_rounds}, must be at least 0")
    if keep_rounds == 0 and run.status not in AT_REST:
        raise RunError(
            f"--keep-rounds is 0, but run {run.name!r} is {run.status}; slow devices and `fleetdistill export` "
            "need its newest closed round: set --keep-rounds to at least 1"
        )


def _first_kept(store: Store, run: str, keep_rounds: int | None, older_than_seconds: float | None) -> int:
    first = store.runs.first_kept_round(run, keep_rounds)
    if older_than_seconds is None:
        return first
    since = time.time() - older_than_seconds
    recent: list[int] = [
        found.number for found in store.runs.rounds(run) if found.ended_at is None or found.ended_at >= since
    ]
    return min([first, *recent])


class _DryRunRollback(Exception):
    """Rolls back the transaction of a dry run."""


def _delete_rows(
    store: Store, run: str, stop: int, whole: bool, spent: set[bytes], dry_run: bool
) -> tuple[int, int, set[bytes]]:
    """Deletes rows, except in a dry run; returns the numbers of events and figures, and the files no longer needed."""
    events, figures, left = 0, 0, set[bytes]()
    with contextlib.suppress(_DryRunRollback), store.transaction():
        events, figures = store.runs.delete(run) if whole else store.runs.prune_rounds(run, stop)
        kept = needed(store)
        left = {item for item in spent if item not in kept}
        if dry_run:
            raise _DryRunRollback
        if whole:
            failpoints.hit("runs.delete.before-commit")
    if whole:
        failpoints.hit("runs.delete.after-commit")
    return events, figures, left


def _run_files(store: Store, run: Run) -> set[bytes]:
    """Returns the digests of the files that a run needs besides the payloads of its rounds."""
    return _checkpoints(store, run) | (_contract_digests(run.contract) if run.contract else set())


def _checkpoints(store: Store, run: Run) -> set[bytes]:
    """Returns the digests of the run's current checkpoint and of those that it can be rolled back to."""
    return {run.checkpoint, *(checkpoint.sha256 for checkpoint in store.runs.checkpoints(run.name))} - {b""}


def _contract_digests(contract: bytes) -> set[bytes]:
    read = contract_pb2.Contract.FromString(contract)
    return {read.initial_weights, read.proxy_digest, read.extractor_file} - {b""}


def _delete(store: Store, digests: Iterable[bytes], grace_seconds: float = 0.0) -> list[bytes]:
    """Deletes those blobs that are unneeded and at least `grace_seconds` old; returns their digests.

    The age is read under the lock, because an engine may have put a blob again since the blobs were listed.
    """
    deleted: list[bytes] = []
    left = iter(digests)
    while group := list(islice(left, _GROUP)):
        if not store.database.in_transaction():
            store.deletions.announce()
        with store.transaction():  # the write lock: no receipt can be committed between check and deletion
            if not store.deletions.announced():  # another process has ended it; a sweep deletes the rest
                break
            kept = needed(store)
            for sha256 in group:
                if sha256 not in kept and (not grace_seconds or store.blobs.age_seconds(sha256) >= grace_seconds):
                    store.deletions.announced()  # raises if the connection, and with it the lock, is lost
                    failpoints.hit("engine.gc.before-drop")
                    store.blobs.drop(sha256)
                    failpoints.hit("engine.gc.after-drop")
                    deleted.append(sha256)
            store.deletions.end()
    return deleted


def _discard_staged(store: Store, grace_seconds: float) -> list[int]:
    """Discards uploads to closed asks and partial files left by ended processes; returns their sizes in bytes."""
    staged = store.blobs.staging()  # read first, so that uploads to asks opened later are not in the list
    open_asks = store.asks.open_ids()
    deleted = []
    for item in staged:
        upload = _STAGED_FOR.fullmatch(item.key)
        stale = int(upload[1]) not in open_asks if upload else item.age_seconds >= grace_seconds
        if stale:
            came = store.blobs.staged(item.key)
            store.blobs.discard(item.key)
            if upload:
                store.history.add_refused_traffic(int(upload[1]), came)
            deleted.append(item.bytes)
    return deleted


@contextlib.contextmanager
def exclusive(store: Store) -> Iterator[None]:
    """Locks the store against deletion by other processes, for backups and commands that delete.

    Raises:
        StoreError: Another process still has the lock after `WAIT_SECONDS`.
    """
    with _exclusive_within(store, WAIT_SECONDS) as free:
        if not free:
            raise StoreError("another process is deleting payloads or making a backup; try again when it has finished")
        yield


@contextlib.contextmanager
def _exclusive_within(store: Store, seconds: float) -> Iterator[bool]:
    until = time.monotonic() + seconds
    while True:
        with store.blobs.exclusive() as free:
            if free or time.monotonic() >= until:
                yield free
                return
        time.sleep(0.05)
