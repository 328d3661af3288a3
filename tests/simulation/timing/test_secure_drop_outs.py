"""Devices of a secure sum that vanish by their traces, in simulated time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulation.timing.test_simulated_time import ALWAYS, FLEET, behaviour, run

from fleetdistill.methods import METHODS, config_class
from fleetdistill.methods.classstats_secure.exchange import INPUT, KEYS, SHARES, UNMASK
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.figures import sums_of

SUMMING = [method for method in METHODS if config_class(method).sums_securely]


@pytest.mark.parametrize("method", SUMMING)
@pytest.mark.parametrize(("answered", "step"), list(enumerate([KEYS, SHARES, INPUT, UNMASK])))
def test_a_device_vanishes_by_its_trace(tmp_path: Path, method: str, answered: int, step: str) -> None:
    """Each ask takes 10 s: a device that is there for 10 k + 5 s answers k of them."""
    settings: dict[str, Any] = {"epsilon": 20.0} if method == "classstats_secure" else {}
    gone = ((0.0, 10.0 * answered + 5.0, 1.0),)
    wanted = replace(
        FLEET,
        method=method,
        settings={**settings, "min_in_sum": 4, "dimensions": 32},
        devices=5,
        rounds=1,
        train_limit=400,
        alpha=100.0,
        behaviour=behaviour(ALWAYS, ALWAYS, ALWAYS, ALWAYS, gone),
    )
    store = run(wanted, tmp_path / "work")
    (row,) = store.runs.rounds(RUN)
    (made,) = sums_of(row.figures).values()
    assert (made.failure, made.dropped) == ("", {step: ["device-4"]})
    assert made.inputs == (5 if step == UNMASK else 4)
    store.close()
