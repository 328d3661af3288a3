"""What of a store may be deleted, and deleting it.

Needed are, of every run, its newest checkpoints (`[server] keep_checkpoints`), what its contract names, and what its
kept rounds speak of: the newest closed ones (`[server] keep_rounds`), short ones after them, and the open one. All else
goes: at the end of a round what just ceased to be needed, and now and then, by `sweep`, what crashes left behind.

No acknowledged upload is ever deleted. Who deletes looks at the rows and deletes under the database's write lock. Under
the same lock the front commits a receipt only if the payload is still there, and the engine names a payload or a state
only if it is there, and else writes it again. What they are about to speak of is young, and `sweep` leaves the young
alone, so that this is seldom needed; `sweep_all` does not.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fleetdistill.errors import ConfigurationError, RunError, StoreError
from fleetdistill.state import failpoints
from fleetdistill.wire.v1 import contract_pb2
from fleetdistill_server.store.blobs import Held
from fleetdistill_server.store.database import Row
from fleetdistill_server.store.run_names import no_such_run
from fleetdistill_server.store.states import AT_REST
from fleetdistill_server.store.store import Store

GRACE_SECONDS = 3600.0
"""What nothing speaks of is left alone for so long: somebody may be about to."""
SWEEP_SECONDS = 300.0
"""Between two sweeps of a front."""
WAIT_SECONDS = 10.0
"""A command waits so long for whoever else deletes or makes a backup."""
_GROUP = 200
_STAGED_FOR = re.compile(r"ask-(\d+)-attempt-\d+")
_NEVER = 1 << 62


@dataclass(frozen=True)
class Needed:
    """Digests of what must not be deleted."""

    payloads: set[bytes]
    checkpoints: set[bytes]

    def __contains__(self, sha256: object) -> bool:
        return sha256 in self.payloads or sha256 in self.checkpoints


@dataclass(frozen=True)
class Freed:
    """What was deleted, or would be.

    Attributes:
        payloads: Payloads and checkpoints.
        staged: Uploads that nobody will finish.
        bytes: Of both together.
    """

    payloads: int = 0
    staged: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Pruned:
    """What `prune` gave up, or would.

    Attributes:
        rounds: Rounds that were not given up before; with the whole run all of it.
        events, figures: Rows about them.
        freed: Files.
        later: Files that nothing needs any more either, but too young to delete beside a server: its sweeps do that.
    """

    rounds: int = 0
    events: int = 0
    figures: int = 0
    freed: Freed = Freed()
    later: Freed = Freed()


def needed(store: Store) -> Needed:
    """Everything that must stay readable."""
    found = Needed(set(), set())
    for name in store.runs.names():
        row = store.runs.get(name) or {}
        found.checkpoints.update(_checkpoints(store, row))
        if row["contract"] is not None:
            found.payloads.update(_named_by(row["contract"]))
        found.payloads.update(store.runs.payloads_between(name, store.runs.first_kept_round(name), _NEVER))
    return found


def free_after_round(store: Store, run: str, checkpoints: Iterable[bytes] = ()) -> None:
    """Deletes what the run ceased to need when its newest round closed.

    Args:
        store: Of the run.
        run: The run.
        checkpoints: Those that the run keeps no longer.
    """
    keep = int((store.runs.get(run) or {})["keep_rounds"])
    first, stop = store.runs.first_kept_round(run, keep + 1), store.runs.first_kept_round(run, keep)
    spent = store.runs.payloads_between(run, first, stop)
    with store.blobs.exclusive() as free:
        if free:  # otherwise a later sweep does it
            _delete(store, [*spent, *checkpoints])


def drop_unneeded(store: Store, digests: Iterable[bytes], wait_seconds: float = WAIT_SECONDS) -> None:
    """Deletes those that nothing needs any more; waits so long for whoever else deletes, then leaves it to a sweep."""
    with contextlib.suppress(StoreError), _exclusive_within(store, wait_seconds) as free:
        if free:
            _delete(store, digests)


def sweep(store: Store, grace_seconds: float = GRACE_SECONDS) -> Freed:
    """Deletes what crashes left behind: payloads that nothing needs, and uploads whose asks take no answer any more.

    Does nothing while another process deletes or makes a backup.
    """
    with store.blobs.exclusive() as free:
        return _sweep(store, grace_seconds) if free else Freed()


def sweep_all(store: Store, damaged: Collection[bytes], wait_seconds: float = 0.0) -> bool:
    """Deletes all that nothing needs, the young too, and what is in quarantine under these digests.

    Returns:
        False, and nothing is deleted, if another process deletes or makes a backup for longer than `wait_seconds`.
    """
    with _exclusive_within(store, wait_seconds) as free:
        if free:
            _sweep(store, 0.0)
            store.blobs.drop_quarantined(damaged)
        return free


def _sweep(store: Store, grace_seconds: float) -> Freed:
    kept = needed(store)
    spent = {
        one.sha256: one.bytes
        for one in store.blobs.held()
        if one.age_seconds >= grace_seconds and one.sha256 not in kept
    }
    deleted = _delete(store, spent, grace_seconds)
    staged = _discard_staged(store, grace_seconds)
    return Freed(len(deleted), len(staged), sum(spent[one] for one in deleted) + sum(staged))


def sweep_directory(directory: Path) -> Freed:
    """Sweeps the store in a directory."""
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
    served: str | None = None,
) -> Pruned:
    """Gives up old rounds of a run: their payloads, events and figures; receipts and traffic stay. Or the whole run.

    Args:
        store: Of the run.
        run: The run.
        keep_rounds: Closed rounds to keep, the newest first; by default the run's own setting.
        older_than_seconds: Give up only rounds that ended so long ago.
        whole: Forget the run altogether.
        dry_run: Only say what would go.
        served: The run that a server works on at this moment, if one does.

    Raises:
        ConfigurationError: There is no such run, or `keep_rounds` is negative.
        RunError: The run may still need what would go.
        StoreError: Another process deletes or makes a backup, and does not end.
    """
    row = store.runs.get(run)
    if row is None:
        raise ConfigurationError(no_such_run(run, store.runs.names()))
    _check_may_go(row, keep_rounds, whole, served)
    grace = 0.0 if served is None else GRACE_SECONDS  # a server may be about to speak of what is young
    with exclusive(store):
        held = {one.sha256: one for one in store.blobs.held()}
        stop = _NEVER if whole else _first_kept(store, run, keep_rounds, older_than_seconds)
        kept_from = 0 if whole else int(row["kept_from"])
        rounds = sum(kept_from <= one["round"] < stop for one in store.runs.rounds(run))
        spent = held.keys() & (store.runs.payloads_between(run, 0, stop) | (_whole(store, row) if whole else set()))
        events, figures, spent = _give_up(store, row, stop, whole, spent, dry_run)
        old = {one for one in spent if held[one].age_seconds >= grace}
        going = old if dry_run else set(_delete(store, old, grace))
    return Pruned(rounds, events, figures, _sum(held, going), _sum(held, spent - old))


def _sum(held: dict[bytes, Held], digests: set[bytes]) -> Freed:
    return Freed(payloads=len(digests), bytes=sum(held[one].bytes for one in digests))


def _check_may_go(row: Row, keep_rounds: int | None, whole: bool, served: str | None) -> None:
    over = row["status"] in AT_REST
    if keep_rounds is not None and keep_rounds < 0:
        raise ConfigurationError(f"--keep-rounds is {keep_rounds}, must be at least 0")
    if keep_rounds == 0 and not over:
        raise RunError(
            f"run {row['name']!r} is {row['status']}: its newest closed round is needed, for devices that are slow and "
            "for `fleetdistill export`; keep at least 1"
        )


def _first_kept(store: Store, run: str, keep_rounds: int | None, older_than_seconds: float | None) -> int:
    first = store.runs.first_kept_round(run, keep_rounds)
    if older_than_seconds is None:
        return first
    since = time.time() - older_than_seconds
    young: list[int] = [
        one["round"] for one in store.runs.rounds(run) if one["ended_at"] is None or one["ended_at"] >= since
    ]
    return min([first, *young])


class _TakeBack(Exception):
    """Ends a transaction without its effects."""


def _give_up(
    store: Store, row: Row, stop: int, whole: bool, spent: set[bytes], dry_run: bool
) -> tuple[int, int, set[bytes]]:
    """Changes the rows, unless it is a dry run; returns the events and figures that go, and what nothing needs then."""
    events, figures, left = 0, 0, set[bytes]()
    with contextlib.suppress(_TakeBack), store.transaction():
        events, figures = store.runs.delete(row["name"]) if whole else store.runs.prune_rounds(row["name"], stop)
        kept = needed(store)
        left = {one for one in spent if one not in kept}
        if dry_run:
            raise _TakeBack
    return events, figures, left


def _whole(store: Store, row: Row) -> set[bytes]:
    """What a run needs beside the payloads of its rounds."""
    return _checkpoints(store, row) | (_named_by(row["contract"]) if row["contract"] is not None else set())


def _checkpoints(store: Store, row: Row) -> set[bytes]:
    """The run's state, and those that it can be set back to."""
    return {row["checkpoint"], *(one["sha256"] for one in store.runs.checkpoints(row["name"]))} - {None}


def _named_by(contract: bytes) -> set[bytes]:
    read = contract_pb2.Contract.FromString(contract)
    return {read.initial_weights, read.proxy_digest, read.extractor_file} - {b""}


def _delete(store: Store, digests: Iterable[bytes], grace_seconds: float = 0.0) -> list[bytes]:
    """Deletes those that nothing needs and that are not young, and returns them.

    Age is looked up here, under the lock: an engine may have put one of them again since they were listed.
    """
    gone: list[bytes] = []
    left = iter(digests)
    while group := list(islice(left, _GROUP)):
        with store.transaction():  # the write lock: between the look and the deletion nobody commits a receipt
            kept = needed(store)
            for sha256 in group:
                if sha256 not in kept and store.blobs.age_seconds(sha256) >= grace_seconds:
                    failpoints.hit("engine.gc.before-drop")
                    store.blobs.drop(sha256)
                    failpoints.hit("engine.gc.after-drop")
                    gone.append(sha256)
    return gone


def _discard_staged(store: Store, grace_seconds: float) -> list[int]:
    """Discards uploads whose asks are closed, and pieces of payloads that a dead process made; returns their sizes."""
    staged = store.blobs.staging()  # first: what is staged for an ask that opens after this look is not in it
    open_asks = store.asks.open_ids()
    gone = []
    for one in staged:
        upload = _STAGED_FOR.fullmatch(one.key)
        stale = int(upload[1]) not in open_asks if upload else one.age_seconds >= grace_seconds
        if stale:
            came = store.blobs.staged(one.key)
            store.blobs.discard(one.key)
            if upload:
                store.history.add_refused_traffic(int(upload[1]), came)
            gone.append(one.bytes)
    return gone


@contextlib.contextmanager
def exclusive(store: Store) -> Iterator[None]:
    """Waits a while for whoever else deletes or makes a backup."""
    with _exclusive_within(store, WAIT_SECONDS) as free:
        if not free:
            raise StoreError("another process deletes payloads or makes a backup; try again when it is done")
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
