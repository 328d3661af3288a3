"""kill -9 of front, engine and device at every failpoint of a secure sum with a refined head: the sum is right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fleets import assert_no_upload_lost
from support.small_run import FRAGILE, SmallRun, small_run, store_of
from support.summing_run import CLASSES, DIMENSIONS, SUMS, rows_of

from fleetdistill.methods.classstats_secure.encoding import decode, limited_numbers, rows_on_grid
from fleetdistill.state.failpoints import FAILPOINTS
from fleetdistill.state.state_file import unpack_state
from fleetdistill_lab.simulation.spec.plan import RUN
from fleetdistill_server.config.run_config import load_run_config

WHO = {
    "front": ["blob.", "front."],
    "engine": [f"engine.{name}." for name in ("contract", "start", "asks", "answer", "checkpoint", "close")],
    FRAGILE: [f"device.{name}." for name in ("identity", "check-in", "secure", "outbox", "upload")],
}
"""Which points a process hits in such a run, in the order in which it comes by."""


def points_of(prefixes: Sequence[str]) -> list[str]:
    return [point for prefix in prefixes for point in FAILPOINTS if point.startswith(prefix)]


def assert_right(run: SmallRun) -> None:
    """The run has one sum, number for number that of the devices' rows, and a head that all of them have refined."""
    with store_of(run.place) as store:
        assert_no_upload_lost(store)
        row = store.runs.existing(RUN)
        assert row.status == "finished"
        assert [item.status for item in store.runs.rounds(RUN)] == ["closed"]
        (refined,) = {event.text for event in store.history.events(RUN, "head-refined")}  # again by each engine
        assert "by 2 sums of the gradients of 3 devices" in refined
        state: Any = unpack_state(store.blobs.get_state(row.checkpoint))
    ((_, (part, _)),) = state["parts"].items()
    config = load_run_config(run.place.config).method_config()
    parameters = config.parameters_for(3, CLASSES, DIMENSIONS)
    settings = {name: getattr(config, name) for name in ("min_samples", "rank", "rows_per_direction")}
    plain = [
        limited_numbers(rows_on_grid(rows, 8, 5)[0], labels, CLASSES, 8, **settings)
        for rows, labels in map(rows_of, SUMS.devices)
    ]
    expected = decode(np.sum(plain, axis=0), parameters)
    assert np.array_equal(part["counts"].numpy(), expected.counts)
    assert np.array_equal(part["sums"].numpy(), expected.sums)
    assert np.array_equal(part["second_moment"].numpy(), expected.second_moment[np.triu_indices(DIMENSIONS)])


@pytest.mark.slow
@pytest.mark.parametrize("process", ["nobody", *WHO])
def test_kills_at_every_point_of_a_sum(process: str, tmp_path: Path) -> None:
    """Each life ends at the next point of the table."""
    points = points_of(WHO.get(process, ()))
    with small_run(tmp_path / "run", {process: [f"{point}=kill" for point in points]}, scenario=SUMS) as run:
        run.finish()
        assert process == "nobody" or points[: run.kills(process)] == points
        assert_right(run)
