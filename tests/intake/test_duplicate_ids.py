"""Numbers that repeat are found in bounded memory, as a sort of the whole column finds them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetdistill_server.intake.ingest import ROOM, first_repeat

NUMBERS = st.lists(st.integers(0, 40) | st.integers(0, 2**63 - 1), min_size=1, max_size=60)


def in_one_go(values: np.ndarray) -> tuple[int, int] | None:
    """The plain way, with the whole column and its order in memory."""
    order = np.argsort(values, kind="stable")
    again = np.flatnonzero(values[order][1:] == values[order][:-1])
    return (int(values[order[again[0]]]), int(order[again[0] + 1])) if len(again) else None


def found(values: np.ndarray, piece: int, room: int = ROOM) -> tuple[int, int] | None:
    def read() -> Iterator[np.ndarray]:
        return (values[first : first + piece] for first in range(0, len(values), piece))

    return first_repeat(read, len(values), room)


@given(NUMBERS, st.integers(1, 20), st.integers(2, 20))
def test_the_same_is_found_as_with_all_in_memory(numbers: list[int], piece: int, room: int) -> None:
    values = np.array(numbers, np.int64)
    assert found(values, piece, room) == in_one_go(values)


@given(st.permutations(range(50)), st.integers(1, 20), st.integers(2, 20))
def test_where_all_differ_nothing_is_found(numbers: list[int], piece: int, room: int) -> None:
    values = np.array(numbers, np.int64)
    assert found(values, piece, room) is None
    values[numbers.index(17)] = 42
    assert found(values, piece, room) == in_one_go(values) is not None


@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
def test_memory_does_not_grow_with_the_column(order: str) -> None:
    """The column has 48 MB, and one repeat."""
    values = np.arange(6 * ROOM)
    values = {"rising": values, "falling": values[::-1].copy(), "mixed": (values * 5) % (6 * ROOM + 1)}[order]
    values[-1] = values[7]
    tracemalloc.start()
    assert found(values, 1 << 17) == (values[7], len(values) - 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * ROOM + (8 << 20)
