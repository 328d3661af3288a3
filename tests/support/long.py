"""Which cases of a test `make test` runs, and which are left to `make test-all` and `make matrix`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def long_except(names: Iterable[str], *kept: str, long: Collection[str] | None = None) -> list[Any]:
    """Returns the cases of a parametrisation; all but the kept ones are marked `long`, or `matrix`.

    Args:
        names: The cases.
        *kept: Those that `make test` runs.
        long: Those that `make test-all` runs, too; the others are left to `make matrix`. None for all.

    Raises:
        AssertionError: A kept name is not among the cases.
    """
    cases = list(names)
    assert set(kept) <= set(cases), (kept, cases)
    marks = {name: pytest.mark.long if long is None or name in long else pytest.mark.matrix for name in cases}
    return [name if name in kept else pytest.param(name, marks=marks[name]) for name in cases]
