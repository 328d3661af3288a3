"""A short soak, and that a leak would be found. Growth is held against uploads, so no busy machine turns it red."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak.slope import theil_sen
from soak.soak import FILES_BOUND, Outcome, soak

UPLOADS = 300
MEMORY_BOUND = 24 << 20
"""A front that is young still fills its caches and pools: 7 MB were seen. The leak below is 150 MB, and
large payloads that are not given back are 30 MB."""


def test_the_slope_does_not_mind_jumps() -> None:
    points = [(float(x), 2.0 * x + (1000.0 if x % 7 == 0 else 0.0)) for x in range(100)]
    assert theil_sen(points) == pytest.approx(2.0, abs=0.2)
    assert theil_sen([(float(x), 5.0) for x in range(1000)]) == 0.0


def grown(outcome: Outcome) -> set[str]:
    """What grew beyond its bound in a short soak."""
    bounds = {"memory": MEMORY_BOUND, "files": FILES_BOUND}
    return {figure.name for figure in outcome.figures if figure.growth > bounds[figure.name.split()[1]]}


@pytest.mark.long
@pytest.mark.slow
def test_front_and_engine_do_not_grow_while_devices_come_and_go(tmp_path: Path) -> None:
    outcome = soak(tmp_path / "soak", uploads=UPLOADS)
    assert (grown(outcome), outcome.wrong) == (set(), []), outcome.line()
    assert outcome.uploads >= UPLOADS


@pytest.mark.long
@pytest.mark.slow
def test_a_leak_is_found(tmp_path: Path) -> None:
    outcome = soak(tmp_path / "soak", uploads=UPLOADS, leak=True)
    assert grown(outcome) == {"front's memory", "front's files"}, outcome.line()
