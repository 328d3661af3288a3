"""Finding a number that repeats in a column that is too long for memory: the column is read again and again instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

ROOM = 1 << 20
"""Numbers that are compared with each other in one reading."""
_MOST_READINGS = 64
Read = Callable[[], Iterator[np.ndarray]]


def first_repeat(read: Read, count: int, room: int = ROOM) -> tuple[int, int] | None:
    """The smallest number that repeats, with the row where it stands for the second time; None where all differ.

    Numbers that only rise are read once. Others are read once for each `room` of them, the smallest first, and at most
    about 64 times: of more than 64 * `room` numbers a 64th is held instead. In memory is twice what is held, and a few
    pieces: with `ROOM` 16 MiB for up to 512 MiB of numbers, and above that a 32nd of them.

    Args:
        read: Gives the column of int64 anew, in pieces that are not empty.
        count: Its length.
        room: At least 2.
    """
    if _rises(read):
        return None
    value = _smallest_repeat(read, max(room, -(-count // _MOST_READINGS)))
    return None if value is None else (value, _second_row(read, value))


def _rises(read: Read) -> bool:
    last = None
    for piece in read():
        if (last is not None and piece[0] <= last) or not (piece[1:] > piece[:-1]).all():
            return False
        last = piece[-1]
    return True


def _smallest_repeat(read: Read, room: int) -> int | None:
    low, buffer = None, np.empty(2 * room, np.int64)
    while True:
        held, is_all = _smallest(read, low, buffer)
        again = np.flatnonzero(held[1:] == held[:-1])
        if len(again):
            return int(held[again[0]])
        if is_all:
            return None
        low = held[-1]  # once more: what is equal to it may not have been held


def _smallest(read: Read, low: np.int64 | None, buffer: np.ndarray) -> tuple[np.ndarray, bool]:
    """The smallest numbers from `low` on, half a buffer of them, in order, and whether that is all."""
    room, used, high = len(buffer) // 2, 0, None
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
    raise AssertionError(f"{value} repeats no more")
