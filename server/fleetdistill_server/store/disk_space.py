"""How full the disk may become: uploads and asks are refused before it is full, counting what is on its way in.

Two bounds, both of `[server]`: `disk_budget_bytes`, the most that the store's directory may take, and
`keep_free_bytes`, which stays free on its file system for checkpoints, the database and everybody else. Checkpoints and
rows are never refused: without them nothing could be freed again.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fleetdistill.errors import NoSpaceError
from fleetdistill_server.store.blobs import Blobs, disk_errors

_LOOK_SECONDS = 5.0
_MAKE_ROOM_SECONDS = 10.0


@dataclass(frozen=True)
class Bounds:
    """What `[server]` says about the disk.

    Attributes:
        disk_budget_bytes: The most that the store's directory may take; 0 for no such bound.
        keep_free_bytes: What stays free on its file system.
    """

    disk_budget_bytes: int = 0
    keep_free_bytes: int = 0


@dataclass(eq=False)
class Reservation:
    """Room for an upload under way; given back once, by `release`."""

    key: str
    size: int
    space: DiskSpace

    def release(self, stored: int = 0) -> None:
        """The upload has ended.

        Args:
            stored: Bytes that are at rest now, 0 for an upload that was not finished. What is still staged counts by
                itself.
        """
        self.space.release(self, stored)


class DiskSpace:
    """Room on the disk of one store, as one process sees it.

    Args:
        directory: The store's.
        blobs: Its payloads.
        bounds: How full it may become.
        make_room: Deletes what nothing needs; called before anything is refused, not more often than every ten seconds.
            It may take long: what has room goes on meanwhile, what has none is refused.
    """

    def __init__(self, directory: Path, blobs: Blobs, bounds: Bounds, make_room: Callable[[], object]) -> None:
        self._directory = directory
        self._blobs = blobs
        self._bounds = bounds
        self._make_room = make_room
        self._lock = threading.Lock()
        self._reserved: dict[Reservation, int] = {}
        # Bytes at the last look and what has changed since, both without what uploads under way have staged.
        self.looked, self._used, self._since = -math.inf, 0, 0
        self._made_room = -math.inf

    def reserve(self, key: str, size: int) -> Reservation:
        """Sets room aside for an upload that is staged under `key`.

        Args:
            key: As in `Blobs.stage`; what is staged there already counts as part of `size`.
            size: Bytes of the whole.

        Raises:
            NoSpaceError: There is no room; the message says which bound and by how much.
        """
        made = Reservation(key, size, self)
        self._take(size, key, lambda: self._hold(made))
        return made

    def release(self, reservation: Reservation, stored: int = 0) -> None:
        """Takes a reservation back, see `Reservation.release`; one that was taken back before is no error."""
        with self._lock:
            if self._reserved.pop(reservation, None) is not None:
                self._add(stored or self._staged(reservation.key))

    def check(self, size: int) -> None:
        """Raises NoSpaceError unless there is room for a payload that is about to be written."""
        self._take(size, "", lambda: self._add(size))

    def _hold(self, made: Reservation) -> None:
        self._reserved[made] = made.size
        self._add(-self._staged(made.key))  # it is part of the size that is held from now on

    def _staged(self, key: str) -> int:
        return self._blobs.staged(key) if self._bounds.disk_budget_bytes else 0

    def _add(self, size: int) -> None:
        self._since += size

    def _take(self, size: int, key: str, take: Callable[[], None]) -> None:
        """Calls `take` if there is room, at the latest once some was made. Raises NoSpaceError."""
        lacking = self._take_now(size, key, take)
        if lacking and self._may_make_room():
            self._make_room()
            with self._lock:
                self.looked = -math.inf
            lacking = self._take_now(size, key, take)
        if lacking:
            raise NoSpaceError(lacking)

    def _take_now(self, size: int, key: str, take: Callable[[], None]) -> str:
        with self._lock:
            lacking = self._lacking(size, key)
            if not lacking:
                take()
        return lacking

    def _may_make_room(self) -> bool:
        with self._lock:
            due = time.monotonic() - self._made_room >= _MAKE_ROOM_SECONDS
            if due:
                self._made_room = time.monotonic()
        return due

    def _lacking(self, size: int, key: str) -> str:
        """What is against a payload of `size` bytes that is staged under `key`; empty for nothing."""
        if not (self._bounds.disk_budget_bytes or self._bounds.keep_free_bytes):
            return ""
        staged = {one.key: one.bytes for one in self._blobs.staging()}
        missing = max(size - staged.get(key, 0), 0)
        under_way = sum(self._reserved.values())
        begun = sum(staged.get(one.key, 0) for one in self._reserved)
        return self._over_budget(missing, under_way, begun) or self._below_floor(missing, under_way - begun)

    def _over_budget(self, missing: int, under_way: int, begun: int) -> str:
        """Uploads under way count as what they will be, all else as it is on the disk."""
        budget = self._bounds.disk_budget_bytes
        if not budget:
            return ""
        if time.monotonic() - self.looked >= _LOOK_SECONDS:
            self.looked, self._since = time.monotonic(), 0
            self._used = _bytes_under(self._directory) - begun
        total = self._used + self._since + under_way + missing
        if total <= budget:
            return ""
        text = f"with {missing} bytes more the store would take {total} ({under_way} of uploads under way)"
        return f"{text}, [server] disk_budget_bytes is {budget}"

    def _below_floor(self, missing: int, promised: int) -> str:
        """`promised` bytes of uploads under way are still to be written."""
        with disk_errors("looking at the disk"):
            found = os.statvfs(self._directory)
        free = found.f_bavail * found.f_frsize - promised - missing
        floor = self._bounds.keep_free_bytes
        if free >= floor:
            return ""
        return f"with {missing} bytes more the disk would have {free} free, [server] keep_free_bytes is {floor}"


def _bytes_under(directory: Path) -> int:
    with disk_errors("looking at the store"):
        return sum(_size(Path(folder) / name) for folder, _, names in os.walk(directory) for name in names)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # deleted or renamed meanwhile
        return 0
