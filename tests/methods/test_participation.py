"""`participation_ratio` of every method: how many of the present devices a round takes."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from support.fleets import EVERY_METHOD, RUNS, prepare, run_in_memory
from support.long import long_except

from fleetdistill.errors import ConfigurationError
from fleetdistill.knowledge import DELIVER
from fleetdistill.methods import example_config
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.methods.cohort import devices_needed
from fleetdistill_server.store.store import Store

every_method = pytest.mark.parametrize("method", long_except(EVERY_METHOD, "classstats", "fedavg", "feddkc"))


def asked_in(store: Store, number: int) -> list[str]:
    """Whom a round asks for knowledge; its first step may be for newcomers alone."""
    asks = [row for step in (1, 2) for row in store.asks.of_step(RUN, number, step)]
    return sorted({row.device for row in asks if row.step != DELIVER})


@pytest.mark.parametrize(
    "method",
    long_except(sorted({*EVERY_METHOD} - {"classstats_secure", "classstats_summed"}), "classstats", "fedavg", "feddkc"),
)
def test_a_round_takes_the_part_of_the_devices_that_is_wanted(method: str, tmp_path: Path) -> None:
    half = {**RUNS[method].settings, "participation_ratio": 0.5}
    store = run_in_memory(
        prepare(replace(RUNS[method], devices=4, rounds=3, train_limit=200, settings=half), tmp_path / "work")
    )
    taken = [asked_in(store, number) for number in (1, 2, 3)]
    assert [len(devices) for devices in taken] == [2, 2, 2]
    assert len({tuple(devices) for devices in taken}) > 1, "every round took the same devices"
    assert len({row.id for row in store.devices.all(RUN)}) == 4
    store.close()


@every_method
@pytest.mark.parametrize("ratio", [0.0, -0.5, 1.01, float("nan")])
def test_a_part_that_is_none_is_refused(method: str, ratio: float) -> None:
    with pytest.raises(ConfigurationError, match=r"participation_ratio must be in \(0, 1\], got"):
        example_config(method, participation_ratio=ratio)


@every_method
def test_all_devices_take_part_by_default(method: str) -> None:
    assert example_config(method).participation_ratio == 1.0


def test_a_quorum_is_rounded_up_from_what_was_written() -> None:
    """0.07 of 100 devices are 7, though 0.07 * 100 is above 7 in floating point; 0.07 of 101 are 8."""
    for percent in range(101):
        for asked in range(1, 301):
            exact = math.ceil(Fraction(percent * asked, 100))
            assert devices_needed(asked, percent / 100) == exact, f"{percent} % of {asked}"
    assert [devices_needed(asked, 2 / 3) for asked in (3, 4, 6, 3_000)] == [2, 3, 4, 2_000]
