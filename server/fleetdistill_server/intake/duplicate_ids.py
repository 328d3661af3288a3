"""Finds duplicates in a column that does not fit in memory, by reading the column repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

ROOM = 1 << 20
"""Default number of values that one pass over the column holds in memory."""
_MAX_READINGS = 64
Read = Callable[[], Iterator[np.ndarray]]


def first_repeat(read: Read, count: int, room: int = ROOM) -> tuple[int, int] | None:
    """Returns the smallest duplicated value and the row of its second occurrence; None if all values differ.

    A strictly increasing column is read once. Any other column is read once per `room` values, smallest values first,
    but at most about 64 times: for longer columns, each pass holds a 64th of the values. Memory use is twice the values
    held: 16 MiB with the default `room` for columns up to 512 MiB, and 1/32 of the column above that.

    Args:
        read: Returns the int64 column from its start, as an iterator over non-empty pieces.
        count: Length of the column.
        room: Number of values to hold per pass, at least 2.
    """
    if _is_increasing(read):
        return None
    value = _smallest_repeat(read, max(room, -(-count // _MAX_READINGS)))
    return None if value is None else (value, _second_row(read, value))


def _is_increasing(read: Read) -> bool:
    last = None
    for piece in read():
        if (last is not None and piece[0] <= last) or not (piece[1:] > piece[:-1]).all():
            return False
        last = piece[-1]
    return True


def _smallest_repeat(read: Read, room: int) -> int | None:
    low = None
    buffer = np.empty(2 * room, np.int64)
    while True:
        held, is_all = _smallest(read, low, buffer)
        repeated = np.flatnonzero(held[1:] == held[:-1])
        if len(repeated):
            return int(held[repeated[0]])
        if is_all:
            return None
        low = held[-1]  # included again, because equal values may not have fitted


def _smallest(read: Read, low: np.int64 | None, buffer: np.ndarray) -> tuple[np.ndarray, bool]:
    """Returns up to half a buffer of the smallest values from `low` on, sorted, and whether no larger values remain."""
    room = len(buffer) // 2
    used = 0
    high = None
    for piece in read():
        wanted = piece if low is None else piece[piece >= low]
        wanted = wanted if high is None else wanted[wanted <= high]
        while len(wanted):
            taken = wanted[: len(buffer) - used]
            buffer[used : used + len(taken)] = taken
            used, wanted = used + len(taken), wanted[len(taken) :]
            if used == len(buffer):
                buffer.partition(room - 1)
                used, high = room, buffer[room - 1]
    buffer[:used].sort()
    return buffer[: min(used, room)], high is None and used <= room


def _second_row(read: Read, value: int) -> int:
    rows: list[int] = []
    first = 0
    for piece in read():
        rows += (first + np.flatnonzero(piece == value)[:2]).tolist()
        if len(rows) > 1:
            return rows[1]
        first += len(piece)
    raise AssertionError(f"{value} is no longer duplicated; the column changed between two passes")
