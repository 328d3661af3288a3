"""Which cases of a test `make test` runs, and which are left to `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long_except(names: Iterable[str], *kept: str) -> list[Any]:
    """Returns the cases of a parametrisation; all but the kept ones are marked `long`.

    Raises:
        AssertionError: A kept name is not among the cases.
    """
    cases = list(names)
    assert set(kept) <= set(cases), (kept, cases)
    return [name if name in kept else pytest.param(name, marks=pytest.mark.long) for name in cases]
