"""The checks of `fleetdistill doctor` on a store: database, schema, clock and payloads. Nothing is changed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from fleetdistill.device.doctor import ERROR, OK, WARNING
from fleetdistill.errors import DamagedError
from fleetdistill_server.config.server_config import ServerSection
from fleetdistill_server.store.checks import check_schema, is_current
from fleetdistill_server.store.location import Location, has_store
from fleetdistill_server.store.retention import needed
from fleetdistill_server.store.rollback import way_back
from fleetdistill_server.store.store import Store, open_for_reading

_SHOWN = 5
_CLOCK_SECONDS = 60.0
"""Newest row's lead over the clock from which the clock counts as set back."""
Found = Iterator[tuple[str, str]]


def store_findings(server: ServerSection, now: float, *, quick: bool) -> Found:
    """Yields what is wrong with the store of a server.

    Args:
        server: The server's settings.
        now: This machine's time, Unix seconds.
        quick: Whether to look only whether payloads exist. Those in an object store are never read.

    Raises:
        ConfigurationError: An extra is missing, or the place of the payloads does not exist.
        StoreError: The database cannot be reached, is damaged, or is from a later version.
    """
    directory = Path(server.store)
    location = Location.of(server)
    if not has_store(directory):
        yield OK, f"there is no store in {directory} yet; `fleetdistill serve` creates it"
        return
    database, blobs = open_for_reading(directory, location)
    with contextlib.closing(database):
        database.check()
        yield OK, f"the database {database.name} is intact"
        check_schema(database, blobs)
        if not is_current(database):
            text = "an earlier version wrote the store; back it up before `fleetdistill serve` migrates it"
            yield WARNING, f"{text}. Payloads were not checked"
            return
        blobs.check()
        store = Store(database, blobs)
        yield from _clock(store, now)
        yield from _payloads(store, read=not quick and not location.blobs)


def _clock(store: Store, now: float) -> Found:
    newest = store.latest_time() or 0.0
    if newest > now + _CLOCK_SECONDS:
        lead = f"{newest - now:,.0f} s later than this machine's clock"
        yield ERROR, f"the newest row is from {_when(newest)}, {lead}; set the clock, for example with NTP"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _payloads(store: Store, *, read: bool) -> Found:
    """Compares the payloads and checkpoints that are needed with their digests, or looks whether they exist."""
    wanted = needed(store)
    damaged = {}
    for sha256 in sorted(wanted.payloads | wanted.checkpoints):
        is_payload = sha256 in wanted.payloads
        reason = _damage(store, sha256, is_payload=is_payload, read=read)
        if reason:
            lost = "the server asks devices again for lost answers" if is_payload else _without(store, sha256)
            damaged[sha256] = f"{reason}; {lost}"
    if damaged:  # a server beside this command deletes what it no longer needs
        again = needed(store)
        damaged = {one: reason for one, reason in damaged.items() if one in again.payloads | again.checkpoints}
    for _, reason in list(damaged.items())[:_SHOWN]:
        yield ERROR, reason
    if len(damaged) > _SHOWN:
        yield ERROR, f"{len(damaged) - _SHOWN} more payloads or checkpoints are missing or damaged"
    if not damaged:
        how = "match their digests" if read else "exist"
        yield OK, f"all {len(wanted.payloads | wanted.checkpoints)} payloads and checkpoints {how}"


def _damage(store: Store, sha256: bytes, *, is_payload: bool, read: bool) -> str:
    if not store.blobs.has(sha256):
        return f"{'payload' if is_payload else 'checkpoint'} {sha256.hex()} is missing"
    if read:
        try:
            if is_payload:
                store.blobs.open(sha256, verify=True)
            else:
                store.blobs.get_state(sha256)
        except DamagedError as error:
            return str(error)
    return ""


def _without(store: Store, sha256: bytes) -> str:
    """Returns which runs need a checkpoint that is lost, and what to do."""
    said = []
    for run in store.runs.names():
        if store.runs.existing(run).checkpoint == sha256:
            said.append(f"run {run!r} cannot go on from it: {way_back(store, run, sha256)}")
        elif result := [checkpoint.round for checkpoint in store.runs.checkpoints(run) if checkpoint.sha256 == sha256]:
            said.append(f"run {run!r} cannot be rolled back to round {result[-1]}")
    return "; ".join(said)
