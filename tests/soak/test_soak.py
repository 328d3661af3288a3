"""A short soak, and that a leak would be found."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak.slope import theil_sen
from soak.soak import soak

SECONDS = 20.0


def test_the_slope_does_not_mind_jumps() -> None:
    points = [(float(x), 2.0 * x + (1000.0 if x % 7 == 0 else 0.0)) for x in range(100)]
    assert theil_sen(points) == pytest.approx(2.0, abs=0.2)
    assert theil_sen([(float(x), 5.0) for x in range(1000)]) == 0.0


@pytest.mark.slow
def test_front_and_engine_do_not_grow_while_devices_come_and_go(tmp_path: Path) -> None:
    outcome = soak(tmp_path / "soak", SECONDS)
    assert outcome.is_good, outcome.line()
    assert outcome.uploads > 0


@pytest.mark.slow
def test_a_leak_is_found(tmp_path: Path) -> None:
    outcome = soak(tmp_path / "soak", SECONDS / 2, leak=True)
    grown = {figure.name for figure in outcome.figures if not figure.is_good}
    assert grown >= {"front's memory", "front's files"}, outcome.line()
