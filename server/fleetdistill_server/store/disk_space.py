"""Disk-space limits: uploads and asks are refused before the disk is full.

Uploads in progress count with their final size.

`[server]` has two limits: `disk_budget_bytes`, the largest size of the store's directory, and `keep_free_bytes`, which
must stay free on its file system for checkpoints, the database and other programs. Checkpoints and rows are never
refused, because freeing space requires them.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fleetdistill.errors import NoSpaceError
from fleetdistill_server.store.blobs import Blobs, disk_errors
from fleetdistill_server.texts import readable_bytes

__all__ = ["bytes_under"]

_LOOK_SECONDS = 5.0
_MAKE_ROOM_SECONDS = 10.0


@dataclass(frozen=True)
class Bounds:
    """The `[server]` settings that limit disk usage.

    Attributes:
        disk_budget_bytes: Largest size of the store's directory in bytes; 0 for no limit.
        keep_free_bytes: Bytes that must stay free on its file system.
    """

    disk_budget_bytes: int = 0
    keep_free_bytes: int = 0


@dataclass(eq=False)
class Reservation:
    """Disk space reserved for an upload in progress, until `release` is called."""

    key: str
    size: int
    space: DiskSpace

    def release(self, stored: int = 0) -> None:
        """Releases the reservation at the end of the upload.

        Args:
            stored: Bytes that the upload has stored; 0 if it was not completed. Data that is still staged is counted
                separately.
        """
        self.space.release(self, stored)


class DiskSpace:
    """Disk-space accounting of one store, as seen by one process.

    Args:
        directory: The store's directory.
        blobs: The store's payloads.
        bounds: Limits.
        make_room: Deletes unneeded files. Called before a request is refused, at most every 10 seconds. The call may be
            slow; until it returns, requests that fit are accepted and others are refused.
    """

    def __init__(self, directory: Path, blobs: Blobs, bounds: Bounds, make_room: Callable[[], object]) -> None:
        self._directory = directory
        self._blobs = blobs
        self._bounds = bounds
        self._make_room = make_room
        self._lock = threading.Lock()
        self._reserved: dict[Reservation, int] = {}
        # Bytes at the last measurement and the change since; neither includes staged data of uploads in progress.
        self.looked, self._used, self._since = -math.inf, 0, 0
        self._made_room = -math.inf

    def reserve(self, key: str, size: int) -> Reservation:
        """Reserves space for an upload that is staged under `key`.

        Args:
            key: Key passed to `Blobs.stage`; data already staged under it counts as part of `size`.
            size: Total size of the upload in bytes.

        Raises:
            NoSpaceError: The upload does not fit; the message names the limit and the sizes.
        """
        made = Reservation(key, size, self)
        self._take(size, key, lambda: self._hold(made))
        return made

    def release(self, reservation: Reservation, stored: int = 0) -> None:
        """Releases a reservation (see `Reservation.release`). Releasing it again has no effect."""
        with self._lock:
            if self._reserved.pop(reservation, None) is not None:
                self._add(stored or self._staged(reservation.key))

    def check(self, size: int) -> None:
        """Raises NoSpaceError unless there is room for a payload of `size` bytes, which then counts as used."""
        self._take(size, "", lambda: self._add(size))

    def shortfall(self) -> str:
        """Returns which limit is reached, so that no upload fits; empty if none is. Raises StoreError."""
        with self._lock:
            return self._shortfall(1, "")

    def _hold(self, made: Reservation) -> None:
        self._reserved[made] = made.size
        self._add(-self._staged(made.key))  # the reservation now includes it

    def _staged(self, key: str) -> int:
        return self._blobs.staged(key) if self._bounds.disk_budget_bytes else 0

    def _add(self, size: int) -> None:
        self._since += size

    def _take(self, size: int, key: str, take: Callable[[], None]) -> None:
        """Calls `take` if the size fits, after freeing space if necessary. Raises NoSpaceError if it does not fit."""
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
            lacking = self._shortfall(size, key)
            if not lacking:
                take()
        return lacking

    def _may_make_room(self) -> bool:
        with self._lock:
            due = time.monotonic() - self._made_room >= _MAKE_ROOM_SECONDS
            if due:
                self._made_room = time.monotonic()
        return due

    def _shortfall(self, size: int, key: str) -> str:
        """Returns why a payload of `size` bytes staged under `key` does not fit; empty if it fits."""
        if not (self._bounds.disk_budget_bytes or self._bounds.keep_free_bytes):
            return ""
        staged = {item.key: item.bytes for item in self._blobs.staging()}
        missing = max(size - staged.get(key, 0), 0)
        under_way = sum(self._reserved.values())
        begun = sum(staged.get(item.key, 0) for item in self._reserved)
        return self._over_budget(missing, under_way, begun) or self._below_floor(missing, under_way - begun)

    def _over_budget(self, missing: int, under_way: int, begun: int) -> str:
        """Returns how an upload would exceed `disk_budget_bytes`; empty if it would not."""
        budget = self._bounds.disk_budget_bytes
        if not budget:
            return ""
        if time.monotonic() - self.looked >= _LOOK_SECONDS:
            self.looked, self._since = time.monotonic(), 0
            self._used = bytes_under(self._directory) - begun
        total = self._used + self._since + under_way + missing
        if total <= budget:
            return ""
        text = f"storing {readable_bytes(missing)} more would bring the store to {readable_bytes(total)} "
        text += f"({readable_bytes(under_way)} for uploads in progress)"
        return f"{text}; [server] disk_budget_bytes is {readable_bytes(budget)}"

    def _below_floor(self, missing: int, promised: int) -> str:
        """Returns how an upload would violate `keep_free_bytes`; empty if it would not.

        `promised` is the number of bytes that uploads in progress have yet to write.
        """
        with disk_errors("measuring free disk space"):
            free = shutil.disk_usage(self._directory).free - promised - missing
        floor = self._bounds.keep_free_bytes
        if free >= floor:
            return ""
        text = f"storing {readable_bytes(missing)} more would leave {readable_bytes(max(free, 0))} free on the disk"
        return f"{text}; [server] keep_free_bytes is {readable_bytes(floor)}"


def bytes_under(directory: Path) -> int:
    """Returns the size of all files in a directory. Raises StoreError."""
    with disk_errors("measuring the size of the store"):
        return sum(_size(Path(folder) / name) for folder, _, names in os.walk(directory) for name in names)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # deleted or renamed in the meantime
        return 0
